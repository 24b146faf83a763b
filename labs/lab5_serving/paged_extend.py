"""Attention of ragged chunks of new tokens over a paged cache that holds their past and themselves: chunked prefill."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .paged_arguments import FLOATS, INTEGERS, check_cache, check_same, check_sequences, check_tensor, softmax_scale
from .paged_decode import LOG2_E, load_tokens

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def sequence_of(slot, query_starts_ptr, stride_s, S, BLOCK_Q: tl.constexpr):
    """Sequence to which a program belongs, the program's tile of it, and its first query and number of queries.

    Sequence s has the programs from ``query_starts[s] // BLOCK_Q + s`` on: as many as it has tiles, or a few more. So a
    program finds its place without anybody counting tiles beforehand.
    """
    low, high = 0, S
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts_ptr + middle * stride_s).to(tl.int32) // BLOCK_Q + middle
        low = tl.where(first <= slot, middle, low)
        high = tl.where(first <= slot, high, middle)
    begin = tl.load(query_starts_ptr + low * stride_s).to(tl.int32)
    count = tl.load(query_starts_ptr + (low + 1) * stride_s).to(tl.int32) - begin
    return tl.cast(low, tl.int64), slot - (begin // BLOCK_Q + low), begin, count


@triton.jit(do_not_specialize=["stride_bs", "S"])
def paged_extend_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, query_starts_ptr, context_lens_ptr, o_ptr,
    stride_q, stride_k, stride_v, stride_bs, stride_bb, stride_ss, stride_cs, stride_o, S, scale_log2,
    GROUP: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M / PADDED queries of one chunk in the ``GROUP`` heads of one key head, against what they see.

    A row of the tile is one query in one head; the heads of a query are padded to ``PADDED``, a power of two.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // PADDED
    key_head = tl.program_id(0)
    slot = tl.num_programs(1) - 1 - tl.program_id(1)  # a chunk's longest tiles first, so that short ones fill the end
    sequence, tile, begin, count = sequence_of(slot, query_starts_ptr, stride_ss, S, BLOCK_Q)
    if tile * BLOCK_Q < count:
        length = tl.load(context_lens_ptr + sequence * stride_cs).to(tl.int32)
        query = tile * BLOCK_Q + tl.arange(0, BLOCK_M) // PADDED  # in the chunk, whose last query sees the last token
        member = tl.arange(0, BLOCK_M) % PADDED
        column = tl.arange(0, BLOCK_D)
        head = (key_head * GROUP + member).to(tl.int64)
        mine = ((query < count) & (member < GROUP))[:, None] & (column < HEAD_DIM)[None, :]
        place = (begin + query).to(tl.int64)[:, None] * stride_q[0] + head[:, None] * stride_q[1]
        q = tl.load(q_ptr + place + column.to(tl.int64)[None, :] * stride_q[2], mask=mine, other=0.0)
        position = length - count + query  # (BLOCK_M,): the query sees the tokens up to this one
        seen_by_all = length - count + tile * BLOCK_Q + 1
        seen_by_one = tl.minimum(length - count + (tile + 1) * BLOCK_Q, length)
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
                s = tl.where(token[None, :] <= position[:, None], s, -float("inf"))
                s = tl.where(inside[None, :], s, -float("inf"))
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


def paged_attention_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of the newest tokens of each sequence, whose keys and values are already in the cache.

    Sequence s has the queries ``query_starts[s]`` to ``query_starts[s + 1] - 1`` of ``q``: its last n of
    ``context_lens[s]`` tokens, so that query i of n sees the tokens up to ``context_lens[s] - n + i``. A chunk of one
    query is what :func:`.paged_decode.paged_attention_decode` does, which splits long contexts.

    Args:
        q: (T, H, D), the chunks laid end to end; float32, float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, G, D) of q's dtype, any strides; block_size is a power of two, and
            G divides H: query head h reads key head h // (H / G).
        block_tables: (S, max_blocks) int32; entries beyond a sequence's context are not read.
        query_starts: (S + 1,) int32, growing from 0 to T; a sequence may have no query.
        context_lens: (S,) int32, tokens of each sequence in the cache, the new ones included.
        scale: Factor of the scores, by default 1 / sqrt(D).

    Returns:
        (T, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_tensor("q", q, "(T, H, D)", FLOATS)
    check_cache("q", q, k_cache, v_cache)
    check_tensor("context_lens", context_lens, "(S,)", INTEGERS)
    S = context_lens.shape[0]
    check_sequences(S, block_tables, context_lens, q.device)
    check_tensor("query_starts", query_starts, "(S + 1,)", INTEGERS)
    check_same("query_starts", query_starts, (S + 1,), f"for {S} sequences")
    scale = softmax_scale(scale, q.shape[2])
    T, H, D = q.shape
    block_size, G = k_cache.shape[1:3]
    o = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if not o.numel() or not S:
        return o
    group = H // G
    tile = tuning.extend(D, q.dtype, group, tuning.capability_of(q.device))
    padded = tuning.power_of_two(group)
    paged_extend_kernel[(G, T // (tile.m // padded) + S)](
        q, k_cache, v_cache, block_tables, query_starts, context_lens, o,
        q.stride(), k_cache.stride(), v_cache.stride(), *block_tables.stride(), query_starts.stride(0),
        context_lens.stride(0), o.stride(), S, scale * LOG2_E,
        GROUP=group, PADDED=padded, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o
