"""The checks of exercises 3.5 to 3.7: delta, the gradients of keys and values, and that of queries."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import Diagnosis, Evidence, same_as
from utils.checks.hidden import tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import cdiv, no_atomics, tile_sizes, within
from utils.checks.tensors import agrees
from utils.checks.traffic import Budget, Passes

from . import forward, gradients, hidden, shapes, tiles
from .hopper import DESCRIBED, launched_on_hopper, with_hoppers_tiles
from .shapes import FP16, sizes

DELTA, DKDV, DQ = "delta_kernel", "dkdv_kernel", "dq_kernel"
Tensor = torch.Tensor
Gradients = Callable[..., Any]


# ---- 3.5


def _delta(o: Tensor, do: Tensor) -> Tensor:
    """Summed in float32 at least, whatever the inputs' dtype."""
    wide = torch.promote_types(o.dtype, torch.float32)
    return (o.to(wide) * do.to(wide)).sum(-1)


def _o_and_do(case: Case) -> tuple[Tensor, Tensor]:
    """The output in the case's layout; its gradient in another one."""
    other = {"contiguous": "contiguous", "padded": shapes.HEADS_LAST, "expanded": "contiguous"}
    axes = ("B", "Hq", "Nq", "D")
    near = "contiguous" if case.layout == "expanded" else None
    o = shapes.tensor(case, "o", *axes, layout=near)
    if case.layout == "expanded":  # as the gradient of a sum arrives
        return o, case.tensor("do", 1, layout="contiguous").expand(o.shape)
    return o, shapes.tensor(case, "do", *axes, layout=other.get(case.layout, "contiguous"))


def _delta_cases(seed: int, block: int) -> list[Case]:
    draw = generator(seed)
    ragged = sizes(2, 3, 3, block + draw.randint(1, block - 1), 1, draw.choice((19, 24, 40)))
    whole = sizes(1, 2, 2, 2 * block, 1, 32)
    layouts = (shapes.HEADS_LAST, "padded", "transposed", "expanded")
    return [
        Case("whole tiles", whole, seed=seed),
        Case("ragged", ragged, seed=seed),
        Case("one element", sizes(1, 1, 1, 1, 1, 16), seed=seed),
        Case("no element", sizes(0, 2, 2, block, 1, 16), seed=seed),
        *(Case("ragged", ragged, layout=layout, seed=seed) for layout in layouts),
        *(Case("ragged", ragged, dtype, seed=seed) for dtype in (FP16, shapes.BF16)),
        *(Case("whole tiles", whole, dtype, seed=seed, magnitude=30.0) for dtype in (FP16, shapes.BF16)),
    ]


def _one_number_a_tile(e: Evidence) -> bool:
    """Whether the rows of the first tile all get the sum over the whole tile."""
    block = tiles.blocks_of_rows(e, DELTA)
    rows = min(block, e.got.shape[-1])
    tile, sums = e.got[..., :rows], e.right[..., :rows].sum(-1, keepdim=True)
    if rows < 2 or not bool((tile == tile[..., :1]).all()):
        return False
    return bool(agrees(tile[..., :1], sums, rows * e.difference.allowed, e.difference.dtype).all())


_DELTA_TILES = tiles.query_tiles(DELTA, "delta_ptr")
_DELTA_MISTAKES = (
    same_as(lambda o, do: (o * do).mean(-1), classic("this is the mean of the products: delta is their sum", 3)),
    same_as(lambda o, do: (do * do).sum(-1), classic("dO is multiplied by itself: delta is rowsum(dO * O)", 2)),
    same_as(lambda o, do: (o * o).sum(-1), classic("O is multiplied by itself: delta is rowsum(dO * O)", 2)),
    same_as(lambda o, do: do.sum(-1), classic("the factor O is missing", 2)),
    same_as(lambda o, do: o.sum(-1), classic("the factor dO is missing", 2)),
    same_as(lambda o, do: o.sum(-1) * do.sum(-1), classic("this is a product of two sums, not a sum of products", 3)),
    same_as(
        lambda o, do: -(o * do).sum(-1), classic("the sign is wrong: delta is subtracted later, where it is used", 3)
    ),
    Diagnosis(
        _one_number_a_tile,
        classic("all rows of a tile get the same number: the sum runs along axis 1 alone", 3),
    ),
    same_as(lambda o, do: (o * do).amax(-1), classic("this is the largest product: delta is their sum", 3)),
    Diagnosis(
        tiles.not_contiguous,
        classic("only non-contiguous inputs fail: o and dO have four strides each", 4),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.dtype.itemsize < 4),
        lambda e: classic(
            f"right in float32, too inaccurate in {str(e.case.dtype).removeprefix('torch.')}: convert both to float32 "
            "before they are multiplied",
            1,
        ),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.sizes["D"] & (case.sizes["D"] - 1) != 0),
        classic(
            "only head dimensions that are no power of two go wrong, where BLOCK_D is larger than D: columns from D on "
            "must add nothing, and only D may be a factor",
            5,
        ),
    ),
)


