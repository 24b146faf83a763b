"""The check of exercise 6.7: the product of a layer of experts, in kernels of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from utils import runtime
from utils.checks import forbid
from utils.checks.cases import Case, far_fits
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.hidden import tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import arguments_in, probed_tile, tile_over
from utils.checks.tiling import Tiling

from .expert_rows import (
    FP16,
    LONG,
    MANY,
    cases,
    counts_of,
    experts_of,
    huge_weights,
    huge_x,
    inputs,
    multiplied,
    product,
)
from .expert_traffic import moved
from .rules import OF_TABLES

Tensor = torch.Tensor


def _largest(case: Case) -> int:
    """Elements of the largest tensor that an answer may allocate: no padded copy of x, no weights of each row."""
    return max(case.numel("T", "N"), 4 * case.numel("T"), 4 * case.numel("E"))


RULES = forbid.Rules(allow=OF_TABLES, largest=_largest, place=6)


def _rows(function: Callable[..., Tensor]) -> int:
    """Rows of the tiles of x that a function loads, between 16 and 256."""
    x = torch.zeros(64, 64, device=runtime.DEVICE, dtype=FP16)
    counts = torch.tensor([64], dtype=torch.int32, device=runtime.DEVICE)
    rows = probed_tile(function, (x, x[None].clone(), counts), x)[0]
    return min(256, max(16, rows)) if rows > 1 else 32


def _checked_cases(seed: int, m: int) -> list[Case]:
    far = [Case("far rows", {"T": 3, "E": 2, "K": 32, "N": 32}, FP16, "far", seed=seed)] if far_fits(FP16) else []
    return cases(seed, m) + far


def _tiling(trials: Sequence[CaseResult]) -> Tiling | None:
    """Which tile an element is in, where tiles begin at multiples of their size."""
    trial = trials[0]
    rows, columns = tile_over(trial.profile, trial.outputs[0]) if trial.profile is not None else (1, 1)
    width = trial.case.sizes["N"]
    for launch in trial.profile.launches if rows * columns > 1 else ():
        names = arguments_in(launch, trial.outputs[0])
        firsts = [first for (_, name), (first, _) in launch.written.items() if name in names]
        if firsts and all(first // width % rows == 0 and first % width % columns == 0 for first in firsts):
            return Tiling("T N", tiles={"T": rows, "N": columns}, loops={"K": 1})
    return None


# ---- what is wrong
@dataclass(frozen=True)
class Reading:
    """A known mistake: what it gives, its cause, and its place in the list."""

    formula: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    cause: str
    place: int

    def gives(self, e: Evidence) -> bool:
        """Whether the answer is what this mistake gives, with the answer's own tile."""
        rows = tile_over(e.trial.profile, e.trial.args[0])[0] if e.trial.profile is not None else 1
        return e.same_as(lambda x, weights, counts: self.formula(x, weights, counts, rows))


def _experts(change: Callable[[Tensor, Tensor, int], Tensor], cause: str, place: int) -> Reading:
    """Another expert for each row, from the right ones (T,), the counts and the rows of a tile."""

    def formula(x: Tensor, weights: Tensor, counts: Tensor, rows: int) -> Tensor:
        found = change(experts_of(counts), counts, rows)
        return multiplied(x, weights, found.clamp(0, len(weights) - 1))

    return Reading(formula, cause, place)


def _rows_in_group(x: Tensor, weights: Tensor, counts: Tensor, rows: int) -> Tensor:
    begin = (counts.cumsum(0) - counts)[experts_of(counts)]
    return multiplied(x[torch.arange(len(x)) - begin], weights, experts_of(counts))


def _turned(x: Tensor, weights: Tensor, counts: Tensor, rows: int) -> Tensor:
    E, K, N = weights.shape
    return multiplied(x, weights.reshape(E, N, K).mT, experts_of(counts))


def _of_tile(experts: Tensor, rows: int, last: bool) -> Tensor:
    row = torch.arange(len(experts)) // rows * rows
    return experts[(row + rows - 1).clamp(max=len(experts) - 1) if last else row]


def _fitting(e: Evidence) -> str:
    """The mistake that gives the simplest failed case, and of several the one that gives most of the others."""
    found = [reading for reading in _READINGS if reading.gives(e)]
    if not found:
        return ""
    cases = e.of_each_case() if len(found) > 1 else [e]
    best = max(found, key=lambda reading: sum(reading.gives(case) for case in cases))
    return classic(best.cause, best.place)


