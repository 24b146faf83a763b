"""What the kernels of exercise 6.7 may read and multiply, whatever their cut."""

from __future__ import annotations

import math

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult
from utils.checks.launches import arguments_in, by_memory, cdiv, tile_over
from utils.checks.problem import Problem

from .expert_rows import counts_of

#: Sides of the smallest tile of out for which the budget has room; bytes of a table for each row and expert; and bytes
#: that each program may read of it for each expert, to find its own.
LEAST_TILE, TABLE, ENTRY = 32, 16, 8
#: Products of tiles beside those that are needed, as a share.
BESIDE = 1.25
#: Where the list tells of what is moved.
MOVED = 6


def tiles(case: Case, rows: int) -> int:
    """Most tiles of so many rows that read an expert's matrix: they begin anew in each group, or in the row's order."""
    begin = anew = in_order = 0
    for count in filter(None, counts_of(case)):
        anew += cdiv(count, rows)
        in_order += cdiv(begin + count, rows) - begin // rows
        begin += count
    return max(anew, in_order)


def moved(trial: CaseResult) -> Problem | None:
    """An inspection: one launch; x and each expert's weights once for each tile of 32; out once, and little else."""
    case, (x, weights, counts), out = trial.case, trial.args, trial.outputs[0]
    T, E, N = case.shape("T", "E", "N")
    launches = trial.profile.launches
    writing = [each for each in launches if any(each.by_argument[n].bytes_stored for n in arguments_in(each, out))]
    if len(writing) > 1:
        cause = "all experts are computed in one launch: small products one after the other leave most of a GPU empty"
        return Problem(f"out is written by {len(writing)} launches, expected 1", classic(cause, MOVED))
    found = by_memory(launches, {"x": x, "weights": weights, "counts": counts, "out": out})
    if found["out"].bytes_stored != out.nbytes:
        cause = classic("each element of out is stored once, when its sum is complete", MOVED)
        return Problem(f"out: expected {out.nbytes:,} bytes stored, got {found['out'].bytes_stored:,}", cause)
    columns = cdiv(N, LEAST_TILE)
    one = case.numel("T", "K") * case.element_size
    if not one <= found["x"].bytes_loaded <= columns * one:
        cause = f"a tile of out has at least {LEAST_TILE} rows and columns, and a row of x is read once for each"
        got = f"{found['x'].bytes_loaded / one:.1f} times, expected 1 to {columns}"
        return Problem(f"x is loaded {got} ({found['x'].bytes_loaded:,} bytes)", classic(cause, MOVED))
    matrix = case.numel("K", "N") * case.element_size
    allowed, loaded = tiles(case, LEAST_TILE) * matrix, found["weights"].bytes_loaded
    if loaded > allowed:
        headline = f"weights: expected at most {allowed:,} bytes loaded, got {loaded:,} (one matrix is {matrix:,})"
        return Problem(headline, classic(_cause(case, trial, loaded / matrix), MOVED))
    programs = sum(math.prod(launch.grid) for launch in launches)
    most = TABLE * (T + E) * columns + ENTRY * E * programs
    beside = found[""].bytes_loaded + found[""].bytes_stored + found["out"].bytes_loaded
    if beside > most:
        cause = classic("sums stay on chip, and a table of tiles takes a few numbers for each row and expert", MOVED)
        return Problem(f"other memory: expected at most {most:,} bytes loaded and stored, got {beside:,}", cause)
    return _multiplied(trial)


def _cause(case: Case, trial: CaseResult, matrices: float) -> str:
    """Why more of the weights is read, as far as the count tells it."""
    counts = counts_of(case)
    rows = tile_over(trial.profile, trial.args[0])[0]
    if rows < LEAST_TILE and matrices <= tiles(case, rows):
        return f"a tile of out has at least {LEAST_TILE} rows, and an expert's matrix is read once for each"
    if 0 in counts and matrices <= tiles(case, max(rows, LEAST_TILE)) + counts.count(0):
        return "matrices of experts without rows are read: such an expert has no tile"
    return "an expert's matrix is read once for each tile of its own rows: a program that finds no rows ends at once"


def _multiplied(trial: CaseResult) -> Problem | None:
    """Whether programs without rows multiply."""
    x, out = trial.args[0], trial.outputs[0]
    K, N = trial.case.shape("K", "N")
    of_x, of_out = tile_over(trial.profile, x), tile_over(trial.profile, out)
    if min(*of_x, *of_out) < 16:
        return None
    needed = max(  # a tile may be loaded or stored the other way round
        2 * tiles(trial.case, m) * m * cdiv(N, n) * n * cdiv(K, k) * k for m, k in (of_x, of_x[::-1]) for n in of_out
    )
    if trial.profile.flops <= BESIDE * needed:
        return None
    cause = classic("programs multiply that have no row: their tile lies beyond the end of its group", MOVED)
    return Problem(f"tl.dot: expected at most {needed:,} FLOPs, got {trial.profile.flops:,}", cause)
