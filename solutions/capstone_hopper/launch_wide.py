"""Launch of :mod:`.backward_wide`: the backward pass for a head_dim of 256."""

from __future__ import annotations

import torch
import triton

from . import tuning
from .backward_wide import hopper_wide_backward_kernel
from .launch import row_terms, scaled
from .launch_reordered import heads_together
from .parts import LOG2_E, copyable, rows_of, tiles_of


def hopper_wide_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
    dlse: torch.Tensor | None, causal: bool, scale: float, ordered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv of q's, k's and v's shapes and dtype.

    Args:
        q, do: (B, Hq, Nq, 256), float16 or bfloat16.
        k, v: (B, Hkv, Nk, 256) of q's dtype; Hkv divides Hq.
        o, lse: What the forward pass returned: (B, Hq, Nq, 256) of q's dtype, and (B, Hq, Nq) float32.
        dlse: Gradient of the logsumexp (B, Hq, Nq), float32, or None.
        scale: Factor of the scores, greater than 0.
        ordered: Whether programs add to dq in a fixed order.
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    tile = tuning.backward(head_dim)
    padded = triton.cdiv(queries, tile.rows) * tile.rows
    sums = torch.empty((1, 1, batch * heads * padded, head_dim), dtype=torch.float32, device=q.device)
    do = do if do.stride(3) == 1 else do.contiguous()
    turns = sums  # not used
    if ordered:
        turns = torch.zeros(batch * heads * padded // tile.rows, dtype=torch.int32, device=q.device)
        if causal and queries > keys:  # tiles that no program adds to
            sums.view(batch * heads, padded * head_dim)[:, : (queries - keys) // tile.rows * tile.rows * head_dim] = 0
    score_starts, dp_starts = row_terms(o, do, lse, dlse, 1 / scale, padded, None if ordered else sums)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    together = 1
    if ordered or causal:
        together = heads_together(batch * kv_heads, heads // kv_heads * queries * head_dim * 8)
    hopper_wide_backward_kernel[(together, triton.cdiv(keys, tile.columns), batch * kv_heads // together)](
        tiles_of(copyable(q), tile.rows, head_dim), tiles_of(copyable(k), tile.columns, head_dim),
        tiles_of(copyable(v), tile.columns, head_dim), tiles_of(copyable(do), tile.rows, head_dim),
        rows_of(score_starts, tile.rows), rows_of(dp_starts, tile.rows), tiles_of(sums, tile.rows, head_dim), turns,
        tiles_of(dk, 64, head_dim), tiles_of(dv, 64, head_dim), scale, scale * LOG2_E, heads, heads // kv_heads,
        queries, keys, S=tile.stages, CAUSAL=causal, RAGGED=not causal and keys % tile.columns != 0, ORDERED=ordered,
        num_warps=tile.warps, maxnreg=tile.launch_maxnreg,
    )  # fmt: skip
    return scaled(sums, q, scale, padded), dk, dv
