"""Causal attention of documents that are packed in one row (exercise 6.5).

Letters: T tokens of all documents together, H heads, D head dimension. A query sees the keys of its own document up to
itself.

Which program takes which queries, how many there are, and the tile: all that is yours.
"""

from __future__ import annotations

import math

import torch

from utils import runtime  # before triton: it decides between GPU and interpreter

from .simple_arguments import check_shape, check_tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2_E = 1.4426950408889634


### BEGIN SOLUTION 6.5: your kernel
@triton.jit
def begin_of(query, cu_seqlens_ptr, documents, BLOCK_S: tl.constexpr):
    """(BLOCK_M,): where each query's document begins, which is the last beginning that is not behind the query."""
    begin = query * 0
    for some in range(0, documents, BLOCK_S):
        document = some + tl.arange(0, BLOCK_S)
        begins = tl.load(cu_seqlens_ptr + document, mask=document < documents, other=0)  # (BLOCK_S,)
        begin = tl.maximum(begin, tl.max(tl.where(begins[None, :] <= query[:, None], begins[None, :], 0), 1))
    return begin


@triton.jit
def document_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, cu_seqlens_ptr, documents, T, stride_q, stride_k, stride_v, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` neighbouring queries of one head, of one document or of several.

    It goes from the first key of the first query's document to the last query's own. Each of these tiles holds a key
    that one of the queries sees. ``stride_q``, ``stride_k``, ``stride_v``: from token to token, and from head to head.
    """
    start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    query = start + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    loaded = (query < T)[:, None] & (column < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + query.to(tl.int64)[:, None] * stride_q[0] + head * stride_q[1] + column[None, :]
    q = tl.load(q_ptrs, mask=loaded, other=0.0)  # (BLOCK_M, BLOCK_D), stays on chip
    begin = begin_of(query, cu_seqlens_ptr, documents, BLOCK_S)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a query may see no key of the first tiles
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum(start + BLOCK_M, T)
    for first in range(tl.min(begin, 0), end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        loaded_k = (key < end)[:, None] & (column < HEAD_DIM)[None, :]
        k_ptrs = k_ptr + key.to(tl.int64)[:, None] * stride_k[0] + head * stride_k[1] + column[None, :]
        k = tl.load(k_ptrs, mask=loaded_k, other=0.0)  # (BLOCK_N, BLOCK_D)
        s = tl.dot(q, k.T) * scale_log2  # (BLOCK_M, BLOCK_N)
        seen = (key[None, :] >= begin[:, None]) & (key[None, :] <= query[:, None])
        s = tl.where(seen, s, -float("inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_ptrs = v_ptr + key.to(tl.int64)[:, None] * stride_v[0] + head * stride_v[1] + column[None, :]
        v = tl.load(v_ptrs, mask=loaded_k, other=0.0)  # (BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_ij
    heads = tl.num_programs(1)
    o_ptrs = o_ptr + (query.to(tl.int64)[:, None] * heads + head) * HEAD_DIM + column[None, :]
    tl.store(o_ptrs, (acc / l_i[:, None]).to(o_ptr.dtype.element_ty), mask=loaded)


### END SOLUTION


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Causal attention of each document by itself, of all documents of a row in one call.

    Args:
        q, k, v: (T, H, D) float16 or bfloat16; D from 16 to 256, and the D numbers of a head lie side by side. The
            strides from token to token and from head to head are each tensor's own. Scores are multiplied by
            1 / sqrt(D).
        cu_seqlens: (documents + 1,) int32, contiguous, rising from 0 to T: document d has the tokens from cu_seqlens[d]
            up to, not including, cu_seqlens[d + 1], and may have none. The values stay on the GPU, and are not checked.

    Returns:
        (T, H, D) of q's dtype, contiguous. Sums are float32.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(q, k, v, cu_seqlens)
    (T, H, D), documents = q.shape, len(cu_seqlens) - 1
    o = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    scale = 1 / math.sqrt(D)
    ### BEGIN SOLUTION 6.5: the launch
    m, n = runtime.pick(cpu=(32, 32), gpu=(64, 64))
    document_kernel[(triton.cdiv(T, m), H)](
        q, k, v, o, cu_seqlens, documents, T, q.stride()[:2], k.stride()[:2], v.stride()[:2], scale * LOG2_E,
        HEAD_DIM=D, BLOCK_D=triton.next_power_of_2(D), BLOCK_S=32, BLOCK_M=m, BLOCK_N=n, num_warps=4,
    )  # fmt: skip
    return o
    ### END SOLUTION


def _check(q, k, v, cu_seqlens) -> None:
    check_tensor("q", q, 3, torch.float16, torch.bfloat16)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, 3, q.dtype)
        if x.shape != q.shape or x.stride(2) != 1:
            got = f"{tuple(x.shape)} with strides {x.stride()}"
            raise ValueError(f"{name} must have shape {tuple(q.shape)} and heads in one piece, got {got}")
    T, H, D = q.shape
    if not T or not H or not 16 <= D <= 256:
        raise ValueError(f"q must have a token, a head and 16 to 256 numbers in it, got shape {(T, H, D)}")
    check_tensor("cu_seqlens", cu_seqlens, 1, torch.int32)
    check_shape("cu_seqlens", cu_seqlens, (max(2, len(cu_seqlens)),))