def _delta_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    rows = ("B", "Hq", "Nq")
    return Budget(
        {"o_ptr": Passes(*rows, "D"), "do_ptr": Passes(*rows, "D")},
        {"delta_ptr": Passes(*rows, element_size=4)},
        exact=True,
    )


def _with_dlse(seed: int) -> list[Case]:
    """What only the operator of exercise 3.8 hands over: the gradient of L, and queries that see no key."""
    draw = generator(seed)
    n, masked = draw.randint(18, 40), draw.randint(2, 9)
    dlse = torch.randn(1, 2, n, generator=torch.Generator().manual_seed(seed)).to(runtime.DEVICE)
    options = {"dlse": dlse, "num_fully_masked": masked}
    return [Case("dlse and queries that see no key", sizes(1, 2, 2, n, 1, 16), options=options, seed=seed)]


ATTENTION_DELTA = Exercise(
    "3.5",
    "delta",
    points=3,
    observe=tried(
        "3.5",
        "attention_delta",
        ("",),
        lambda seed: [*_delta_cases(seed, 16), *_with_dlse(seed)],
        _o_and_do,
    ),
    tolerance=hidden.ATTENTION,
)


@ATTENTION_DELTA.checked_by
def check_delta(attention_delta: Callable[[Tensor, Tensor], Tensor], seed: int | None = None) -> None:
    """Exercise 3.5: delta = rowsum(dO * O), one number a query.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    block = tile_sizes(attention_delta, forward.small()[:2], DELTA, BLOCK_M=16)["BLOCK_M"]
    check_kernel(
        ATTENTION_DELTA,
        lambda o, do: attention_delta(o, do),
        _delta,
        _delta_cases(seed, block),
        _o_and_do,
        outputs=("delta",),
        tiling={"delta": _DELTA_TILES("b h row")},
        inspections=[within(DELTA, _delta_budget), tiles.one_launch(DELTA, "delta_ptr")],
        forbidden=forward.RULES,
        diagnose=_DELTA_MISTAKES,
        seed=seed,
        notice="one number a query stands for a row of P * dP that was never there",
    )


# ---- 3.6 and 3.7


def _gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, **options: Any) -> tuple:
    return shapes.attention_gradients(q, k, v, do, **options)


def _with_scale(function: Gradients) -> Gradients:
    """A part of the backward pass, called with the scale 1/sqrt(D) unless the case gives one."""

    def run(q, k, v, do, lse, delta, causal=False, scale=None):
        return function(q, k, v, do, lse, delta, causal, 1 / math.sqrt(q.shape[3]) if scale is None else scale)

    return run


def _cases(seed: int, block_m: int, block_n: int) -> list[Case]:
    """Cases without a mask, then with one."""
    without = shapes.drawn(seed, block_m, block_n, causal=False)
    masked = shapes.drawn(seed + 1, block_m, block_n, causal=True)
    draw = generator(seed)
    square = block_m + block_n + draw.randint(1, 9)
    masked = [case for case in masked if case.layout in ("contiguous",) and case.kind not in ("one tile", "no element")]
    masked = [case for case in masked if case.dtype != shapes.BF16 and case.kind != shapes.DRIFTING]
    options = {"causal": True}
    masked.insert(0, Case("square", sizes(1, 1, 1, square, square, 16), options=options, seed=seed))
    masked.append(
        Case("many more queries than keys", sizes(1, 1, 1, 3 * block_m + 5, 3, 16), options=options, seed=seed)
    )
    whole = block_m * (cdiv(block_n, block_m) + 2)  # ends with a tile, while no tile of keys begins with one
    masked.append(
        Case(
            "whole query tiles",
            sizes(1, 2, 2, whole, whole + draw.randint(1, block_m - 1), 16),
            options=options,
            seed=seed,
        )
    )
    keys = block_n + draw.randint(2, block_n)
    last_of_its_tile = sizes(1, 1, 1, keys - block_n + block_m - 1, keys, 16)
    masked.append(Case("first query is its tile's last", last_of_its_tile, options=options, seed=seed))
    # of the first tile of keys and the second of queries, one pair is hidden: the last key from the first query
    pair = sizes(1, 1, 1, block_m + 2, block_n, 16)
    # of the first tile of queries and the first of keys, the same
    corner = sizes(1, 1, 1, block_m, block_m + block_n - 2, 16)
    masked += [Case("one pair hidden", named, options=options, seed=seed) for named in (pair, corner)]
    return gradients.without_large_scores([*without, *masked])


def _hidden_cases(block_m: int, block_n: int) -> Callable[[int], list[Case]]:
    def cases(seed: int) -> list[Case]:
        further = hidden.further(seed, causal=True) + hidden.further(seed, causal=False)[-1:]
        return [*hidden.comparable(_cases(seed, block_m, block_n)), *further]

    return cases


def _low(seed: int, block_m: int, block_n: int) -> Case:
    """Scores so far below 0 that a key past the end, with score 0, has an infinite P; the last tile is ragged."""
    keys = block_n + generator(seed).randint(1, block_n - 1)
    return Case(shapes.LOW, sizes(1, 1, 1, block_m, keys, 16), options={"causal": False}, seed=seed)


#: Where the lists of both exercises tell of each part of the algorithm.
_PLACES = {
    "delta": 1,
    "scale": 2,
    "softmax": 3,
    "products": 4,
    "mask": 5,
    "heads": 6,
    "sums": 7,
    "empty": 5,
    "precision": 8,
    "do": 9,
}


def _mistakes(kernel: str) -> tuple:
    return (
        Diagnosis(
            lambda e: e.findings("races"),
            lambda e: classic(
                f"programs race for the same rows ({e.findings('races')[0]}): each tile is stored by one of them",
                _PLACES["sums"],
            ),
        ),
        *tiles.only_where({"empty": _PLACES["empty"]}),
        *gradients.mistakes(
            lambda e: tiles.blocks(e, kernel),
            **{name: place for name, place in _PLACES.items() if name not in ("empty", "precision")},
        ),
        *tiles.only_where(
            {
                "scale": _PLACES["scale"],
                "negative": _PLACES["scale"],
                "heads": _PLACES["heads"],
                "head_dim": _PLACES["do"],
                "precision": _PLACES["precision"],
            }
        ),
        Diagnosis(
            lambda e: e.only(lambda case: case.kind == shapes.LOW),
            classic(
                "only scores far below 0 go wrong: a key past the end has score 0, and e^(0 - L) is infinite for a low "
                "L; mask P in the last, ragged tile too",
                _PLACES["empty"],
            ),
        ),
        *([_BEGIN] if kernel == DKDV else [forward.range_rule(_PLACES["mask"], "key_end", "unmasked_end"), _MASKED]),
        Diagnosis(
            lambda e: e.only(causal) and not e.findings("out_of_bounds"),
            classic(
                "only causal attention goes wrong: which pairs of tiles see each other, which of them need a mask, and "
                "which pairs inside of a tile does it set to 0, and leave as they are?",
                _PLACES["mask"],
            ),
        ),
    )


_MASKED = Diagnosis(
    lambda e: not e.only(causal) and e.only(lambda case: causal(case) or case.kind == shapes.LOW),
    classic(
        "only tiles that need a mask go wrong, causal ones and the last, ragged one: which are they, and which pairs "
        "does the mask set to 0, and leave as they are?",
        _PLACES["mask"],
    ),
)
_BEGIN = Diagnosis(
    lambda e: e.only(lambda case: causal(case) and case.sizes["Nq"] % tiles.blocks_of_rows(e, DKDV) == 0),
    classic(
        "only queries that fill their tiles go wrong: `begin` is no multiple of BLOCK_M, so that the last tile passes "
        "the end, which EVEN_M promises it does not",
        _PLACES["mask"],
    ),
)


def _queries_read(case: Case, block_m: int, block_n: int) -> tuple[int, int]:
    """Queries that the tiles of one head's keys read, all together, and the steps that this takes."""
    num_queries, num_keys = case.sizes["Nq"], case.sizes["Nk"]
    read = steps = 0
    for first in range(0, num_keys, block_n):
        begin = max(0, first - (num_keys - num_queries)) // block_m * block_m if case.options.get("causal") else 0
        read += max(0, num_queries - begin)
        steps += cdiv(max(0, num_queries - begin), block_m)
    return read, steps


