"""Queries of the attention kernels over an fp8 cache, and the extend kernel's step over one tile of tokens.

Letters: M rows of queries, N tokens of a tile, D head dimension.
"""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .fp8_codes import power_below, widen

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def into_reach(q, scale_log2, NATIVE: tl.constexpr):
    """Queries (M, D) in float16, and what makes scores (M,) of their products with codes.

    bfloat16 reaches further than float16: each row is divided by a power of two, exactly, that goes into the scores.
    """
    wide = q.to(tl.float32)
    power = power_below(tl.max(tl.abs(wide), 1))
    factor = power * scale_log2 * (1.0 if NATIVE else 256.0)
    return (wide / power[:, None]).to(tl.float16), factor


@triton.jit
def per_token(per_block, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """A number of each block (BLOCKS,) for each of its tokens, (BLOCKS * BLOCK_SIZE,)."""
    return tl.reshape(tl.broadcast_to(per_block[:, None], (BLOCKS, BLOCK_SIZE)), (BLOCKS * BLOCK_SIZE,))


@triton.jit
def attend_to_tile(
    q, m, d, o, largest, start, end, position, factor, k_head_ptr, v_head_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    stride_k, stride_v,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One step of the loop: the tokens from ``start`` on, which every row sees unless ``MASKED``.

    With ``MASKED`` a row sees the tokens up to its ``position`` (BLOCK_M,), and none is there from ``end`` on.

    Strides are those of a cache's four axes, then those of its scales' two.

    ``o`` is a multiple of ``largest``, the largest scale of values so far: a weight times its own scale over the
    largest is at most 1, whatever the scales are, and does not vanish in float16.
    """
    BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE
    index = start // BLOCK_SIZE + tl.arange(0, BLOCKS)
    offset = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_D)
    slot = (offset[None, :, None].to(tl.int64), column[None, None, :].to(tl.int64))
    present = index * BLOCK_SIZE < end  # (BLOCKS,)
    token = start + tl.arange(0, BLOCK_N)
    if MASKED:
        block = tl.load(table_ptr + index, mask=present, other=0).to(tl.int64)
        k_scale = tl.load(k_scale_ptr + block * stride_k[4], mask=present, other=0.0)
        v_scale = tl.load(v_scale_ptr + block * stride_v[4], mask=present, other=0.0)
    else:
        block = tl.load(table_ptr + index).to(tl.int64)
        k_scale = tl.load(k_scale_ptr + block * stride_k[4])
        v_scale = tl.load(v_scale_ptr + block * stride_v[4])
    k_ptrs = k_head_ptr + block[:, None, None] * stride_k[0] + slot[0] * stride_k[1] + slot[1] * stride_k[3]
    v_ptrs = v_head_ptr + block[:, None, None] * stride_v[0] + slot[0] * stride_v[1] + slot[1] * stride_v[3]
    narrow = (column < HEAD_DIM)[None, None, :]
    zero = 0.0 if NATIVE else 0
    if MASKED:  # keys of tokens that are there, and values of blocks: a mask by token would make a load of each byte
        there = tl.reshape(token < end, (BLOCKS, BLOCK_SIZE))[:, :, None]
        k = tl.load(k_ptrs, mask=there & narrow, other=zero)
        v = tl.load(v_ptrs, mask=present[:, None, None] & narrow, other=zero)
    elif HEAD_DIM == BLOCK_D:
        k = tl.load(k_ptrs)  # (BLOCKS, BLOCK_SIZE, BLOCK_D)
        v = tl.load(v_ptrs)  # (BLOCKS, BLOCK_SIZE, BLOCK_D)
    else:
        k = tl.load(k_ptrs, mask=narrow, other=zero)
        v = tl.load(v_ptrs, mask=narrow, other=zero)
    k = widen(tl.reshape(k, (BLOCK_N, BLOCK_D)), NATIVE)
    s = tl.dot(q, tl.trans(k))  # (BLOCK_M, BLOCK_N)
    s = s * per_token(k_scale, BLOCKS, BLOCK_SIZE)[None, :] * factor[:, None]
    if MASKED:
        s = tl.where(token[None, :] <= position[:, None], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    d = d * rescale + tl.sum(p, 1)
    largest_new = tl.maximum(largest, tl.max(v_scale, 0))
    p = p * per_token(v_scale / largest_new, BLOCKS, BLOCK_SIZE)[None, :]
    v = widen(tl.reshape(v, (BLOCK_N, BLOCK_D)), NATIVE)
    if MASKED:  # what lies behind the context may be NaN, and a weight of 0 does not remove that
        v = tl.where((token < end)[:, None], v, 0.0)
    o = o * (rescale * (largest / largest_new))[:, None]
    o = tl.dot(p.to(tl.float16), v, o)
    return m_new, d, o, largest_new
