"""The backward pass of FlashAttention: delta (exercise 3.5), dK and dV (3.6), dQ (3.7).

Each gradient is written by the one program that owns it, so that nothing is added up across programs: no atomics, no
zeroed buffers, and the same bits on every run.
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
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
def delta_kernel(
    o_ptr, do_ptr, dlse_ptr, delta_ptr, stride_o, stride_do, stride_dlse, heads, Nq, num_fully_masked,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: delta of ``BLOCK_M`` queries of one head; the first ``num_fully_masked`` queries see no key."""
    tiles = tl.cdiv(Nq, BLOCK_M)
    off_hz = tl.program_id(0) // tiles
    batch, head = off_hz // heads, off_hz % heads
    start_m = tl.program_id(0) % tiles * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    ### BEGIN SOLUTION 3.5: delta
    o = load_rows(o_ptr, stride_o, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, False, ACCESS)
    do = load_rows(do_ptr, stride_do, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, False, ACCESS)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    ### END SOLUTION
    if HAS_DLSE:  # dL/ds = p: the gradient of L adds to dP as -delta does
        stride_b, stride_h, stride_n = stride_dlse
        dlse_start = dlse_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        delta -= tl.load(dlse_start + offs_m.to(tl.int64) * stride_n, mask=offs_m < Nq, other=0.0)
    delta = tl.where(offs_m < num_fully_masked, 0.0, delta)
    tl.store(delta_ptr + off_hz.to(tl.int64) * Nq + offs_m, delta, mask=offs_m < Nq)


@triton.jit
def probabilities(s, lse, scale, scale_log2, dtype: tl.constexpr):
    """exp(scale * s - L): the softmax again, from the scores of a tile and the logsumexp of its queries."""
    if dtype == tl.float32:  # subtracted first: a product with log2(e) would round away digits of a large L
        p = tl.exp2((s * scale - lse) * 1.4426950408889634)
    else:
        p = tl.exp2(s * scale_log2 - lse * 1.4426950408889634)
    return p


@triton.jit
def load_numbers(ptr, row, N, MASKED: tl.constexpr):
    """L or delta of the queries ``row`` (BLOCK_M,) of one head, which has N; MASKED: 0 past the last."""
    if MASKED:
        numbers = tl.load(ptr + row, mask=row < N, other=0.0)
    else:
        numbers = tl.load(ptr + row)
    return numbers


