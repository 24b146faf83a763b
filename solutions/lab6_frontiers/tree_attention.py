"""Attention of trees of candidates over a paged cache: each query sees the text and its own ancestors.

The kernel is that of :mod:`solutions.lab5_serving.paged_extend` with another mask. A tree is the end of a chunk: its
nodes stand in the cache one after the other, whatever their depth, and whether a query sees node j is bit j of one
64-bit integer. So a mask costs 8 bytes per query, and prompts and trees go through one launch.

Letters as there: T queries, S sequences, H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

import torch

from solutions.lab5_serving import tuning
from solutions.lab5_serving.paged_arguments import (
    FLOATS,
    INTEGERS,
    check_cache,
    check_same,
    check_sequences,
    check_tensor,
    softmax_scale,
)
from solutions.lab5_serving.paged_decode import LOG2_E, load_tokens
from solutions.lab5_serving.paged_extend import sequence_of
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip


def tile_of(head_dim: int, dtype: torch.dtype, group: int, capability: tuple[int, int]) -> tuning.Tile:
    """Lab 5's tile of the extend kernel; of 32 tokens at most from D = 129 on, where masks would spill on Ampere."""
    tile = tuning.extend(head_dim, dtype, group, capability)
    return tile._replace(n=min(tile.n, 32)) if tuning.block_d(head_dim) > 128 else tile


@triton.jit(do_not_specialize=["stride_bs", "S"])
def paged_tree_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, query_starts_ptr, context_lens_ptr, tree_starts_ptr, bits_ptr,
    o_ptr, stride_q, stride_k, stride_v, stride_bs, stride_bb, stride_o, S, scale_log2,
    GROUP: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M / PADDED queries of one chunk in the ``GROUP`` heads of one key head, against what they see.

    A row of the tile is one query in one head; the heads of a query are padded to ``PADDED``, a power of two.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // PADDED
    key_head = tl.program_id(0)
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, tile, begin, count = sequence_of(slot, query_starts_ptr, 1, S, BLOCK_Q)
    if tile * BLOCK_Q < count:
        length = tl.load(context_lens_ptr + sequence).to(tl.int32)
        tree_start = tl.load(tree_starts_ptr + sequence).to(tl.int32)  # position of the tree's root in the cache
        query = tile * BLOCK_Q + tl.arange(0, BLOCK_M) // PADDED
        member = tl.arange(0, BLOCK_M) % PADDED
        column = tl.arange(0, BLOCK_D)
        head = (key_head * GROUP + member).to(tl.int64)
        mine = ((query < count) & (member < GROUP))[:, None] & (column < HEAD_DIM)[None, :]
        place = (begin + query).to(tl.int64)[:, None] * stride_q[0] + head[:, None] * stride_q[1]
        q = tl.load(q_ptr + place + column.to(tl.int64)[None, :] * stride_q[2], mask=mine, other=0.0)
        bits = tl.load(bits_ptr + (begin + query).to(tl.int64), mask=query < count, other=0)  # (BLOCK_M,)
        position = length - count + query
        seen_by_all = tl.minimum(length - count + tile * BLOCK_Q + 1, tree_start)
        seen_by_one = tl.minimum(length - count + (tile + 1) * BLOCK_Q, length)  # ancestors stand before a node
        table_ptr = block_tables_ptr + sequence * stride_bs
        k_head_ptr = k_cache_ptr + key_head.to(tl.int64) * stride_k[2]
        v_head_ptr = v_cache_ptr + key_head.to(tl.int64) * stride_v[2]

        m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
        d = tl.zeros((BLOCK_M,), tl.float32)
        o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(0, seen_by_one, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            inside = token < seen_by_one
            block = tl.load(table_ptr + token // BLOCK_SIZE * stride_bb, mask=inside, other=0)  # (BLOCK_N,)
            k = load_tokens(
                k_head_ptr, block, token, inside, stride_k[0], stride_k[1], stride_k[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
            )  # (BLOCK_N, BLOCK_D)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # (BLOCK_M, BLOCK_N)
            if start + BLOCK_N > seen_by_all:
                node = tl.minimum(tl.maximum(token - tree_start, 0), 63).to(tl.int64)
                ancestor = (bits[:, None] >> node[None, :]) & 1
                in_text = (token < tree_start)[None, :]
                sees = (token[None, :] <= position[:, None]) & (in_text | (ancestor == 1))
                s = tl.where(sees & inside[None, :], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            d = d * rescale + tl.sum(p, 1)
            v = load_tokens(
                v_head_ptr, block, token, inside, stride_v[0], stride_v[1], stride_v[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
            )  # (BLOCK_N, BLOCK_D)
            o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision="ieee")
            m = m_new
        o = o / tl.where(d == 0, 1.0, d)[:, None]
        place = (begin + query).to(tl.int64)[:, None] * stride_o[0] + head[:, None] * stride_o[1]
        tl.store(o_ptr + place + column.to(tl.int64)[None, :] * stride_o[2], o.to(o_ptr.dtype.element_ty), mask=mine)


def paged_attention_tree(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tree_starts: torch.Tensor,
    bits: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of chunks that may end in a tree, whose keys and values are already in the cache.

    Query i of the n of sequence s stands at ``context_lens[s] - n + i`` in the cache. It sees the tokens before
    ``tree_starts[s]`` up to itself, and of those from there on, again up to itself, token ``tree_starts[s] + j`` if bit
    j of its own ``bits`` is set. Without a tree, ``tree_starts[s] = context_lens[s]``: a causal chunk.

    Args:
        q: (T, H, D), the chunks laid end to end; float32, float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache, block_tables, query_starts, context_lens, scale: as for
            :func:`solutions.lab5_serving.paged_extend.paged_attention_extend`; ``query_starts`` and ``context_lens``
            are contiguous.
        tree_starts: (S,) int32, contiguous; a tree has at most 64 nodes.
        bits: (T,) int64, contiguous: :attr:`.draft_tree.Tree.bits` of the queries that are nodes, anything elsewhere.

    Returns:
        (T, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_tensor("q", q, "(T, H, D)", FLOATS)
    check_cache("q", q, k_cache, v_cache)
    check_tensor("context_lens", context_lens, "(S,)", INTEGERS)
    S, (T, H, D) = context_lens.shape[0], q.shape
    check_sequences(S, block_tables, context_lens, q.device)
    for name, value, shape, dtypes in (
        ("query_starts", query_starts, (S + 1,), INTEGERS),
        ("tree_starts", tree_starts, (S,), INTEGERS),
        ("bits", bits, (T,), (torch.int64,)),
    ):
        check_tensor(name, value, f"({shape[0]},)", dtypes)
        check_same(name, value, shape, f"for {S} sequences and {T} queries")
    for name, value in (("query_starts", query_starts), ("context_lens", context_lens), ("tree_starts", tree_starts),
                        ("bits", bits)):  # fmt: skip
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    scale = softmax_scale(scale, D)
    block_size, G = k_cache.shape[1:3]
    o = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if not o.numel() or not S:
        return o
    group = H // G
    tile = tile_of(D, q.dtype, group, tuning.capability_of(q.device))
    padded = tuning.power_of_two(group)
    paged_tree_kernel[(G, T // (tile.m // padded) + S)](
        q, k_cache, v_cache, block_tables, query_starts, context_lens, tree_starts, bits, o,
        q.stride(), k_cache.stride(), v_cache.stride(), *block_tables.stride(), o.stride(), S, scale * LOG2_E,
        GROUP=group, PADDED=padded, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o
