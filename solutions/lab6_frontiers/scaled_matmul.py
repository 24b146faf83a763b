"""Products of e4m3 matrices with scales: one for the tensor, one for each row, or one for each 128 of K.

Letters: M rows of a, N rows of b, K their common axis; the product is c = a b^T, (M, N). Both operands lie in memory
along K, since Hopper's tensor cores read 8-bit operands no other way (PTX ISA, ``wgmma.mma_async``); b is what a linear
layer holds as its weight.

A scale of a tensor or of a row stands outside of the sum over K: one multiplication of the finished tile. The scales of
128 products stand inside: the sum of each 128 is taken by itself, scaled, and added in float32.

The kernels here run on every GPU with 8-bit tensor cores. On Hopper :mod:`.hopper_row_scaled` and
:mod:`.hopper_block_scaled` take over where TMA can describe all three matrices and the product has two bytes a number.
"""

from __future__ import annotations

import torch

from solutions.lab2_triton_kernels.arguments import FLOATS
from solutions.lab2_triton_kernels.grouping import grouped_tile
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.formats import Quantized

from . import tuning
from .arguments import BLOCK, check_operand
from .square_blocks import SquareBlocks
from .tiles import aligned, extent, load_tile, operand, programs, store_tile

import triton  # isort: skip
import triton.language as tl  # isort: skip

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def scaled_matmul_kernel(
    a, b, c, a_scale_ptr, b_scale_ptr, M, N, K, stride_a, stride_b, stride_as, stride_bs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIBED: tl.constexpr, C_DESCRIBED: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One program: every ``num_programs``-th tile of c. The stride of a tensor's one scale is 0."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # flattened, the loads of the next tile run while this one is stored
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            a_tile = load_tile(a, row, start, M, K, stride_a, BLOCK_M, BLOCK_K, DESCRIBED)  # (BLOCK_M, BLOCK_K)
            b_tile = load_tile(b, column, start, N, K, stride_b, BLOCK_N, BLOCK_K, DESCRIBED)  # (BLOCK_N, BLOCK_K)
            # without max_num_imprecise_acc the whole sum stays in the tensor core, as torch._scaled_mm's does
            total = tl.dot(a_tile, b_tile.T, total)
        m = row + tl.arange(0, BLOCK_M)
        n = column + tl.arange(0, BLOCK_N)
        a_scale = tl.load(a_scale_ptr + m.to(tl.int64) * stride_as, mask=m < M, other=0.0)  # (BLOCK_M,)
        b_scale = tl.load(b_scale_ptr + n.to(tl.int64) * stride_bs, mask=n < N, other=0.0)  # (BLOCK_N,)
        total = total * a_scale[:, None] * b_scale[None, :]
        if HALVES:  # half a tile at a time takes half the shared memory on the way out
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
            store_tile(c, left, row, column, M, N, BLOCK_M, HALF, C_DESCRIBED, DTYPE)
            store_tile(c, right, row, column + HALF, M, N, BLOCK_M, HALF, C_DESCRIBED, DTYPE)
        else:
            store_tile(c, total, row, column, M, N, BLOCK_M, BLOCK_N, C_DESCRIBED, DTYPE)


@triton.jit
def row_scales(scale_ptr, row, block, rows, strides, BLOCK_ROWS: tl.constexpr):
    """(BLOCK_ROWS,) scales of a tile's rows in one block of K."""
    r = row + tl.arange(0, BLOCK_ROWS)
    return tl.load(scale_ptr + r.to(tl.int64) * strides[0] + block * strides[1], mask=r < rows, other=0.0)


@triton.jit
def block_scaled_matmul_kernel(
    a, b, c, a_scale_ptr, b_scale_ptr, M, N, K, stride_a, stride_b, strides_as, strides_bs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIBED: tl.constexpr, C_DESCRIBED: tl.constexpr, FLATTEN: tl.constexpr, DTYPE: tl.constexpr,
    SQUARE: tl.constexpr,
):  # fmt: skip
    """One program: every ``num_programs``-th tile of c; ``SQUARE``: b has a scale for 128 of its rows.

    Hopper's tensor cores add 8-bit products with some 14 bits of a sum, whatever the accumulator's dtype (DeepSeek-V3
    technical report, 2024, section 3.3.2). So no sum there is longer than the 128 products that share a scale, and the
    sums are added in float32, which the scales between them ask for anyway.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in range(0, K // BLOCK_K):
            start = block * BLOCK_K
            scale = row_scales(a_scale_ptr, row, block, M, strides_as, BLOCK_M)
            if SQUARE:  # a tile has no more than 128 columns, all of one square
                scale *= tl.load(b_scale_ptr + column // BLOCK_K * strides_bs[0] + block * strides_bs[1])
            a_tile = load_tile(a, row, start, M, K, stride_a, BLOCK_M, BLOCK_K, DESCRIBED)  # (BLOCK_M, BLOCK_K)
            b_tile = load_tile(b, column, start, N, K, stride_b, BLOCK_N, BLOCK_K, DESCRIBED)  # (BLOCK_N, BLOCK_K)
            partial = tl.dot(a_tile, b_tile.T)
            if not SQUARE:
                partial *= row_scales(b_scale_ptr, column, block, N, strides_bs, BLOCK_N)[None, :]
            total += partial * scale[:, None]
        store_tile(c, total, row, column, M, N, BLOCK_M, BLOCK_N, C_DESCRIBED, DTYPE)


def scaled_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``a @ b.T`` of dequantised operands, without dequantising them.

    Args:
        a: (..., K) in e4m3 with one scale, one for each row (``block`` K), or one for each 128 of a row (block 128).
        b: (N, K) in e4m3, scaled likewise, or :class:`SquareBlocks`. Operands of which one has blocks of 128 must both
            have them; a scale for the tensor and scales for rows go together.
        out_dtype: float32, float16 or bfloat16; what does not fit it becomes infinite.

    Returns:
        (..., N) contiguous. Rows of K numbers that do not start at multiples of 16 bytes, and GPUs before Hopper, are
        served through pointers, more slowly.

    Raises:
        TypeError: an operand is not quantised, or ``out_dtype`` is another.
        ValueError: format, shape, strides, device or blocks are not these, or the GPU has no 8-bit tensor cores.
    """
    check_operand("a", a, 1)
    check_operand("b", b, 2)
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be torch.float32, float16 or bfloat16, got {out_dtype!r}")
    K, N = a.values.shape[-1], b.values.shape[0]
    if b.values.ndim != 2 or b.values.shape[1] != K:
        raise ValueError(
            f"b must have shape (N, {K}) to follow a of {tuple(a.values.shape)}, got {tuple(b.values.shape)}"
        )
    if a.values.device != b.values.device:
        raise ValueError(f"b must be on a's device {a.values.device}, got {b.values.device}")
    in_blocks = _in_blocks(a, b)
    shape = (*a.values.shape[:-1], N)
    if K == 0 or 0 in shape:
        return torch.zeros(shape, dtype=out_dtype, device=a.values.device)
    capability = tuning.capability_of(a.values.device)
    if capability is not None and capability < (8, 9):
        raise ValueError(f"e4m3 products need compute capability 8.9 (Ada, Hopper), this GPU has {capability}")
    product = _block_scaled if in_blocks else _scaled
    if a.values.ndim == 2:
        return product(a.values, a.scales, b, out_dtype, capability)
    values = a.values.reshape(-1, K)
    scales = a.scales if a.block is None else a.scales.reshape(len(values), -1)
    return product(values, scales, b, out_dtype, capability).view(shape)


def _in_blocks(a: Quantized, b: Quantized) -> bool:
    """Whether the scales stand inside of the sum over K.

    Raises:
        ValueError: they stand inside for one operand only, or the blocks are not of 128.
    """
    K = a.values.shape[-1]
    if isinstance(a, SquareBlocks):
        raise ValueError(
            "a must have a scale for each row of a block (quantize_blocks without square), got SquareBlocks"
        )
    if a.block in (None, K) and b.block in (None, K) and not isinstance(b, SquareBlocks):
        return False
    if a.block == b.block == BLOCK:
        return True
    raise ValueError(
        f"blocks of a and b must both be {BLOCK}, or each be None or K = {K}, got a.block={a.block} and "
        f"b.block={b.block}"
    )


def _described(
    capability: tuple[int, int] | None, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[bool, bool]:
    """Whether tiles of a and b come through descriptors, and whether those of c leave through them."""
    if capability is not None and capability < (9, 0):  # no TMA
        return False, False
    return aligned(a) and aligned(b), aligned(c)


def _hopper_multiplies(
    capability: tuple[int, int] | None, described: bool, a_scales: torch.Tensor, b_scales: torch.Tensor,
    out_dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether the kernels for Hopper take a product: of matrices that TMA describes, to two bytes a number."""
    takes = capability == (9, 0) and described and out_dtype != torch.float32
    return takes and extent(a_scales) < 1 << 31 and extent(b_scales) < 1 << 31  # so far are 32-bit offsets apart


def _scaled(
    a: torch.Tensor, a_scales: torch.Tensor, b: Quantized, out_dtype: torch.dtype, capability: tuple[int, int] | None
) -> torch.Tensor:
    """The product of a (M, K) and b, one or M scales and one or N scales."""
    (M, K), N = a.shape, b.values.shape[0]
    c = torch.empty((M, N), dtype=out_dtype, device=a.device)
    described, c_described = _described(capability, a, b.values, c)
    if _hopper_multiplies(capability, described and c_described, a_scales, b.scales, out_dtype):
        from .hopper_row_scaled import hopper_row_scaled  # Gluon is imported where it can run only

        hopper_row_scaled(a, a_scales, b.values, b.scales, c)
        return c
    tile = tuning.scaled_matmul(described, out_dtype, capability)
    out_columns = tile.n // 2 if tile.halves else tile.n
    tiles = triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n)
    scaled_matmul_kernel[(min(tiles, tile.per_sm * programs(a.device)),)](
        operand(a, described, (tile.m, tile.k)), operand(b.values, described, (tile.n, tile.k)),
        operand(c, c_described, (tile.m, out_columns)), a_scales, b.scales, M, N, K, a.stride(0), b.values.stride(0),
        a_scales.stride(0) if a_scales.ndim else 0, b.scales.stride(0) if b.scales.ndim else 0,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=tile.group, DESCRIBED=described,
        C_DESCRIBED=c_described, HALVES=tile.halves, FLATTEN=tile.flatten, DTYPE=_TL_DTYPES[out_dtype],
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return c


def _block_scaled(
    a: torch.Tensor, a_scales: torch.Tensor, b: Quantized, out_dtype: torch.dtype, capability: tuple[int, int] | None
) -> torch.Tensor:
    """The product of a (M, K) and b, a scale for each 128 of K."""
    (M, K), N = a.shape, b.values.shape[0]
    c = torch.empty((M, N), dtype=out_dtype, device=a.device)
    described, c_described = _described(capability, a, b.values, c)
    described_all = described and c_described
    if isinstance(b, SquareBlocks) and _hopper_multiplies(capability, described_all, a_scales, b.scales, out_dtype):
        from .hopper_block_scaled import hopper_block_scaled  # Gluon is imported where it can run only

        hopper_block_scaled(a, a_scales, b, c)
        return c
    tile = tuning.block_scaled_matmul(isinstance(b, SquareBlocks), capability)
    tiles = triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n)
    block_scaled_matmul_kernel[(min(tiles, tile.per_sm * programs(a.device)),)](
        operand(a, described, (tile.m, BLOCK)), operand(b.values, described, (tile.n, BLOCK)),
        operand(c, c_described, (tile.m, tile.n)), a_scales, b.scales, M, N, K, a.stride(0), b.values.stride(0),
        a_scales.stride(), b.scales.stride(),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=BLOCK, GROUP_M=tile.group, DESCRIBED=described,
        C_DESCRIBED=c_described, FLATTEN=tile.flatten, DTYPE=_TL_DTYPES[out_dtype],
        SQUARE=isinstance(b, SquareBlocks), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return c
