"""The symptoms of a wrong kernel that are the same in every exercise, each with its likely cause: :data:`GENERIC`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from utils.checks.cases import Case
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.launches import arguments_in
from utils.checks.tensors import Difference, agrees, number, upcast
from utils.checks.traffic import OVERFLOW
from utils.kernel_profile import LaunchProfile

# ---- what the profiler saw


def _out_of_bounds(e: Evidence) -> str:
    found = e.findings("out_of_bounds")[0]
    if found.index < 0:
        return f"out-of-bounds access ({found}): its offset is negative"
    return (
        f"out-of-bounds access ({found}): no mask stops it, its offset is wrong, a loop or the grid goes a step too "
        "far, or the launch passes another tensor, size or stride than is meant"
    )


# ---- which cases fail


def _plain(case: Case) -> bool:
    return case.layout == "contiguous" and case.magnitude == 1


def _low_precision(case: Case) -> bool:
    return case.dtype.is_floating_point and case.dtype.itemsize < 4


def _ragged(e: Evidence) -> Callable[[Case], bool]:
    tiles = {**e.tiling.tiles, **e.tiling.loops} if e.tiling else {}
    return lambda case: any(
        math.prod(case.sizes[axis] for axis in key.split("*")) % tile
        for key, tile in tiles.items()
        if all(axis in case.sizes for axis in key.split("*"))
    )


def _later_tiles(e: Evidence) -> str | None:
    """The loop axis whose second tile breaks the answer: cases of one tile are right, none of whole tiles is."""
    for axis, tile in (e.tiling.loops if e.tiling else {}).items():
        several = [t for t in e.trials if t.case.sizes.get(axis, 0) > tile]
        one = [t for t in e.trials if 0 < t.case.sizes.get(axis, 0) <= tile]
        whole = [t for t in several if t.case.kind == "whole tiles"]
        if one and whole and all(t.failed for t in whole) and not any(t.failed for t in one):
            return axis
    return None


def _option(e: Evidence) -> tuple[str, Any] | None:
    """A keyword argument and the value that all failed cases have, and no case has that is right and not empty."""
    right = [trial.case.options for trial in e.trials if not trial.failed and all(trial.case.sizes.values())]
    for option in e.case.options.items():
        if e.only(lambda case, option=option: option in case.options.items()):
            return None if any(option in options.items() for options in right) else option
    return None


# ---- how large the error is


def _relative_error(e: Evidence) -> float:
    finite = e.right[e.right.isfinite()].abs()
    return e.difference.largest_error / (finite.max().item() or 1.0) if finite.numel() else math.nan


def inaccurate(e: Evidence) -> bool:
    """Whether the answer is near the right one: a rounding error, however large, and no wrong formula."""
    return _relative_error(e) < 0.1


def _slight(e: Evidence) -> bool:
    """Whether the error is so small that it shows in some cases only, by chance."""
    return e.difference.largest_error < 32 * e.difference.allowed


# ---- where the wrong elements are


def _beyond_first_program(e: Evidence) -> torch.Tensor | None:
    """Which elements belong to another program than the first: bool; None when there is a single program."""
    shape = tuple(e.bad.shape)
    programs = e.tiling.programs(shape) if e.tiling and e.bad.dim() else {}
    if len(set(programs.values())) < 2:
        return None
    counts = tuple(e.tiling.counts(shape).values())
    later = np.zeros(counts, dtype=bool)
    for tile, program in programs.items():
        later[tile] = program != programs[(0,) * len(counts)]
    index = np.indices(shape)
    return torch.from_numpy(later[tuple(dimension.tile_of(index, shape) for dimension in e.tiling.dimensions)])


def _last_tile(e: Evidence) -> str | None:
    """The dimension along which only the last tile, cut short by the tensor's end, holds wrong elements."""
    if e.bad_tiles is None:
        return None
    shape = tuple(e.bad.shape)
    for number_, dimension in enumerate(e.tiling.dimensions):
        count = dimension.count(shape)
        if dimension.tile is None or count < 2 or dimension.size(shape) % dimension.tile == 0:
            continue
        along = e.bad_tiles.any(axis=tuple(i for i in range(e.bad_tiles.ndim) if i != number_))
        if along[-1] and not along[:-1].any():
            return dimension.name
    return None


def _repeats_first_tile(e: Evidence) -> bool:
    """Every whole tile along some dimension holds what the first one should."""
    for dimension in e.tiling.dimensions if e.tiling else ():
        if dimension.tile is None or len(dimension.axes) != 1 or dimension.count(tuple(e.right.shape)) < 2:
            continue
        axis, tile = dimension.axes[0], dimension.tile
        size = e.right.shape[axis]
        index = torch.arange(size, device="cpu") % tile
        wanted = e.right.index_select(axis, index)
        if bool(agrees(e.got, wanted, e.difference.allowed, e.difference.dtype).all()):
            return True
    return False


