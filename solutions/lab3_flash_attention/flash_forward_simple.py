"""The forward pass of FlashAttention-2 in its common form: the inner loop (exercise 3.3), then causal (3.4).

It can be read from top to bottom: pointers, masks, the running maximum ``m_i``, the denominator ``l_i``, the
accumulator ``acc``, and the factor ``alpha`` that rescales both. :mod:`.flash_forward`, which the operator of exercise
3.8 calls, computes the same. What it does differently, and why:

- **Loads**: a tile comes by TMA where the strides allow, so that one thread requests all of it and no registers hold
  addresses. Elsewhere ``load_rows`` leaves out the masks that a tile does not need.
- **Mask**: only tiles that end after ``unmasked_end`` are masked. The others save a comparison and a select per score.
- **Scale**: it is part of the exponent, ``exp2(s * factor - m_i * factor)``, one multiply-add per score. A scale
  that is not positive would not keep the order of the scores, so then the scores are scaled first (``PRESCALE``).
- **Order of programs**: those of ``nheads_in_l2`` heads follow one another, so that they share keys and values in the
  L2 cache; causal programs with the most keys start first, so that short ones fill the end.
- **Offsets** take 64 bits only where a tensor is large enough to need them.
- **float32**: the product of a tile is summed separately (``add_product``), so that errors grow with the number of
  tiles rather than with the number of keys.
- **Running maximum**: it may be left out while nothing overflows (exercise 3.9).
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_attention, softmax_scale
from .tiles import LOG2_E, empty_in_order

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def causal_key_range(start_m, Nq, Nk, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys every query of the tile sees, and how many at least one sees; the tile begins at ``start_m``."""
    if CAUSAL:
        ### BEGIN SOLUTION 3.4: keys that a tile of queries sees
        unmasked_end = tl.minimum(start_m + 1 + Nk - Nq, Nk)
        key_end = tl.minimum(start_m + BLOCK_M + Nk - Nq, Nk)
        return unmasked_end, key_end
        ### END SOLUTION
    else:
        return Nk, Nk


@triton.jit
def attention_mask(offs_m, offs_n, Nq, Nk, CAUSAL: tl.constexpr):
    """Which of the keys ``offs_n`` (1, BLOCK_N) the queries ``offs_m`` (BLOCK_M, 1) see: (BLOCK_M, BLOCK_N)."""
    if CAUSAL:
        ### BEGIN SOLUTION 3.4: the causal mask
        return (offs_n < Nk) & (offs_n <= offs_m + (Nk - Nq))
        ### END SOLUTION
    else:
        return (offs_n < Nk) & (offs_m >= 0)  # the second is always true: it makes the shape (BLOCK_M, BLOCK_N)


@triton.jit
def tile_ptrs(ptr, strides, batch, head, rows, columns):
    """Pointers to the elements (rows, columns) of one head of a (B, H, N, D) tensor, in 64 bits."""
    stride_b, stride_h, stride_n, stride_d = strides
    offsets = rows[:, None].to(tl.int64) * stride_n + columns[None, :].to(tl.int64) * stride_d
    return ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + offsets


@triton.jit
def flash_forward_simple_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, num_heads, Nq, Nk, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GQA_GROUP_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` queries of one head, against all keys that they see, ``BLOCK_N`` at a time.

    Scores are kept as powers of two: exp(scale * s) = exp2(scale_log2 * s) with scale_log2 = scale * log2(e).
    """
    start_m = tl.program_id(0) * BLOCK_M
    head, batch = tl.program_id(1), tl.program_id(2)
    key_head = head // GQA_GROUP_SIZE
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m, mask_d = offs_m < Nq, offs_d < HEAD_DIM  # what is past the edges is loaded as 0 and never stored
    mask_q = mask_m[:, None] & mask_d[None, :]
    # (BLOCK_M, BLOCK_D), stays on chip for the whole row of tiles
    q = tl.load(tile_ptrs(q_ptr, stride_q, batch, head, offs_m, offs_d), mask=mask_q, other=0.0)

    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: where a row has seen no key, s - m_i is -inf, not NaN
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    _, key_end = causal_key_range(start_m, Nq, Nk, BLOCK_M, CAUSAL)
    for start_n in range(0, key_end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_kv = (offs_n < Nk)[:, None] & mask_d[None, :]
        ### BEGIN SOLUTION 3.3: one step of the inner loop
        k = tl.load(tile_ptrs(k_ptr, stride_k, batch, key_head, offs_n, offs_d), mask=mask_kv, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # (BLOCK_M, BLOCK_N)
        s = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), s, -float("inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(tile_ptrs(v_ptr, stride_v, batch, key_head, offs_n, offs_d), mask=mask_kv, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij
        ### END SOLUTION
    ### BEGIN SOLUTION 3.3: the end of a row of tiles
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = tl.where(l_i == 0, -float("inf"), (m_i + tl.log2(l_i)) * 0.6931471805599453)  # back to powers of e
    ### END SOLUTION
    tl.store(tile_ptrs(o_ptr, stride_o, batch, head, offs_m, offs_d), acc.to(o_ptr.dtype.element_ty), mask=mask_q)
    tl.store(lse_ptr + (batch * num_heads + head).to(tl.int64) * Nq + offs_m, lse, mask=mask_m)


def flash_forward_simple(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its logsumexp; no gradient is recorded.

    Arguments, results and errors are those of :func:`.flash_forward.flash_forward`.
    """
    check_attention(q, k, v)
    scale = softmax_scale(scale, q.shape[3])
    (B, Hq, Nq, D), (Hkv, Nk) = q.shape, k.shape[1:3]
    o = empty_in_order(q)
    lse = torch.empty((B, Hq, Nq), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o, lse
    config = tuning.forward(D, q.dtype, causal, tuning.capability_of(q.device), described=False, anchored=False)
    flash_forward_simple_kernel[(triton.cdiv(Nq, config.m), Hq, B)](
        q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), Hq, Nq, Nk, scale * LOG2_E,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=config.m, BLOCK_N=config.n, GQA_GROUP_SIZE=Hq // Hkv,
        CAUSAL=causal, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return o, lse