def _dkdv_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    """k and v once; q, dO, L and delta once for each tile of keys that they see."""
    block_m, block_n = launch["BLOCK_M"], launch["BLOCK_N"]
    read, steps = _queries_read(case, block_m, block_n)
    times = Fraction(read, max(1, case.sizes["Nq"]))
    rows, keys = ("B", "Hq", "Nq"), Passes("B", "Hkv", "Nk", "D")
    matrix, vector = Passes(*rows, "D", times=times), Passes(*rows, times=times, element_size=4)
    return Budget(
        {"k_ptr": keys, "v_ptr": keys, "q_ptr": matrix, "do_ptr": matrix, "lse_ptr": vector, "delta_ptr": vector},
        {"dk_ptr": keys, "dv_ptr": keys},
        flops=case.numel("B", "Hq") * steps * 8 * block_m * block_n * launch["BLOCK_D"],
        least=0.5,
    )


def _dq_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    """q, dO, L and delta once; k and v up to the last key that a tile of queries sees."""
    block_m, block_n = launch["BLOCK_M"], launch["BLOCK_N"]
    rows = ("B", "Hq", "Nq")
    times = Fraction(forward.keys_read(case, block_m, block_n), max(1, case.sizes["Nk"]))
    keys = Passes("B", "Hq", "Nk", "D", times=times)
    matrix, vector = Passes(*rows, "D"), Passes(*rows, element_size=4)
    steps = sum(forward.tiles_seen(case, block_m, block_n))
    return Budget(
        {"q_ptr": matrix, "do_ptr": matrix, "lse_ptr": vector, "delta_ptr": vector, "k_ptr": keys, "v_ptr": keys},
        {"dq_ptr": matrix},
        flops=case.numel("B", "Hq") * steps * 6 * block_m * block_n * launch["BLOCK_D"],
        least=0.5,
    )


