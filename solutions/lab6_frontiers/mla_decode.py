"""Attention of one new token a sequence over a paged cache of latents, for all heads, whole or in parts.

Letters: S sequences, H heads, P parts of a context. The cache keeps for each token the latent, from which keys and
values of all heads are projected, and behind it a key that carries the position (DeepSeek-AI 2024, "DeepSeek-V2",
section 2.1). With the projections absorbed (:mod:`.mla_torch`) a latent is key and value at once: the kernel loads a
tile of latents once, for a block of heads, and multiplies it twice. On Hopper :mod:`.hopper_mla_decode` does the same
where it can.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor

from solutions.lab5_serving.merge import merge_parts_kernel
from solutions.lab5_serving.paged_arguments import (
    FLOATS,
    check_sequences,
    check_splits,
    check_tensor,
    softmax_scale,
)
from solutions.lab5_serving.paged_decode import LOG2_E, load_tokens, part_of
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import long_tuning
from .arguments import dtype_name
from .tuning import capability_of, multiprocessors, power_of_two

import triton  # isort: skip
import triton.language as tl  # isort: skip

SMALLEST_DIM, LARGEST_LATENT_DIM, LARGEST_ROPE_DIM = 16, 512, 128


@triton.jit
def load_queries(
    q_ptr, strides, sequence, head, heads, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One query of each of the heads ``head`` (BLOCK_M,): (BLOCK_M, BLOCK_D), zeros beyond the edges."""
    column = tl.arange(0, BLOCK_D)
    place = head.to(tl.int64)[:, None] * strides[1] + column.to(tl.int64)[None, :] * strides[2]
    inside = (head < heads)[:, None] & (column < DIM)[None, :]
    return tl.load(q_ptr + sequence * strides[0] + place, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["stride_bs", "parts", "heads"])
