"""Quantising at the end of the operation before: the result in 16 bits is neither written nor read again.

What RMSNorm and SwiGLU give goes into a matrix product. By itself each writes 2 bytes for a number, the quantising
kernel reads them and writes one; together they write that one.
"""

from __future__ import annotations

import torch

from solutions.lab2_triton_kernels.arguments import check_tensor, refuse_gradient
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.formats import Quantized

from . import tuning
from .arguments import dtype_name
from .quantize_kernels import Codes, check_columns, check_rows, store_codes

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def rms_norm_quantized_kernel(
    x_ptr, weight_ptr, codes_ptr, scales_ptr, num_rows, columns, eps, stride_row, stride_sr, stride_sb,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` whole rows, normalised, rounded to their dtype, quantised."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    narrow = tl.load(x_ptr + row[:, None] * stride_row + column[None, :], mask=inside, other=0.0)  # (ROWS, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)  # (BLOCK,)
    x = narrow.to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / columns + eps)
    y = (x * rstd[:, None] * weight[None, :]).to(narrow.dtype).to(tl.float32)
    store_codes(y, codes_ptr, scales_ptr, row, 0, num_rows, columns, stride_sr, stride_sb, LARGEST, GROUPS, DTYPE)


@triton.jit
def swiglu_quantized_kernel(
    x_ptr, codes_ptr, scales_ptr, num_rows, columns, stride_row, stride_sr, stride_sb,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows of ``BLOCK`` gates and what they let through, rounded to their dtype, quantised."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    gate_ptrs = x_ptr + row[:, None] * stride_row + column[None, :]
    narrow = tl.load(gate_ptrs, mask=inside, other=0.0)  # (ROWS, BLOCK)
    up = tl.load(gate_ptrs + columns, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
    gate = narrow.to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(narrow.dtype).to(tl.float32)
    y = (silu * up).to(narrow.dtype).to(tl.float32)
    store_codes(y, codes_ptr, scales_ptr, row, first, num_rows, columns, stride_sr, stride_sb, LARGEST, GROUPS, DTYPE)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., columns) as (rows, columns) with contiguous rows: a view unless its axes are out of order."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, format: str = "e4m3", block: int | None = None
) -> Quantized:
    """Quantised ``x / sqrt(mean(x * x) + eps) * weight``: what quantising an RMSNorm's result in x's dtype would give.

    Args:
        x: (..., K), float32, float16 or bfloat16, K at most :data:`quantize_kernels.LONGEST_ROW`; copied where its last
            axis is not contiguous.
        weight: (K,), contiguous, of x's dtype.
        eps: added to the mean of the squares.
        format: ``"e4m3"``, ``"e5m2"`` or ``"int8"``.
        block: None for a scale for each row, 128 for one for each 128 of it.

    Returns:
        As :func:`quantize_rows`, or with ``block`` as :func:`quantize_blocks`.

    Raises:
        TypeError, ValueError: dtype, shape, strides, device, format or block are not these.
        RuntimeError: autograd is recording and an argument asks for its gradient.
    """
    check_rows("rms_norm_quantized", x, format, block)
    check_tensor("weight", weight, 1)
    refuse_gradient("rms_norm_quantized", weight)
    columns = x.shape[-1]
    check_columns(columns, None)  # whole rows stay on chip whatever shares a scale
    if tuple(weight.shape) != (columns,) or weight.dtype != x.dtype or weight.stride(0) != 1:
        raise ValueError(
            f"weight must have shape ({columns},), x's dtype {dtype_name(x.dtype)} and stride 1, got "
            f"{tuple(weight.shape)}, {dtype_name(weight.dtype)} and strides {weight.stride()}"
        )
    codes = Codes.empty(x.shape, x.device, format, block or columns)
    rows, width, warps = tuning.row_tile(columns)
    x = _as_rows(x)
    rms_norm_quantized_kernel[(triton.cdiv(codes.rows, rows),)](
        x, weight, codes.values, codes.scales, codes.rows, columns, eps, x.stride(0), *codes.scales.stride(),
        ROWS=rows, BLOCK=width, GROUPS=width // block if block else 1, **codes.constants, num_warps=warps,
    )  # fmt: skip
    return codes.quantized()


def swiglu_quantized(gate_up: torch.Tensor, format: str = "e4m3", block: int | None = None) -> Quantized:
    """Quantised ``silu(gate) * up``: what quantising a SwiGLU's result in its dtype would give.

    Args:
        gate_up: (..., 2 I), gates first, as one product gives them; float32, float16 or bfloat16; copied where its last
            axis is not contiguous. With a scale for each row, I is at most :data:`quantize_kernels.LONGEST_ROW`.
        format: ``"e4m3"``, ``"e5m2"`` or ``"int8"``.
        block: None for a scale for each row, 128 for one for each 128 of it.

    Returns:
        ``values`` (..., I), contiguous, and ``scales`` (..., 1) or (..., I / 128), as :func:`quantize_rows` and
        :func:`quantize_blocks`.

    Raises:
        TypeError, ValueError: dtype, shape, device, format or block are not these.
        RuntimeError: autograd is recording and gate_up asks for its gradient.
    """
    check_tensor("gate_up", gate_up, 1)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even last axis, gates and ups, got shape {tuple(gate_up.shape)}")
    columns = gate_up.shape[-1] // 2
    check_rows("swiglu_quantized", gate_up[..., :columns], format, block)
    codes = Codes.empty((*gate_up.shape[:-1], columns), gate_up.device, format, block or columns)
    rows, width, warps = tuning.column_tile(columns) if block else tuning.row_tile(columns)
    x = _as_rows(gate_up)
    swiglu_quantized_kernel[(triton.cdiv(codes.rows, rows), triton.cdiv(columns, width))](
        x, codes.values, codes.scales, codes.rows, columns, x.stride(0), *codes.scales.stride(),
        ROWS=rows, BLOCK=width, GROUPS=width // block if block else 1, **codes.constants, num_warps=warps,
    )  # fmt: skip
    return codes.quantized()
