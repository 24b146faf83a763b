"""The backward pass for a head_dim of 64 or 128: launches of :mod:`.backward_reordered`.

:class:`Step` is a ladder from :mod:`.launch`'s backward pass, one change a step, so that each change can be measured
beside the one before it (``benchmarks.hopper_backward``). Attention uses the last two: ``BALANCED`` is the fastest, and
with ``ORDERED`` equal runs give equal gradients.
"""

from __future__ import annotations

import enum

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import tuning
from .backward_reordered import reordered_backward_kernel
from .launch import row_terms, scaled
from .parts import LOG2_E, ROW_LAYOUT, copyable, rows_of, tiles_of


class Step(enum.IntEnum):
    """Each has the changes of those before it.

    Attributes:
        MASK: Code for the end of the keys is compiled only where it is needed.
        LATE: The logsumexp and delta are subtracted from finished products; no accumulator starts from them.
        LINEAR: dQ is stored and summed in the order in which threads hold it. The kernel before zeroes the sums, and
            the kernel after puts them into order.
        REORDERED: dQ is issued before dK, and is stored while dK is computed; queries and output gradients share a
            barrier.
        RED: Threads add dQ to global memory from registers, four numbers at a time.
        LAGGED: dQ is computed a step late, when the other warpgroup's dS has long been there.
        BALANCED: Under a causal mask, tiles of keys of several heads go side by side, the longest first.
        ORDERED: Programs add to dQ in a fixed order; several heads go side by side without a mask, too.
    """

    MASK = 0
    LATE = 1
    LINEAR = 2
    REORDERED = 3
    RED = 4
    LAGGED = 5
    BALANCED = 6
    ORDERED = 7


#: Floats of a warpgroup's part of dQ, which is always 64 by 64.
PART = 64 * 64
#: Bytes of queries, output gradients and sums of dQ of the heads side by side, at most: they fit an H100's L2 cache.
TOGETHER_BYTES = 32 * 2**20


@triton.jit
def from_accumulator_order_kernel(sum_ptr, dq_ptr, scale, queries, padded, D: tl.constexpr):
    """dQ of one part (64, 64) from its sums, whose order is :func:`.backward_reordered.in_accumulator_order`'s.

    Grid: parts of all heads. dQ (heads of the batch, queries, D) is contiguous.
    """
    parts = padded * D // 4096
    part = tl.program_id(0) % parts
    head = (tl.program_id(0) // parts).to(tl.int64)
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
    dlse: torch.Tensor | None, causal: bool, scale: float, step: Step,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv of q's, k's and v's shapes and dtype.

    Args:
        q, do: (B, Hq, Nq, D), float16 or bfloat16, D = 64 or 128.
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
    if step >= Step.LINEAR:
        sums = torch.empty((batch * heads * padded * head_dim // 32, 32), dtype=torch.float32, device=q.device)
        dq_descriptor = TensorDescriptor(sums, list(sums.shape), list(sums.stride()), [PART // 32, 32], ROW_LAYOUT)
    else:
        sums = torch.zeros((batch, heads, queries, head_dim), device=q.device)
        dq_descriptor = tiles_of(sums, 64, 64)
    do = do if do.stride(3) == 1 else do.contiguous()
    factor = LOG2_E if step >= Step.LATE else 1 / scale
    turns = sums  # not used
    if step == Step.ORDERED:
        turns = torch.zeros(batch * heads * padded * head_dim // PART, dtype=torch.int32, device=q.device)
        if causal and queries > keys:  # tiles that no program adds to
            sums.view(batch * heads, padded * head_dim)[:, : (queries - keys) // tile.rows * tile.rows * head_dim] = 0
    score_terms, dp_terms = row_terms(
        o, do, lse, dlse, factor, padded, sums if Step.LINEAR <= step < Step.ORDERED else None
    )
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    together = 1
    if step == Step.ORDERED or (step == Step.BALANCED and causal):
        together = heads_together(batch * kv_heads, heads // kv_heads * queries * head_dim * 8)
    reordered_backward_kernel[(together, triton.cdiv(keys, tile.columns), batch * kv_heads // together)](
        tiles_of(copyable(q), tile.rows, head_dim), tiles_of(copyable(k), tile.columns, head_dim),
        tiles_of(copyable(v), tile.columns, head_dim), tiles_of(copyable(do), tile.rows, head_dim),
        rows_of(score_terms, tile.rows), rows_of(dp_terms, tile.rows), sums if step >= Step.RED else dq_descriptor,
        turns, tiles_of(dk, 64, head_dim), tiles_of(dv, 64, head_dim), scale * LOG2_E, heads, heads // kv_heads,
        queries, keys,
        **constants(tile, causal, keys, step), num_warps=tile.warps, maxnreg=tile.launch_maxnreg,
    )  # fmt: skip
    if step < Step.LINEAR:
        return scaled(sums, q, scale, queries), dk, dv
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    from_accumulator_order_kernel[(padded * head_dim // PART * batch * heads,)](
        sums, dq, scale, queries, padded, D=head_dim
    )
    return dq, dk, dv


def heads_together(kv_heads: int, touched: int) -> int:
    """How many key heads go side by side: a divisor of their number, at most 8.

    Args:
        kv_heads: Key heads of the whole batch.
        touched: Bytes that the programs of one key head read and add to, its keys and values aside.
    """
    most = min(8, max(1, TOGETHER_BYTES // touched))
    return max(n for n in range(1, most + 1) if kv_heads % n == 0)


def constants(tile: tuning.BackwardTile, causal: bool, keys: int, step: Step) -> dict[str, int | bool]:
    """The kernel's compile-time constants by name."""
    return {
        "S": tile.stages, "CAUSAL": causal, "RAGGED": not causal and keys % tile.columns != 0, "STEP": int(step),
        "EARLY": tile.early, "REGISTERS": tile.registers,
    }  # fmt: skip
