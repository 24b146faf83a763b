"""Sliding-window attention, forward and backward (exercise 3.10), with kernels of your own.

Query i sees key i + Nk - Nq and the ``window - 1`` keys before it (Beltagy et al. 2020, section 3.1; Mistral 7B: Jiang
et al. 2023, section 2).
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_attention, softmax_scale
from .flash_backward import attention_delta
from .flash_forward_simple import tile_ptrs
from .tiles import LOG2_E, empty_in_order

import triton  # isort: skip
import triton.language as tl  # isort: skip


### BEGIN SOLUTION 3.10: your kernels
@triton.jit
def in_window(i, j, Nq, Nk, window):
    """Whether query i sees key j."""
    return (j <= i + Nk - Nq) & (j > i + Nk - Nq - window)


@triton.jit
def load_tile(ptr, strides, batch, head, rows, N, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Those rows of the N of one head: (rows, BLOCK_D), 0 beyond the edges."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(tile_ptrs(ptr, strides, batch, head, rows, offs_d), mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, strides, value, batch, head, rows, N, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store (rows, BLOCK_D) as those rows of the N of one head, in the tensor's dtype."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(tile_ptrs(ptr, strides, batch, head, rows, offs_d), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def window_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_o, Nq, Nk, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` queries of one head, from the first key that one of them sees to the last."""
    start_m = tl.program_id(0) * BLOCK_M
    head, batch = tl.program_id(1), tl.program_id(2)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, stride_q, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = tl.maximum(start_m + Nk - Nq - window + 1, 0)  # of the first query
    end = tl.minimum(start_m + Nk - Nq + BLOCK_M, Nk)  # behind the last key of the last query
    for start_n in range(first, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # (BLOCK_M, BLOCK_N)
        s = tl.where(in_window(offs_m[:, None], offs_n[None, :], Nq, Nk, window), s, -float("inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_tile(v_ptr, stride_v, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_ij
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = tl.where(l_i == 0, -float("inf"), (m_i + tl.log2(l_i)) * 0.6931471805599453)
    store_tile(o_ptr, stride_o, acc, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)
    tl.store(lse_ptr + (batch * tl.num_programs(1) + head) * Nq + offs_m, lse, mask=offs_m < Nq)


@triton.jit
def window_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, Nq, Nk, window, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of ``BLOCK_N`` keys of a head, from the first query that sees one of them to the last."""
    start_n = tl.program_id(0) * BLOCK_N
    head, batch = tl.program_id(1), tl.program_id(2)
    rows = (batch * tl.num_programs(1) + head) * Nq
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, stride_k, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
    v = load_tile(v_ptr, stride_v, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first = tl.maximum(start_n - (Nk - Nq), 0)  # the first key is its last
    end = tl.minimum(start_n - (Nk - Nq) + BLOCK_N + window - 1, Nq)  # behind the last that sees the last key
    for start_m in range(first, end, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr, stride_q, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)
        do = load_tile(do_ptr, stride_do, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)
        lse = tl.load(lse_ptr + rows + offs_m, mask=offs_m < Nq, other=0.0)
        delta = tl.load(delta_ptr + rows + offs_m, mask=offs_m < Nq, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
        p = tl.exp2((s * scale - lse[None, :]) * 1.4426950408889634)
        # also where a query sees no key: its p is infinite
        p = tl.where(in_window(offs_m[None, :], offs_n[:, None], Nq, Nk, window), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    store_tile(dk_ptr, stride_dk, dk * scale, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
    store_tile(dv_ptr, stride_dv, dv, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)


@triton.jit
def window_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq, Nq, Nk, window, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: dQ of ``BLOCK_M`` queries of one head, from the keys of the forward pass."""
    start_m = tl.program_id(0) * BLOCK_M
    head, batch = tl.program_id(1), tl.program_id(2)
    rows = (batch * tl.num_programs(1) + head) * Nq
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, stride_q, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)
    do = load_tile(do_ptr, stride_do, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)
    lse = tl.load(lse_ptr + rows + offs_m, mask=offs_m < Nq, other=0.0)
    delta = tl.load(delta_ptr + rows + offs_m, mask=offs_m < Nq, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = tl.maximum(start_m + Nk - Nq - window + 1, 0)
    end = tl.minimum(start_m + Nk - Nq + BLOCK_M, Nk)
    for start_n in range(first, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
        v = load_tile(v_ptr, stride_v, batch, head, offs_n, Nk, HEAD_DIM, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        p = tl.exp2((s * scale - lse[:, None]) * 1.4426950408889634)
        p = tl.where(in_window(offs_m[:, None], offs_n[None, :], Nq, Nk, window), p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_tile(dq_ptr, stride_dq, dq * scale, batch, head, offs_m, Nq, HEAD_DIM, BLOCK_D)


### END SOLUTION


def check_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> int:
    """The window, at most all keys; refuses what no function here can take.

    Raises:
        TypeError, ValueError: as :func:`.arguments.check_attention`; shared heads; a window that is no integer above 0.
    """
    check_attention(q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"k and v must have q's {q.shape[1]} heads, got {k.shape[1]}")
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window must be an integer, got {type(window).__name__}")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    return min(window, max(1, k.shape[2]))


def window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in which a query sees ``window`` keys at most, and its logsumexp; no gradient is recorded.

    Args:
        q: (B, H, Nq, D), float32 (multiplied as such, not as TF32), float16 or bfloat16, any strides, D 16 to 256.
        k, v: (B, H, Nk, D) of q's dtype.
        window: Query i sees keys i + Nk - Nq - window < j <= i + Nk - Nq: the last query sees the last key. At least 1.
        scale: Factor of the scores, by default 1 / sqrt(D).

    Returns:
        o, of q's shape and dtype, and L (B, H, Nq) float32, contiguous, the natural logsumexp of each row of scores. A
        query that sees no key has o = 0 and L = -inf.

    Raises:
        TypeError, ValueError: as :func:`check_window`.
    """
    window = check_window(q, k, v, window)
    scale = softmax_scale(scale, q.shape[3])
    ### BEGIN SOLUTION 3.10: the forward pass
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    o = empty_in_order(q)
    lse = torch.empty((B, H, Nq), dtype=torch.float32, device=q.device)
    tile = tuning.forward(D, q.dtype, True, tuning.capability_of(q.device), described=False, anchored=False)
    window_forward_kernel[(triton.cdiv(Nq, tile.m), H, B)](
        q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), Nq, Nk, window, scale * LOG2_E,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o, lse
    ### END SOLUTION


def window_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    window: int,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, each in its shape and dtype; 0 for a query that sees no key and a key that none sees.

    Args:
        q, k, v, window, scale: As :func:`window_attention` took them.
        o, lse: What it returned.
        do: dO, (B, H, Nq, D) of q's dtype, any strides.

    Raises:
        TypeError, ValueError: as :func:`check_window`.
    """
    window = check_window(q, k, v, window)
    scale = softmax_scale(scale, q.shape[3])
    ### BEGIN SOLUTION 3.10: the backward pass
    (B, H, Nq, D), Nk = q.shape, k.shape[2]
    dq, dk, dv = (empty_in_order(x) for x in (q, k, v))
    delta = attention_delta(o, do)
    about = D, q.dtype, True, tuning.capability_of(q.device), False
    tile = tuning.dkdv(*about)
    window_dkdv_kernel[(triton.cdiv(Nk, tile.n), H, B)](
        q, k, v, do, lse, delta, dk, dv, *(x.stride() for x in (q, k, v, do, dk, dv)), Nq, Nk, window, scale,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = tuning.dq(*about)
    window_dq_kernel[(triton.cdiv(Nq, tile.m), H, B)](
        q, k, v, do, lse, delta, dq, *(x.stride() for x in (q, k, v, do, dq)), Nq, Nk, window, scale,
        HEAD_DIM=D, BLOCK_D=tuning.block_d(D), BLOCK_M=tile.m, BLOCK_N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv
    ### END SOLUTION
