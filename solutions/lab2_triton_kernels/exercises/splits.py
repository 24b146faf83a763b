"""Mistakes in a gradient that sums over rows in two stages: splits of tiles, then the splits' partial sums."""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.launches import launched

#: What is summed, as (rows, columns) in float64.
Products = Callable[[Evidence], torch.Tensor]


def _splits(e: Evidence, kernel: str, products: Products) -> tuple[tuple[torch.Tensor, ...], int]:
    """The splits as the first stage cuts them, and the rows of a tile."""
    found = launched([e.trial], kernel)
    return products(e).split(found["ROWS"] * found["tiles_per_split"]), found["ROWS"]


def _last_tiles(e: Evidence, kernel: str, products: Products) -> torch.Tensor:
    splits, rows = _splits(e, kernel, products)
    return sum(split.split(rows)[-1].sum(0) for split in splits)


def _first_tiles(e: Evidence, kernel: str, products: Products) -> torch.Tensor:
    splits, rows = _splits(e, kernel, products)
    return sum(split[:rows].sum(0) for split in splits)


def _overlapping(e: Evidence, kernel: str, products: Products) -> torch.Tensor:
    """Split s begins at tile s, not at tile s * tiles_per_split."""
    splits, rows = _splits(e, kernel, products)
    tiles, most = products(e).split(rows), launched([e.trial], kernel)["tiles_per_split"]
    return sum(tile.sum(0) for s in range(len(splits)) for tile in tiles[s : s + most])


def _missing(e: Evidence) -> torch.Tensor | None:
    """Which elements of a matrix are never written, as (rows, columns), if all that is wrong is that."""
    never = e.difference.never_written
    if never.dim() < 2 or not never.any() or not bool(never[e.bad].all()):
        return None
    return never.flatten(0, -2)


def _whole_rows_missing(e: Evidence) -> bool:
    missing = _missing(e)
    return missing is not None and not missing.all() and bool((missing.all(1) == missing.any(1)).all())


def _same_columns_missing(e: Evidence) -> bool:
    missing = _missing(e)
    return missing is not None and not missing.all() and bool((missing == missing[:1]).all())


_LOOK = "see how many programs there are, which rows and columns each takes, and the offsets and the mask of its store"


def _missing_rows(e: Evidence) -> str:
    rows = _missing(e).all(1).nonzero().flatten().tolist()
    which = f"{len(rows)} of them, the first is row {rows[0]}"
    return f"whole rows are never written ({which}): {_LOOK}"


def _missing_columns(e: Evidence) -> str:
    missing = _missing(e)[0]
    columns, block = missing.nonzero().flatten().tolist(), e.tiling.tiles[list(e.case.sizes)[-1]]
    partial = len(missing) % block
    look = "a row has triton.cdiv(columns, BLOCK) blocks, in the grid and in the kernel"
    return (
        f"the same {len(columns)} columns of every row are never written (the first is column {columns[0]}): "
        f"{look if partial and columns == list(range(len(missing)))[-partial:] else _LOOK}"
    )


def mistakes(kernel: str, output: str, products: Products, sharing: int, adding: int) -> tuple[Diagnosis, ...]:
    """Rules for the gradient ``output`` that ``kernel`` begins, with their places in the exercise's list.

    Args:
        sharing: Where the list tells of splits that get in each other's way.
        adding: Where it tells of tiles that are not added up.
    """

    def races(e: Evidence) -> list:
        return [race for race in e.findings("races") if race.argument == "partial_ptr"]

    def unwritten(e: Evidence) -> list:
        return [found for found in e.findings("uninitialized_reads") if found.argument == "partial_ptr"]

    def is_output(e: Evidence) -> bool:
        return e.difference.name == output

    return (
        Diagnosis(lambda e: not is_output(e) and _whole_rows_missing(e), _missing_rows),
        Diagnosis(lambda e: not is_output(e) and _same_columns_missing(e), _missing_columns),
        Diagnosis(
            lambda e: is_output(e) and races(e),
            lambda e: classic(
                f"splits write the same partial sums ({races(e)[0]}): split s has row s to itself", sharing
            ),
        ),
        Diagnosis(
            lambda e: is_output(e) and unwritten(e),
            lambda e: classic(
                f"partial sums are added up that no program has written ({unwritten(e)[0]}): "
                "split s writes row s, all its columns",
                sharing,
            ),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_last_tiles(e, kernel, products)),
            classic(f"{output} holds the last tile of each split only: add every tile to the sums", adding),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_first_tiles(e, kernel, products)),
            classic(f"{output} holds the first tile of each split only: go through all its tiles", adding),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_overlapping(e, kernel, products)),
            classic("splits overlap: tile t of split s is tile s * tiles_per_split + t of all", adding),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_splits(e, kernel, products)[0][0].sum(0)),
            classic(f"{output} holds the first split's sums only: column_sums adds up the rows of partial", sharing),
        ),
    )
