"""Attention of ragged chunks of new tokens over an fp8 cache that holds their past and themselves: chunked prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.lab5_serving.paged_arguments import (
    INTEGERS,
    check_same,
    check_sequences,
    check_tensor,
    softmax_scale,
)
from solutions.lab5_serving.paged_extend import sequence_of
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import fp8_tuning
from .fp8_arguments import HALVES, check_fp8_cache, in_rows
from .fp8_step import attend_to_tile, into_reach
from .paged_attention_fp8 import LOG2_E

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["stride_bs", "S"])
def paged_extend_fp8_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, block_tables_ptr, query_starts_ptr, context_lens_ptr,
    o_ptr, stride_q, stride_k, stride_v, stride_bs, S, scale_log2,
    GROUP: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M / PADDED queries of one chunk in the ``GROUP`` heads of one key head, against what they see.

    A row of the tile is one query in one head; the heads of a query are padded to ``PADDED``, a power of two.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // PADDED
    key_head = tl.program_id(0).to(tl.int64)
    slot = tl.num_programs(1) - 1 - tl.program_id(1)  # a chunk's longest tiles first, so that short ones fill the end
    sequence, tile, begin, count = sequence_of(slot, query_starts_ptr, 1, S, BLOCK_Q)
    if tile * BLOCK_Q < count:
        length = tl.load(context_lens_ptr + sequence).to(tl.int32)
        query = tile * BLOCK_Q + tl.arange(0, BLOCK_M) // PADDED  # in the chunk, whose last query sees the last token
        member = tl.arange(0, BLOCK_M) % PADDED
        column = tl.arange(0, BLOCK_D)
        head = key_head * GROUP + member
        mine = ((query < count) & (member < GROUP))[:, None] & (column < HEAD_DIM)[None, :]
        place = (begin + query).to(tl.int64)[:, None] * stride_q[0] + head[:, None] * stride_q[1]
        q = tl.load(q_ptr + place + column.to(tl.int64)[None, :] * stride_q[2], mask=mine, other=0.0)
        q, factor = into_reach(q, scale_log2, NATIVE)  # (BLOCK_M, BLOCK_D), (BLOCK_M,)
        position = length - count + query  # (BLOCK_M,): the query sees the tokens up to this one
        end = tl.minimum(length - count + (tile + 1) * BLOCK_Q, length)
        seen_by_all = (length - count + tile * BLOCK_Q + 1) // BLOCK_N * BLOCK_N
        table_ptr = block_tables_ptr + sequence * stride_bs
        k_cache_ptr += key_head * stride_k[2]
        v_cache_ptr += key_head * stride_v[2]
        k_scale_ptr += key_head * stride_k[5]
        v_scale_ptr += key_head * stride_v[5]

        m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
        d = tl.zeros((BLOCK_M,), tl.float32)
        o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        largest = 1e-30  # not 0, by which scales could not be divided
        for start in range(0, seen_by_all, BLOCK_N):
            m, d, o, largest = attend_to_tile(
                q, m, d, o, largest, start, end, position, factor,
                k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stride_k, stride_v,
                BLOCK_N, BLOCK_SIZE, HEAD_DIM, BLOCK_D, False, NATIVE,
            )  # fmt: skip
        for start in range(seen_by_all, end, BLOCK_N):
            m, d, o, largest = attend_to_tile(
                q, m, d, o, largest, start, end, position, factor,
                k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stride_k, stride_v,
                BLOCK_N, BLOCK_SIZE, HEAD_DIM, BLOCK_D, True, NATIVE,
            )  # fmt: skip
        o = o * (largest * (1.0 if NATIVE else 256.0)) / tl.where(d == 0, 1.0, d)[:, None]
        o_row = (begin + query).to(tl.int64) * (tl.num_programs(0) * GROUP) + head  # of (T, H, D)
        tl.store(o_ptr + o_row[:, None] * HEAD_DIM + column[None, :], o.to(o_ptr.dtype.element_ty), mask=mine)


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
    """Causal attention of the newest tokens of each sequence, whose keys and values are already in the cache.

    As :func:`solutions.lab5_serving.paged_extend.paged_attention_extend`, over an fp8 cache.

    Args:
        q: (T, H, D), the chunks laid end to end; float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache, block_tables, context_lens, k_scale, v_scale: as for
            :func:`.paged_attention_fp8.paged_attention_decode`.
        query_starts: (S + 1,) int32, growing from 0 to T; a sequence may have no query.
        scale: factor of the scores, by default 1 / sqrt(D).

    Returns:
        (T, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_tensor("q", q, "(T, H, D)", HALVES)
    check_fp8_cache("q", q, k_cache, v_cache, k_scale, v_scale)
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
    padded = fp8_tuning.power_of_two(group)
    block_tables, context_lens = in_rows(block_tables), context_lens.contiguous()
    query_starts = query_starts.contiguous()
    native = fp8_tuning.converts_e4m3(q.device)
    tile = fp8_tuning.extend(D, padded, block_size, native)
    if not native:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    paged_extend_fp8_kernel[(G, T // (tile.m // padded) + S)](
        q, k_cache, v_cache, k_scale, v_scale, block_tables, query_starts, context_lens, o,
        q.stride(), k_cache.stride() + k_scale.stride(), v_cache.stride() + v_scale.stride(),
        block_tables.stride(0), S, scale * LOG2_E,
        GROUP=group, PADDED=padded, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size,
        HEAD_DIM=D, BLOCK_D=fp8_tuning.block_d(D), NATIVE=native, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o
