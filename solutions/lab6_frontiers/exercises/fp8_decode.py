"""The check of exercise 6.4: decode attention over a paged cache in e4m3, with a scale for each block and head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.hidden import Tolerance, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import launched, within
from utils.checks.problem import Problem
from utils.checks.traffic import Budget, Passes

from .fp8_cache import FP8, HEADS_FIRST, LOW, Reading, attention, inputs, lengths

Tensor = torch.Tensor
KERNEL = "fp8_decode_kernel"
FP16, BF16 = torch.float16, torch.bfloat16


def _cases(seed: int) -> list[Case]:
    draw = generator(seed)
    group, odd = draw.choice((2, 3)), draw.choice((20, 24, 40))

    def case(kind: str, sizes: tuple[int, ...], dtype: torch.dtype = FP16, layout: str = "contiguous") -> Case:
        return Case(kind, dict(zip(("S", "H", "G", "D", "block"), sizes)), dtype, layout, seed=seed)

    return [
        case("one sequence", (1, 1, 1, 16, 16)),
        case("ragged", (2, 2, 2, 16, 16)),
        case("shared heads", (2, 2 * group, 2, 16, 16)),
        case("small blocks", (2, 2, 1, 16, draw.choice((2, 4)))),
        case("small blocks", (1, 2, 2, 16, 8), BF16),
        case("large blocks", (1, 1, 1, 16, 32)),
        case("no context", (2, 2, 1, 16, 16)),
        case("one token", (2, 2, 2, 16, 8), BF16),
        case("odd head dimension", (1, 2, 1, odd, 16)),
        case("ragged", (2, 2, 2, 16, 16), layout=HEADS_FIRST),
        case("ragged", (2, group, 1, 32, 16), BF16),
        case(LOW, (1, 1, 1, 16, 16)),
    ]


def _huge(axes: Sequence[int]) -> tuple[Tensor, ...]:
    """Caches of more than 2^31 bytes, whose memory nothing fills, and a context in their last block.

    ``axes``: those of a cache in the order in which they lie in memory, the outermost first.
    """
    shape, device = (2**20 + 2**17, 16, 1, 128), runtime.DEVICE
    home, back = [shape[axis] for axis in axes], [axes.index(axis) for axis in range(4)]
    caches = (torch.empty(home, dtype=torch.uint8, device=device).view(FP8).permute(back) for _ in range(2))
    scales = (torch.empty((shape[0], 1), device=device) for _ in range(2))
    table = torch.full((1, 1), shape[0] - 1, dtype=torch.int32, device=device)
    q = torch.ones((1, 1, 128), dtype=FP16, device=device)
    return q, *caches, *scales, table, torch.full((1,), 16, dtype=torch.int32, device=device)


#: The last block lies more than 2^31 elements from the first, then the last slot, then the last column.
_HUGE = [functools.partial(_huge, axes) for axes in ((0, 1, 2, 3), (1, 0, 2, 3), (3, 0, 1, 2))]


# ---- what may be read
def _tokens(case: Case) -> int:
    return sum(lengths(case)) * case.sizes["G"]


def _exact(case: Case, launch: Mapping[str, Any]) -> Budget:
    """Each code of each context once, q once, the result once."""
    codes = _tokens(case) * case.sizes["D"]
    loads = {"q_ptr": Passes("S", "H", "D"), "k_cache_ptr": codes, "v_cache_ptr": codes}
    return Budget(loads, {"o_ptr": Passes("S", "H", "D")}, exact=True)


def _small(case: Case, launch: Mapping[str, Any]) -> Budget:
    """At most one entry of a table and one scale of each cache for a token."""
    return Budget(dict.fromkeys(("block_tables_ptr", "k_scale_ptr", "v_scale_ptr"), 4 * _tokens(case)))


def _codes_once(trial: CaseResult) -> Problem | None:
    """An inspection: no code is loaded twice."""
    needed = _tokens(trial.case) * trial.case.sizes["D"]
    for name in ("k_cache_ptr", "v_cache_ptr"):
        found = trial.profile.by_argument.get(name)
        if found is not None and found.bytes_loaded > needed:
            headline = f"{name}: expected {needed:,} bytes loaded, got {found.bytes_loaded:,}"
            return Problem(headline, classic("each code of a context is loaded once, for all query heads", 7))
    return None


# ---- mistakes
def _gives(e: Evidence, reading: Reading) -> bool:
    """Whether the answer is what this reading of the cache gives, with the answer's own tile."""
    tile = (launched([e.trial], KERNEL) or {}).get("BLOCK_N", 16)
    return e.same_as(replace(reading, tile=tile))


