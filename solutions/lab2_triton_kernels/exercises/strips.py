"""Mistakes in a gradient that sums over rows in two stages: strips of tiles, then the strips' partial sums."""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.launches import launched

#: What is summed, as (rows, columns) in float64.
Products = Callable[[Evidence], torch.Tensor]


def _strips(e: Evidence, kernel: str, products: Products) -> tuple[tuple[torch.Tensor, ...], int]:
    """The strips as the first stage cuts them, and the rows of a tile."""
    found = launched([e.trial], kernel)
    return products(e).split(found["ROWS"] * found["tiles_per_strip"]), found["ROWS"]


def _last_tiles(e: Evidence, kernel: str, products: Products) -> torch.Tensor:
    strips, rows = _strips(e, kernel, products)
    return sum(strip.split(rows)[-1].sum(0) for strip in strips)


def _first_tiles(e: Evidence, kernel: str, products: Products) -> torch.Tensor:
    strips, rows = _strips(e, kernel, products)
    return sum(strip[:rows].sum(0) for strip in strips)


def _overlapping(e: Evidence, kernel: str, products: Products) -> torch.Tensor:
    """Strip s begins at tile s, not at tile s * tiles_per_strip."""
    strips, rows = _strips(e, kernel, products)
    tiles, most = products(e).split(rows), launched([e.trial], kernel)["tiles_per_strip"]
    return sum(tile.sum(0) for s in range(len(strips)) for tile in tiles[s : s + most])


def mistakes(kernel: str, output: str, products: Products, sharing: int, adding: int) -> tuple[Diagnosis, ...]:
    """Rules for the gradient ``output`` that ``kernel`` begins, with their places in the exercise's list.

    Args:
        sharing: Where the list tells of strips that get in each other's way.
        adding: Where it tells of tiles that are not added up.
    """

    def races(e: Evidence) -> list:
        return [race for race in e.findings("races") if race.argument == "partial_ptr"]

    def unwritten(e: Evidence) -> list:
        return [found for found in e.findings("uninitialized_reads") if found.argument == "partial_ptr"]

    def is_output(e: Evidence) -> bool:
        return e.difference.name == output

    return (
        Diagnosis(
            lambda e: not is_output(e) and bool(e.difference.never_written[e.bad].all()),
            "these elements are never written: a row has triton.cdiv(columns, BLOCK) blocks, "
            "in the grid and in the kernel",
        ),
        Diagnosis(
            lambda e: is_output(e) and races(e),
            lambda e: classic(
                f"strips write the same partial sums ({races(e)[0]}): strip s has row s to itself", sharing
            ),
        ),
        Diagnosis(
            lambda e: is_output(e) and unwritten(e),
            lambda e: classic(
                f"partial sums are added up that no program has written ({unwritten(e)[0]}): "
                "strip s writes row s, all its columns",
                sharing,
            ),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_last_tiles(e, kernel, products)),
            classic(f"{output} holds the last tile of each strip only: add every tile to the sums", adding),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_first_tiles(e, kernel, products)),
            classic(f"{output} holds the first tile of each strip only: go through all its tiles", adding),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_overlapping(e, kernel, products)),
            classic("strips overlap: tile t of strip s is tile s * tiles_per_strip + t of all", adding),
        ),
        Diagnosis(
            lambda e: is_output(e) and e.close(_strips(e, kernel, products)[0][0].sum(0)),
            classic(f"{output} holds the first strip's sums only: column_sums adds up the rows of partial", sharing),
        ),
    )