def _shift(e: Evidence) -> str | None:
    """Which way the tiles are shifted by one, if they are."""
    for dimension in e.tiling.dimensions if e.tiling else ():
        if dimension.tile is None or len(dimension.axes) != 1:
            continue
        axis, tile = dimension.axes[0], dimension.tile
        rest = e.right.shape[axis] - tile
        if rest < 1:
            continue
        for start, name in ((tile, "the tile after it"), (0, "the tile before it")):
            got = e.got.narrow(axis, tile - start, rest)
            if bool(agrees(got, e.right.narrow(axis, start, rest), e.difference.allowed, e.difference.dtype).all()):
                return name
    return None


def _first_tile_right(e: Evidence) -> str | None:
    """The dimension along which, in every failed case, the first tile is right and each later one is wrong."""

    def right_first(difference: Difference, position: int) -> bool:
        tiles = e.tiling.bad_tiles(difference.bad.numpy())
        along = tiles.any(axis=tuple(i for i in range(tiles.ndim) if i != position))
        return len(along) > 1 and not along[0] and bool(along[1:].all())

    failed = [trial.differences[e.position] for trial in e.trials if trial.failed and trial.differences]
    for position, dimension in enumerate(e.tiling.dimensions if e.bad_tiles is not None else ()):
        if all(right_first(difference, position) for difference in failed if difference.count):
            return dimension.name
    return None


# ---- what the wrong values are


def _constants(case: Case) -> dict[str, float]:
    named = {"-1": -1.0, "log2(e)": math.log2(math.e), "ln(2)": math.log(2), "2": 2.0, "1/2": 0.5}
    for name, size in case.sizes.items():
        if size > 1:
            values = {f"{name}": size, f"1/{name}": 1 / size, f"sqrt({name})": size**0.5, f"1/sqrt({name})": size**-0.5}
            named |= {f"{key} for {name}={size}": value for key, value in values.items()}
    return named


def _constant_factor(e: Evidence) -> float | None:
    large = e.right.isfinite() & (e.right.abs() > 0.1 * e.right[e.right.isfinite()].abs().max()) & e.got.isfinite()
    if large.sum() < 2 or e.bad.sum() < 2:
        return None
    factor = (e.got[large] / e.right[large]).median().item()
    return factor if factor != 0 and abs(factor - 1) > 0.02 and e.close(factor * e.right) else None


def _factor_sentence(e: Evidence) -> str:
    factor = _constant_factor(e)
    named = [name for name, value in _constants(e.case).items() if math.isclose(value, factor, rel_tol=5e-3)]
    if factor is not None and abs(factor + 1) < 5e-3:
        return "every element has the wrong sign"
    told = f"every element is {number(factor)} times the expected value"
    asked = "is a factor missing, wrong or applied twice, or a term added twice?"
    return f"{told} ({' or '.join(named[:2])}): {asked}" if named else told


def _constant_offset(e: Evidence) -> float | None:
    if e.right.numel() < 2 or not e.got.isfinite().all() or e.right.std() < 8 * e.difference.allowed:
        return None
    offset = (e.got - e.right).median().item()
    return offset if abs(offset) > 4 * e.difference.allowed and e.close(e.right + offset) else None


def _transposed(e: Evidence) -> bool:
    if e.right.dim() < 2 or min(e.right.shape[-2:]) < 2:
        return False
    return e.close(e.right.transpose(-1, -2).reshape(e.right.shape))


def _swapped_inputs(e: Evidence) -> tuple[int, int] | None:
    args = e.args64
    for i in range(len(args)):
        for j in range(i + 1, len(args)):
            if all(isinstance(args[k], torch.Tensor) for k in (i, j)) and args[i].shape == args[j].shape:
                swapped = [*args]
                swapped[i], swapped[j] = args[j], args[i]
                if e.same_as(e.reference, swapped):
                    return i, j
    return None


def _swapped_sentence(e: Evidence) -> str:
    i, j = (e.names[k] if k < len(e.names) else f"argument {k + 1}" for k in _swapped_inputs(e))
    return f"this is the right result with {i} and {j} swapped"


def _ignores_strides(e: Evidence) -> bool:
    """The answer is what one gets by reading each input as if it were contiguous."""
    flat = []
    for value in e.trial.args:
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            strides = torch.empty(value.shape, device="meta").stride()
            value = value.as_strided(value.shape, strides, value.storage_offset())
        flat.append(upcast(value))
    return e.same_as(e.reference, flat)


