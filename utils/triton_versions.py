"""What differs between the versions of Triton that the Gluon kernels of the course run on.

That is names, the order in which a thread reduces what it holds, and where ptxas is. Importing this module gives the
Triton at hand whichever name of a renamed function it lacks, so that a kernel may use either name on each of them: one
source for 3.6, 3.7, 3.8 and 3.9, and answers written after either documentation.

It also gives Gluon's ``max`` and ``sum`` back the order that they had before Triton 3.8, where what they reduce comes
from the tensor cores of Hopper: a thread goes through its columns of a row from the first to the last. From 3.8 on
Triton reduces them pairwise, as a tree. That is shorter for a warp that runs alone, but ptxas then arranges the softmax
of the capstone's forward pass in another way, and two warpgroups that nothing keeps apart may stay in step: both
multiply, and then both exponentiate while the tensor cores wait.

It imports nothing of the course, because the processes that compile for a GPU that is not there import it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.experimental.gluon.language as gl
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import cache


class Renamed(NamedTuple):
    """A function of Gluon: where it is, its name before and its name from a version of Triton on."""

    owner: Any
    before: str
    after: str
    version: str


RENAMED = (
    Renamed(gl, "thread_barrier", "barrier", "3.7"),
    Renamed(gl.shared_memory_descriptor, "_reinterpret", "reinterpret", "3.9"),
    Renamed(tma, "async_copy_global_to_shared", "async_load", "3.8"),
    Renamed(tma, "async_copy_shared_to_global", "async_store", "3.8"),
    Renamed(async_copy, "async_copy_global_to_shared", "async_load", "3.8"),
)


def give_both_names(renamed: Iterable[Renamed]) -> None:
    """Make both names of each function lead to the one that this Triton has.

    Some versions keep the name of before for a function that only says what it is called now: the later name decides.

    Raises:
        AttributeError: This Triton has neither name.
    """
    for owner, before, after, _ in renamed:
        function = getattr(owner, after) if hasattr(owner, after) else getattr(owner, before)
        setattr(owner, before, function)
        setattr(owner, after, function)


# ---- reductions ------------------------------------------------------------------------------------------------------

#: Whether this Triton reduces pairwise, so that its functions are exchanged for those below.
PAIRWISE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
gluon_max, gluon_sum = gl.max, gl.sum  # as this Triton has them


@gluon.constexpr_function
def goes_in_order(shape: list[int], layout: Any, axis: int | None) -> bool:
    """Whether an axis of a tensor is reduced column by column: of two forms, the rest is left to Triton.

    One is a result of Hopper's tensor cores (rows, columns) whose rows are not shared out among warps or blocks. The
    other is such a result as eights (rows, columns / 8, 8) whose middle axis lies within one thread.
    """
    if axis != 1 or any(size & (size - 1) for size in shape):
        return False
    if len(shape) == 2:
        return (
            isinstance(layout, gl.NVMMADistributedLayout)
            and shape[1] >= 16
            and layout.warps_per_cta[1] == 1
            and not layout.cga_layout
        )
    if len(shape) != 3 or shape[2] != 8 or not isinstance(layout, gl.DistributedLinearLayout):
        return False
    return not any(base[1] for base in (*layout.lane_bases, *layout.warp_bases, *layout.block_bases))


@gluon.jit
def parts_of(x):
    """The first and the second half of the columns; of eight the even and the odd ones, which one thread has."""
    if x.shape[1] == 8:
        parts = gl.split(gl.reshape(x, [x.shape[0], 4, 2]))
    else:
        parts = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
    return parts


@gluon.jit
def reduced_onto(result, x, MAX: gl.constexpr):
    """``result`` (rows, 4 or 8), combined with one group of so many columns of ``x`` after the other."""
    if x.shape[1] == result.shape[1]:
        if MAX:
            result = gl.maximum(result, x)
        else:
            result = result + x
    else:
        first, second = parts_of(x)
        result = reduced_onto(reduced_onto(result, first, MAX), second, MAX)
    return result


@gluon.jit
def reduced_in_order(x, COLUMNS: gl.constexpr, MAX: gl.constexpr):
    """``x`` (rows, columns) reduced to ``COLUMNS`` columns, 4 or 8, each from the first to the last."""
    if x.shape[1] == COLUMNS:
        result = x
    else:
        first, second = parts_of(x)
        result = reduced_onto(reduced_in_order(first, COLUMNS, MAX), second, MAX)
    return result


@gluon.jit
def max_in_order(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
    """Gluon's ``max``, from the first column to the last where :func:`goes_in_order` says so."""
    IN_ORDER: gl.constexpr = goes_in_order(input.shape, input.type.layout, axis)
    if IN_ORDER and len(input.shape) == 2 and input.dtype == gl.float32 and not (return_indices or keep_dims):
        result = gluon_max(reduced_in_order(input, 4, True), 1)
        result = gl.convert_layout(result, gl.SliceLayout(1, input.type.layout))
    else:
        result = gluon_max(input, axis, return_indices, return_indices_tie_break_left, keep_dims)
    return result


@gluon.jit
def sum_in_order(input, axis=None, keep_dims=False, dtype: gl.constexpr = None):
    """Gluon's ``sum``, from the first column to the last where :func:`goes_in_order` says so."""
    IN_ORDER: gl.constexpr = goes_in_order(input.shape, input.type.layout, axis)
    if IN_ORDER and not keep_dims and dtype is None and input.dtype == gl.float32:
        if len(input.shape) == 2:
            result = gluon_sum(reduced_in_order(input, 4, False), 1)
        else:
            result = reduced_in_order(gl.reshape(input, [input.shape[0], input.shape[1] * 8]), 8, False)
        result = gl.convert_layout(result, gl.SliceLayout(1, input.type.layout))
    else:
        result = gluon_sum(input, axis, keep_dims, dtype)
    return result


def key_with_reductions(key: Callable[[], str]) -> Callable[[], str]:
    """What Triton's cache on disk knows this Triton by, with this file where its functions are exchanged for ours.

    By itself the cache takes a function of Gluon for a part of Triton, and would go on with kernels from before.
    """
    if not PAIRWISE:
        return key
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return lambda: f"{key()} {source}"


# ---- the assembler ---------------------------------------------------------------------------------------------------


def ptxas(capability: int = 90) -> str:
    """Path of the assembler with which this Triton makes code for one GPU architecture (90: Hopper).

    A version of Triton may ship several, and the text that it writes for one is too new for another.

    Triton 3.9 takes ``ptxas-blackwell`` (CUDA 13.4) for Hopper too; ``TRITON_PTXAS_BLACKWELL_PATH`` names another. Lab
    3's anchored forward kernel for a head_dim of 128, which takes 254 registers on 3.6, spills there: 164 bytes with
    either assembler of 3.9, as its addresses of tiles in shared memory take more registers, and 244 with the later one.
    """
    return get_ptxas(capability).path


give_both_names(RENAMED)
if PAIRWISE:
    gl.max, gl.sum = max_in_order, sum_in_order
    cache.triton_key = key_with_reductions(cache.triton_key)
