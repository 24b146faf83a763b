"""The fp8 cache in plain PyTorch: what runs on a CPU, and what the kernels are compared with.

The functions have the kernels' names and arguments; float32 is taken too. Attention gathers each sequence's blocks and
dequantises them, which moves a context's bytes many times.

Letters: S sequences, T tokens of a step, H query heads, G key and value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.serving import causal_attention

from .fp8_cache import scale_of


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Store each token's key and value; arguments as for :func:`.fp8_write.write_kv`, k and v of any float dtype."""
    block_size = k_cache.shape[1]
    stored = slots >= 0
    slots = slots[stored].long()
    for block in torch.unique(slots // block_size).tolist():
        mine = slots // block_size == block
        offsets = slots[mine] % block_size
        first = int(offsets[0])
        for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            x = x[stored][mine].float()  # (tokens of the block, G, D)
            scale = scale_of(x.abs().amax((0, 2)))  # (G,)
            if first:
                held = scales[block]
                scale = torch.maximum(scale, held)
                old = cache[block, :first].float() * (held / scale)[:, None]
                cache[block, :first] = old.to(cache.dtype)
            scales[block] = scale
            codes = cache[block].float()
            codes[offsets] = x / scale[:, None]
            cache[block] = codes.to(cache.dtype)


def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of one query a sequence; arguments as for :func:`.paged_attention_fp8.paged_attention_decode`."""
    starts = torch.arange(q.shape[0] + 1)
    return paged_attention_extend(
        q, k_cache, v_cache, block_tables, starts, context_lens, k_scale, v_scale, scale=scale
    )


def paged_attention_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of ragged chunks; arguments as for :func:`.paged_extend_fp8.paged_attention_extend`."""
    block_size, out = k_cache.shape[1], torch.zeros_like(q)
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    starts = query_starts.tolist()
    for s, length in enumerate(context_lens.tolist()):
        start, stop = starts[s], starts[s + 1]
        if start == stop or length == 0:
            continue
        blocks = block_tables[s, : -(-length // block_size)].long()
        keys, values = (
            (blocks_of(cache, blocks).float() * scales[blocks][:, None, :, None]).flatten(0, 1)[:length].to(q.dtype)
            for cache, scales in ((k_cache, k_scale), (v_cache, v_scale))
        )
        out[start:stop] = causal_attention(q[start:stop], keys, values)
    return out


def blocks_of(cache: Tensor, blocks: Tensor) -> Tensor:
    """Some blocks of a cache (num_blocks, block_size, G, D) float8_e4m3fn, gathered as bytes on any device."""
    return cache.view(torch.uint8)[blocks].view(cache.dtype)
