"""The symptoms of a wrong kernel that are the same in every exercise, each with its likely cause: :data:`GENERIC`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from utils.checks.cases import Case
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.tensors import agrees, number, upcast
from utils.checks.traffic import OVERFLOW

# ---- what the profiler saw


def _out_of_bounds(e: Evidence) -> str:
    found = e.findings("out_of_bounds")
    return f"the kernel leaves its tensor ({found[0]}): the mask is missing there, or compares with the wrong size"


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
    """The loop axis whose second tile breaks the answer: cases of one tile are right, some of whole tiles are wrong."""
    for axis, tile in (e.tiling.loops if e.tiling else {}).items():
        several = [t for t in e.trials if t.case.sizes.get(axis, 0) > tile]
        one = [t for t in e.trials if 0 < t.case.sizes.get(axis, 0) <= tile]
        whole = [t for t in several if t.case.kind == "whole tiles"]
        if one and any(t.failed for t in whole) and not any(t.failed for t in one):
            return axis
    return None


def _option(e: Evidence) -> tuple[str, Any] | None:
    """A keyword argument and the value that all failed cases have and other cases have not."""
    return next((i for i in e.case.options.items() if e.only(lambda c, i=i: c.options.get(i[0]) == i[1])), None)


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
    """The dimension along which the first tile is right and each later one has wrong elements."""
    for position, dimension in enumerate(e.tiling.dimensions if e.bad_tiles is not None else ()):
        along = e.bad_tiles.any(axis=tuple(i for i in range(e.bad_tiles.ndim) if i != position))
        if len(along) > 1 and not along[0] and along[1:].all():
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
    return factor if factor != 0 and e.close(factor * e.right) else None


def _factor_sentence(e: Evidence) -> str:
    factor = _constant_factor(e)
    named = [name for name, value in _constants(e.case).items() if math.isclose(value, factor, rel_tol=5e-3)]
    if factor is not None and abs(factor + 1) < 5e-3:
        return "every element has the wrong sign"
    known = f" ({' or '.join(named[:2])})" if named else ""
    return f"every element is {number(factor)} times what it should be{known}: a factor is missing or applied twice"


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
    """Float32 results that are right to about three digits only."""
    scale = e.right[e.right.isfinite()].abs().max().item()
    return e.difference.dtype == torch.float32 and 1e-6 < e.difference.largest_error / scale < 8e-3


def _nan(e: Evidence) -> bool:
    return bool((e.got.isnan() & ~e.right.isnan()).any())


def _never(e: Evidence) -> torch.Tensor:
    return e.difference.never_written


_CARRY = (
    "what a program carries from tile to tile (running maximum, sum, accumulator) is not updated or not rescaled "
    "when the next tile comes"
)

#: The rules that hold for any kernel, the most telling first.
GENERIC: tuple[Diagnosis, ...] = (
    Diagnosis(
        lambda e: e.only(lambda case: case.layout == "far"),
        OVERFLOW,
    ),
    Diagnosis(
        lambda e: (
            e.only(lambda case: case.layout != "contiguous")
            or (not e.trial.args[0].is_contiguous() and _ignores_strides(e))
        ),
        "only inputs that are not contiguous go wrong: the kernel steps through memory without their strides; "
        "pass x.stride() to it and multiply each index by its own stride",
    ),
    Diagnosis(
        lambda e: e.findings("uninitialized_reads"),
        lambda e: f"the kernel reads memory that nothing has written ({e.findings('uninitialized_reads')[0]})",
    ),
    Diagnosis(
        lambda e: bool(_never(e).all()),
        "nothing is ever written into the output: is the kernel launched on it, and does it end in tl.store?",
    ),
    Diagnosis(
        lambda e: _last_tile(e) and bool(_never(e)[e.bad].all()),
        "the last, ragged tile is never written: the grid has too few programs, it needs triton.cdiv(size, BLOCK), "
        "not size // BLOCK",
    ),
    Diagnosis(
        lambda e: _beyond_first_program(e) is not None and bool((_never(e) == _beyond_first_program(e)).all()),
        "only the first program's tile is written: the store's offsets do not use tl.program_id, "
        "or the grid has a single program",
    ),
    Diagnosis(
        lambda e: bool(_never(e)[e.bad].all()),
        "these elements are never written: no program's store covers them (too small a grid, a mask that cuts too "
        "much, or two programs that write the same tile)",
    ),
    Diagnosis(lambda e: bool(e.findings("out_of_bounds")), _out_of_bounds),
    Diagnosis(
        lambda e: e.only(lambda case: case.magnitude != 1),
        "only large values go wrong: exp overflows unless the maximum is subtracted first, "
        "and sums of large terms need float32",
    ),
    Diagnosis(
        lambda e: _last_tile(e),
        lambda e: (
            f"only the last, ragged tile along {_last_tile(e)} is wrong: the mask is missing there, "
            "or its `other` value takes part in the result"
        ),
    ),
    Diagnosis(
        lambda e: e.only(_ragged(e)) and any(trial.failed and _plain(trial.case) for trial in e.trials),
        "only sizes that the tile does not divide go wrong: lanes beyond the end take part; check the mask of each "
        "load and the `other` value it gives them",
    ),
    Diagnosis(
        lambda e: e.right.numel() > 0 and bool((e.got == 0).all()),
        "the result is zero everywhere: the accumulator is never added to, or something else than it is stored",
    ),
    Diagnosis(
        _transposed,
        "this is the right result transposed: rows and columns are swapped in the store's or a load's offsets",
    ),
    Diagnosis(_swapped_inputs, _swapped_sentence),
    Diagnosis(_constant_factor, _factor_sentence),
    Diagnosis(
        _constant_offset,
        lambda e: f"every element is off by the same {number(_constant_offset(e))}: a constant is added or missing",
    ),
    Diagnosis(
        _repeats_first_tile,
        "each tile holds what the first one should: the loads' offsets do not use tl.program_id",
    ),
    Diagnosis(_shift, lambda e: f"each tile holds what {_shift(e)} should: a program number is off by one"),
    Diagnosis(
        lambda e: e.only(_low_precision) and bool((e.got.isinf() & ~e.right.isinf()).any()),
        "right in float32, but the values overflow in the shorter type: convert to float32 before the arithmetic",
    ),
    Diagnosis(
        lambda e: e.only(_low_precision),
        lambda e: (
            f"right in float32, too inaccurate in {str(e.case.dtype).removeprefix('torch.')}: "
            "convert to float32 after loading, accumulate in float32, and round once when storing"
        ),
    ),
    Diagnosis(
        _three_digits,
        (
            "right to about three digits only: a float32 value passes through a shorter type on its way "
            "(a conversion, or tl.dot in TF32: input_precision='ieee')"
        ),
    ),
    Diagnosis(
        _later_tiles,
        lambda e: f"right while one tile covers {_later_tiles(e)}, wrong from its second tile on: {_CARRY}",
    ),
    Diagnosis(
        lambda e: e.findings("races"),
        lambda e: f"programs overwrite each other's results ({e.findings('races')[0]})",
    ),
    Diagnosis(
        lambda e: _nan(e) and bool(e.got.isnan().all()),
        "every element is NaN: 0/0, inf - inf, or arithmetic on memory that nothing has written",
    ),
    Diagnosis(
        _nan,
        "NaN appears where a number belongs: 0/0 or inf - inf, as in a row whose every element is masked, "
        "or arithmetic on memory that nothing has written",
    ),
    Diagnosis(
        lambda e: _first_tile_right(e),
        lambda e: (
            f"the first tile along {_first_tile_right(e)} is right and each later one is wrong: {_CARRY}, "
            "or an offset that grows with the tile's number is wrong"
        ),
    ),
    Diagnosis(_option, lambda e: "only cases with {}={} go wrong".format(*_option(e))),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "one element"), "only the smallest case goes wrong: sizes of one"
    ),
)
