"""Attention of one new token per sequence over a paged cache, whole or in parts (exercise 5.4)."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .merge import merge_parts
from .paged_arguments import FLOATS, check_cache, check_sequences, check_splits, check_tensor, softmax_scale

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2_E = 1.4426950408889634


@triton.jit
def part_of(length, part, parts, BLOCK_N: tl.constexpr):
    """First token and end of one part of a context: two parts differ by at most one tile. End is at most ``length``."""
    ### BEGIN SOLUTION 5.4: the tokens of a part
    tiles = tl.cdiv(length, BLOCK_N)
    first = tiles * part // parts * BLOCK_N
    end = tl.minimum(tiles * (part + 1) // parts * BLOCK_N, length)
    return first, end
    ### END SOLUTION


@triton.jit
def load_tokens(
    head_ptr, block, token, inside, stride_b, stride_t, stride_d,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head for the tokens (BLOCK_N,) in the blocks (BLOCK_N,): (BLOCK_N, BLOCK_D).

    ``head_ptr`` points to the head in the cache's first slot. Zeros where a token is not ``inside`` the context.
    """
    column = tl.arange(0, BLOCK_D)
    slot_ptr = head_ptr + block.to(tl.int64) * stride_b + (token % BLOCK_SIZE).to(tl.int64) * stride_t
    place = slot_ptr[:, None] + column.to(tl.int64)[None, :] * stride_d
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(place, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(place, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["stride_bs", "parts"])
def paged_decode_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, block_tables_ptr, context_lens_ptr, o_ptr, lse_ptr,
    stride_q, stride_k, stride_v, stride_bs, stride_bb, stride_cs, stride_o, scale_log2, parts,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the ``GROUP`` query heads of one key head of one sequence, against one part of its context.

    Scores are kept as powers of two: exp(scale * s) = exp2(scale_log2 * s) with scale_log2 = scale * log2(e).
    """
    key_head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    head = key_head * GROUP + row
    mine = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    place = head.to(tl.int64)[:, None] * stride_q[1] + column.to(tl.int64)[None, :] * stride_q[2]
    q = tl.load(q_ptr + sequence * stride_q[0] + place, mask=mine, other=0.0)  # (BLOCK_M, BLOCK_D)
    length = tl.load(context_lens_ptr + sequence * stride_cs).to(tl.int32)
    table_ptr = block_tables_ptr + sequence * stride_bs
    k_head_ptr = k_cache_ptr + key_head.to(tl.int64) * stride_k[2]
    v_head_ptr = v_cache_ptr + key_head.to(tl.int64) * stride_v[2]

    m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
    d = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first, end = part_of(length, part, parts, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        ### BEGIN SOLUTION 5.4: one step of the loop
        token = start + tl.arange(0, BLOCK_N)
        inside = token < end
        block = tl.load(table_ptr + token // BLOCK_SIZE * stride_bb, mask=inside, other=0)  # (BLOCK_N,)
        k = load_tokens(
            k_head_ptr, block, token, inside, stride_k[0], stride_k[1], stride_k[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
        )  # (BLOCK_N, BLOCK_D), read by this program only
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # (BLOCK_M, BLOCK_N)
        s = tl.where(inside[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        d = d * rescale + tl.sum(p, 1)
        v = load_tokens(
            v_head_ptr, block, token, inside, stride_v[0], stride_v[1], stride_v[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
        )  # (BLOCK_N, BLOCK_D)
        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision=PRECISION)
        m = m_new
        ### END SOLUTION
    ### BEGIN SOLUTION 5.4: the end of a part
    o = o / tl.where(d == 0, 1.0, d)[:, None]
    lse = tl.where(d == 0, -float("inf"), (m + tl.log2(d)) * 0.6931471805599453)  # back to powers of e
    ### END SOLUTION
    o_place = head.to(tl.int64)[:, None] * stride_o[1] + column.to(tl.int64)[None, :] * stride_o[3]
    o_place += sequence * stride_o[0] + part.to(tl.int64) * stride_o[2]
    if SPLIT:  # an empty part says -inf and nothing else: the merge does not read its output
        tl.store(o_ptr + o_place, o, mask=mine & (d != 0)[:, None])
        heads = tl.num_programs(0) * GROUP
        tl.store(lse_ptr + (sequence * heads + head) * parts + part, lse, mask=row < GROUP)
    else:
        tl.store(o_ptr + o_place, o.to(o_ptr.dtype.element_ty), mask=mine)


def paged_attention_parts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_splits: int,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over each of ``num_splits`` parts of every context, for :func:`.merge.merge_parts` to put together.

    Args:
        q, k_cache, v_cache, block_tables, context_lens, scale: As for :func:`paged_attention_decode`.
        num_splits: P, parts of every context.

    Returns:
        Outputs (S, H, P, D) float32, each divided by the sum of its own part's weights, and the natural logsumexp of
        each part's scores, (S, H, P) float32. An empty part has -inf, and its output is not written.

    Raises:
        TypeError, ValueError: as :func:`paged_attention_decode`.
    """
    _check(q, k_cache, v_cache, block_tables, context_lens, num_splits)
    S, H, D = q.shape
    outputs = torch.empty((S, H, num_splits, D), dtype=torch.float32, device=q.device)
    logsumexps = torch.empty((S, H, num_splits), dtype=torch.float32, device=q.device)
    _launch(q, k_cache, v_cache, block_tables, context_lens, outputs, logsumexps, num_splits, scale)
    return outputs, logsumexps


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence over the keys and values that its block table names.

    Token t of sequence s lies in ``cache[block_tables[s, t // block_size], t % block_size]`` (Kwon et al. 2023). With
    more than one part, parts of a context run side by side and a second kernel merges them (Dao et al. 2023,
    "Flash-Decoding"). Nothing waits for the GPU, so that a CUDA graph can hold the call.

    Args:
        q: (S, H, D), float32 (multiplied as such, not as TF32), float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, G, D) of q's dtype, any strides; block_size is a power of two, and
            G divides H: query head h reads key head h // (H / G).
        block_tables: (S, max_blocks) int32; entries beyond a sequence's context are not read.
        context_lens: (S,) int32, tokens of each sequence in the cache, the new one included, at most
            max_blocks * block_size. A sequence of 0 gets 0.
        scale: Factor of the scores, by default 1 / sqrt(D).
        num_splits: Parts of every context; by default as many as fill the GPU (:func:`.tuning.splits`).

    Returns:
        (S, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(q, k_cache, v_cache, block_tables, context_lens, num_splits)
    S, H, D = q.shape
    block_size, G = k_cache.shape[1:3]
    if num_splits is None:
        num_splits = tuning.splits(S * G, block_tables.shape[1] * block_size, tuning.multiprocessors(q.device))
    if num_splits > 1:
        parts = paged_attention_parts(q, k_cache, v_cache, block_tables, context_lens, num_splits, scale=scale)
        return merge_parts(*parts, dtype=q.dtype)
    o = torch.empty((S, H, D), dtype=q.dtype, device=q.device)
    _launch(q, k_cache, v_cache, block_tables, context_lens, o.unsqueeze(2), None, 1, scale)
    return o


def _check(q, k_cache, v_cache, block_tables, context_lens, num_splits) -> None:
    check_tensor("q", q, "(S, H, D)", FLOATS)
    check_cache("q", q, k_cache, v_cache)
    check_sequences(q.shape[0], block_tables, context_lens, q.device)
    check_splits(num_splits)


def _launch(q, k_cache, v_cache, block_tables, context_lens, o, lse, parts, scale) -> None:
    """Run the kernel; ``o`` (S, H, P, D), and no logsumexp for one part."""
    scale = softmax_scale(scale, q.shape[2])
    S, H, D = q.shape
    block_size, G = k_cache.shape[1:3]
    if not S * H:
        return
    tile = tuning.decode(D, q.dtype, H // G, tuning.capability_of(q.device))
    paged_decode_kernel[(G, parts, S)](
        q, k_cache, v_cache, block_tables, context_lens, o, o if lse is None else lse,
        q.stride(), k_cache.stride(), v_cache.stride(), *block_tables.stride(), context_lens.stride(0), o.stride(),
        scale * LOG2_E, parts,
        GROUP=H // G, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), SPLIT=lse is not None, PRECISION="ieee",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
