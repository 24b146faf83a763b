"""Attention of one new token per sequence over a paged cache in e4m3 (exercise 6.4).

Letters: S sequences, H query heads, G key heads, D head dimension. The key of token t of sequence s in head g is
``k_cache[b, t % block_size, g] * k_scale[b, g]`` with ``b = block_tables[s, t // block_size]``; its value likewise.
"""

from __future__ import annotations

import math

import torch

from utils import runtime  # before triton: it decides between GPU and interpreter

from .simple_arguments import check_shape, check_tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2_E = 1.4426950408889634
#: Tokens of a tile.
BLOCK_N = runtime.pick(cpu=16, gpu=64)


@triton.jit
def fp8_decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, block_tables_ptr, context_lens_ptr, o_ptr,
    stride_k, stride_v, max_blocks, scale_log2,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the ``GROUP`` query heads of one key head of one sequence, against its whole context.

    Scores are kept as powers of two: exp(scale * s) = exp2(scale_log2 * s) with scale_log2 = scale * log2(e).
    """
    key_head, key_heads, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D).to(tl.int64)  # a stride may be large
    mine = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = sequence * key_heads * GROUP + key_head * GROUP + row
    q = tl.load(q_ptr + head[:, None] * HEAD_DIM + column[None, :], mask=mine, other=0.0)  # (BLOCK_M, BLOCK_D)
    length = tl.load(context_lens_ptr + sequence)
    table_ptr = block_tables_ptr + sequence * max_blocks
    k_head_ptr = k_cache_ptr + key_head.to(tl.int64) * stride_k[2]
    v_head_ptr = v_cache_ptr + key_head.to(tl.int64) * stride_v[2]

    m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
    d = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, length, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        inside = token < length
        loaded = inside[:, None] & (column < HEAD_DIM)[None, :]
        ### BEGIN SOLUTION 6.4: one step of the loop
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)  # (BLOCK_N,)
        slot = (token % BLOCK_SIZE).to(tl.int64)
        k_ptrs = k_head_ptr + (block * stride_k[0] + slot * stride_k[1])[:, None] + column[None, :] * stride_k[3]
        k = tl.load(k_ptrs, mask=loaded, other=0.0)  # (BLOCK_N, BLOCK_D), 8 bits
        k_scale = tl.load(k_scale_ptr + block * key_heads + key_head, mask=inside, other=0.0)  # (BLOCK_N,)
        # a token's scale is the same in all columns: one multiplication of its score, not of D numbers
        s = tl.dot(q, k.to(q.dtype).T) * (k_scale * scale_log2)[None, :]  # (BLOCK_M, BLOCK_N)
        s = tl.where(inside[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        d = d * rescale + tl.sum(p, 1)  # of the weights themselves: a value's scale is no part of them
        v_ptrs = v_head_ptr + (block * stride_v[0] + slot * stride_v[1])[:, None] + column[None, :] * stride_v[3]
        v = tl.load(v_ptrs, mask=loaded, other=0.0)  # (BLOCK_N, BLOCK_D), 8 bits
        v_scale = tl.load(v_scale_ptr + block * key_heads + key_head, mask=inside, other=0.0)  # (BLOCK_N,)
        o = tl.dot((p * v_scale[None, :]).to(q.dtype), v.to(q.dtype), o * rescale[:, None])
        m = m_new
        ### END SOLUTION
    o = o / tl.where(d == 0, 1.0, d)[:, None]
    tl.store(o_ptr + head[:, None] * HEAD_DIM + column[None, :], o.to(o_ptr.dtype.element_ty), mask=mine)


def fp8_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """Attention of one query per sequence over the 8-bit keys and values that its block table names.

    Args:
        q: (S, H, D) float16 or bfloat16, contiguous; D from 16 to 256. Scores are multiplied by 1 / sqrt(D).
        k_cache, v_cache: (num_blocks, block_size, G, D) float8_e4m3fn, any strides. block_size is a power of two, and G
            divides H: query head h reads key head h // (H / G).
        k_scale, v_scale: (num_blocks, G) float32, contiguous: what the codes of a block in a head are multiplied by.
        block_tables: (S, max_blocks) int32, contiguous; entries beyond a sequence's context are not read.
        context_lens: (S,) int32, tokens of each sequence in the cache. A sequence of 0 gets 0.

    Returns:
        (S, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens)
    (S, H, D), (_, block_size, G, _) = q.shape, k_cache.shape
    o = torch.empty_like(q)
    fp8_decode_kernel[(G, S)](
        q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens, o,
        k_cache.stride(), v_cache.stride(), block_tables.shape[1], LOG2_E / math.sqrt(D),
        GROUP=H // G, BLOCK_M=max(16, triton.next_power_of_2(H // G)), BLOCK_N=BLOCK_N, BLOCK_SIZE=block_size,
        HEAD_DIM=D, BLOCK_D=triton.next_power_of_2(D), num_warps=4,
    )  # fmt: skip
    return o


def _check(q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens) -> None:
    check_tensor("q", q, 3, torch.float16, torch.bfloat16)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, 4, torch.float8_e4m3fn)
    (S, H, D), (blocks, block_size, G, _) = q.shape, k_cache.shape
    if not S * H * G or H % G or not 16 <= D <= 256 or block_size & (block_size - 1) or not block_size:
        raise ValueError(f"q of shape {(S, H, D)} does not go with caches of shape {tuple(k_cache.shape)}")
    if k_cache.shape[3] != D or v_cache.shape != k_cache.shape:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must have shape (num_blocks, block_size, G, {D}), got {shapes}")
    check_shape("q", q, (S, H, D))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_tensor(name, scale, 2, torch.float32)
        check_shape(name, scale, (blocks, G))
    check_tensor("block_tables", block_tables, 2, torch.int32)
    check_shape("block_tables", block_tables, (S, block_tables.shape[1]))
    check_tensor("context_lens", context_lens, 1, torch.int32)
    check_shape("context_lens", context_lens, (S,))
