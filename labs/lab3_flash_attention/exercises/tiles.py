"""Which program of lab 3's kernels computes which tile, read off what each program wrote; and rules that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.launches import launched
from utils.checks.problem import Problem
from utils.checks.symptoms import inaccurate
from utils.checks.tiling import Tiling
from utils.kernel_profile import LaunchProfile

from . import shapes


def query_tiles(kernel: str, written: str, block: str = "BLOCK_M", loop: Mapping[str, str] | None = None):
    """A tiling of (B, H, N) or (B, H, N, D) into tiles of ``block`` rows, whose owners are read off a trial's launch.

    Args:
        kernel: The kernel that writes the output.
        written: Its argument for an output whose rows are written by the same programs.
        block: The constant that holds the rows of a tile.
        loop: Axes of the inputs that a program walks through, with their constants: ``{"Nk": "BLOCK_N"}``.
    """
    noun = {"BLOCK_M": "query tile", "BLOCK_N": "key tile"}[block]

    def of(axes: str) -> Callable[[Sequence[CaseResult]], Tiling | None]:
        def tiling(trials: Sequence[CaseResult]) -> Tiling | None:
            found = launched(trials, kernel)
            if found is None or block not in found:
                return None
            launch = _launch(trials, kernel)
            loops = {axis: found[name] for axis, name in (loop or {}).items() if name in found}
            tiles = {"b": 1, "h": 1, "row": found[block]}
            program = _owner(launch, written, axes, found[block]) if launch and launch.written else None
            return Tiling(axes, tiles=tiles, noun=noun, loops=loops, program=program)

        return tiling

    return of


def _launch(trials: Sequence[CaseResult], kernel: str) -> LaunchProfile | None:
    launches = trials[0].profile.launches if trials[0].profile is not None else ()
    return next((launch for launch in launches if launch.kernel == kernel), None)


def _owner(launch: LaunchProfile, written: str, axes: str, block: int):
    """The program whose first written element lies in a tile; ``()`` where the launch does not say."""
    shape = next((shape for name, shape, _ in launch.tensors if name == written), ())
    if len(shape) < 3:
        return None
    rows, width = shape[2], shape[3] if len(shape) > 3 else 1
    first = {}
    for (program, argument), (start, _) in launch.written.items():
        if argument == written:
            row = start // width
            first[row // rows // shape[1], row // rows % shape[1], row % rows // block] = program

    def program(tile: Mapping[str, int], counts: Mapping[str, int]) -> Sequence[int]:
        owner = first.get((tile["b"], tile["h"], tile["row"]), ())
        return owner[: max((axis for axis, size in enumerate(launch.grid) if size > 1), default=0) + 1]

    return program


def blocks(e: Evidence, kernel: str) -> dict[str, int]:
    """``block_m`` and ``block_n`` of the launch that led to this evidence."""
    found: Mapping[str, Any] = launched([e.trial, *e.trials], kernel) or {}
    return {"block_m": found["BLOCK_M"], "block_n": found["BLOCK_N"]}


def blocks_of_rows(e: Evidence, kernel: str) -> int:
    """``BLOCK_M`` of the launch that led to this evidence."""
    return (launched([e.trial, *e.trials], kernel) or {})["BLOCK_M"]


def _has(name: str) -> Callable[[Evidence], bool]:
    return lambda e: e.only(lambda case: case.kind == name)


def only_where(numbers: Mapping[str, int]) -> tuple[Diagnosis, ...]:
    """Rules that look at which cases fail, with their places in the exercise's list.

    ``numbers`` holds places for ``strides``, ``heads``, ``head_dim``, ``precision``, ``maximum``, ``scale``,
    ``negative``, ``low`` and ``empty``; a rule whose place is missing is left out.
    """
    rules = {
        "empty": Diagnosis(
            lambda e: bool((e.got.isnan() & ~e.right.isnan())[e.bad].all()) and e.only(_has_empty_rows),
            "a query that sees no key gives NaN: 0/0, or -inf - (-inf). Its output and gradients are 0, its logsumexp "
            "is -inf",
        ),
        "scale": Diagnosis(
            _has("given scale"),
            "only a scale that the caller gives goes wrong: 1/sqrt(D) is used in its place",
        ),
        "heads": Diagnosis(
            lambda e: e.only(lambda case: case.sizes["Hq"] != case.sizes["Hkv"]),
            "only heads that share keys and values go wrong: query head h reads head h // (Hq // Hkv)",
        ),
        "negative": Diagnosis(
            _has(shapes.NEGATIVE),
            "only a negative scale goes wrong: the largest product is then the smallest score, so the scores are "
            "multiplied by the scale before the mask and the maximum",
        ),
        "low": Diagnosis(
            _has(shapes.VERY_LOW),
            "only scores far below 0 go wrong: a score that does not count is -inf before the maximum is taken, and no "
            "maximum begins at a number that scores may lie below",
        ),
        "maximum": Diagnosis(
            lambda e: e.only(lambda case: case.magnitude != 1 or case.kind == shapes.VERY_LOW),
            "only scores far from 0 go wrong: exp overflows or gives 0 unless the running maximum is subtracted first",
        ),
        "strides": Diagnosis(
            not_contiguous,
            "only non-contiguous inputs fail: each axis of each tensor has a stride of its own, the last one too",
        ),
        "head_dim": Diagnosis(
            lambda e: e.only(lambda case: case.sizes["D"] & (case.sizes["D"] - 1) != 0),
            "only head dimensions that are no power of two go wrong: columns from D to BLOCK_D must be masked, with "
            "other=0.0",
        ),
        "precision": Diagnosis(
            lambda e: e.case.layout != "far" and inaccurate(e) and e.only(lambda case: case.dtype.itemsize < 4),
            lambda e: (
                f"right in float32, too inaccurate in {str(e.case.dtype).removeprefix('torch.')}: scores, maximum, sum "
                "and accumulator are float32; only what tl.dot multiplies is rounded"
            ),
        ),
    }

    def numbered(rule: Diagnosis, place: int) -> Diagnosis:
        if isinstance(rule.cause, str):
            return Diagnosis(rule.applies, classic(rule.cause, place))
        return Diagnosis(rule.applies, lambda e: classic(rule.cause(e), place))

    return tuple(numbered(rule, numbers[name]) for name, rule in rules.items() if name in numbers)


def not_contiguous(e: Evidence) -> bool:
    """Whether only tensors go wrong whose strides are not those of their shape; rows that lie far apart among them."""
    return e.only(lambda case: case.layout != "contiguous")


def one_launch(kernel: str, *stored: str) -> Callable[[CaseResult], Problem | None]:
    """An inspection: one launch of ``kernel`` does the whole call, and writes to the arguments ``stored`` alone."""

    def inspect(trial: CaseResult) -> Problem | None:
        if trial.profile is None:
            return None
        launches = [launch for launch in trial.profile.launches if launch.kernel == kernel]
        if len(launches) > 1:
            return Problem(
                f"{kernel} is launched {len(launches)} times, once is enough",
                "the grid holds every tile of every head and batch entry: no loop around the launch is needed",
            )
        for launch in launches:
            other = {name for (_, name), cell in launch.cells.items() if cell.bytes_stored} - set(stored)
            if other:
                return Problem(
                    f"{kernel} also writes to {', '.join(sorted(other))}",
                    f"only {' and '.join(stored)} leave the kernel: scores and probabilities stay on chip",
                )
        return None

    return inspect


def numbered(inspection: Callable[[CaseResult], Problem | None], place: int) -> Callable[[CaseResult], Problem | None]:
    """An inspection whose problem has a place in the exercise's list."""

    def inspect(trial: CaseResult) -> Problem | None:
        found = inspection(trial)
        return found and Problem(found.headline, classic(found.cause or "the budget is exact", place), found.details)

    return inspect


def _has_empty_rows(case: Any) -> bool:
    return bool(case.options.get("causal")) and case.sizes["Nq"] > case.sizes["Nk"]