def mla_decode_kernel(
    q_latent_ptr, q_rope_ptr, cache_ptr, block_tables_ptr, context_lens_ptr, o_ptr, lse_ptr,
    stride_ql, stride_qr, stride_c, stride_bs, stride_bb, stride_cs, scale_log2, heads, parts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` heads of one sequence, against one part of its context, ``BLOCK_N`` tokens at a time.

    Scores are kept as powers of two: exp(scale * s) = exp2(scale_log2 * s) with scale_log2 = scale * log2(e).
    """
    part, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # (BLOCK_M, BLOCK_L) and (BLOCK_M, BLOCK_R), stay on chip for the whole part
    q_latent = load_queries(q_latent_ptr, stride_ql, sequence, head, heads, LATENT_DIM, BLOCK_L)
    q_rope = load_queries(q_rope_ptr, stride_qr, sequence, head, heads, ROPE_DIM, BLOCK_R)
    length = tl.load(context_lens_ptr + sequence * stride_cs).to(tl.int32)
    table_ptr = block_tables_ptr + sequence * stride_bs
    rope_ptr = cache_ptr + LATENT_DIM * stride_c[2]

    m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
    d = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    first, end = part_of(length, part, parts, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        inside = token < end
        block = tl.load(table_ptr + token // BLOCK_SIZE * stride_bb, mask=inside, other=0)  # (BLOCK_N,)
        latent = load_tokens(
            cache_ptr, block, token, inside, stride_c[0], stride_c[1], stride_c[2], BLOCK_SIZE, LATENT_DIM, BLOCK_L
        )  # (BLOCK_N, BLOCK_L), key and value of all heads
        rope = load_tokens(
            rope_ptr, block, token, inside, stride_c[0], stride_c[1], stride_c[2], BLOCK_SIZE, ROPE_DIM, BLOCK_R
        )  # (BLOCK_N, BLOCK_R)
        s = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        s = tl.dot(q_latent, tl.trans(latent), s, input_precision="ieee") * scale_log2
        s = tl.where(inside[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        d = d * alpha + tl.sum(p, 1)
        o = tl.dot(p.to(latent.dtype), latent, o * alpha[:, None], input_precision="ieee")
        m = m_new
    o = o / tl.where(d == 0, 1.0, d)[:, None]
    lse = tl.where(d == 0, -float("inf"), (m + tl.log2(d)) * 0.6931471805599453)  # back to powers of e
    row = (sequence * heads + head) * parts + part  # of (S, H, P)
    column = tl.arange(0, BLOCK_L)
    place = row[:, None] * LATENT_DIM + column[None, :]
    mine = (head < heads)[:, None] & (column < LATENT_DIM)[None, :]
    if SPLIT:  # an empty part says -inf and nothing else: the merge does not read its output
        tl.store(o_ptr + place, o, mask=mine & (d != 0)[:, None])
        tl.store(lse_ptr + row, lse, mask=head < heads)
    else:
        tl.store(o_ptr + place, o.to(o_ptr.dtype.element_ty), mask=mine)


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of one query for each head of a sequence over the latents that its block table names.

    Token t of sequence s lies in ``latent_cache[block_tables[s, t // block_size], t % block_size]``: first its latent,
    then its key with the position; DeepSeek-V3 has 512 and 64 numbers. With more than one part, parts of a context run
    side by side and lab 5's kernel merges them (Dao et al. 2023, "Flash-Decoding"). Each number of a context is read
    once for each block of heads. Nothing waits for the GPU, so that a CUDA graph can hold the call.

    Args:
        q_latent: (S, H, latent_dim), absorbed queries (:func:`.mla_torch.absorb_queries`), float32 (multiplied as such,
            not as TF32), float16 or bfloat16, any strides; latent_dim from 16 to 512.
        q_rope: (S, H, rope_dim) of q_latent's dtype, the queries' part with a position; rope_dim from 16 to 128.
        latent_cache: (num_blocks, block_size, latent_dim + rope_dim) of q_latent's dtype, any strides; block_size is a
            power of two.
        block_tables: (S, max_blocks) int32; entries beyond a sequence's context are not read.
        context_lens: (S,) int32, tokens of each sequence in the cache, the new one included, at most
            max_blocks * block_size. A sequence of 0 gets 0.
        scale: factor of the scores; 1 / sqrt(head_dim + rope_dim) of the queries before absorption.
        num_splits: parts of every context; by default so many that programs fill the GPU in whole waves.

    Returns:
        (S, H, latent_dim) of q_latent's dtype, in the latents' space: :func:`.mla_torch.project_values` makes outputs.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(q_latent, q_rope, latent_cache, block_tables, context_lens, num_splits)
    if scale is None:
        raise TypeError("scale must be a number: 1 / sqrt(head_dim + rope_dim) of the queries before absorption")
    scale_log2 = softmax_scale(scale, 1) * LOG2_E
    (S, H, L), block_size = q_latent.shape, latent_cache.shape[1]
    if not S * H:
        return torch.empty_like(q_latent)
    capability = capability_of(q_latent.device)
    hopper = hopper_kernel(q_latent, q_rope, latent_cache, scale_log2, capability)
    tile = long_tuning.mla_decode(H, q_latent.dtype, capability)
    head_blocks = triton.cdiv(H, hopper.M if hopper else tile.m)
    if num_splits is None:
        longest = block_tables.shape[1] * block_size
        num_splits = long_tuning.mla_splits(S * head_blocks, longest, multiprocessors(q_latent.device))
    split = num_splits > 1
    made = {"device": q_latent.device, "dtype": torch.float32 if split else q_latent.dtype}
    o = torch.empty((S, H, num_splits, L), **made)
    lse = torch.empty((S, H, num_splits) if split else (0,), dtype=torch.float32, device=q_latent.device)
    if hopper:
        hopper.hopper_mla_decode(q_latent, q_rope, latent_cache, block_tables, context_lens, scale_log2, o, lse)
        return _merged(o, lse, q_latent.dtype) if split else o.squeeze(2)
    mla_decode_kernel[(head_blocks, num_splits, S)](
        q_latent, q_rope, latent_cache, block_tables, context_lens, o, lse,
        q_latent.stride(), q_rope.stride(), latent_cache.stride(), *block_tables.stride(), context_lens.stride(0),
        scale_log2, H, num_splits,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size, LATENT_DIM=L, ROPE_DIM=q_rope.shape[2],
        BLOCK_L=power_of_two(L), BLOCK_R=power_of_two(q_rope.shape[2]), SPLIT=split,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _merged(o, lse, q_latent.dtype) if split else o.squeeze(2)


def hopper_kernel(q_latent, q_rope, latent_cache, scale, capability) -> types.ModuleType | None:
    """The module of the kernel for Hopper, on such a GPU and for tensors that it takes; None otherwise."""
    if capability is None or capability[0] != 9:
        return None
    from . import hopper_mla_decode  # Gluon needs a GPU's Triton, not the interpreter's

    return None if hopper_mla_decode.why_portable(q_latent, q_rope, latent_cache, scale) else hopper_mla_decode


def _merged(outputs: Tensor, logsumexps: Tensor, dtype: torch.dtype) -> Tensor:
    """Lab 5's merge of parts, with a tile for rows of 512."""
    S, H, P, L = outputs.shape
    o = torch.empty((S, H, L), dtype=dtype, device=outputs.device)
    tile = long_tuning.merge(P, power_of_two(L))
    merge_parts_kernel[(S * H,)](
        outputs, logsumexps, o, *outputs.stride(), *logsumexps.stride(), *o.stride(), H, P,
        BLOCK_P=tile.n, HEAD_DIM=L, BLOCK_D=power_of_two(L), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o


def _check(q_latent, q_rope, latent_cache, block_tables, context_lens, num_splits) -> None:
    check_tensor("q_latent", q_latent, "(S, H, latent_dim)", FLOATS)
    check_tensor("q_rope", q_rope, "(S, H, rope_dim)", FLOATS)
    check_tensor("latent_cache", latent_cache, "(num_blocks, block_size, latent_dim + rope_dim)", FLOATS)
    for name, value in (("q_rope", q_rope), ("latent_cache", latent_cache)):
        if value.dtype != q_latent.dtype:
            wanted = dtype_name(q_latent.dtype)
            raise TypeError(f"{name} must have q_latent's dtype {wanted}, got {dtype_name(value.dtype)}")
        if value.device != q_latent.device:
            raise ValueError(f"{name} must be on q_latent's device {q_latent.device}, got {value.device}")
    if q_rope.shape[:2] != q_latent.shape[:2]:
        wanted = f"{tuple(q_latent.shape[:2])} as its first axes, as q_latent"
        raise ValueError(f"q_rope must have {wanted}, got shape {tuple(q_rope.shape)}")
    for name, dim, largest in (
        ("q_latent", q_latent.shape[2], LARGEST_LATENT_DIM), ("q_rope", q_rope.shape[2], LARGEST_ROPE_DIM),
    ):  # fmt: skip
        if not SMALLEST_DIM <= dim <= largest:
            raise ValueError(f"the last axis of {name} must be from {SMALLEST_DIM} to {largest}, got {dim}")
    _, block_size, width = latent_cache.shape
    if width != q_latent.shape[2] + q_rope.shape[2]:
        both = f"{q_latent.shape[2]} + {q_rope.shape[2]}"
        raise ValueError(f"latent_cache must have {both} numbers on its last axis, got {tuple(latent_cache.shape)}")
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    check_sequences(q_latent.shape[0], block_tables, context_lens, q_latent.device)
    check_splits(num_splits)
