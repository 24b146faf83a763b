"""The backward pass of FlashAttention: delta (exercise 3.5), dK and dV (3.6), dQ (3.7).

Each gradient is written by the one program that owns it, so that nothing is added up across programs: no atomics, no
zeroed buffers, and the same bits on every run.
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .flash_forward import is_visible, keys_seen
from .tiles import LOG2_E, add_product, describable, empty_in_order, is_wide, load_rows, sources, store_rows, tile_of

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, dlse_ptr, delta_ptr,
    stride_ob, stride_oh, stride_on, stride_od, stride_dob, stride_doh, stride_don, stride_dod,
    stride_dlb, stride_dlh, stride_dln, heads, Nq, blind,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: delta of ``BLOCK_M`` queries of one head; the first ``blind`` queries see no key."""
    tiles = tl.cdiv(Nq, BLOCK_M)
    sequence = tl.program_id(0) // tiles
    batch, head = sequence // heads, sequence % heads
    first = tl.program_id(0) % tiles * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    raise NotImplementedError("Lab 3, exercise 3.5: delta")
    if HAS_DLSE:  # dL/ds = p: the gradient of L adds to dP as -delta does
        dlse_start = dlse_ptr + batch.to(tl.int64) * stride_dlb + head.to(tl.int64) * stride_dlh
        delta -= tl.load(dlse_start + row.to(tl.int64) * stride_dln, mask=row < Nq, other=0.0)
    delta = tl.where(row < blind, 0.0, delta)
    tl.store(delta_ptr + sequence.to(tl.int64) * Nq + row, delta, mask=row < Nq)


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
    """The numbers of rows ``row`` of N; MASKED: 0 beyond the last."""
    if MASKED:
        numbers = tl.load(ptr + row, mask=row < N, other=0.0)
    else:
        numbers = tl.load(ptr + row)
    return numbers


