"""The product of two matrices at the speed of tensor cores: descriptors and the grouped order (exercise 2.8).

A tensor descriptor tells the hardware a matrix's base, shape and strides and the shape of a tile. From Hopper on one
thread then asks for a whole tile, and the TMA unit brings it, zeros beyond the edges included; other threads
spend neither registers nor instructions on addresses and masks.
"""

from __future__ import annotations

import functools
import math

import torch

from utils import runtime

from . import tuning
from .arguments import check_same, check_tensor, refuse_gradient
from .grouping import swizzle_tile
from .tiled_matmul import tiled_matmul

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def descriptor_matmul_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_COL_MAJOR: tl.constexpr, B_COL_MAJOR: tl.constexpr, SUBTILE: tl.constexpr, FLATTEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One program: every ``num_programs``-th tile of c, so that as many programs as SMs compute them all.

    The descriptor of a column-major operand describes its transpose, and a tile is transposed on chip.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # flattened, the loads of the next tile run while this one is stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = swizzle_tile(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        raise NotImplementedError("Lab 2, exercise 2.8: a tile through descriptors")
        if SUBTILE:  # half a tile at a time takes half the shared memory on the way out
            pair = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(pair)
            c_desc.store([row, column], left.to(DTYPE))
            c_desc.store([row, column + BLOCK_N // 2], right.to(DTYPE))
        else:
            c_desc.store([row, column], total.to(DTYPE))


def _col_major(x: torch.Tensor) -> bool | None:
    """Whether a descriptor describes ``x`` (rows, columns) transposed; None where it cannot describe it at all.

    The hardware asks for one axis of stride 1, the other's stride and the start at multiples of 16 bytes.
    """
    if x.data_ptr() % 16:
        return None
    for col_major, (pitch, inner) in ((False, x.stride()), (True, x.stride()[::-1])):
        if inner == 1 and pitch > 0 and pitch * x.element_size() % 16 == 0:
            return col_major
    return None


def _describe(x: torch.Tensor, col_major: bool, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of ``x``, or of its transpose, for tiles of ``rows`` x ``columns`` of ``x``."""
    if col_major:
        return TensorDescriptor.from_tensor(x.T, [columns, rows])
    return TensorDescriptor.from_tensor(x, [rows, columns])


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs run at a time: one for each SM of a GPU."""
    return runtime.pick(cpu=4, gpu=0) or torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether TMA brings tiles: from compute capability 9.0 on, and in the interpreter."""
    return runtime.INTERPRET or torch.cuda.get_device_capability(device) >= (9, 0)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, summed in float32.

    Operands that a tensor descriptor can describe, plain or transposed, go through TMA; any others (rows
    that do not start at multiples of 16 bytes, say) through pointers. Both take tiles in the grouped order.

    Args:
        a: (..., K) of any strides; float32 (multiplied as such, not as TF32), float16 or bfloat16.
        b: (K, N) of any strides, of a's dtype.

    Returns:
        A contiguous tensor (..., N) of a's dtype. It is forward only.

    Raises:
        TypeError, ValueError: dtype, shape or device are not these.
        RuntimeError: autograd is recording and an operand asks for its gradient.
    """
    check_tensor("a", a, least_dims=1)
    check_tensor("b", b, least_dims=2)
    check_same("a", a, "b", b)
    if b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(f"b must have shape ({a.shape[-1]}, N) to follow a of {tuple(a.shape)}, got {tuple(b.shape)}")
    refuse_gradient("matmul", a, b)
    shape = (*a.shape[:-1], b.shape[1])
    if math.prod(shape) == 0 or b.shape[0] == 0:
        return torch.zeros(shape, dtype=a.dtype, device=a.device)
    a = a.reshape(-1, a.shape[-1])  # a view unless the leading axes are out of order
    a_col_major, b_col_major = _col_major(a), _col_major(b)
    aligned = b.shape[1] * b.element_size() % 16 == 0
    if a_col_major is None or b_col_major is None or not aligned or not _has_descriptors(a.device):
        return tiled_matmul(a, b, tuning.tiled_matmul(a.element_size()).group).view(shape)
    return _through_descriptors(a, b, a_col_major, b_col_major).view(shape)


def _through_descriptors(a: torch.Tensor, b: torch.Tensor, a_col_major: bool, b_col_major: bool) -> torch.Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    tile = tuning.descriptor_matmul(a.element_size())
    tiles = triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n)
    descriptor_matmul_kernel[(min(tiles, _programs(a.device)),)](
        _describe(a, a_col_major, tile.m, tile.k), _describe(b, b_col_major, tile.k, tile.n),
        _describe(c, False, tile.m, tile.n // 2 if tile.subtile else tile.n), M, N, K,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=tile.group,
        A_COL_MAJOR=a_col_major, B_COL_MAJOR=b_col_major, SUBTILE=tile.subtile, FLATTEN=tile.flatten,
        DTYPE=_TL_DTYPES[c.dtype], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return c
