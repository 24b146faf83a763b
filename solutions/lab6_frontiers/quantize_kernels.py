"""Kernels that quantise: each number is read once, its block's maximum found on chip, and its code written once.

In PyTorch the maximum, the division, the rounding and the cast are kernels of their own that read and write the tensor
several times. Here the traffic is the least there is: the input, a byte for each number, four for each scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from solutions.lab2_triton_kernels.arguments import check_tensor, refuse_gradient
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.formats import ELEMENTS, Quantized

from . import tuning
from .arguments import BLOCK
from .codes import KERNEL_FORMATS, check_format, scaled_codes
from .square_blocks import SquareBlocks

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Columns of the longest row that a program holds on chip.
LONGEST_ROW = 16384


@triton.jit
def store_codes(
    y, codes_ptr, scales_ptr, row, first, num_rows, columns, stride_sr, stride_sb, LARGEST: tl.constexpr,
    GROUPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile y (ROWS, BLOCK) of the rows ``row`` from the column ``first`` on; it is 0 outside of the tensor.

    Each of the ``GROUPS`` equal parts of a row gets a scale of its own.
    """
    ROWS: tl.constexpr = y.shape[0]
    SIZE: tl.constexpr = y.shape[1] // GROUPS
    groups = tl.reshape(y, (ROWS, GROUPS, SIZE))
    amax = tl.max(tl.abs(groups), axis=2)  # (ROWS, GROUPS)
    codes, scales = scaled_codes(groups, amax[:, :, None], LARGEST, DTYPE)
    column = first + tl.arange(0, y.shape[1])
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    tl.store(codes_ptr + row[:, None] * columns + column[None, :], tl.reshape(codes, y.shape), mask=inside)
    group = tl.arange(0, GROUPS).to(tl.int64) + first // SIZE
    inside = (row[:, None] < num_rows) & (group[None, :] * SIZE < columns)
    scales_ptrs = scales_ptr + row[:, None] * stride_sr + group[None, :] * stride_sb
    tl.store(scales_ptrs, tl.reshape(scales, (ROWS, GROUPS)), mask=inside)


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, columns, stride_row, stride_col, stride_sr, stride_sb,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows of ``BLOCK`` columns, which are whole rows (GROUPS 1) or whole blocks of them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    x_ptrs = x_ptr + row[:, None] * stride_row + column[None, :].to(tl.int64) * stride_col
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
    store_codes(x, codes_ptr, scales_ptr, row, first, num_rows, columns, stride_sr, stride_sb, LARGEST, GROUPS, DTYPE)


@triton.jit
def quantize_squares_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, columns, stride_row, stride_col, stride_sr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program: a square of ``BLOCK`` rows and columns, with one scale."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    x_ptrs = x_ptr + row[:, None] * stride_row + column[None, :].to(tl.int64) * stride_col
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)  # (BLOCK, BLOCK)
    codes, scale = scaled_codes(x, tl.max(tl.max(tl.abs(x), axis=1), axis=0), LARGEST, DTYPE)
    tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=inside)
    tl.store(scales_ptr + tl.program_id(0).to(tl.int64) * stride_sr + tl.program_id(1), scale)


@dataclass(frozen=True)
class Codes:
    """Empty codes and scales for a tensor (..., columns), and how a kernel fills them.

    ``block`` is what shares a scale, ``rows`` how many rows there are. Scales of blocks lie in memory block by block:
    a product takes a tile's scales of one block at a time, and finds them side by side.
    """

    values: torch.Tensor
    scales: torch.Tensor
    format: str
    block: int
    rows: int

    @classmethod
    def empty(cls, shape: torch.Size, device: torch.device, format: str, block: int) -> Codes:
        """Codes for a tensor of ``shape``, without numbers in them."""
        rows, groups = math.prod(shape[:-1]), shape[-1] // block
        values = torch.empty(shape, dtype=ELEMENTS[format].dtype, device=device)
        return cls(values, torch.empty((groups, rows), dtype=torch.float32, device=device).T, format, block, rows)

    @property
    def constants(self) -> dict[str, object]:
        """The kernels' arguments that the format decides on."""
        return {"LARGEST": ELEMENTS[self.format].largest, "DTYPE": KERNEL_FORMATS[self.format]}

    def quantized(self) -> Quantized:
        """What was filled."""
        scales = self.scales.unflatten(0, self.values.shape[:-1]) if self.values.ndim > 1 else self.scales[0]
        return Quantized(self.values, scales, self.format, self.block)