def causal(case: Case) -> bool:
    """Whether a case has a causal mask."""
    return bool(case.options.get("causal"))


def _asked(function: Gradients, kernel: str, block_m: int, block_n: int) -> tuple[int, int]:
    """The tile, (queries, keys), with which a part of the backward pass launches its kernel."""
    q, k, v = forward.small()
    row = torch.zeros(q.shape[:3], device=q.device)
    found = tile_sizes(_with_scale(function), (q, k, v, q, row, row), kernel, BLOCK_M=block_m, BLOCK_N=block_n)
    return found["BLOCK_M"], found["BLOCK_N"]


def _compiled(function: Gradients, kernel: str) -> Compiled:
    """What is asked of a kernel of the backward pass when it is compiled, with the tiles of a Hopper GPU too."""
    q, k, v = forward.small(shapes.BF16)
    row = torch.zeros(q.shape[:3], device=q.device)
    return Compiled(
        tf32=_PLACES["precision"],
        wide=_PLACES["precision"],
        further=lambda: launched_on_hopper(_with_scale(function), (q, k, v, q, row, row), kernel, of=function),
        further_cause=classic(DESCRIBED, {DKDV: 11, DQ: 10}[kernel]),
    )


def _check_on_hopper(exercise: Exercise, function: Gradients, outputs: tuple[str, ...], seed: int) -> None:
    """The same gradients with the tiles of a Hopper GPU, where a laptop interprets.

    There loads may stand before what the step before computes, and numbers are loaded without a mask where tiles are
    even.
    """
    if not runtime.INTERPRET:  # this GPU has tiles of its own
        return
    options = {"causal": False}
    cases = [
        Case("Hopper's tiles", sizes(1, 1, 1, 128, 64, width), FP16, options=options, seed=seed) for width in (64, 128)
    ]
    first = ["dq", "dk", "dv"].index(outputs[0])
    with contextlib.redirect_stdout(io.StringIO()):  # the check has said that it passes
        check_kernel(
            exercise.part(f"{exercise.title} with a Hopper's tiles"),
            with_hoppers_tiles(_with_scale(function), function),
            lambda *args, **options: _gradients(*args, **options)[first : first + len(outputs)],
            cases,
            gradients.inputs_with_delta,
            outputs=outputs,
            atol=gradients.ROUNDING,
            forbidden=forward.RULES,
            compiled=None,
            seed=seed,
        )


