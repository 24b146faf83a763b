"""Launches of the Hopper kernels: descriptors, tile lists, and what comes before and after the backward kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tuning
from .backward import hopper_backward_kernel
from .backward_wide import hopper_wide_backward_kernel
from .forward import hopper_forward_kernel
from .parts import LOG2_E, copyable, rows_of, tiles_of
from .tile_order import tile_table

#: Rows are counted in whole tiles of this many where the backward kernel reads row sums.
ROWS = 128


def hopper_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (B, Hq, Nq, D) of q's dtype and the natural logsumexp (B, Hq, Nq), float32; see lab 3's ``flash_forward``."""
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    tile = tuning.forward(head_dim, causal)
    o = torch.empty((batch, heads, queries, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    rows = 64 * tile.warpgroups
    tiles, counts = tile_table(
        q.device, batch * heads, queries, keys, rows, tile.columns, causal, programs, tile.together
    )
    hopper_forward_kernel[(len(counts),)](
        tiles_of(copyable(q), 64, head_dim), tiles_of(copyable(k), tile.columns, head_dim),
        tiles_of(copyable(v), tile.columns, head_dim), tiles_of(o, 64, min(head_dim, 128)), lse, tiles, counts,
        scale * LOG2_E, tiles.shape[1], heads, heads // kv_heads, queries, keys, G=tile.warpgroups, N=tile.columns,
        S=tile.stages, CAUSAL=causal, MASKED=causal or keys % tile.columns != 0, PINGPONG=tile.pingpong,
        RESCALE_AFTER_MMA=tile.rescale_after_mma, PARTIAL=tile.partial_sums, B=tile.num_q_buffers,
        REGISTERS=tile.registers, num_warps=4, maxnreg=tile.launch_maxnreg,
    )  # fmt: skip
    return o, lse


@triton.jit
def row_starts_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, score_ptr, dp_ptr, inverse_scale, heads, queries, padded, o_b,
                      o_h, o_n, do_b, do_h, do_n, dlse_b, dlse_h, dlse_n, D: tl.constexpr, M: tl.constexpr,
                      DLSE: tl.constexpr):  # fmt: skip
    """What accumulators of a row of scores and of dP start from: -L / scale and -delta, delta = rowsum(dO * O) - dL.

    Rows are padded to whole tiles. One that sees no key, or that is none, starts from -inf and 0: its weights are 0.
    """
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, D)
    there = row < queries
    at = row.to(tl.int64)[:, None]
    o = tl.load(o_ptr + b * o_b + h * o_h + at * o_n + column, mask=there[:, None], other=0.0)
    do = tl.load(do_ptr + b * do_b + h * do_h + at * do_n + column, mask=there[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(dlse_ptr + b * dlse_b + h * dlse_h + row.to(tl.int64) * dlse_n, mask=there, other=0.0)
    lse = tl.load(lse_ptr + head * queries + row, mask=there, other=float("-inf"))
    sees = lse != float("-inf")
    tl.store(score_ptr + head * padded + row, tl.where(sees, -lse * inverse_scale, float("-inf")))
    tl.store(dp_ptr + head * padded + row, tl.where(sees, -delta, 0.0))


@triton.jit
def scaled_kernel(sum_ptr, out_ptr, scale, elements, BLOCK: tl.constexpr):
    """out = scale * sum, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(sum_ptr + at, mask=at < elements, other=0.0)
    tl.store(out_ptr + at, (value * scale).to(out_ptr.dtype.element_ty), mask=at < elements)


def hopper_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, causal: bool, scale: float, sum_dq: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv of q's, k's and v's shapes and dtype.

    Args:
        dlse: Gradient of the logsumexp (B, Hq, Nq), or None.
        sum_dq: Whether dq is summed by TMA, in no fixed order; dq is None otherwise.
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    tile = tuning.backward(head_dim)
    padded = triton.cdiv(queries, ROWS) * ROWS
    score_starts = torch.empty((batch * heads, padded), dtype=torch.float32, device=q.device)
    dp_starts = torch.empty_like(score_starts)
    do = do if do.stride(3) == 1 else do.contiguous()
    row_starts_kernel[(padded // 64, batch * heads)](
        o, do, lse, dlse, score_starts, dp_starts, 1 / scale, heads, queries, padded, *o.stride()[:3], *do.stride()[:3],
        *(dlse.stride() if dlse is not None else (0, 0, 0)), D=head_dim, M=64, DLSE=dlse is not None,
    )  # fmt: skip
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # Without dq the kernel's descriptor of its sums is never used; it describes the smallest tensor that fits.
    sums = torch.zeros((batch, heads, queries, head_dim) if sum_dq else (1, 1, 1, head_dim), device=q.device)
    wide = tile.warps == 8
    kernel = hopper_wide_backward_kernel if wide else hopper_backward_kernel
    options = {} if wide else {"EARLY": tile.early, "REGISTERS": tile.registers}
    kernel[(triton.cdiv(keys, tile.columns), kv_heads, batch)](
        tiles_of(copyable(q), tile.rows, head_dim), tiles_of(copyable(k), tile.columns, head_dim),
        tiles_of(copyable(v), tile.columns, head_dim), tiles_of(copyable(do), tile.rows, head_dim),
        rows_of(score_starts, tile.rows), rows_of(dp_starts, tile.rows),
        tiles_of(sums, 64, head_dim if wide else head_dim * tile.rows // 128), tiles_of(dk, 64, head_dim),
        tiles_of(dv, 64, head_dim), scale, scale * LOG2_E, heads, heads // kv_heads, queries, keys, M=tile.rows,
        N=tile.columns, S=tile.stages, CAUSAL=causal, DQ=sum_dq, num_warps=tile.warps,
        maxnreg=tile.launch_maxnreg, **options,
    )  # fmt: skip
    if not sum_dq:
        return None, dk, dv
    dq = torch.empty((batch, heads, queries, head_dim), dtype=q.dtype, device=q.device)
    scaled_kernel[(triton.cdiv(dq.numel(), 4096),)](sums, dq, scale, dq.numel(), BLOCK=4096)
    return dq, dk, dv