def check_rows(function: str, x: torch.Tensor, format: str, block: int | None) -> None:
    """Refuse what no kernel of this lab quantises; a block of None is a row, which must fit on chip.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`quantize_rows` and :func:`quantize_blocks`.
    """
    check_tensor("x", x, 1)
    check_format(format)
    refuse_gradient(function, x)
    if x.numel() == 0:
        raise ValueError(f"x must hold at least one number, got shape {tuple(x.shape)}")
    check_columns(x.shape[-1], block)


def check_columns(columns: int, block: int | None) -> None:
    """Refuse rows of so many columns.

    Raises:
        ValueError: a row is too long to stay on chip, or is not made of whole blocks of 128.
    """
    if block is None:
        if columns > LONGEST_ROW:
            raise ValueError(f"a row must have at most {LONGEST_ROW:,} columns, got {columns:,}")
    elif block != BLOCK:
        raise ValueError(f"block must be {BLOCK}, got {block!r}")
    elif columns % block:
        raise ValueError(f"block must divide the last axis, got block={block} for {columns} columns")


def quantize_rows(x: torch.Tensor, format: str = "e4m3") -> Quantized:
    """:func:`utils.formats.quantize` with a scale for each row, in one kernel.

    Args:
        x: (..., K) of any strides, float32, float16 or bfloat16, K at most :data:`LONGEST_ROW`. Nothing waits for the
            GPU to see whether it is finite: a row that holds NaN or infinity gives numbers without meaning.
        format: ``"e4m3"``, ``"e5m2"`` or ``"int8"``.

    Returns:
        ``values`` (..., K), contiguous, and ``scales`` (..., 1).

    Raises:
        TypeError, ValueError: dtype, shape, device or format are not these.
        RuntimeError: autograd is recording and x asks for its gradient.
    """
    check_rows("quantize_rows", x, format, None)
    return _launched(x, format, x.shape[-1], tuning.row_tile(x.shape[-1]))


def quantize_blocks(x: torch.Tensor, block: int = BLOCK, square: bool = False, format: str = "e4m3") -> Quantized:
    """:func:`utils.formats.quantize` with a scale for each 128 of a row, in one kernel.

    Args:
        x: (..., K) of any strides, float32, float16 or bfloat16, K a multiple of 128; finite, as in
            :func:`quantize_rows`.
        block: 128.
        square: for a weight (N, K): one scale for each square of 128 rows and columns, :class:`SquareBlocks`.
        format: ``"e4m3"``, ``"e5m2"`` or ``"int8"``.

    Returns:
        ``values`` (..., K), contiguous, and ``scales`` (..., K / 128), of which those of one block lie side by side in
        memory; of squares (ceil(N / 128), K / 128).

    Raises:
        TypeError, ValueError: dtype, shape, device, block or format are not these.
        RuntimeError: autograd is recording and x asks for its gradient.
    """
    check_rows("quantize_blocks", x, format, block)
    return _squares(x, block, format) if square else _launched(x, format, block, tuning.column_tile(x.shape[-1]))


def _launched(x: torch.Tensor, format: str, block: int, tile: tuple[int, int, int]) -> Quantized:
    """``x`` with a scale for each ``block`` of a row, a program for each tile of rows, columns and warps."""
    codes = Codes.empty(x.shape, x.device, format, block)
    rows, width, warps = tile
    x = x.reshape(codes.rows, -1)  # a view unless the leading axes are out of order
    columns = x.shape[1]
    quantize_kernel[(triton.cdiv(codes.rows, rows), triton.cdiv(columns, width))](
        x, codes.values, codes.scales, codes.rows, columns, *x.stride(), *codes.scales.stride(),
        ROWS=rows, BLOCK=width, GROUPS=width // block if block < columns else 1, **codes.constants, num_warps=warps,
    )  # fmt: skip
    return codes.quantized()


def _squares(x: torch.Tensor, block: int, format: str) -> SquareBlocks:
    """``x`` (N, K) with a scale for each square."""
    if x.ndim != 2:
        raise ValueError(f"x must have shape (N, K) for square blocks, got {tuple(x.shape)}")
    (N, K), dtype = x.shape, ELEMENTS[format].dtype
    values = torch.empty((N, K), dtype=dtype, device=x.device)
    scales = torch.empty((triton.cdiv(N, block), K // block), dtype=torch.float32, device=x.device)
    quantize_squares_kernel[tuple(scales.shape)](
        x, values, scales, N, K, *x.stride(), scales.stride(0),
        LARGEST=ELEMENTS[format].largest, BLOCK=block, DTYPE=KERNEL_FORMATS[format], num_warps=8,
    )  # fmt: skip
    return SquareBlocks(values, scales, format, block)