def _three_digits(e: Evidence) -> bool:
    """Float32 results that are right to about three digits only, and err in both directions, in many places."""
    if e.difference.dtype != torch.float32 or not 1e-6 < _relative_error(e) < 8e-3 or e.bad.double().mean() < 1 / 8:
        return False
    found = [trial.differences[e.position] for trial in e.trials if trial.failed and trial.differences]
    errors = torch.cat([((each.got - each.right) * each.right.sign())[each.bad].flatten() for each in found])
    return bool((errors > 0).any() and (errors < 0).any())


def _nan(e: Evidence) -> bool:
    return bool((e.got.isnan() & ~e.right.isnan()).any())


def _only_read(launch: LaunchProfile, tensor: Any) -> bool:
    """Whether a launch loads from a tensor's memory and stores nothing there."""
    moved = launch.by_argument
    counts = [moved[name] for name in arguments_in(launch, tensor) if name in moved]
    return any(c.bytes_loaded for c in counts) and not any(c.bytes_stored for c in counts)


def _launches(e: Evidence) -> list[LaunchProfile]:
    """The launches that are given the output, but for those that only read it."""
    launches, out = getattr(e.trial.profile, "launches", ()), e.trial.outputs[e.position]
    return [launch for launch in launches if arguments_in(launch, out) and not _only_read(launch, out)]


def _uninitialized(e: Evidence) -> list:
    """Reads of memory that nothing has written, on the way to the output.

    A later kernel may read an output that an earlier one should have written: that says nothing about the later one.
    """
    if not _launches(e):
        return []
    launches, outputs = getattr(e.trial.profile, "launches", ()), e.trial.outputs
    given = [number for number, launch in enumerate(launches, 1) if arguments_in(launch, outputs[e.position])]
    before = launches[: max(given)]
    kernels = {launch.kernel for launch in before}
    read = {
        (launch.kernel, name)
        for launch in before
        for output in outputs
        if _only_read(launch, output)
        for name in arguments_in(launch, output)
    }
    found = e.findings("uninitialized_reads")
    return [each for each in found if each.kernel in kernels and (each.kernel, each.argument) not in read]


def _no_store(e: Evidence) -> str:
    """What to say of an output that no program has written."""
    launches = _launches(e)
    ran = list(dict.fromkeys(launch.kernel for launch in launches if math.prod(launch.grid)))
    if launches and not ran:
        return f"the output is never written: the grid of {launches[0].kernel} is {launches[0].grid}, without a program"
    if not ran:
        return "the output is never written: is the kernel launched on it, and does it end with tl.store?"
    return (
        f"the output is never written, though {', '.join(ran)} ran: where is its tl.store, is it reached, with "
        "which mask and offsets, and which arguments does the launch pass?"
    )


def _never(e: Evidence) -> torch.Tensor:
    return e.difference.never_written


def _programs(e: Evidence) -> int:
    """How many programs the largest of these launches has."""
    return max((math.prod(launch.grid) for launch in _launches(e)), default=0)


def _needed(e: Evidence) -> int:
    """How many programs the tiles of the output take."""
    return len(set(e.tiling.programs(tuple(e.bad.shape)).values()))


def _writes_outside(e: Evidence) -> bool:
    return any(found.access == "write" for found in e.findings("out_of_bounds"))


def _first_program_alone(e: Evidence) -> str | None:
    """What to say where the first program's tile is written and no other element, inside of the tensor or outside."""
    later = _beyond_first_program(e)
    if later is None or _writes_outside(e) or not bool((_never(e) == later).all()):
        return None
    if _programs(e) == 1:
        return "only the first tile is written: the grid has a single program, which does not walk through the others"
    return "only the first program's tile is written: what do the others write, at which offsets, with which mask?"


_CARRY = (
    "look at the loop, at what each of its tiles loads or stores, at what is carried from tile to tile, and at what "
    "belongs to the whole row instead of one tile"
)

