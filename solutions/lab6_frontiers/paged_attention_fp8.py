"""Attention of one new token a sequence over a paged cache of 8-bit numbers.

Letters: S sequences, H query heads, G key heads, D head dimension, P parts of a context; in the kernel M rows of
queries and N tokens of a warp.

In a decode step attention reads every key and value of the context once, so that with half the bytes it takes half the
time, as long as the conversion keeps up. Four things make it do so:

- e4m3 becomes float16, which holds all of its numbers and for which Hopper has an instruction that converts two;
- scales are not multiplied into keys and values, of which there are D to a token, but into scores and weights;
- the values of a block lie with its tokens side by side (:mod:`.fp8_cache`): a product over tokens wants them so, and
  shared memory transposes numbers of 16 bits but not of 8;
- each warp has tokens of its own, with their maximum, sum and output, as each program has in FlashDecoding.

Why the last? Suppose that four warps share a tile of 64 tokens. Each warp computes the scores of 16 tokens, and later
some columns of the output. A row's maximum and sum then come from all four warps, and each warp needs the weights of
all 64 tokens. All of this passes through shared memory, and each time the warps wait for one another. Such a step has
nine barriers (Triton 3.6 for sm_90): three for the maximum, three for the sum, one for the weights, and two for the
copies from the cache. With a few rows of queries there is little arithmetic between them. When each warp has 16
tokens of its own, with their maximum, sum and output, only the two barriers for the copies remain. The warps are
merged once, behind the loop, as FlashDecoding merges the parts of a context.

Within a warp, weights also stay in the registers where they were computed. The lanes of a warp compute scores in one
order of tokens and multiply values in another. But attention does not depend on the order of its tokens, so the keys
are taken in the order that makes both the same (:func:`.fp8_decode_step.key_order`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.lab5_serving.merge import merge_parts
from solutions.lab5_serving.paged_arguments import (
    check_sequences,
    check_splits,
    check_tensor,
    softmax_scale,
)
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import fp8_tuning
from .fp8_arguments import HALVES, check_fp8_cache, in_rows
from .fp8_decode_step import attend_by_warps, first_rows, merge_warps
from .fp8_step import into_reach
from .tuning import multiprocessors

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2_E = 1.4426950408889634


@triton.jit
def part_of(length, part, parts, BLOCK_N: tl.constexpr):
    """First token and end of one part of a context: its tiles are dealt out evenly, so that parts differ by one."""
    tiles = tl.cdiv(length, BLOCK_N)
    return tiles * part // parts * BLOCK_N, tl.minimum(tiles * (part + 1) // parts * BLOCK_N, length)


@triton.jit(do_not_specialize=["stride_bs", "parts"])
def paged_decode_fp8_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, block_tables_ptr, context_lens_ptr, o_ptr, lse_ptr,
    stride_q, stride_k: tl.constexpr, stride_v: tl.constexpr, stride_bs, scale_log2, parts,
    GROUP: tl.constexpr, M: tl.constexpr, WARPS: tl.constexpr, N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: ``M`` of the ``GROUP`` query heads of one key head of one sequence, against one part of its context.

    Scores are kept as powers of two: exp(scale * s) = exp2(scale_log2 * s) with scale_log2 = scale * log2(e).
    """
    PROGRAMS: tl.constexpr = (GROUP + M - 1) // M  # of a key head
    key_head, part, sequence = tl.program_id(0) // PROGRAMS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = key_head.to(tl.int64)
    first_member = tl.program_id(0) % PROGRAMS * M  # of the group
    row = tl.arange(0, 16)
    column = tl.arange(0, BLOCK_D)
    mine = ((row < M) & (first_member + row < GROUP))[:, None] & (column < HEAD_DIM)[None, :]
    head = key_head * GROUP + first_member + row
    place = head[:, None] * stride_q[1] + column.to(tl.int64)[None, :] * stride_q[2]
    q = tl.load(q_ptr + sequence * stride_q[0] + place, mask=mine, other=0.0)  # (16, BLOCK_D)
    q, factor = into_reach(q, scale_log2, NATIVE)
    q = tl.broadcast_to(q[None, :, :], (WARPS, 16, BLOCK_D))
    factor = first_rows(factor[None, :, None], M)
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    table_ptr = block_tables_ptr + sequence * stride_bs
    k_cache_ptr += key_head * stride_k[2]
    v_cache_ptr += key_head * stride_v[2]
    k_scale_ptr += key_head * stride_k[5]
    v_scale_ptr += key_head * stride_v[5]

    m = tl.full((WARPS, M), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
    d = tl.zeros((WARPS, M), tl.float32)
    o = tl.zeros((WARPS, BLOCK_D, M), tl.float32)
    largest = tl.full((WARPS, 1), 2.0**-100, tl.float32)  # not 0, which has no inverse
    first, end = part_of(length, part, parts, WARPS * N)
    whole = first + (end - first) // (WARPS * N) * (WARPS * N)
    for start in range(first, whole, WARPS * N):
        m, d, o, largest = attend_by_warps(
            q, m, d, o, largest, start, end, factor,
            k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stride_k, stride_v,
            N, BLOCK_SIZE, HEAD_DIM, BLOCK_D, False, NATIVE,
        )  # fmt: skip
    if whole < end:
        m, d, o, largest = attend_by_warps(
            q, m, d, o, largest, whole, end, factor,
            k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table_ptr, stride_k, stride_v,
            N, BLOCK_SIZE, HEAD_DIM, BLOCK_D, True, NATIVE,
        )  # fmt: skip
    m, d, o, largest = merge_warps(m, d, o, largest)
    o = o * (1.0 if NATIVE else 256.0) / tl.where(d == 0, 1.0, d)[None, :] * largest  # last: it may be 2^126
    lse = tl.where(d == 0, -float("inf"), (m + tl.log2(d)) * 0.6931471805599453)  # back to powers of e
    heads = tl.num_programs(0) // PROGRAMS * GROUP
    member = first_member + tl.arange(0, M)
    o_row = (sequence * heads + key_head * GROUP + member) * parts + part  # of (S, H, P, D)
    o_ptrs = o_ptr + o_row[None, :] * HEAD_DIM + column[:, None]
    mine = (member < GROUP)[None, :] & (column < HEAD_DIM)[:, None]
    if SPLIT:  # an empty part says -inf and nothing else: the merge does not read its output
        tl.store(o_ptrs, o, mask=mine & (d != 0)[None, :])
        tl.store(lse_ptr + o_row, lse, mask=member < GROUP)
    else:
        tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mine)


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
    num_splits: int | None = None,
    tile: fp8_tuning.DecodeTile | None = None,
) -> Tensor:
    """Attention of one query a sequence over the 8-bit keys and values that its block table names.

    As :func:`solutions.lab5_serving.paged_attention_decode`, where the key of token t of sequence s in head g is
    ``k_cache[b, t % block_size, g] * k_scale[b, g]`` with ``b = block_tables[s, t // block_size]``, and its value
    likewise. Nothing waits for the GPU, so that a CUDA graph can hold the call.

    Args:
        q: (S, H, D), float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, G, D) float8_e4m3fn, any strides; those of
            :func:`.fp8_cache.empty_fp8_cache` are read fastest. block_size is a power of two, and G divides H.
        block_tables: (S, max_blocks) int32; entries beyond a sequence's context are not read.
        context_lens: (S,) int32, tokens of each sequence in the cache. A sequence of 0 gets 0.
        k_scale, v_scale: (num_blocks, G) float32, not negative, any strides.
        scale: factor of the scores, by default 1 / sqrt(D).
        num_splits: parts of every context; by default as many as fill the GPU.
        tile: instead of :func:`.fp8_tuning.decode`'s.

    Returns:
        (S, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_tensor("q", q, "(S, H, D)", HALVES)
    check_fp8_cache("q", q, k_cache, v_cache, k_scale, v_scale)
    check_sequences(q.shape[0], block_tables, context_lens, q.device)
    check_splits(num_splits)
    scale = softmax_scale(scale, q.shape[2])
    S, H, D = q.shape
    block_size, G = k_cache.shape[1:3]
    if not S * H:
        return torch.empty_like(q)
    sms = multiprocessors(q.device)
    tile = tile or fp8_tuning.decode(D, H // G, S * G, sms)
    programs = G * -(-H // G // tile.m)
    if num_splits is None:
        at_once = tile.programs_per_sm * sms
        num_splits = fp8_tuning.splits(S * programs, block_tables.shape[1] * block_size, at_once)
    split = num_splits > 1
    kind = {"dtype": torch.float32 if split else q.dtype, "device": q.device}
    o = torch.empty((S, H, num_splits, D), **kind)
    lse = torch.empty((S, H, num_splits) if split else (0,), dtype=torch.float32, device=q.device)
    block_tables, context_lens = in_rows(block_tables), context_lens.contiguous()
    native = fp8_tuning.converts_e4m3(q.device)
    if not native:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    paged_decode_fp8_kernel[(programs, num_splits, S)](
        q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens, o, lse,
        q.stride(), k_cache.stride() + k_scale.stride(), v_cache.stride() + v_scale.stride(),
        block_tables.stride(0), scale * LOG2_E, num_splits,
        GROUP=H // G, M=tile.m, WARPS=tile.warps, N=tile.n, BLOCK_SIZE=block_size,
        HEAD_DIM=D, BLOCK_D=fp8_tuning.block_d(D), SPLIT=split, NATIVE=native, **options,
    )  # fmt: skip
    return merge_parts(o, lse, dtype=q.dtype) if split else o.squeeze(2)
