"""The checks of exercises 3.3 and 3.4: the simple forward kernel, and causal with blocks skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils import runtime
from utils.checks import forbid
from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, fail, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.hidden import Observation, Tolerance, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import cdiv, launched, tile_sizes, within
from utils.checks.problem import Problem
from utils.checks.speed import Speed
from utils.checks.traffic import Budget, Passes

from . import hidden, key_range, mistakes, shapes, tiles
from .shapes import sizes

SIMPLE, FORWARD = "flash_forward_simple_kernel", "flash_forward_kernel"
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
#: Tokens of a sequence that is timed.
TIMED = 4096

#: What the functions of this lab may not do.
RULES = forbid.Rules(largest=lambda case: largest(case))


def tiling(kernel: str) -> dict[str, Any]:
    """Which program of a forward kernel computes which rows of ``o`` and ``lse``."""
    of = tiles.query_tiles(kernel, "lse_ptr", loop={"Nk": "BLOCK_N"})
    return {"o": of("b h row col"), "lse": of("b h row")}


def alone(kernel: str) -> Callable[[CaseResult], Problem | None]:
    """An inspection: one launch does a whole call, and nothing but its results leaves it."""
    return tiles.one_launch(kernel, "o_ptr", "lse_ptr")


def largest(case: Case) -> int:
    """Elements of the largest tensor that an answer may allocate: nothing of Nq x Nk."""
    return max(case.numel("B", "Hq", "Nq", "D"), case.numel("B", "Hkv", "Nk", "D"))


def blocks_of(attention: Callable[..., Any], *args: Any, kernel: str) -> tuple[int, int]:
    """The tile, (queries, keys), with which a function launches a kernel."""
    found = tile_sizes(attention, args, kernel, BLOCK_M=32, BLOCK_N=16)
    return found["BLOCK_M"], found["BLOCK_N"]


def small(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one tile, to ask a function for its tile sizes."""
    x = torch.zeros(1, 1, 16, 16, device=runtime.DEVICE, dtype=dtype)
    return x, x, x


def tiles_seen(case: Case, block_m: int, block_n: int) -> list[int]:
    """Key tiles that each tile of queries sees, at least one of its queries."""
    num_queries, num_keys = case.sizes["Nq"], case.sizes["Nk"]
    found = []
    for first in range(0, num_queries, block_m):
        seen = num_keys
        if case.options.get("causal"):
            seen = max(0, min(num_keys, first + block_m + num_keys - num_queries))
        found.append(cdiv(seen, block_n))
    return found


def keys_read(case: Case, block_m: int, block_n: int) -> int:
    """Keys that the tiles of one head's queries read, all together."""
    return sum(min(case.sizes["Nk"], seen * block_n) for seen in tiles_seen(case, block_m, block_n))


def _budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    """q once, k and v up to the last key that a tile of queries sees, o and the logsumexp once."""
    of, block_m, block_n = case.sizes, launch["BLOCK_M"], launch["BLOCK_N"]
    heads = of["B"] * of["Hq"]
    steps = sum(tiles_seen(case, block_m, block_n))
    keys = Passes("B", "Hq", "Nk", "D", times=Fraction(keys_read(case, block_m, block_n), max(1, of["Nk"])))
    return Budget(
        {"q_ptr": Passes("B", "Hq", "Nq", "D"), "k_ptr": keys, "v_ptr": keys},
        {"o_ptr": Passes("B", "Hq", "Nq", "D"), "lse_ptr": Passes("B", "Hq", "Nq", element_size=4)},
        flops=heads * steps * 4 * block_m * block_n * launch["BLOCK_D"],
        exact=True,
    )


def skips_blocks(kernel: str, place: int = 3) -> Callable[[CaseResult], Problem | None]:
    """An inspection: a causal kernel does not read the key tiles that none of its queries sees."""

    def inspect(trial: CaseResult) -> Problem | None:
        found, case = launched([trial], kernel), trial.case
        if found is None or not case.options.get("causal") or "k_ptr" not in trial.profile.by_argument:
            return None
        block_m, block_n = found["BLOCK_M"], found["BLOCK_N"]
        heads = case.numel("B", "Hq", "D") * case.element_size
        read = sum(x.by_argument["k_ptr"].bytes_loaded for x in trial.profile.launches if x.kernel == kernel)
        allowed = heads * keys_read(case, block_m, block_n)
        every = heads * case.sizes["Nk"] * cdiv(case.sizes["Nq"], block_m)
        if read <= allowed:
            return None
        words = "here no block is skipped: a tile of queries ends at the last key that one of its queries sees"
        if read != every:
            words = "blocks are read in which no query sees a key: the loop ends a step too late"
        return Problem(
            f"k_ptr: {read:,} bytes loaded, {allowed:,} allowed: blocks above the diagonal are read",
            classic(words, place),
        )

    return inspect


