"""Paged attention in plain PyTorch: what runs on a CPU, and what the kernels are compared with.

The functions have the kernels' names and arguments. Each sequence's keys and values are gathered through its block
table into one piece, so these move every byte of the context two more times than a kernel does.

Letters: S sequences, T tokens of a step, H query heads, G key and value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.serving import causal_attention


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store keys and values of T tokens in their slots.

    Args:
        k, v: (T, G, D).
        k_cache, v_cache: (num_blocks, block_size, G, D), written in place.
        slots: (T,) int64, ``block * block_size + offset``; -1: the token is not stored.
    """
    stored = slots >= 0
    slots, block_size = slots[stored], k_cache.shape[1]
    place = slots // block_size, slots % block_size
    k_cache[place], v_cache[place] = k[stored].to(k_cache.dtype), v[stored].to(v_cache.dtype)


def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of one query per sequence over its context in the cache.

    Args:
        q: (S, H, D).
        k_cache, v_cache: (num_blocks, block_size, G, D).
        block_tables: (S, most blocks) integers; entries behind a context are not read.
        context_lens: (S,) integers; 0 gives zeros.
        scale: of the scores; 1/sqrt(D) if None.
        num_splits: of no consequence here.

    Returns:
        (S, H, D) of q's dtype.
    """
    starts = torch.arange(q.shape[0] + 1)
    return paged_attention_extend(q, k_cache, v_cache, block_tables, starts, context_lens, scale=scale)


def paged_attention_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of ragged chunks of queries; the last query of a sequence sees its whole context.

    Args:
        q: (T, H, D), the chunks of all sequences laid end to end.
        k_cache, v_cache, block_tables: as for :func:`paged_attention_decode`.
        query_starts: (S + 1,) integers: queries ``query_starts[s]`` to ``query_starts[s + 1]`` belong to sequence s.
        context_lens: (S,) integers, the chunk's own tokens included.
        scale: of the scores; 1/sqrt(D) if None.

    Returns:
        (T, H, D) of q's dtype.
    """
    block_size, out = k_cache.shape[1], torch.zeros_like(q)
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for s, length in enumerate(lengths):
        start, stop = starts[s], starts[s + 1]
        if start == stop or length == 0:
            continue
        blocks = block_tables[s, : -(-length // block_size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[start:stop] = causal_attention(q[start:stop], keys.to(q.dtype), values.to(q.dtype))
    return out
