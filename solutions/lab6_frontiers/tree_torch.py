"""Attention of trees over a paged cache in plain PyTorch: what runs on a CPU, and what the kernel is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def paged_attention_tree(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    tree_starts: Tensor,
    bits: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """What :func:`.tree_attention.paged_attention_tree` computes, sequence by sequence, with the same arguments."""
    block_size, out = k_cache.shape[1], torch.zeros_like(q)
    starts, lengths, trees = query_starts.tolist(), context_lens.tolist(), tree_starts.tolist()
    for s, length in enumerate(lengths):
        chunk = slice(starts[s], starts[s + 1])
        if chunk.start == chunk.stop or length == 0:
            continue
        blocks = block_tables[s, : -(-length // block_size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].to(q.dtype) for cache in (k_cache, v_cache))
        group = q.shape[1] // keys.shape[1]
        heads = (q[chunk], *(x.repeat_interleave(group, 1) for x in (keys, values)))  # (Nq, H, D), 2 x (length, H, D)
        mask = visible(bits[chunk], length, trees[s])
        seen = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in heads), attn_mask=mask, scale=scale)
        out[chunk] = seen.transpose(0, 1)
    return out


def visible(bits: Tensor, length: int, tree_start: int) -> Tensor:
    """Which of ``length`` tokens in the cache each query of a chunk, its last ones, sees: (queries, length) booleans.

    Args:
        bits: (queries,) int64, as :attr:`.draft_tree.Tree.bits`.
        length, tree_start: of the sequence, as ``context_lens`` and ``tree_starts``.
    """
    queries, token = len(bits), torch.arange(length, device=bits.device)
    causal = token <= token[length - queries :, None]
    node = (token - tree_start).clamp(0, 63)
    return causal & ((token < tree_start) | (bits[:, None] >> node & 1).bool())
