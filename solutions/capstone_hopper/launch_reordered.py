"""Launches of :mod:`.backward_reordered`. Attention does not use them yet.

``STEPS`` is a ladder from :mod:`.launch`'s backward pass, one change a step, so that each change can be measured
beside the one before it (``benchmarks.hopper_backward``). The last but one is the fastest; with the last, equal runs
give equal gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import tuning
from .backward_reordered import reordered_backward_kernel
from .launch import scaled_kernel
from .parts import LOG2_E, ROW_LAYOUT, copyable, rows_of, tiles_of


@dataclass(frozen=True)
class Reordering:
    """What differs from the present backward kernel. Code for the end of the keys is compiled only where it is needed.

    Attributes:
        late: The logsumexp and delta are subtracted from finished products; no accumulator starts from them.
        linear: dQ is stored and summed in the order in which threads hold it. The kernel before zeroes the sums, and
            the kernel after puts them into order.
        reordered: dQ is issued before dK, and is stored while dK is computed; queries and output gradients share a
            barrier.
        red: Threads add dQ to global memory from registers, four numbers at a time.
        lagged: dQ is computed a step late, when the other warpgroup's dS has long been there.
        balanced: Under a causal mask, tiles of keys of several heads go side by side, the longest first.
        ordered: Programs add to dQ in a fixed order; several heads go side by side without a mask, too.
    """

    late: bool = False
    linear: bool = False
    reordered: bool = False
    red: bool = False
    lagged: bool = False
    balanced: bool = False
    ordered: bool = False


#: One change a step, in this order.
STEPS = {
    "mask": Reordering(),
    "late": Reordering(late=True),
    "linear": Reordering(late=True, linear=True),
    "reordered": Reordering(late=True, linear=True, reordered=True),
    "red": Reordering(late=True, linear=True, reordered=True, red=True),
    "lagged": Reordering(late=True, linear=True, reordered=True, red=True, lagged=True),
    "balanced": Reordering(late=True, linear=True, reordered=True, red=True, lagged=True, balanced=True),
    "ordered": Reordering(late=True, linear=True, reordered=True, red=True, lagged=True, balanced=True, ordered=True),
}
#: Floats of a warpgroup's part of dQ, which is always 64 by 64.
PART = 64 * 64
#: Bytes of queries, output gradients and sums of dQ of the heads side by side, at most: they fit an H100's L2 cache.
TOGETHER_BYTES = 32 * 2**20


@triton.jit
def row_terms_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, score_ptr, dp_ptr, sum_ptr, factor, heads, queries, padded, o_b,
                     o_h, o_n, do_b, do_h, do_n, dlse_b, dlse_h, dlse_n, D: tl.constexpr, M: tl.constexpr,
                     DLSE: tl.constexpr, ZERO: tl.constexpr):  # fmt: skip
    """What is added to a row of scores and of dP: -L * factor and -delta, delta = rowsum(dO * O) - dL.

    Rows are padded to whole tiles. One that sees no key, or that is none, gets -inf and 0: its weights are 0. With
    ``ZERO`` the sums of dQ (heads of the batch, padded, D) are zeroed on the way.
    """
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    row = tl.program_id(0) * M + tl.arange(0, M)
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
def from_accumulator_order_kernel(sum_ptr, dq_ptr, scale, queries, padded, D: tl.constexpr):
    """dQ of one part (64, 64) from its sums, whose order is :func:`.backward_reordered.in_accumulator_order`'s.

    Grid: parts of a head, heads of the batch. dQ (heads of the batch, queries, D) is contiguous.
    """
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, 4096)
    sums = tl.load(sum_ptr + head * padded * D + part * 4096 + at)
    sums = tl.reshape(sums, [8, 4, 8, 4, 2, 2])  # eight, warp, r, c, half, which of the two columns
    sums = tl.reshape(tl.permute(sums, (1, 4, 2, 0, 3, 5)), [64, 64])
    row = part // (D // 64) * 64 + tl.arange(0, 64)
    column = part % (D // 64) * 64 + tl.arange(0, 64)
    to = dq_ptr + (head * queries + row)[:, None] * D + column
    tl.store(to, (sums * scale).to(dq_ptr.dtype.element_ty), mask=(row < queries)[:, None])


def hopper_backward_reordered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, causal: bool, scale: float, step: Reordering = STEPS["balanced"],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv as :func:`.launch.hopper_backward` returns them with ``sum_dq``, for a head_dim of 64 or 128.

    Args:
        q, do: (B, Hq, Nq, D), float16 or bfloat16.
        k, v: (B, Hkv, Nk, D) of q's dtype; Hkv divides Hq.
        o, lse: What the forward pass returned: (B, Hq, Nq, D) of q's dtype, and (B, Hq, Nq) float32.
        dlse: Gradient of the logsumexp (B, Hq, Nq), float32, or None.
        scale: Factor of the scores, greater than 0.

    Raises:
        ValueError: another head_dim.
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim must be 64 or 128, got {head_dim}")
    tile = tuning.backward(head_dim)
    padded = triton.cdiv(queries, tile.rows) * tile.rows
    score_terms = torch.empty((batch * heads, padded), dtype=torch.float32, device=q.device)
    dp_terms = torch.empty_like(score_terms)
    if step.linear:
        sums = torch.empty((batch * heads * padded * head_dim // 32, 32), dtype=torch.float32, device=q.device)
        dq_descriptor = TensorDescriptor(sums, list(sums.shape), list(sums.stride()), [PART // 32, 32], ROW_LAYOUT)
    else:
        sums = torch.zeros((batch, heads, queries, head_dim), device=q.device)
        dq_descriptor = tiles_of(sums, 64, 64)
    do = do if do.stride(3) == 1 else do.contiguous()
    row_terms_kernel[(padded // 64, batch * heads)](
        o, do, lse, dlse, score_terms, dp_terms, sums, LOG2_E if step.late else 1 / scale, heads, queries, padded,
        *o.stride()[:3], *do.stride()[:3], *(dlse.stride() if dlse is not None else (0, 0, 0)), D=head_dim, M=64,
        DLSE=dlse is not None, ZERO=step.linear,
    )  # fmt: skip
    dq = torch.empty((batch, heads, queries, head_dim), dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    turns = sums  # not used
    if step.ordered:
        turns = torch.zeros(batch * heads * padded * head_dim // PART, dtype=torch.int32, device=q.device)
    together = 1
    if step.ordered or (step.balanced and causal):
        together = heads_together(batch * kv_heads, heads // kv_heads * queries * head_dim * 8)
    reordered_backward_kernel[(together, triton.cdiv(keys, tile.columns), batch * kv_heads // together)](
        tiles_of(copyable(q), tile.rows, head_dim), tiles_of(copyable(k), tile.columns, head_dim),
        tiles_of(copyable(v), tile.columns, head_dim), tiles_of(copyable(do), tile.rows, head_dim),
        rows_of(score_terms, tile.rows), rows_of(dp_terms, tile.rows), sums if step.red else dq_descriptor, turns,
        tiles_of(dk, 64, head_dim), tiles_of(dv, 64, head_dim), scale * LOG2_E, heads, heads // kv_heads, queries, keys,
        **constants(tile, causal, keys, step), num_warps=tile.warps, maxnreg=tile.launch_maxnreg,
    )  # fmt: skip
    if step.linear:
        parts = padded * head_dim // PART
        from_accumulator_order_kernel[(parts, batch * heads)](sums, dq, scale, queries, padded, D=head_dim)
    else:
        scaled_kernel[(triton.cdiv(dq.numel(), 4096),)](sums, dq, scale, dq.numel(), BLOCK=4096)
    return dq, dk, dv


def heads_together(kv_heads: int, touched: int) -> int:
    """How many key heads go side by side: a divisor of their number, at most 8.

    Args:
        kv_heads: Key heads of the whole batch.
        touched: Bytes that the programs of one key head read and add to, its keys and values aside.
    """
    most = min(8, max(1, TOGETHER_BYTES // touched))
    return max(n for n in range(1, most + 1) if kv_heads % n == 0)


def constants(tile: tuning.BackwardTile, causal: bool, keys: int, step: Reordering) -> dict[str, int | bool]:
    """The kernel's compile-time constants by name."""
    return {
        "S": tile.stages, "CAUSAL": causal, "RAGGED": not causal and keys % tile.columns != 0, "LATE": step.late,
        "LINEAR": step.linear, "REORDERED": step.reordered, "RED": step.red, "LAGGED": step.lagged,
        "ORDERED": step.ordered, "EARLY": tile.early, "REGISTERS": tile.registers,
    }  # fmt: skip
