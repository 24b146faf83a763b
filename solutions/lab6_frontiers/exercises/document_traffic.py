"""What the kernels of exercise 6.5 may read and multiply, whatever their cut: counted from the sizes of their tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult
from utils.checks.launches import arguments_in, by_memory, cdiv
from utils.checks.problem import Problem
from utils.kernel_profile import LaunchProfile

from .document_mask import lengths

#: Queries of the smallest tile for which the budget has room; bytes of a table for each query and head; and bytes that
#: each program may read of it for each document, to find its own.
LEAST_TILE, TABLE, ENTRY = 32, 16, 8
#: Where the list tells of tiles that no query needs, and of everything else that is moved.
SKIPPED, MOVED = 5, 9
#: Products beside the two of attention that a kernel may have, as a share of these.
BESIDE = 1.5


def _block(launch: LaunchProfile, tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the largest block that a launch loads of a tensor; empty for none."""
    shapes = [launch.blocks[name] for name in arguments_in(launch, tensor) if name in launch.blocks]
    return max(shapes, key=math.prod, default=())


def tile_of(trial: CaseResult) -> tuple[int, int, int]:
    """Queries, keys and columns of the tiles of the launch that stores o; zeros where it loads no tile of q or of k."""
    q, k = trial.args[:2]
    for launch in trial.profile.launches if trial.profile is not None and trial.outputs else ():
        of_q, of_k = _block(launch, q), _block(launch, k)
        if arguments_in(launch, trial.outputs[0]) and len(of_q) > 1 and len(of_k) > 1:
            columns = of_q[-1] if of_q[-1] >= q.shape[2] else of_q[0]  # a tile may be loaded the other way round
            return math.prod(of_q) // columns, math.prod(of_k) // columns, columns
    return 0, 0, 0


def _tiles(case: Case, m: int) -> list[list[tuple[int, int]]]:
    """(first key, end) that each tile of ``m`` queries needs, for tiles of the row, and for tiles of each document."""
    starts = [0]
    for length in lengths(case):
        starts.append(starts[-1] + length)
    T = starts[-1]
    begin = [a for a, b in pairwise(starts) for _ in range(a, b)]
    of_row = [(begin[first], min(first + m, T)) for first in range(0, T, m)]
    of_each = [(a, min(first + m, b)) for a, b in pairwise(starts) for first in range(a, b, m)]
    return [of_row, of_each]


def _keys(case: Case, m: int, n: int) -> int:
    """Most keys that the tiles of one head's queries read together, in tiles of n where one of them is needed."""
    T = case.sizes["T"]

    def read(first: int, end: int) -> Iterator[int]:
        for begin in (first, first // n * n):
            yield min(T, begin + cdiv(end - begin, n) * n) - begin

    return max(sum(max(read(*tile)) for tile in tiles) for tiles in _tiles(case, m))


def _steps(case: Case, m: int, n: int) -> int:
    """Most tiles of keys that the tiles of one head's queries visit together."""
    return max(
        sum(max(cdiv(end - first, n), cdiv(end, n) - first // n) for first, end in tiles) for tiles in _tiles(case, m)
    )


def moved(trial: CaseResult) -> Problem | None:
    """An inspection: q once, k and v in tiles with a key that is seen, o once, and little else."""
    case, (q, k, v, starts), o = trial.case, trial.args, trial.outputs[0]
    found = by_memory(trial.profile.launches, {"q": q, "k": k, "v": v, "cu_seqlens": starts, "o": o})
    if found["o"].bytes_stored != o.nbytes:
        cause = classic("each element of o is stored once, when its sum is complete", MOVED)
        return Problem(f"o: expected {o.nbytes:,} bytes stored, got {found['o'].bytes_stored:,}", cause)
    if found["q"].bytes_loaded > o.nbytes:
        cause = classic("a tile of queries is loaded once, and stays on chip for the whole loop", MOVED)
        return Problem(f"q: expected {o.nbytes:,} bytes loaded, got {found['q'].bytes_loaded:,}", cause)
    if problem := _skips(trial, {"k": found["k"].bytes_loaded, "v": found["v"].bytes_loaded}):
        return problem
    beside = found[""].bytes_loaded + found[""].bytes_stored + found["o"].bytes_loaded
    programs = sum(math.prod(launch.grid) for launch in trial.profile.launches)
    allowed = TABLE * case.numel("T", "H") + ENTRY * (case.sizes["S"] + 1) * programs
    if beside > allowed:
        cause = classic("scores and sums stay on chip; a table of documents takes a few numbers for each query", MOVED)
        return Problem(f"other memory: expected at most {allowed:,} bytes loaded and stored, got {beside:,}", cause)
    return None


def _skips(trial: CaseResult, loaded: dict[str, int]) -> Problem | None:
    case, (m, n, columns) = trial.case, tile_of(trial)
    if not columns:
        return None
    width = case.numel("H", "D") * case.element_size
    allowed = _keys(case, max(m, LEAST_TILE), n) * width
    for name, got in loaded.items():
        if got > allowed:
            headline = (
                f"{name}: expected at most {allowed:,} bytes loaded, got {got:,} (tiles of {m} queries, {n} keys)"
            )
            if got <= _keys(case, m, n) * width:
                cause = f"a tile has at least {LEAST_TILE} queries, and the keys that they see are read once for all"
                return Problem(headline, classic(cause, MOVED))
            return Problem(headline, classic(_cause(case, m, got // width), SKIPPED))
    needed = case.sizes["H"] * _steps(case, m, n) * 4 * m * n * columns
    if trial.profile.flops > BESIDE * needed:
        cause = classic(
            "tiles are multiplied that hold no key that a query of theirs sees: end the loop there", SKIPPED
        )
        return Problem(f"tl.dot: expected {needed:,} FLOPs, got {trial.profile.flops:,}", cause)
    return None


def _cause(case: Case, m: int, keys: int) -> str:
    """Which tiles are read in vain, as far as the count tells it."""
    T = case.sizes["T"]
    if keys == cdiv(T, m) * T:
        return "every tile of queries reads the keys of the whole row: skip the tiles in which no query sees a key"
    before = sum(min(first + m, T) for first in range(0, T, m))
    if before <= keys < before + cdiv(T, m) * m:
        return (
            "the keys of the documents before are read: the loop begins where the document of the tile's first query "
            "does"
        )
    return "tiles are read that hold no key which a query of theirs sees"
