"""Tensors of rows: how many there are, what a pass over them moves, and how programs cover them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from utils.checks.cases import Case
from utils.checks.diagnoses import CaseResult
from utils.checks.launches import launched
from utils.checks.tiling import Tiling
from utils.checks.traffic import Passes


def every(case: Case, times: float = 1) -> Passes:
    """So many passes over a tensor that has all the axes of the case."""
    return Passes(*case.sizes, times=times)


def num_rows(case: Case) -> int:
    """Rows of a tensor (..., col): the product of its leading axes."""
    return case.numel(*list(case.sizes)[:-1])


def rows_tiling(trials: Sequence[CaseResult], kernel: str, per_split: bool = False) -> Tiling | None:
    """Tiles of ``ROWS`` rows (or of a whole split of them) by ``BLOCK`` columns, counted row by row.

    All leading axes are flattened into rows. Where the student's grid has another form than the stub suggests, tiles
    are named and programs are not.
    """
    found = launched(trials, kernel)
    if found is None:
        return None
    *leading, col = trials[0].case.sizes
    row = "*".join(leading)
    height = found.get("ROWS", 1) * (found.get("tiles_per_split", 1) if per_split else 1)

    def program(tile: Mapping[str, int], counts: Mapping[str, int]) -> tuple[int]:
        return (tile[row] * counts[col] + tile[col],)

    in_line = tuple(found["grid"][1:]) == (1, 1)
    noun = "split" if per_split else "tile"
    return Tiling(
        [*leading, col], tiles={row: height, col: found["BLOCK"]}, program=program if in_line else None, noun=noun
    )


def sums_tiling(trials: Sequence[CaseResult]) -> Tiling | None:
    """Blocks of columns, as the second stage of a gradient sums them."""
    found = launched(trials, "column_sums_kernel")
    return found and Tiling("col", tiles={"col": found["BLOCK"]}, grid="col")