_FORWARD_MISTAKES = (
    *tiles.only_where({"empty": 8}),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == shapes.VERY_LOW and case.sizes["Nk"] % _key_tile(e) != 0),
        classic(
            "only scores far below 0 beside a ragged last tile go wrong: a key past the end counts more than they do, "
            "unless its score is -inf before the maximum is taken",
            3,
        ),
    ),
    *mistakes.forward(
        lambda e: tiles.blocks(e, SIMPLE),
        sums=1,
        scale=2,
        mask=3,
        corner=3,
        range=3,
        last=3,
        heads=5,
        lse=4,
        empty=8,
    ),
    *tiles.only_where(
        {"scale": 2, "negative": 2, "heads": 5, "low": 1, "strides": 6, "head_dim": 6, "maximum": 1, "precision": 7}
    ),
)


def _key_tile(e: Evidence) -> int:
    return tiles.blocks(e, SIMPLE)["block_n"]


def range_rule(place: int | None = None, *numbers: str) -> Diagnosis:
    """A rule: ``causal_key_range`` of the package that launched the kernel returns wrong ``numbers``, by name."""

    def found(e: Evidence) -> Problem | None:
        launches = e.trial.profile.launches if e.trial.profile is not None else ()
        asked = next((key_range.function_of(launch.function) for launch in launches if launch.function), None)
        return key_range.problem(asked, e.case.seed, numbers) if asked and e.case.options.get("causal") else None

    def cause(e: Evidence) -> str:
        problem = found(e)
        words = "; ".join((f"causal_key_range: {problem.headline}", *problem.details))
        words = f"{words}; {problem.cause}" if problem.cause else words
        return words if place is None else classic(words.split(': see "classic')[0], place)

    return Diagnosis(found, cause)


def _causal_mistakes(kernel: str) -> tuple[Diagnosis, ...]:
    return (
        Diagnosis(
            lambda e: e.only(lambda case: bool(case.options.get("causal"))) and e.case.kind == "not causal",
            "attention without a mask is wrong already: finish exercise 3.3 first",
        ),
        *tiles.only_where({"negative": 6}),
        *tiles.only_where({"empty": 5}),
        range_rule(None, "key_end", *(["unmasked_end"] if kernel == FORWARD else [])),
        *mistakes.forward(
            lambda e: tiles.blocks(e, kernel),
            sums=6,
            scale=6,
            mask=1,
            corner=2,
            range=4,
            last=6,
            heads=6,
            lse=6,
            empty=5,
        ),
        Diagnosis(
            lambda e: sum(t.failed for t in e.trials) > 1 and e.only(lambda case: case.sizes["Nq"] != case.sizes["Nk"]),
            classic("only Nq != Nk goes wrong: the last query sees the last key, j <= i + Nk - Nq", 2),
        ),
        Diagnosis(
            lambda e: e.only(lambda case: bool(case.options.get("causal"))),
            "only causal attention goes wrong, and causal_key_range returns what it should: look at attention_mask",
        ),
        *tiles.only_where({"low": 5, "maximum": 6, "precision": 6}),
    )


def flash_peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """PyTorch's FlashAttention-2."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def large(causal: bool, head_dim: int = 64, seq_len: int = TIMED) -> tuple[Any, ...]:
    """16,384 tokens of width 2048 in bfloat16, as arguments of an attention function."""
    shape = (2**14 // seq_len, 2048 // head_dim, seq_len, head_dim)
    return *(torch.randn(shape, device=runtime.DEVICE, dtype=torch.bfloat16) for _ in range(3)), causal


FLASH_FORWARD = Exercise(
    "3.3",
    "forward kernel",
    points=12,
    observe=tried(
        "3.3",
        "flash_forward_simple",
        ("o", "lse"),
        lambda seed: hidden.comparable(shapes.drawn(seed, 16, 16, causal=False)) + hidden.further(seed, causal=False),
        shapes.qkv,
    ),
    tolerance=hidden.ATTENTION,
    tolerances={
        f"o of flash_forward_simple, {shapes.DRIFTING}": Tolerance(absolute=1e-4 * shapes.DRIFT),
        f"o of flash_forward_simple, {shapes.LOW}": hidden.LOW,
    },
)


@FLASH_FORWARD.checked_by
def check_flash_forward(flash_forward_simple: Forward, seed: int | None = None) -> None:
    """Exercise 3.3: the simple forward kernel without a causal mask, its traffic exactly the formula's.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        FLASH_FORWARD,
        flash_forward_simple,
        shapes.attention,
        shapes.drawn(seed, *blocks_of(flash_forward_simple, *small(), kernel=SIMPLE), causal=False),
        shapes.qkv,
        outputs=("o", "lse"),
        tiling=tiling(SIMPLE),
        inspections=[tiles.numbered(rule, 9) for rule in (within(SIMPLE, _budget), alone(SIMPLE))],
        forbidden=RULES,
        diagnose=_FORWARD_MISTAKES,
        compiled=Compiled(tf32=10, wide=10),
        speed=Speed(lambda: large(False), flash_peer, 0.5, "PyTorch's FlashAttention-2"),
        seed=seed,
        notice="q is read once, o written once; k and v are read once for each tile of queries; no score is stored",
    )


