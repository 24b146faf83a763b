"""The forward pass of FlashAttention, made fast: :mod:`.flash_forward_simple` says what differs; with an anchor (3.9).

The inner loop keeps a running maximum and rescales what it has summed whenever the maximum grows. The anchored loop
takes the maximum of a row's first tile for the whole row, which is right as long as nothing overflows. After that loop
the kernel checks whether any value overflowed, and if so the tile goes through the inner loop.
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_attention, softmax_scale
from .flash_forward_simple import attention_mask, causal_key_range
from .tiles import (
    LOG2_E,
    Access,
    add_product,
    empty_in_order,
    index_dtype,
    kernel_operands,
    load_rows,
    store_rows,
    swizzle_tile,
    tma_compatible,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def masked_scores(
    q, k_ptr, stride_k, batch, key_head, start_n, offs_m, unmasked_end, Nq, Nk, scale_log2, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PRESCALE: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of queries ``q`` (BLOCK_M, BLOCK_D) and the keys from ``start_n`` on: (BLOCK_M, BLOCK_N)
    float32, -inf where a query sees no key."""
    raise NotImplementedError("Lab 3, exercise 3.9: scores of one tile")


@triton.jit
def anchored_row(
    q, k_ptr, v_ptr, stride_k, stride_v, batch, key_head, offs_m, unmasked_end, key_end, Nq, Nk, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PRESCALE: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """A row of tiles with one reference, the maximum of its first tile: no other maximum is taken, nothing is rescaled.

    Each step adds the values of one tile and multiplies the keys of the next: what a step loads arrives while the next
    one computes its exponentials.

    Returns:
        acc (BLOCK_M, BLOCK_D), m_i and l_i (BLOCK_M,), as the inner loop leaves them, and whether they are
        usable: one truth value, false if any value came near overflow.
    """
    raise NotImplementedError("Lab 3, exercise 3.9: a row of tiles with an anchor")


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, sizes, scale_log2, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, PRESCALE: tl.constexpr, ANCHORED: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` queries of one head, against all keys that they see, ``BLOCK_N`` at a time.

    Scores are kept as powers of two: exp(scale * s) = exp2(scale_log2 * s) with scale_log2 = scale * log2(e).
    """
    heads, num_hz, Nq, Nk = sizes
    tiles = tl.cdiv(Nq, BLOCK_M)
    tile, off_hz = swizzle_tile(tl.program_id(0), tiles, num_hz, nheads_in_l2)
    batch, head = off_hz // heads, off_hz % heads
    key_head = head // GQA_GROUP_SIZE
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first, so that short ones fill the end
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # (BLOCK_M, BLOCK_D), stays on chip for the whole row of tiles
    q = load_rows(q_ptr, stride_q, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, False, ACCESS)

    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a row that sees no key subtracts it from -inf
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # a scale that is not positive would not keep the order of the scores: there they are scaled before the maximum
    factor = 1.0 if PRESCALE else scale_log2
    unmasked_end, key_end = causal_key_range(start_m, Nq, Nk, BLOCK_M, CAUSAL)
    end = key_end
    if ANCHORED:  # exercise 3.9
        acc, m_i, l_i, done = anchored_row(
            q, k_ptr, v_ptr, stride_k, stride_v, batch, key_head, offs_m, unmasked_end, key_end, Nq, Nk, scale_log2,
            BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, EVEN_N, PRESCALE, ACCESS,
        )  # fmt: skip
        if done:
            end = 0
        else:  # something overflowed: the whole row again
            m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start_n in range(0, end, BLOCK_N):
        k = load_rows(k_ptr, stride_k, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, EVEN_N, ACCESS)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        if PRESCALE:
            s = s * scale_log2
        if CAUSAL or not EVEN_N:  # noqa: SIM102  (the first decides what is compiled, the second what runs)
            if start_n + BLOCK_N > unmasked_end:
                offs_n = start_n + tl.arange(0, BLOCK_N)
                s = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), s, -float("inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s * factor - (m_ij * factor)[:, None])
        alpha = tl.exp2((m_i - m_ij) * factor)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_rows(v_ptr, stride_v, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, EVEN_N, ACCESS)
        acc = add_product(acc * alpha[:, None], p.to(v.dtype), v)
        m_i = m_ij
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = tl.where(l_i == 0, -float("inf"), (m_i * factor + tl.log2(l_i)) * 0.6931471805599453)  # back to powers of e
    store_rows(o_ptr, stride_o, acc, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, ACCESS)
    tl.store(lse_ptr + off_hz.to(tl.int64) * Nq + offs_m, lse, mask=offs_m < Nq)


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    anchored: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its logsumexp; no gradient is recorded.

    Args:
        q: (B, Hq, Nq, D), float32 (multiplied as such, not as TF32), float16 or bfloat16, any strides, D 16 to 256.
        k, v: (B, Hkv, Nk, D) of q's dtype; Hkv divides Hq, and query head h reads key head h // (Hq / Hkv).
        causal: Query i sees keys j <= i + Nk - Nq.
        scale: Factor of the scores, by default 1 / sqrt(D).
        anchored: Whether rows may be anchored (exercise 3.9), where the table of tiles finds that faster.

    Returns:
        o, of q's shape and dtype, and L (B, Hq, Nq) float32, the natural logsumexp of each row of scores. A query that
        sees no key has o = 0 and L = -inf.

    Raises:
        TypeError, ValueError: as :func:`.arguments.check_attention`.
    """
    check_attention(q, k, v)
    scale = softmax_scale(scale, q.shape[3])
    (B, Hq, Nq, D), (Hkv, Nk) = q.shape, k.shape[1:3]
    o = empty_in_order(q)
    lse = torch.empty((B, Hq, Nq), dtype=torch.float32, device=q.device)
    if not lse.numel():
        return o, lse
    anchored = anchored and Nk >= tuning.ANCHORED_FROM
    tile = tuning.forward(D, q.dtype, causal, tuning.capability_of(q.device), tma_compatible(q, k, v), anchored)
    group = Hq // Hkv
    operands, use_tma = kernel_operands(tile.descriptors, (q, tile.m), (k, tile.n), (v, tile.n))
    flash_forward_kernel[(triton.cdiv(Nq, tile.m) * B * Hq,)](
        *operands, o, lse, *(x.stride() for x in (q, k, v, o)),
        (Hq, B * Hq, Nq, Nk), scale * LOG2_E, tuning.nheads_in_l2("forward", Nk, causal) * group,
        BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GQA_GROUP_SIZE=group,
        CAUSAL=causal, EVEN_N=Nk % tile.n == 0, PRESCALE=scale <= 0, ANCHORED=tile.anchored,
        ACCESS=Access(D, index_dtype(q, k, v, o), use_tma),
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return o, lse
