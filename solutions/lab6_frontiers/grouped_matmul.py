"""The product of an expert layer: each group of rows times the matrix of its own expert, in one launch.

Letters: T rows of x, sorted by expert, E experts, K columns of x, N of the result. ``counts`` says how many rows each
expert has. It stays on the GPU: nothing waits for it, so the grid is as large as any counts could make it, and programs
that find no tile end at once.

A loop over experts launches E small products, most of which leave the GPU half empty. A padded batch computes as many
rows for each expert as the busiest has.

The kernels here run on every GPU. On Hopper :mod:`.hopper_grouped_matmul` and :mod:`.hopper_grouped_gradient` take
their place for the dtypes, shapes and strides that they can work with.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch import Tensor

from solutions.lab2_triton_kernels.arguments import check_tensor
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_device, dtype_name

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def group_of(tile, tile_ends_ptr, experts, EXPERTS: tl.constexpr):
    """The expert of a tile of rows: as many experts as have their last tile before it."""
    each = tl.arange(0, EXPERTS)
    ends = tl.load(tile_ends_ptr + each, mask=each < experts, other=2147483647)
    return tl.sum((ends <= tile).to(tl.int32), axis=0)


@triton.jit
def grouped_matmul_kernel(
    x_ptr, weights_ptr, out_ptr, row_ends_ptr, tile_ends_ptr, experts, N, K, stride_x, stride_we, stride_wk, stride_wn,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One program: a tile of (BLOCK_M, BLOCK_N) of out (T, N), all of whose rows belong to one expert."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.load(tile_ends_ptr + experts - 1)  # of all experts together
    pid = tl.program_id(0)
    first = pid // (GROUP_M * tiles_n) * GROUP_M  # GROUP_M rows of tiles at a time share what the L2 cache holds
    rows_in_group = tl.minimum(tiles_m - first, GROUP_M)
    if rows_in_group <= 0:
        return
    tile_m = first + pid % (GROUP_M * tiles_n) % rows_in_group
    tile_n = pid % (GROUP_M * tiles_n) // rows_in_group
    if tile_n >= tiles_n:
        return
    expert = group_of(tile_m, tile_ends_ptr, experts, EXPERTS)
    begin = tl.load(row_ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(row_ends_ptr + expert)
    before = tl.load(tile_ends_ptr + expert - 1, mask=expert > 0, other=0)
    row = begin + (tile_m - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    weight_ptr = weights_ptr + expert.to(tl.int64) * stride_we
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_x + inner[None, :]
    w_ptrs = weight_ptr + inner[:, None].to(tl.int64) * stride_wk + column[None, :].to(tl.int64) * stride_wn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=(row < end)[:, None], other=0.0)  # (BLOCK_M, BLOCK_K)
            w = tl.load(w_ptrs, mask=(column < N)[None, :], other=0.0)  # (BLOCK_K, BLOCK_N)
        else:
            inside = inner < K - start
            x = tl.load(x_ptrs, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=inside[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])


@triton.jit
def grouped_weight_gradient_kernel(
    x_ptr, dout_ptr, dweights_ptr, row_ends_ptr, N, K, stride_x, stride_do,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a tile of (BLOCK_K, BLOCK_N) of one expert's gradient (K, N): the sum over its rows, in order."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_k, tile_n, expert = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tl.program_id(1)
    begin = tl.load(row_ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(row_ends_ptr + expert)
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = begin + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + row.to(tl.int64)[None, :] * stride_x + k[:, None]
    dout_ptrs = dout_ptr + row.to(tl.int64)[:, None] * stride_do + n[None, :]
    total = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for start in range(0, end - begin, BLOCK_M):
        inside = row < end - start
        x = tl.load(x_ptrs, mask=(k < K)[:, None] & inside[None, :], other=0.0)  # (BLOCK_K, BLOCK_M)
        dout = tl.load(dout_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)  # (BLOCK_M, BLOCK_N)
        total = tl.dot(x, dout, total, input_precision="ieee")
        x_ptrs += BLOCK_M * stride_x
        dout_ptrs += BLOCK_M * stride_do
    place = expert.to(tl.int64) * K * N + k[:, None].to(tl.int64) * N + n[None, :]
    tl.store(dweights_ptr + place, total.to(dweights_ptr.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, counts)
        return _product(x, weights, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, counts = ctx.saved_tensors
        dout = _with_contiguous_rows(dout)
        dx = _product(dout, weights.mT, counts) if ctx.needs_input_grad[0] else None
        dweights = _weight_gradient(x, dout, counts) if ctx.needs_input_grad[1] else None
        return dx, dweights, None


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def hopper_product(x: Tensor, weights: Tensor) -> types.ModuleType | None:
    """The module of the product for Hopper, on such a GPU and for operands that it takes; None otherwise."""
    if tuning.capability_of(x.device) != (9, 0):
        return None
    from . import hopper_grouped_matmul  # Gluon is imported where it can run only

    return None if hopper_grouped_matmul.why_portable(x, weights) else hopper_grouped_matmul


def hopper_gradient(x: Tensor, dout: Tensor) -> types.ModuleType | None:
    """As :func:`hopper_product`, of the gradient of the weights."""
    if tuning.capability_of(x.device) != (9, 0):
        return None
    from . import hopper_grouped_gradient

    return None if hopper_grouped_gradient.why_portable(x, dout) else hopper_grouped_gradient


def _product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows of x (T, K) times its matrix of weights (E, K, N), any strides."""
    (T, K), (E, _, N) = x.shape, weights.shape
    out = torch.empty((T, N), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if hopper := hopper_product(x, weights):
        hopper.hopper_grouped_matmul(x, weights, counts, out)
        return out
    tile = tuning.grouped_matmul(x.element_size(), tuning.capability_of(x.device))
    tile_ends = ((counts + tile.m - 1) // tile.m).cumsum(0, dtype=torch.int32)
    most = T // tile.m + min(E, T)  # an expert's last tile may have a single row
    grid = triton.cdiv(most, tile.group) * tile.group * triton.cdiv(N, tile.n)
    grouped_matmul_kernel[(grid,)](
        x, weights, out, _row_ends(counts), tile_ends, E, N, K, x.stride(0), *weights.stride(),
        EXPERTS=tuning.power_of_two(E), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=tile.group,
        EVEN_K=K % tile.k == 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _weight_gradient(x: Tensor, dout: Tensor, counts: Tensor) -> Tensor:
    """x^T dout for each expert's rows, (E, K, N); zeros for an expert without rows."""
    E, K, N = len(counts), x.shape[1], dout.shape[1]
    dweights = torch.empty((E, K, N), dtype=x.dtype, device=x.device)
    if hopper := hopper_gradient(x, dout):
        hopper.hopper_grouped_gradient(x, dout, counts, dweights)
        return dweights
    tile = tuning.grouped_weight_gradient(x.element_size(), tuning.capability_of(x.device))
    grouped_weight_gradient_kernel[(triton.cdiv(K, tile.k) * triton.cdiv(N, tile.n), E)](
        x, dout, dweights, _row_ends(counts), N, K, x.stride(0), dout.stride(0),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dweights


def _row_ends(counts: Tensor) -> Tensor:
    """Where each expert's rows end."""
    return counts.cumsum(0, dtype=torch.int32)


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows of x times the matrix of the expert that they are sorted by, with gradients for x and weights.

    The first ``counts[0]`` rows meet ``weights[0]``, the next ``counts[1]`` ``weights[1]``, and so on. Products are
    summed in float32; float32 operands are not rounded to TF32.

    Args:
        x: (T, K) float32, float16 or bfloat16; copied where its rows are not contiguous.
        weights: (E, K, N) of x's dtype, any strides.
        counts: (E,) int32 or int64 on x's device, none negative, T in all. Nothing waits for the GPU to see whether
            they are: with fewer, the rows beyond keep what the memory held; with more, memory beyond x is touched.

    Returns:
        (T, N) of x's dtype, contiguous.

    Raises:
        TypeError, ValueError: a dtype, a shape or a device does not fit.
    """
    check_tensor("x", x, 2)
    check_tensor("weights", weights, 3)
    _check_shapes(x, weights, counts)
    return _GroupedMatmul.apply(_with_contiguous_rows(x), weights, counts)


def _check_shapes(x: Tensor, weights: Tensor, counts: Tensor) -> None:
    if x.ndim != 2 or weights.ndim != 3 or weights.shape[1] != x.shape[1] or not math.prod(weights.shape):
        raise ValueError(
            f"x must have shape (T, K) and weights (E, K, N), none of E, K and N zero, got {tuple(x.shape)} and "
            f"{tuple(weights.shape)}"
        )
    if weights.dtype != x.dtype:
        raise TypeError(f"weights must have x's dtype {dtype_name(x.dtype)}, got {dtype_name(weights.dtype)}")
    if not isinstance(counts, Tensor) or counts.dtype not in (torch.int32, torch.int64):
        got = dtype_name(counts.dtype) if isinstance(counts, Tensor) else type(counts).__name__
        raise TypeError(f"counts must be an int32 or int64 tensor, got {got}")
    if counts.shape != weights.shape[:1]:
        raise ValueError(
            f"counts must have one number for each of {len(weights)} experts, got shape {tuple(counts.shape)}"
        )
    check_device("counts", counts)
