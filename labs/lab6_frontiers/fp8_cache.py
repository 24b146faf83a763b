"""A paged cache of keys and values in e4m3, with a scale for each block and head, and what writes it.

Letters: T tokens of a step, G key and value heads, D head dimension.

Scales are powers of two, the least with which a block's largest number fits. A float has its fraction bits at any
magnitude, so a finer scale would gain nothing; and where a token outgrows the scale of its block, the numbers that are
there already get the new scale without being rounded again, but for those that become subnormal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: The largest number of e4m3.
LARGEST = 448.0
#: The least scale: a power of two that float32 holds as a normal number, and its inverse too.
SMALLEST_SCALE = 2.0**-100


class Fp8Cache(NamedTuple):
    """Keys and values (num_blocks, block_size, G, D) float8_e4m3fn and their scales (num_blocks, G) float32."""

    keys: Tensor
    values: Tensor
    k_scale: Tensor
    v_scale: Tensor


def empty_fp8_cache(
    num_blocks: int, block_size: int, heads: int, head_dim: int, device: torch.device | str, layers: int | None = None
) -> Fp8Cache:
    """A cache of zeros in the order in which decode attention reads it fastest.

    A head's keys in a block lie together, token after token, and so do its values, but column after column: there the
    tokens of a block are side by side.

    Args:
        layers: as many caches behind one another, with an axis for them in front.
    """
    front = () if layers is None else (layers,)
    zeros = {"dtype": torch.float8_e4m3fn, "device": device}
    keys = torch.zeros((*front, num_blocks, heads, block_size, head_dim), **zeros).transpose(-3, -2)
    values = torch.zeros((*front, num_blocks, heads, head_dim, block_size), **zeros).movedim(-1, -3)
    scales = (torch.ones((*front, num_blocks, heads), dtype=torch.float32, device=device) for _ in range(2))
    return Fp8Cache(keys, values, *scales)


def scale_of(amax: Tensor) -> Tensor:
    """The least power of two that brings ``amax`` (float32, finite) to 448 or below, but 2^-100 at least."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent with 1/2 <= mantissa < 1; 448 = 7/8 * 2^9
    exponent = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8)
    scale = torch.ldexp(torch.ones_like(amax), exponent).clamp(min=SMALLEST_SCALE)
    return torch.where(amax > 0, scale, SMALLEST_SCALE)


def quantize_cache(k_cache: Tensor, v_cache: Tensor) -> Fp8Cache:
    """A whole cache in 8 bits.

    Args:
        k_cache, v_cache: (num_blocks, block_size, G, D), floating point. Slots that hold nothing must hold zeros, as
            they count for the scale of their block.

    Raises:
        ValueError: shapes that are not such, or differ.
    """
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must have one shape (num_blocks, block_size, G, D), got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    cache = empty_fp8_cache(*k_cache.shape, k_cache.device)
    for source, codes, scale in ((k_cache, cache.keys, cache.k_scale), (v_cache, cache.values, cache.v_scale)):
        scale.copy_(scale_of(source.float().abs().amax((1, 3))))
        codes.copy_((source.float() / scale[:, None, :, None]).to(torch.float8_e4m3fn))
    return cache


def dequantize_cache(cache: Fp8Cache, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values again, (num_blocks, block_size, G, D) each."""
    keys = cache.keys.float() * cache.k_scale[:, None, :, None]
    values = cache.values.float() * cache.v_scale[:, None, :, None]
    return keys.to(dtype), values.to(dtype)