#: The rules that hold for any kernel, the most telling first.
GENERIC: tuple[Diagnosis, ...] = (
    Diagnosis(
        lambda e: e.only(lambda case: case.layout == "far"),
        OVERFLOW,
    ),
    Diagnosis(
        lambda e: (
            (e.only(lambda case: case.layout != "contiguous") and not (_writes_outside(e) or e.findings("races")))
            or (not e.trial.args[0].is_contiguous() and _ignores_strides(e))
        ),
        lambda e: (
            "only non-contiguous inputs fail: "
            + ("the kernel ignores their strides; " if _ignores_strides(e) else "")
            + "pass x.stride() to it and multiply each index by its own stride"
        ),
    ),
    Diagnosis(
        _uninitialized,
        lambda e: f"the kernel reads uninitialized memory ({_uninitialized(e)[0]})",
    ),
    Diagnosis(
        lambda e: bool(_never(e).all()),
        _no_store,
    ),
    Diagnosis(
        lambda e: _last_tile(e) and bool(_never(e)[e.bad].all()) and _programs(e) < _needed(e),
        lambda e: (
            f"the partial last tile is never written: the grid has too few programs, {_programs(e):,} for the "
            f"{_needed(e):,} of triton.cdiv(size, BLOCK)"
        ),
    ),
    Diagnosis(_first_program_alone, lambda e: _first_program_alone(e)),
    Diagnosis(
        lambda e: bool(_never(e)[e.bad].all()) and not _writes_outside(e),
        "these elements are never written: no program's store covers them (the grid is too small, a loop ends too "
        "early, a mask excludes too much, an offset is wrong, the launch passes other sizes, or two programs "
        "write the same tile)",
    ),
    Diagnosis(lambda e: bool(e.findings("out_of_bounds")), _out_of_bounds),
    Diagnosis(
        lambda e: e.right.numel() > 0 and bool((e.got == 0).all()),
        "the result is zero everywhere",
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.magnitude != 1),
        "only large values fail: exp overflows unless the maximum is subtracted first, "
        "and sums of large terms need float32",
    ),
    Diagnosis(
        lambda e: _last_tile(e) and not _slight(e),
        lambda e: (
            f"only the partial last tile along {_last_tile(e)} differs: look at the mask of each load, its `other` "
            "value, and where a loop ends"
        ),
    ),
    Diagnosis(
        lambda e: (
            e.only(_ragged(e))
            and any(not (t.failed or _ragged(e)(t.case)) and all(t.case.sizes.values()) for t in e.trials)
            and not _slight(e)
            and any(t.failed and _plain(t.case) and t.case.kind != "one element" for t in e.trials)
        ),
        "only sizes that are no multiple of the tile fail: look at the lanes past the end (masks, `other`, what is "
        "reduced over them), and at where a loop ends",
    ),
    Diagnosis(
        _transposed,
        "this is the transpose of the right result: rows and columns are swapped in the offsets of a load or the store",
    ),
    Diagnosis(_swapped_inputs, _swapped_sentence),
    Diagnosis(_constant_factor, _factor_sentence),
    Diagnosis(
        _constant_offset,
        lambda e: (
            f"every element differs by the same constant, {number(_constant_offset(e))}: a term is added or missing"
        ),
    ),
    Diagnosis(
        _repeats_first_tile,
        "every tile repeats tile 0: the load offsets do not grow with tl.program_id",
    ),
    Diagnosis(_shift, lambda e: f"each tile holds the values of {_shift(e)}: the program id is off by one"),
    Diagnosis(
        lambda e: e.only(_low_precision) and bool((e.got.isinf() & ~e.right.isinf()).any()),
        "float32 passes, but values overflow in the 16-bit dtype: convert to float32 before the arithmetic",
    ),
    Diagnosis(
        lambda e: e.only(_low_precision) and inaccurate(e),
        lambda e: (
            f"right in float32, but too inaccurate in {str(e.case.dtype).removeprefix('torch.')}: "
            "convert to float32 after loading, accumulate in float32, and round once when storing"
        ),
    ),
    Diagnosis(
        _three_digits,
        (
            "only about three digits are right: a float32 value is rounded to a narrower format on the way "
            "(a conversion, or tl.dot in TF32: use input_precision='ieee'), large numbers cancel, or a small part of "
            "the result is missing or wrong"
        ),
    ),
    Diagnosis(
        _later_tiles,
        lambda e: f"right while one tile covers {_later_tiles(e)}, wrong from the second tile on: {_CARRY}",
    ),
    Diagnosis(
        lambda e: e.findings("races"),
        lambda e: f"race: programs overwrite each other's results ({e.findings('races')[0]})",
    ),
    Diagnosis(
        lambda e: bool(_never(e).any()),
        lambda e: f"{int(_never(e).sum()):,} of these elements are never written, and others hold wrong values",
    ),
    Diagnosis(
        _nan,
        lambda e: (
            f"{'every element is NaN' if e.got.isnan().all() else 'NaN where a finite value is expected'}: "
            "it comes from 0/0, inf/inf, 0 * inf, inf - inf or the root or logarithm of a negative number, or from a "
            "lane that a mask should have left out, or did leave out without `other`"
        ),
    ),
    Diagnosis(
        lambda e: _first_tile_right(e),
        lambda e: f"the first tile along {_first_tile_right(e)} is right and each later one is wrong",
    ),
    Diagnosis(_option, lambda e: "only cases with {}={} fail".format(*_option(e))),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "one element") and not _slight(e),
        "only the case with all sizes 1 fails",
    ),
)
