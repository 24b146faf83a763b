"""What the kernels over an fp8 cache ask of its tensors, checked on entry and without waiting for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.lab5_serving.paged_arguments import (
    LARGEST_HEAD_DIM,
    SMALLEST_HEAD_DIM,
    check_same,
    check_tensor,
)

#: What queries, keys and values may be.
HALVES = (torch.float16, torch.bfloat16)


def check_fp8_cache(q_name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
    """Refuse caches or scales that do not fit ``q`` (tokens or sequences, heads, D): device, D and a divisor of heads.

    Raises:
        TypeError, ValueError: with what was given and what would be right.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, "(num_blocks, block_size, G, D)", (torch.float8_e4m3fn,))
    check_same("v_cache", v_cache, tuple(k_cache.shape), "as k_cache")
    blocks, block_size, G, D = k_cache.shape
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_tensor(name, scale, "(num_blocks, G)", (torch.float32,))
        check_same(name, scale, (blocks, G), "one number for each block and head of the cache")
    for name, value in (("k_cache", k_cache), ("v_cache", v_cache), ("k_scale", k_scale), ("v_scale", v_scale)):
        if value.device != q.device:
            raise ValueError(f"{name} must be on {q_name}'s device {q.device}, got {value.device}")
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    if not SMALLEST_HEAD_DIM <= D <= LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim must be from {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}, got {D}")
    if q.shape[2] != D:
        raise ValueError(f"{q_name} must have the caches' head_dim {D} on its last axis, got {tuple(q.shape)}")
    H = q.shape[1]
    if G == 0 or H % G:
        raise ValueError(f"the heads of {q_name} must be a multiple of those of the caches, got {H} and {G}")


def in_rows(block_tables: Tensor) -> Tensor:
    """The block tables with the entries of each row side by side, copied only if they are not."""
    return block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
