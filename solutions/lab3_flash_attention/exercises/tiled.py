"""The check of exercise 3.2: attention tile by tile in plain PyTorch, with its logsumexp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis
from utils.checks.forbid import Rules
from utils.checks.hidden import tried
from utils.checks.kernel import check_kernel
from utils.checks.tiling import Tiling

from . import gradients, hidden, mistakes, shapes, tiles
from .shapes import sizes


def _cases(seed: int) -> list[Case]:
    draw = generator(seed)
    m, n = draw.choice((4, 8, 12)), draw.choice((8, 12, 16))
    options = {"causal": False, "block_m": m, "block_n": n}
    causal = {**options, "causal": True}
    odd = draw.choice((17, 19, 20))
    few, many = m + draw.randint(1, m - 1), 2 * n + draw.randint(1, n - 1)

    def case(kind: str, named: dict[str, int], with_options: dict[str, Any], **more: Any) -> Case:
        return Case(kind, named, options=with_options, seed=seed, **more)

    ragged, shared = sizes(1, 2, 2, few, many, odd), sizes(2, 4, 2, few, many, 16)
    return [
        case("one tile", sizes(1, 1, 1, m, n, 16), options),
        case("whole tiles", sizes(1, 2, 2, 2 * m, 3 * n, 16), options),
        case("ragged", ragged, options),
        case("shared heads", shared, options),
        case("one element", sizes(1, 1, 1, 1, 1, 16), options),
        case(shapes.GROWING, sizes(1, 1, 1, few, 3 * n + 2, 16), options),
        case("whole tiles", sizes(1, 1, 1, 3 * n, 3 * n, 16), causal),
        case("fewer queries than keys", ragged, causal),
        case("more queries than keys", sizes(1, 1, 1, n + 2 + 2 * m + draw.randint(1, m - 1), n + 2, 16), causal),
        case("shared heads", shared, causal),
        case("one element", sizes(1, 1, 1, 1, 1, 16), causal),
        case("given scale", ragged, {**options, "scale": 0.37}),
        case(shapes.NEGATIVE, ragged, {**causal, "scale": -0.29}),
        case("ragged", ragged, options, magnitude=15.0),
        case("ragged", ragged, options, layout=shapes.HEADS_LAST),
        case("ragged", ragged, options, dtype=shapes.FP16),
        case("ragged", ragged, causal, dtype=shapes.BF16),
        case(shapes.DRIFTING, sizes(1, 1, 1, m, shapes.STEPS * n, 16), options, dtype=shapes.FP16),
    ]  # fmt: skip


def _largest(case: Case) -> int:
    """Elements of the largest tensor that a tile by tile computation needs: nothing of Nq x Nk.

    That is an input with a head for each query head, a whole tile of scores, or two of rows side by side, with two
    numbers more per row: the two parts that ``merge_outputs`` is given, should it put each into one tensor. What a
    student's exercise 3.1 allocates thus costs no points here.
    """
    of = case.sizes
    heads, d = of["B"] * of["Hq"], of["D"]
    m, n = case.options["block_m"], case.options["block_n"]
    return heads * max(of["Nq"] * d, of["Nk"] * d, m * n, 2 * max(m, n) * (d + 2))


def _tiles(axes: str) -> Callable[[Sequence[CaseResult]], Tiling | None]:
    def tiling(trials: Sequence[CaseResult]) -> Tiling:
        options = trials[0].case.options
        tiles = {"b": 1, "h": 1, "row": options["block_m"]}
        return Tiling(axes, tiles=tiles, noun="query tile", loops={"Nk": options["block_n"]})

    return tiling


_MISTAKES = (
    Diagnosis(
        lambda e: bool(e.difference.never_written.all()),
        lambda e: f"{e.difference.name} is never written: each tile of queries writes its rows of o and lse",
    ),
    *mistakes.forward(
        lambda e: {"block_m": e.case.options["block_m"], "block_n": e.case.options["block_n"]},
        sums=1, scale=2, mask=3, corner=3, range=3, last=4, heads=5, lse=6, empty=7,
    ),
    *tiles.only_where({"empty": 7, "scale": 2, "heads": 5, "precision": 8, "maximum": 1}),
)  # fmt: skip


def _gradients(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, **options: Any) -> Any:
    return shapes.attention_gradients(q, k, v, do, **options)


def _backward_blocks(e: Any) -> dict[str, int]:
    return {"block_m": e.case.options["block_m"], "block_n": e.case.options["block_n"]}


def _short_tile(trials: Sequence[CaseResult]) -> str:
    """What is said if an exception meets the cases whose last tile of keys is a short one, all of them and no other."""
    if all(trial.failed == (trial.case.sizes["Nk"] % trial.case.options["block_n"] > 0) for trial in trials):
        return classic("only a last tile of fewer keys goes wrong: take sizes from scores or v_tile, not block_n", 4)
    return ""


_WORDS = ("Expected size for first two dimensions", "must match the size of tensor")
_SHAPES = classic("the shapes of a product, or of what is added, do not fit: which operand is transposed?", 12)
_RAISED = dict.fromkeys(_WORDS, lambda trials: _short_tile(trials) or _SHAPES)
_BACKWARD_MISTAKES = (
    *tiles.only_where({"empty": 7}),
    *gradients.mistakes(_backward_blocks, delta=9, scale=10, sums=11, mask=3, heads=5, softmax=12, products=12, do=5),
    *tiles.only_where({"scale": 10, "heads": 5, "precision": 8}),
)


def _both_passes(package: ModuleType) -> Callable[..., tuple[Any, ...]]:
    def run(q: Any, k: Any, v: Any, do: Any, **options: Any) -> tuple[Any, ...]:
        o, lse = package.tiled_attention(q, k, v, **options)
        return o, lse, *package.tiled_attention_backward(q, k, v, o, lse, do, **options)

    return run


TILED_ATTENTION = Exercise(
    "3.2",
    "tiled attention",
    points=12,
    observe=tried(
        "3.2",
        "tiled_attention and its backward pass",
        ("o", "lse", "dq", "dk", "dv"),
        lambda seed: gradients.without_large_scores(_cases(seed)),
        shapes.with_do,
        _both_passes,
    ),
    tolerance=hidden.ATTENTION,
)


@TILED_ATTENTION.checked_by
def check_tiled_attention(
    tiled_attention: Callable[..., Any], tiled_attention_backward: Callable[..., Any], seed: int | None = None
) -> None:
    """Exercise 3.2: attention in tiles of queries and keys, forward and backward, in plain PyTorch.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    rules = Rules(groups=("softmax", "attention", "NumPy"), kernel=False, largest=_largest)
    check_kernel(
        TILED_ATTENTION,
        tiled_attention,
        shapes.attention,
        _cases(seed),
        shapes.qkv,
        outputs=("o", "lse"),
        tiling={"o": _tiles("b h row col"), "lse": _tiles("b h row")},
        forbidden=rules,
        diagnose=_MISTAKES,
        raised=dict.fromkeys(_WORDS, _short_tile),
        seed=seed,
        notice="no tensor had Nq x Nk elements: what is kept for a row is its maximum, its sum and its output",
    )

    check_kernel(
        TILED_ATTENTION.part("tiled attention, backward"),
        tiled_attention_backward,
        _gradients,
        gradients.without_large_scores(_cases(seed)),
        gradients.inputs_with_output,
        outputs=("dq", "dk", "dv"),
        atol=gradients.ROUNDING,
        tiling={"dq": _tiles("b h row col")},
        forbidden=rules,
        diagnose=_BACKWARD_MISTAKES,
        raised=_RAISED,
        seed=seed,
        notice="the probabilities were computed again from the logsumexp, a tile at a time",
    )
