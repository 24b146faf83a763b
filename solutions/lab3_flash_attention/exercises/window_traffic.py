"""What the kernels of exercise 3.10 may read: launches are told by what they store, and tiles by BLOCK_M and BLOCK_N.

Nothing here knows the names of the kernels or of their arguments, which the student chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult
from utils.checks.launches import cdiv
from utils.checks.problem import Problem
from utils.kernel_profile import LaunchProfile

#: Where the exercise's list tells of what is read.
SKIPPED = 2


def tile_of(launch: LaunchProfile) -> tuple[int, int] | None:
    """(BLOCK_M, BLOCK_N) of a launch that has both."""
    m, n = launch.scalars.get("BLOCK_M"), launch.scalars.get("BLOCK_N")
    return (m, n) if type(m) is int and type(n) is int and m > 0 and n > 0 else None


def _keys_read(case: Case, m: int, n: int, everything: bool = False) -> int:
    """Keys in the tiles of which some query of a tile of queries sees one, for all tiles of queries together.

    ``everything``: in the tiles before them, too.
    """
    num_queries, num_keys = case.sizes["Nq"], case.sizes["Nk"]
    read = 0
    for first in range(0, num_queries, m):
        begin = 0 if everything else max(0, first + num_keys - num_queries - case.options["window"] + 1)
        end = min(num_keys, first + m + num_keys - num_queries)
        if begin < end:
            read += min(num_keys, cdiv(end, n) * n) - begin // n * n
    return read


def _queries_read(case: Case, m: int, n: int, everything: bool = False) -> int:
    """Queries in the tiles of which some sees a key of a tile of keys, for all tiles of keys together.

    ``everything``: in the tiles behind them, too.
    """
    num_queries, num_keys = case.sizes["Nq"], case.sizes["Nk"]
    read = 0
    for first in range(0, num_keys, n):
        begin = max(0, first - num_keys + num_queries)
        last = min(first + n, num_keys) - 1 - num_keys + num_queries + case.options["window"] - 1
        end = num_queries if everything else min(num_queries, last + 1)
        if begin < end:
            read += min(num_queries, cdiv(end, m) * m) - begin // m * m
    return read


def _kinds(case: Case) -> dict[int, str]:
    """What a tensor of so many elements holds: ``queries`` (q, o, dq, ...), ``keys``, or ``rows``, a number a query."""
    heads, d = case.sizes["B"] * case.sizes["Hq"], case.sizes["D"]
    num_queries, num_keys = case.sizes["Nq"], case.sizes["Nk"]
    kinds = {heads * num_queries * d: "queries", heads * num_keys * d: "keys", heads * num_queries: "rows"}
    return kinds if len(kinds) == 3 else {}


def stored_by(case: Case, launch: LaunchProfile) -> set[str]:
    """The kinds of tensors that a launch stores: ``queries``, ``keys`` or ``rows``."""
    kinds, counted = _kinds(case), launch.by_argument
    found = {kinds.get(math.prod(shape)) for name, shape, _ in launch.tensors if counted[name].bytes_stored}
    return found - {None}


def moved(trial: CaseResult) -> Problem | None:
    """An inspection: each launch reads what its programs own once, and of the other axis the tiles in the window."""
    kinds = _kinds(trial.case)
    problems = (_too_much(trial.case, kinds, launch) for launch in (trial.profile.launches if kinds else ()))
    return next((problem for problem in problems if problem), None)


def _too_much(case: Case, kinds: Mapping[int, str], launch: LaunchProfile) -> Problem | None:
    counted, tile = launch.by_argument, tile_of(launch)
    of = {name: (kinds.get(math.prod(shape)), math.prod(shape) * kind.itemsize) for name, shape, kind in launch.tensors}
    stored = stored_by(case, launch)
    owns = {"queries": bool(stored & {"queries", "rows"}), "keys": "keys" in stored}
    for name, (kind, once) in of.items():
        if kind is None:
            continue
        axis, other = ("keys", "queries") if kind == "keys" else ("queries", "keys")
        if counted[name].bytes_stored > once:
            return _problem(launch, name, "stored", counted[name].bytes_stored, once, "each result is stored once")
        if owns[other] and tile is None:
            cause = "name the queries and the keys of a tile BLOCK_M and BLOCK_N: the check counts in tiles"
            return Problem(f"{launch.kernel} has no constants BLOCK_M and BLOCK_N", cause)
        count, length = (_keys_read, case.sizes["Nk"]) if axis == "keys" else (_queries_read, case.sizes["Nq"])
        allowed, unskipped = (
            int(once * (owns[axis] + (Fraction(count(case, *tile, everything), length) if owns[other] else 0)))
            for everything in (False, True)
        )
        loaded = counted[name].bytes_loaded
        if loaded > allowed:
            return _problem(launch, name, "loaded", loaded, allowed, _cause(axis, owns[other], loaded == unskipped))
    return None


def _cause(axis: str, walked: bool, unskipped: bool) -> str:
    if not walked:
        words = "what a program owns is loaded once, and stays on chip for its whole loop"
    elif not unskipped:
        words = "a tile is loaded once where an element of it is in the window, and no other tile"
    elif axis == "keys":
        words = "the keys before the window are read, and masked: the loop begins at the first key that a query sees"
    else:
        words = (
            "queries past the window are read, and masked: the loop ends at the last query that sees one of the keys"
        )
    return classic(words, SKIPPED)


def _problem(launch: LaunchProfile, name: str, verb: str, got: int, allowed: int, cause: str) -> Problem:
    return Problem(f"{launch.kernel}, {name}: expected at most {allowed:,} bytes {verb}, got {got:,}", cause)