FLASH_DKDV = Exercise(
    "3.6",
    "dK and dV",
    points=14,
    observe=tried(
        "3.6",
        "flash_dkdv",
        ("dk", "dv"),
        _hidden_cases(16, 32),
        gradients.inputs_with_delta,
        lambda package: _with_scale(package.flash_dkdv),
    ),
    tolerance=hidden.ATTENTION,
    tolerances={f"{name} of flash_dkdv, {shapes.LOW}": hidden.LOW for name in ("dk", "dv")},
)


@FLASH_DKDV.checked_by
def check_dkdv(flash_dkdv: Gradients, seed: int | None = None) -> None:
    """Exercise 3.6: dK and dV, each written by the one program that owns its keys.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    of_keys = tiles.query_tiles(DKDV, "dk_ptr", "BLOCK_N", loop={"Nq": "BLOCK_M"})("b h row col")
    check_kernel(
        FLASH_DKDV,
        _with_scale(flash_dkdv),
        lambda *args, **options: _gradients(*args, **options)[1:],
        _cases(seed, *_asked(flash_dkdv, DKDV, 16, 32)),
        gradients.inputs_with_delta,
        outputs=("dk", "dv"),
        atol=gradients.ROUNDING,
        tiling={"dk": of_keys, "dv": of_keys},
        inspections=[
            no_atomics,
            tiles.numbered(within(DKDV, _dkdv_budget), 10),
            tiles.one_launch(DKDV, "dk_ptr", "dv_ptr"),
        ],
        forbidden=forward.RULES,
        diagnose=_mistakes(DKDV),
        compiled=_compiled(flash_dkdv, DKDV),
        seed=seed,
        notice="a program owns its keys and walks over queries: no two programs write the same element",
    )
    _check_on_hopper(FLASH_DKDV, flash_dkdv, ("dk", "dv"), seed)


FLASH_DQ = Exercise(
    "3.7",
    "dQ",
    points=7,
    builds_on=("3.4",),
    observe=tried(
        "3.7",
        "flash_dq",
        ("dq",),
        _hidden_cases(16, 16),
        gradients.inputs_with_delta,
        lambda package: _with_scale(package.flash_dq),
    ),
    tolerance=hidden.ATTENTION,
    tolerances={f"dq of flash_dq, {shapes.LOW}": hidden.LOW},
)


@FLASH_DQ.checked_by
def check_dq(flash_dq: Gradients, seed: int | None = None) -> None:
    """Exercise 3.7: dQ, each tile written by the one program that owns its queries.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    tile = _asked(flash_dq, DQ, 32, 16)
    of_queries = tiles.query_tiles(DQ, "dq_ptr", loop={"Nk": "BLOCK_N"})("b h row col")
    check_kernel(
        FLASH_DQ,
        _with_scale(flash_dq),
        lambda *args, **options: _gradients(*args, **options)[0],
        [*_cases(seed, *tile), _low(seed, *tile)],
        gradients.inputs_with_delta,
        outputs=("dq",),
        atol=gradients.ROUNDING,
        tiling={"dq": of_queries},
        inspections=[no_atomics, within(DQ, _dq_budget), tiles.one_launch(DQ, "dq_ptr")],
        forbidden=forward.RULES,
        diagnose=_mistakes(DQ),
        compiled=_compiled(flash_dq, DQ),
        seed=seed,
        notice="the scores are computed a third time: two more products a tile, and no two programs share a row of dQ",
    )