_READINGS = (
    _experts(lambda own, counts, rows: own * 0, "every row meets the first expert's matrix", 1),
    _experts(lambda own, counts, rows: own + 1, "each group meets the matrix of the next expert", 1),
    _experts(lambda own, counts, rows: own - 1, "each group meets the matrix of the expert before", 1),
    _experts(
        lambda own, counts, rows: torch.arange(len(own)) // -(-len(own) // len(counts)),
        "every expert has as many rows as the others: counts says how many each has", 1,
    ),
    _experts(
        lambda own, counts, rows: (counts > 0).cumsum(0)[own] - 1,
        "experts without rows are left out of the numbering: the group behind one meets its matrix", 2,
    ),
    _experts(
        lambda own, counts, rows: _of_tile(own, rows, False),
        "all rows of a tile meet the expert of its first row: a tile of the row's order may hold several groups", 3,
    ),
    _experts(
        lambda own, counts, rows: _of_tile(own, rows, True),
        "all rows of a tile meet the expert of its last row: a tile of the row's order may hold several groups", 3,
    ),
    Reading(_rows_in_group, "rows of x are counted from the beginning of their group, not of x", 3),
    Reading(_turned, "the weights are read as (E, N, K): column n of an expert's matrix lies at k * N + n", 7),
)  # fmt: skip


def _only(holds: Callable[[Case], bool], cause: str, place: int) -> Diagnosis:
    return Diagnosis(lambda e: e.only(holds), classic(cause, place))


def _never_written(e: Evidence) -> bool:
    return bool(e.difference.never_written.any()) and not e.findings("out_of_bounds")


BEYOND = classic("race between programs: a tile's last row is its group's last, not that of x", 3)


def _at_groups_begin(trial: CaseResult) -> str:
    """Why programs race for rows that lie no further behind the beginning of a group than a tile has rows."""
    rows = tile_over(trial.profile, trial.outputs[0])[0]
    counts = trial.args[2].long().cpu()
    begins = (counts.cumsum(0) - counts)[counts > 0][1:]  # of groups that lie behind another one
    raced = torch.tensor([race.index // trial.case.sizes["N"] for race in trial.profile.races])
    behind = raced[:, None] - begins
    return BEYOND if ((behind >= 0) & (behind < rows)).any(1).all() else ""


def _what_is_never_written(e: Evidence) -> str:
    """Whole groups of rows, the ends of groups, or columns."""
    rows = e.difference.never_written.all(1)
    missed = [group for group in rows.split(counts_of(e.case)) if group.any()]
    if not missed or len(counts_of(e.case)) == 1:
        return classic("elements of out are never written: is there a program for each, and what does it store?", 4)
    if all(group.all() for group in missed):
        return classic("whole groups are never written: is there a program for them, and what does it store?", 4)
    return classic("rows are never written: T // BLOCK_M + E tiles may be needed, as each group's last may be short", 4)


_MISTAKES = (
    _only(
        lambda case: case.layout == "far",
        "only offsets beyond 2^31 are wrong: row.to(tl.int64), before it is multiplied by a stride", 7,
    ),
    _only(
        lambda case: case.layout != "contiguous",
        "only rows that are further apart than K go wrong: row t of x begins at t * x.stride(0)", 7,
    ),
    _only(
        lambda case: case.kind == MANY,
        "only many experts go wrong: there may be more of them than rows in a tile", 2,
    ),
    Diagnosis(_never_written, _what_is_never_written),
    Diagnosis(
        lambda e: bool(e.findings("races")) and not e.findings("out_of_bounds") and e.case.sizes["E"] > 1,
        BEYOND,
    ),
    Diagnosis(_fitting, _fitting),
    _only(lambda case: case.kind == LONG, "only long sums go wrong: the total is float32 until it is stored", 5),
    Diagnosis(
        lambda e: e.only(lambda case: case.sizes["K"] % 16 != 0) and not e.findings("out_of_bounds"),
        classic("only a K that is no multiple of the tile goes wrong: mask both operands along K, with other=0.0", 5),
    ),
    Diagnosis(
        lambda e: all(trial.failed == (trial.case.sizes["K"] > 32) for trial in e.trials),
        classic("one step along K is right, several are not: does each step add the product of its own columns?", 5),
    ),
    _only(
        lambda case: 0 in counts_of(case),
        "only experts without rows go wrong: they have no tile, and keep their number", 2,
    ),
)  # fmt: skip

EXPERTS = Exercise(
    "6.7",
    "the grouped product of experts",
    points=13,
    observe=tried("6.7", "expert_matmul", ("",), cases, inputs),
)


@EXPERTS.checked_by
def check_experts(expert_matmul: Callable[[Tensor, Tensor, Tensor], Tensor], seed: int | None = None) -> None:
    """Exercise 6.7: ragged groups of rows, each times the matrix of its own expert, in one launch.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        EXPERTS,
        expert_matmul,
        product,
        _checked_cases(seed, _rows(expert_matmul)),
        inputs,
        tiling=_tiling,
        inspections=[moved],
        forbidden=RULES,
        diagnose=_MISTAKES,
        compiled=Compiled(wide=8),
        huge=(huge_x, huge_weights),
        seed=seed,
        why_raced=_at_groups_begin,
        raised={
            "accesses outside of": classic("a program that walks through the counts ends behind the last expert", 4)
        },
        notice="every row is computed once, and an expert without rows costs nothing but a look at its count",
    )