def causal_cases(seed: int, block_m: int, block_n: int) -> list[Case]:
    """What a causal kernel with these tiles is tried on, simplest first."""
    draw = generator(seed)
    few, extra = block_m + draw.randint(1, block_m - 1), draw.randint(1, 2 * block_n)
    square = 2 * max(block_m, block_n)
    alone = block_n * (cdiv(block_m, block_n) + draw.randint(1, 2)) + 1  # the last key begins a tile
    options = {"causal": True}
    first = [
        Case("not causal", sizes(1, 1, 1, few, 2 * block_n, 16), options={"causal": False}, seed=seed),
        Case("square", sizes(1, 1, 1, square, square, 16), options=options, seed=seed),
        Case("ragged square", sizes(1, 2, 1, few, few, 16), options=options, seed=seed),
    ]
    last = [
        Case("one query", sizes(1, 1, 1, 1, 3 * block_n + extra, 16), options=options, seed=seed),
        Case("one key", sizes(1, 1, 1, few, 1, 16), options=options, seed=seed),
        Case("last key alone", sizes(1, 1, 1, block_m, alone, 16), options=options, seed=seed),
        # the first query sees all keys of the first tile but one
        Case("one key masked", sizes(1, 1, 1, block_m, block_m + block_n - 2, 16), options=options, seed=seed),
    ]
    drawn = shapes.drawn(seed, block_m, block_n, **options)
    return [*first, *(case for case in drawn if case.kind != "one tile"), *last]


def _observe_causal(package: ModuleType, seed: int) -> dict[str, Observation]:
    """The simple kernel on the cases of its check, and the fast one, which asks for both numbers, on further shapes."""
    of = {
        "flash_forward_simple": lambda s: hidden.comparable(causal_cases(s, 16, 16)),
        "flash_forward": lambda s: hidden.further(s, causal=True),
    }
    every = [tried("3.4", name, ("o", "lse"), cases, shapes.qkv)(package, seed) for name, cases in of.items()]
    ranges = key_range.answers(key_range.function_of(package.flash_forward_simple), key_range.calls(seed))
    return every[0] | every[1] | {"causal_key_range": [number for pair in ranges for number in pair]}


FLASH_CAUSAL = Exercise(
    "3.4",
    "causal forward kernel",
    points=12,
    builds_on=("3.3",),
    observe=_observe_causal,
    tolerance=hidden.ATTENTION,
    tolerances={f"o of flash_forward_simple, {shapes.DRIFTING}": Tolerance(absolute=1e-4 * shapes.DRIFT)},
)


#: Of the cases of exercise 3.4 those that the fast kernel is tried on: it masks only what must be masked.
_AT_THE_DIAGONAL = ("square", "fewer queries than keys", "more queries than keys", "last key alone", "one key masked")


@FLASH_CAUSAL.checked_by
def check_flash_causal(flash_forward_simple: Forward, flash_forward: Forward, seed: int | None = None) -> None:
    """Exercise 3.4: the causal mask, aligned at the bottom right, and the blocks that it makes needless.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    cases = causal_cases(seed, *blocks_of(flash_forward_simple, *small(), kernel=SIMPLE))
    notice = "nearly half of the blocks of a square are never read"
    speed = Speed(lambda: large(True), flash_peer, 0.5, "PyTorch's FlashAttention-2")
    _check_causal(FLASH_CAUSAL, flash_forward_simple, SIMPLE, cases, speed, seed, notice)
    if found := key_range.problem(key_range.function_of(flash_forward_simple), seed):
        part = FLASH_CAUSAL.part("causal, the keys that a tile sees")
        fail(part, found.headline, found.details, found.cause, part.rerun(seed))
    cases = causal_cases(seed, *blocks_of(flash_forward, *small(), kernel=FORWARD))
    cases = [case for case in cases if case.kind in _AT_THE_DIAGONAL]
    notice = (
        "the fast kernel asks the same two functions, and leaves out the mask in blocks that end before unmasked_end"
    )
    _check_causal(FLASH_CAUSAL.part("causal, the fast kernel"), flash_forward, FORWARD, cases, None, seed, notice)


def _check_causal(
    exercise: Exercise, function: Forward, kernel: str, cases: list[Case], speed: Speed | None, seed: int, notice: str
) -> None:
    check_kernel(
        exercise,
        function,
        shapes.attention,
        cases,
        shapes.qkv,
        outputs=("o", "lse"),
        tiling=tiling(kernel),
        inspections=[skips_blocks(kernel), within(kernel, _budget), alone(kernel)],
        forbidden=RULES,
        diagnose=_causal_mistakes(kernel),
        speed=speed,
        seed=seed,
        notice=notice,
    )