@triton.jit(do_not_specialize=["together"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_dob, stride_doh, stride_don, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    key_heads, sequences, Nq, Nk, scale, scale_log2, together,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_M: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    DESCRIPTORS: tl.constexpr, LOADS_FIRST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of ``BLOCK_N`` keys of one key head, from all queries of its group that see them.

    Scores are kept transposed, (BLOCK_N, BLOCK_M), as dV = P^T dO and dK = dS^T Q want them.
    """
    tile, sequence = tile_of(tl.program_id(0), tl.cdiv(Nk, BLOCK_N), sequences, together)  # causal: longest first
    batch, key_head = sequence // key_heads, sequence % key_heads
    first = tile * BLOCK_N
    key = first + tl.arange(0, BLOCK_N)
    k = load_rows(
        k_ptr, batch, key_head, first, Nk, stride_kb, stride_kh, stride_kn, stride_kd,
        BLOCK_N, HEAD_DIM, BLOCK_D, False, WIDE, DESCRIPTORS,
    )  # fmt: skip
    v = load_rows(
        v_ptr, batch, key_head, first, Nk, stride_vb, stride_vh, stride_vn, stride_vd,
        BLOCK_N, HEAD_DIM, BLOCK_D, False, WIDE, DESCRIPTORS,
    )  # fmt: skip
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin = 0
    seen_from = 0  # queries from here on see all of the tile's keys
    if CAUSAL:
        raise NotImplementedError("Lab 3, exercise 3.6: queries that see a tile of keys")
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        rows_before = (sequence * GROUP + member).to(tl.int64) * Nq
        for start in range(begin, Nq, BLOCK_M):
            raise NotImplementedError("Lab 3, exercise 3.6: one step of dK and dV")
    raise NotImplementedError("Lab 3, exercise 3.6: the end of dK and dV")


@triton.jit(do_not_specialize=["together"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_dob, stride_doh, stride_don, stride_dod,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    heads, sequences, Nq, Nk, scale, scale_log2, together,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE_N: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One program: dQ of ``BLOCK_M`` queries of one head, from every key that they see."""
    tiles = tl.cdiv(Nq, BLOCK_M)
    tile, sequence = tile_of(tl.program_id(0), tiles, sequences, together)
    batch, head = sequence // heads, sequence % heads
    key_head = head // GROUP
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first
    first = tile * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    q = load_rows(
        q_ptr, batch, head, first, Nq, stride_qb, stride_qh, stride_qn, stride_qd,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, WIDE, DESCRIPTORS,
    )  # fmt: skip
    do = load_rows(
        do_ptr, batch, head, first, Nq, stride_dob, stride_doh, stride_don, stride_dod,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, WIDE, DESCRIPTORS,
    )  # fmt: skip
    lse = tl.load(lse_ptr + sequence.to(tl.int64) * Nq + row, mask=row < Nq, other=0.0)  # (BLOCK_M,)
    delta = tl.load(delta_ptr + sequence.to(tl.int64) * Nq + row, mask=row < Nq, other=0.0)  # (BLOCK_M,)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    seen_by_all, seen_by_one = keys_seen(first, Nq, Nk, BLOCK_M, CAUSAL)
    for start in range(0, seen_by_one, BLOCK_N):
        raise NotImplementedError("Lab 3, exercise 3.7: one step of dQ")
    raise NotImplementedError("Lab 3, exercise 3.7: the end of dQ")


def attention_delta(
    o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None = None, blind: int = 0
) -> torch.Tensor:
    """rowsum(dO * O), from which the gradient of L is taken off (Dao 2023, section 3.1.2).

    Args:
        o, do: (B, Hq, Nq, D), the output and its gradient, any strides.
        dlse: (B, Hq, Nq) float32, the gradient of the logsumexp; None for 0.
        blind: Queries at the start that see no key: their delta is 0.

    Returns:
        delta (B, Hq, Nq) float32.
    """
    B, Hq, Nq, D = o.shape
    delta = torch.empty((B, Hq, Nq), dtype=torch.float32, device=o.device)
    if not delta.numel():
        return delta
    rows = tuning.delta_rows(D)
    delta_kernel[(triton.cdiv(Nq, rows) * B * Hq,)](
        o, do, delta if dlse is None else dlse, delta, *o.stride(), *do.stride(),
        *(delta if dlse is None else dlse).stride(), Hq, Nq, blind,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=rows, HAS_DLSE=dlse is not None, WIDE=is_wide(o, do),
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
    """Gradients of k and v, each in its shape and dtype; those of a group's query heads are added up.

    Args:
        q, k, v, causal, scale: As for :func:`.flash_forward.flash_forward`.
        do: dO, (B, Hq, Nq, D), any strides.
        lse, delta: (B, Hq, Nq) float32, contiguous.
    """
    (B, Hq, Nq, D), (Hkv, Nk) = q.shape, k.shape[1:3]
    dk, dv = empty_in_order(k), empty_in_order(v)
    if not lse.numel():
        return dk.zero_(), dv.zero_()
    tile = tuning.dkdv(D, q.dtype, causal, tuning.capability_of(q.device), describable(q, do, k, v))
    group = Hq // Hkv
    (q_source, do_source, k_source, v_source), described = sources(
        tile.descriptors, (q, tile.m), (do, tile.m), (k, tile.n), (v, tile.n)
    )
    dkdv_kernel[(triton.cdiv(Nk, tile.n) * B * Hkv,)](
        q_source, k_source, v_source, do_source, lse, delta, dk, dv,
        *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dk.stride(), *dv.stride(),
        Hkv, B * Hkv, Nq, Nk, scale, scale * LOG2_E, tuning.heads_together("dkdv", Nq * group, causal),
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GROUP=group,
        CAUSAL=causal, WHOLE_M=Nq % tile.m == 0, PRECISION="ieee", WIDE=is_wide(q, k, v, do, dk, dv),
        DESCRIPTORS=described, LOADS_FIRST=tile.loads_first, MASKED=tile.masked or Nq % tile.m > 0,
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
    tile = tuning.dq(D, q.dtype, causal, tuning.capability_of(q.device), describable(q, do, k, v))
    group = Hq // Hkv
    (q_source, do_source, k_source, v_source), described = sources(
        tile.descriptors, (q, tile.m), (do, tile.m), (k, tile.n), (v, tile.n)
    )
    dq_kernel[(triton.cdiv(Nq, tile.m) * B * Hq,)](
        q_source, k_source, v_source, do_source, lse, delta, dq,
        *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dq.stride(),
        Hq, B * Hq, Nq, Nk, scale, scale * LOG2_E, tuning.heads_together("dq", Nk, causal) * group,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n, GROUP=group,
        CAUSAL=causal, WHOLE_N=Nk % tile.n == 0, PRECISION="ieee", WIDE=is_wide(q, k, v, do, dq),
        DESCRIPTORS=described,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return dq