@triton.jit(do_not_specialize=["nheads_in_l2"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, sizes, scale, scale_log2, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_M: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of ``BLOCK_N`` keys of one key head, from all queries of its group that see them.

    Scores are kept transposed, (BLOCK_N, BLOCK_M), as dV = P^T dO and dK = dS^T Q want them.
    """
    key_heads, num_hz, Nq, Nk = sizes
    tile, off_hz = swizzle_tile(tl.program_id(0), tl.cdiv(Nk, BLOCK_N), num_hz, nheads_in_l2)  # causal: longest first
    batch, key_head = off_hz // key_heads, off_hz % key_heads
    start_n = tile * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, stride_k, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, False, ACCESS)
    v = load_rows(v_ptr, stride_v, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, False, ACCESS)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = 0
    seen_from = 0  # queries from here on see all of the tile's keys
    if CAUSAL:
        ### BEGIN SOLUTION 3.6: queries that see a tile of keys
        begin = tl.maximum(0, start_n - (Nk - Nq)) // BLOCK_M * BLOCK_M
        seen_from = start_n + BLOCK_N - 1 - (Nk - Nq)
        ### END SOLUTION
    for member in range(0, GQA_GROUP_SIZE):
        head = key_head * GQA_GROUP_SIZE + member
        rows_before = (off_hz * GQA_GROUP_SIZE + member).to(tl.int64) * Nq
        for start_m in range(begin, Nq, BLOCK_M):
            ### BEGIN SOLUTION 3.6: one step of dK and dV
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_rows(q_ptr, stride_q, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, EVEN_M, ACCESS)
            # beyond the last query q, dO, L and delta are 0: p is 1, and adds 0 to both gradients
            lse = load_numbers(lse_ptr + rows_before, offs_m, Nq, ACCESS.masked)  # (BLOCK_M,)
            do = load_rows(do_ptr, stride_do, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, EVEN_M, ACCESS)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            p = probabilities(s, lse[None, :], scale, scale_log2, q.dtype)
            if CAUSAL:  # noqa: SIM102  (the first decides what is compiled, the second what runs)
                if start_m < seen_from:
                    p = tl.where(offs_n[:, None] <= offs_m[None, :] + (Nk - Nq), p, 0.0)
            delta = load_numbers(delta_ptr + rows_before, offs_m, Nq, ACCESS.masked)  # (BLOCK_M,)
            ds = p * (dp - delta[None, :])
            # always true; yet what stands under a condition, the compiler puts behind the loads of the next tile
            if not ACCESS.loads_first or start_m < Nq:
                dv = add_product(dv, p.to(do.dtype), do)
                dk = add_product(dk, ds.to(q.dtype), q)
            ### END SOLUTION
    ### BEGIN SOLUTION 3.6: the end of dK and dV
    store_rows(dk_ptr, stride_dk, dk * scale, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, ACCESS)
    store_rows(dv_ptr, stride_dv, dv, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, ACCESS)
    ### END SOLUTION


@triton.jit(do_not_specialize=["nheads_in_l2"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq, sizes, scale, scale_log2, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_N: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: dQ of ``BLOCK_M`` queries of one head, from every key that they see."""
    heads, num_hz, Nq, Nk = sizes
    tiles = tl.cdiv(Nq, BLOCK_M)
    tile, off_hz = swizzle_tile(tl.program_id(0), tiles, num_hz, nheads_in_l2)
    batch, head = off_hz // heads, off_hz % heads
    key_head = head // GQA_GROUP_SIZE
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, stride_q, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, False, ACCESS)
    do = load_rows(do_ptr, stride_do, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, False, ACCESS)
    lse = tl.load(lse_ptr + off_hz.to(tl.int64) * Nq + offs_m, mask=offs_m < Nq, other=0.0)  # (BLOCK_M,)
    delta = tl.load(delta_ptr + off_hz.to(tl.int64) * Nq + offs_m, mask=offs_m < Nq, other=0.0)  # (BLOCK_M,)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    unmasked_end, key_end = causal_key_range(start_m, Nq, Nk, BLOCK_M, CAUSAL)
    for start_n in range(0, key_end, BLOCK_N):
        ### BEGIN SOLUTION 3.7: one step of dQ
        k = load_rows(k_ptr, stride_k, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, EVEN_N, ACCESS)
        v = load_rows(v_ptr, stride_v, batch, key_head, start_n, Nk, BLOCK_N, BLOCK_D, EVEN_N, ACCESS)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        p = probabilities(s, lse[:, None], scale, scale_log2, q.dtype)
        if CAUSAL or not EVEN_N:  # noqa: SIM102  (the first decides what is compiled, the second what runs)
            if start_n + BLOCK_N > unmasked_end:
                offs_n = start_n + tl.arange(0, BLOCK_N)
                p = tl.where(attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = add_product(dq, ds.to(k.dtype), k)
        ### END SOLUTION
    ### BEGIN SOLUTION 3.7: the end of dQ
    store_rows(dq_ptr, stride_dq, dq * scale, batch, head, start_m, Nq, BLOCK_M, BLOCK_D, ACCESS)
    ### END SOLUTION


def attention_delta(
    o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None = None, num_fully_masked: int = 0
) -> torch.Tensor:
    """rowsum(dO * O), minus the gradient of L (Dao 2023, section 3.1.2).

    Args:
        o, do: (B, Hq, Nq, D), the output and its gradient, any strides.
        dlse: (B, Hq, Nq) float32, the gradient of the logsumexp; None for 0.
        num_fully_masked: Queries at the start that see no key: their delta is 0.

    Returns:
        delta (B, Hq, Nq) float32.
    """
    B, Hq, Nq, D = o.shape
    delta = torch.empty((B, Hq, Nq), dtype=torch.float32, device=o.device)
    if not delta.numel():
        return delta
    rows = tuning.delta_rows(D)
    dlse_or_unused = delta if dlse is None else dlse
    delta_kernel[(triton.cdiv(Nq, rows) * B * Hq,)](
        o, do, dlse_or_unused, delta, o.stride(), do.stride(), dlse_or_unused.stride(), Hq, Nq, num_fully_masked,
        BLOCK_D=tuning.block_d(D), BLOCK_M=rows, HAS_DLSE=dlse is not None, ACCESS=Access(D, index_dtype(o, do)),
        num_warps=4,
    )  # fmt: skip
    return delta


def flash_dkdv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of k and v, each in its shape and dtype; summed over the query heads of a group.

    Args:
        q, k, v, causal, scale: As for :func:`.flash_forward.flash_forward`.
        do: dO, (B, Hq, Nq, D), any strides.
        lse, delta: (B, Hq, Nq) float32, contiguous.
    """
    (B, Hq, Nq, D), (Hkv, Nk) = q.shape, k.shape[1:3]
    dk, dv = empty_in_order(k), empty_in_order(v)
    if not lse.numel():
        return dk.zero_(), dv.zero_()
    tile = tuning.dkdv(D, q.dtype, causal, tuning.capability_of(q.device), tma_compatible(q, do, k, v))
    group = Hq // Hkv
    operands, use_tma = kernel_operands(tile.descriptors, (q, tile.m), (k, tile.n), (v, tile.n), (do, tile.m))
    even = Nq % tile.m == 0
    dkdv_kernel[(triton.cdiv(Nk, tile.n) * B * Hkv,)](
        *operands, lse, delta, dk, dv, *(x.stride() for x in (q, k, v, do, dk, dv)),
        (Hkv, B * Hkv, Nq, Nk), scale, scale * LOG2_E, tuning.nheads_in_l2("dkdv", Nq * group, causal),
        BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GQA_GROUP_SIZE=group,
        CAUSAL=causal, EVEN_M=even,
        ACCESS=Access(D, index_dtype(q, k, v, do, dk, dv), use_tma, tile.loads_first, tile.masked or not even),
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return dk, dv


def flash_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Gradient of q, in its shape and dtype; arguments as for :func:`flash_dkdv`."""
    (B, Hq, Nq, D), (Hkv, Nk) = q.shape, k.shape[1:3]
    dq = empty_in_order(q)
    if not lse.numel():
        return dq
    tile = tuning.dq(D, q.dtype, causal, tuning.capability_of(q.device), tma_compatible(q, do, k, v))
    group = Hq // Hkv
    operands, use_tma = kernel_operands(tile.descriptors, (q, tile.m), (k, tile.n), (v, tile.n), (do, tile.m))
    dq_kernel[(triton.cdiv(Nq, tile.m) * B * Hq,)](
        *operands, lse, delta, dq, *(x.stride() for x in (q, k, v, do, dq)),
        (Hq, B * Hq, Nq, Nk), scale, scale * LOG2_E, tuning.nheads_in_l2("dq", Nk, causal) * group,
        BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GQA_GROUP_SIZE=group,
        CAUSAL=causal, EVEN_N=Nk % tile.n == 0,
        ACCESS=Access(D, index_dtype(q, k, v, do, dq), use_tma),
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return dq
