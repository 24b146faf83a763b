"""What both kernels are made of: a fast exponential, views of tiles, descriptors, sums by TMA."""

from __future__ import annotations

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from utils import triton_versions  # noqa: F401  (the names that the kernels use, on each version of Triton)

#: All threads of a partition wait for each other.
wait_for_all = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
LOG2_E = 1.4426950408889634


@gluon.jit
def exp2(x):
    """2^x to two units in the last place, in one instruction; 2^-inf is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def matrix(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile (1, 1, ROWS, COLUMNS) of shared memory, as TMA wrote it, as a matrix for the tensor cores."""
    bits: gl.constexpr = tile.dtype.primitive_bitwidth
    return tile._reinterpret(tile.dtype, [ROWS, COLUMNS], gl.NVMMASharedLayout(128, bits, 2))


@gluon.jit
def by_eights(scores):
    """Scores (R, C) as (R, C / 8, 8), and the numbers of its rows (R, 1, 1), eights (1, C / 8, 1) and places (1, 1, 8).

    Column 8 e + p is place p of eight e. Which eights a thread has is known while compiling, which places is not: a
    comparison of 8 e with something of a row and a place needs no register for each column, and so no spills.
    """
    eights = gl.reshape(scores, [scores.shape[0], scores.shape[1] // 8, 8])
    ALL: gl.constexpr = eights.type.layout
    row = gl.arange(0, eights.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None, None]
    eight = gl.arange(0, eights.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :, None]
    place = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, ALL)))[None, None, :]
    return eights, row, eight, place


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` barriers that complete a phase when ``ARRIVALS`` have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), ARRIVALS)
    return made


@builtin
def add_to_global(descriptor, coordinates, tile, _semantic=None):
    """TMA adds ``tile`` of shared memory to global memory, in whatever order the adds of a tile arrive.

    Triton 3.6 and 3.7 have the operation in their compiler, but no public name for it in Gluon; from 3.8 on it is
    ``tma.async_atomic_add``.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


def layout(shape: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How TMA lays out a tile of ``shape`` so that the tensor cores read it without bank conflicts."""
    return gl.NVMMASharedLayout.get_default_for(shape, ELEMENTS[dtype])


def tiles_of(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor that hands out tiles (1, 1, rows, columns) of a tensor (B, H, N, D); beyond its end they are 0."""
    block = [1, 1, rows, columns]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout(block, tensor.dtype))


#: Rows of float32 numbers, one after another, unswizzled.
ROW_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)


def rows_of(tensor: torch.Tensor, length: int) -> TensorDescriptor:
    """A descriptor that hands out pieces (1, length) of a float32 tensor (B * H, N)."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, length], ROW_LAYOUT)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (B, H, N, D) as TMA can read it; a copy of it where its strides do not allow that.

    Rows must be without gaps, and everything else a multiple of 16 bytes apart and not 0.
    """
    bytes_each = tensor.element_size()
    strides = [stride for stride, size in zip(tensor.stride()[:3], tensor.shape[:3]) if size > 1]
    fits = tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0
    if not fits or any(stride <= 0 or stride * bytes_each % 16 for stride in strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    if any(stride <= 0 or stride * bytes_each % 16 for stride in tensor.stride()[:3]):  # of axes of one element
        extents = [size * max(stride, 1) for size, stride in zip(tensor.shape, tensor.stride())]
        widest = -(-max(extents) * bytes_each // 16) * 16 // bytes_each
        whole = [stride if size > 1 else widest for size, stride in zip(tensor.shape[:3], tensor.stride()[:3])]
        return tensor.as_strided(tensor.shape, (*whole, 1))
    return tensor
