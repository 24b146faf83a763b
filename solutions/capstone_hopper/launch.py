"""Launches of the Hopper kernels: descriptors, tile lists, and what comes before and after the backward kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tuning
from .backward import hopper_backward_kernel
from .forward import hopper_forward_kernel
from .parts import LOG2_E, copyable, rows_of, tiles_of
from .tile_order import tile_table


def hopper_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, slack: float = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (B, Hq, Nq, D) of q's dtype and the natural logsumexp (B, Hq, Nq), float32; see lab 3's ``flash_forward``.

    Args:
        slack: Powers of two by which a score may exceed what a row takes for its maximum; 0 for the true maximum.
    """
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
        RESCALE_AFTER_MMA=tile.rescale_after_mma, PARTIAL=tile.partial_sums, SLACK=slack, MASK_APART=tile.mask_apart,
        B=tile.num_q_buffers, REGISTERS=tile.registers, num_warps=4, maxnreg=tile.launch_maxnreg,
    )  # fmt: skip
    return o, lse


@triton.jit
def row_terms_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, score_ptr, dp_ptr, sum_ptr, factor, heads, queries, padded, o_b,
                     o_h, o_n, do_b, do_h, do_n, dlse_b, dlse_h, dlse_n, D: tl.constexpr, M: tl.constexpr,
                     DLSE: tl.constexpr, ZERO: tl.constexpr):  # fmt: skip
    """What is added to a row of scores and of dP: -L * factor and -delta, delta = rowsum(dO * O) - dL.

    Rows are padded to whole tiles. One that sees no key, or that is none, gets -inf and 0: its weights are 0. With
    ``ZERO`` the sums of dQ (heads of the batch, padded, D) are zeroed on the way. Grid: tiles of all heads.
    """
    head = (tl.program_id(0) // (padded // M)).to(tl.int64)
    b, h = head // heads, head % heads
    row = tl.program_id(0) % (padded // M) * M + tl.arange(0, M)
    column = tl.arange(0, D)
    there = row < queries
    at = row.to(tl.int64)[:, None]
    if ZERO:
        tl.store(sum_ptr + (head * padded + at) * D + column, tl.zeros([M, D], tl.float32))
    o = tl.load(o_ptr + b * o_b + h * o_h + at * o_n + column, mask=there[:, None], other=0.0)
    do = tl.load(do_ptr + b * do_b + h * do_h + at * do_n + column, mask=there[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE:
        delta -= tl.load(dlse_ptr + b * dlse_b + h * dlse_h + row.to(tl.int64) * dlse_n, mask=there, other=0.0)
    lse = tl.load(lse_ptr + head * queries + row, mask=there, other=float("-inf"))
    sees = lse != float("-inf")
    tl.store(score_ptr + head * padded + row, tl.where(sees, -lse * factor, float("-inf")))
    tl.store(dp_ptr + head * padded + row, tl.where(sees, -delta, 0.0))


@triton.jit
def scaled_kernel(sum_ptr, out_ptr, scale, elements, padded, BLOCK: tl.constexpr):
    """out = scale * sum, rounded once: ``elements`` of each head, whose sums are ``padded`` elements apart.

    Grid: blocks of all heads.
    """
    blocks = tl.cdiv(elements, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(sum_ptr + head * padded + at, mask=at < elements, other=0.0)
    tl.store(out_ptr + head * elements + at, (value * scale).to(out_ptr.dtype.element_ty), mask=at < elements)


def row_terms(
    o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, factor: float, padded: int,
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What :func:`row_terms_kernel` computes: two tensors (B * Hq, padded), float32.

    Args:
        o, do: (B, Hq, Nq, D); elements of a row lie side by side.
        lse, dlse: (B, Hq, Nq), float32; dlse may be None.
        factor: Of the logsumexp.
        padded: Rows of a head, a multiple of 64.
        sums: Zeroed on the way: (B * Hq, padded, D) elements, float32.
    """
    batch, heads, queries, head_dim = o.shape
    score_terms = torch.empty((batch * heads, padded), dtype=torch.float32, device=o.device)
    dp_terms = torch.empty_like(score_terms)
    row_terms_kernel[(padded // 64 * batch * heads,)](
        o, do, lse, dlse, score_terms, dp_terms, sums, factor, heads, queries, padded, *o.stride()[:3],
        *do.stride()[:3], *(dlse.stride() if dlse is not None else (0, 0, 0)), D=head_dim, M=64,
        DLSE=dlse is not None, ZERO=sums is not None,
    )  # fmt: skip
    return score_terms, dp_terms


def hopper_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, causal: bool, scale: float, sum_dq: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv of q's, k's and v's shapes and dtype, for a head_dim of 64 or 128.

    The steps of :mod:`.launch_reordered` start from this kernel and are measured beside it. Attention uses the last two
    of those steps instead.

    Args:
        dlse: Gradient of the logsumexp (B, Hq, Nq), or None.
        sum_dq: Whether dq is summed by TMA, in no fixed order; dq is None otherwise.
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    tile = tuning.backward(head_dim)
    do = do if do.stride(3) == 1 else do.contiguous()
    score_starts, dp_starts = row_terms(o, do, lse, dlse, 1 / scale, triton.cdiv(queries, tile.rows) * tile.rows)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # Without dq the kernel's descriptor of its sums is never used; it describes the smallest tensor that fits.
    sums = torch.zeros((batch, heads, queries, head_dim) if sum_dq else (1, 1, 1, head_dim), device=q.device)
    hopper_backward_kernel[(triton.cdiv(keys, tile.columns), kv_heads, batch)](
        tiles_of(copyable(q), tile.rows, head_dim), tiles_of(copyable(k), tile.columns, head_dim),
        tiles_of(copyable(v), tile.columns, head_dim), tiles_of(copyable(do), tile.rows, head_dim),
        rows_of(score_starts, tile.rows), rows_of(dp_starts, tile.rows),
        tiles_of(sums, 64, head_dim * tile.rows // 128), tiles_of(dk, 64, head_dim), tiles_of(dv, 64, head_dim), scale,
        scale * LOG2_E, heads, heads // kv_heads, queries, keys, M=tile.rows, N=tile.columns, S=tile.stages,
        CAUSAL=causal, DQ=sum_dq, EARLY=tile.early, REGISTERS=tile.registers, num_warps=tile.warps,
        maxnreg=tile.launch_maxnreg,
    )  # fmt: skip
    return scaled(sums, q, scale, queries) if sum_dq else None, dk, dv


def scaled(sums: torch.Tensor, q: torch.Tensor, scale: float, padded: int) -> torch.Tensor:
    """dq, contiguous and of q's shape (B, Hq, Nq, D) and dtype: ``scale`` times sums (B * Hq, padded, D), float32."""
    batch, heads, queries, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elements = queries * head_dim
    scaled_kernel[(triton.cdiv(elements, 4096) * batch * heads,)](
        sums, dq, scale, elements, padded * head_dim, BLOCK=4096
    )
    return dq
