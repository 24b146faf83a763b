"""Shared-prefix attention in plain PyTorch: what runs on a CPU, and what the kernels are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    suffix_tables: Tensor,
    suffix_lens: Tensor,
    prefix_tables: Tensor,
    prefix_lens: Tensor,
    group_starts: Tensor,
    members: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """What :func:`.shared_prefix_attention.shared_prefix_attention` computes, group by group, with the same arguments.

    Everything is computed in float32, and the result is rounded to q's dtype at the end.
    """
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    S, H, D = q.shape
    outputs, logsumexps = q.new_zeros((2, S, H, D), dtype=torch.float32), q.new_full((2, S, H), -math.inf).float()
    starts = group_starts.tolist()
    parts = [
        (0, members[begin:end].long(), prefix_tables[j], length)
        for j, (begin, end, length) in enumerate(zip(starts[:-1], starts[1:], prefix_lens.tolist(), strict=True))
    ]
    parts += [(1, torch.tensor([s]), suffix_tables[s], length) for s, length in enumerate(suffix_lens.tolist())]
    for part, rows, table, length in parts:
        if length and len(rows):
            keys, values = (gather(cache, table, length) for cache in (k_cache, v_cache))
            outputs[part, rows], logsumexps[part, rows] = attend(q[rows].float() * scale, keys, values)
    weights = (logsumexps - logsumexps.amax(0).clamp(min=-1e30)).exp()[..., None]  # (2, S, H, 1), of prefix and suffix
    return ((weights * outputs).sum(0) / weights.sum(0).clamp(min=1e-30)).to(q.dtype)


def gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of the blocks in ``table``: (length, G, D) float32."""
    block_size = cache.shape[1]
    return cache[table[: -(-length // block_size)].long()].flatten(0, 1)[:length].float()


def attend(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of scaled queries (n, H, D) over all keys and values (T, G, D), and the log-sum-exps (n, H).

    The queries of all n requests in the heads of a key head are the rows of one matrix product.
    """
    n, H, D = q.shape
    G = keys.shape[1]
    rows = q.view(n, G, H // G, D).transpose(0, 1).reshape(G, -1, D)
    scores = rows @ keys.permute(1, 2, 0)  # (G, n H / G, T)
    o = scores.softmax(-1) @ values.transpose(0, 1)  # (G, n H / G, D)
    o, lse = (x.view(G, n, H // G, -1).transpose(0, 1).reshape(n, H, -1) for x in (o, scores.logsumexp(-1)))
    return o, lse[..., 0]