def _cause(e: Evidence) -> str:
    """What is read wrongly, or nothing.

    Where one token has nearly all the weight, several readings give the same: of those that give the simplest failed
    case, the one that gives most of the others is meant.
    """
    found = [reading for reading in _READINGS if _gives(e, reading)]
    if not found:
        return ""
    cases = e.of_each_case() if len(found) > 1 else [e]
    return classic(*_READINGS[max(found, key=lambda reading: sum(_gives(case, reading) for case in cases))])


#: What each mistake reads, and its cause and number.
_READINGS = {
    Reading("none", "none"): ("the codes are taken for the numbers: both scales are left out", 1),
    Reading(k_scale="none"): ("the scales of the keys are left out", 1),
    Reading(v_scale="none"): ("the scales of the values are left out", 1),
    Reading("other", "other"): ("keys have the scales of values, and values those of keys", 1),
    Reading(k_scale="other"): ("keys have the scales of values", 1),
    Reading(v_scale="other"): ("values have the scales of keys", 1),
    Reading("logical", "logical"): (
        "a scale is looked up by the block's number in the sequence: like the codes, it lies at the block that the "
        "table names", 2),
    Reading("first head", "first head"): ("every head has the scales of the first one: k_scale[block, head]", 2),
    Reading("tile", "tile"): ("a whole tile has the scales of its first token: a tile spans several blocks", 3),
    Reading(k_scale="tile"): ("a whole tile has the scale of its first key: a tile spans several blocks", 3),
    Reading(v_scale="tile"): ("a whole tile has the scale of its first value: a tile spans several blocks", 3),
    Reading(scaled_sum=True): (
        "d adds up weights that are multiplied by the values' scales: sum p first, then scale it", 4),
    Reading(in_table=False): ("the block table is ignored: token t lies in block table[t // block_size]", 5),
    Reading(whole_blocks=True): ("free slots of the last block count: where not inside, the score is -inf", 5),
    Reading(zeros=True): ("slots that are not inside count with a score of 0: a score of 0 is no weight of 0", 5),
    Reading(rescaled=False): ("neither the sum nor the output is rescaled after the maximum has changed", 6),
}  # fmt: skip
_MISTAKES = (
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == LOW),
        classic("only scores far below zero go wrong: of a slot that is not inside it is -inf, below any of them", 5),
    ),
    Diagnosis(lambda e: bool(_cause(e)), _cause),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "small blocks" or case.sizes["block"] < 16),
        classic("only tiles of several blocks go wrong: each token has a block and scales of its own", 3),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout == HEADS_FIRST),
        classic("only caches of other strides go wrong: each axis of each cache has its own", 5),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.dtype == BF16),
        "only scales of very different sizes go wrong: multiply by them in float32",
    ),
)  # fmt: skip

FP8_DECODE = Exercise(
    "6.4",
    "attention over a cache in 8 bits",
    points=12,
    observe=tried("6.4", "fp8_decode", ("",), _cases, inputs),
    tolerance=Tolerance(2e-2),
)


@FP8_DECODE.checked_by
def check_fp8_decode(fp8_decode: Callable[..., Tensor], seed: int | None = None) -> None:
    """Exercise 6.4: decode attention over a paged cache in e4m3.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        FP8_DECODE,
        fp8_decode,
        attention,
        _cases(seed),
        inputs,
        outputs=("o",),
        inspections=[_codes_once, within(KERNEL, _exact), within(KERNEL, _small)],
        diagnose=_MISTAKES,
        compiled=Compiled(wide=8),
        huge=_HUGE,
        seed=seed,
        notice="a key or value costs half the bytes, and two multiplications of its token",
    )
