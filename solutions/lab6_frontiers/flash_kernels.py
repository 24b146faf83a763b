"""FlashAttention's kernels for sequences of different lengths in one launch, with windows and sinks.

They are lab 3's in the order of their products, with its anchored loop (exercise 3.9), and load, store and add with its
functions. ``sizes`` holds the tiles of a batch entry, its queries and its keys (where rows are not packed), heads,
tiles of all sequences, numbers that L and delta have of a head (:func:`.visible_tiles.lse_rows`), the window and the
sinks. ``plan_ptr`` is read where rows are packed (:func:`.visible_tiles.plan_of`).
"""

from __future__ import annotations

import torch

from solutions.lab3_flash_attention.flash_backward import load_numbers, probabilities
from solutions.lab3_flash_attention.tiles import (
    add_product,
    kernel_operands,
    load_rows,
    store_rows,
    swizzle_tile,
    tma_compatible,
)
from solutions.lab3_flash_attention.tuning import block_d
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .visible_tiles import key_of, key_tiles, query_range, tile_of, visible

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

#: Rows that a descriptor of documents has for each; all documents together must have fewer.
MOST_ROWS = 2**30
#: Length of the two axes in front of such a descriptor, behind every coordinate that is asked for.
FRONT = 0x7FFF0000


def operands(wanted: bool, packed: bool, *tiles: tuple[torch.Tensor, int]) -> tuple[list, bool]:
    """What the kernels load from, and whether these are descriptors: lab 3's, or those of packed documents.

    A descriptor of the whole row would read past a document's last row into the next. One of documents has two axes in
    front, of strides 2^34 - n and n elements, where n is that of a row. At coordinate 2^30 of the first, coordinate
    ``past`` of the second and 2^30 - N + i of the rows the address is that of row past - N + i: the multiples of 2^64
    bytes vanish, since addresses have 64 bits. Rows are in bounds below 2^30, which is where a document of N rows that
    ends before row ``past`` ends; behind it the hardware gives zeros (Triton calls such a descriptor ragged).
    """
    if not (wanted and packed):
        return kernel_operands(wanted, *tiles)
    tensors = [x for x, _ in tiles]
    if any(x.shape[2] >= MOST_ROWS for x in tensors) or not tma_compatible(*tensors):
        return tensors, False
    return [_describe_documents(x, rows) for x, rows in tiles], True


def _describe_documents(x: torch.Tensor, rows: int) -> TensorDescriptor:
    _, heads, N, columns = x.shape
    # the stride of an axis of one is never used, but must be a legal one
    head, row = x.stride(1) if heads > 1 else 16, x.stride(2) if N > 1 else 16
    shape, strides = [FRONT, FRONT, heads, MOST_ROWS, columns], [2**34 - row, row, head, row, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, rows, block_d(columns)])


@triton.jit
def load_tile(
    source, strides, place, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, ACCESS: tl.constexpr
):
    """Rows from ``start`` on of one head of a sequence: (ROWS, BLOCK_D), zeros behind the sequence's end.

    ``source`` is a pointer or a descriptor (:func:`operands`); ``place`` is the batch entry, the head, the sequence's
    first row and how many it has.
    """
    batch, head, first, N = place
    if ACCESS.use_tma and KIND.packed:  # 1073741824 is 2^30
        tile = source.load([1073741824, first + N, head, 1073741824 - N + start, 0]).reshape(ROWS, BLOCK_D)
    else:
        tile = load_rows(source, strides, batch, head, first + start, first + N, ROWS, BLOCK_D, False, ACCESS)
    return tile


@triton.jit
def scores(
    q, k_ptr, stride_k, keys, start_n, offs_m, factor, limits,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """Scores of the queries ``q`` and the keys from ``start_n`` on, times ``factor``: (BLOCK_M, BLOCK_N) float32.

    They are -inf where a query does not see a key. ``keys`` is the keys' place, ``limits`` what :func:`visible` asks
    for, and in front of it between which keys all queries see all.
    """
    unmasked_from, unmasked_end, Nq, Nk, window, sinks = limits
    k = load_tile(k_ptr, stride_k, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if (start_n + BLOCK_N > unmasked_end) | (start_n < unmasked_from):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        s = tl.where(visible(offs_m[:, None], offs_n[None, :], Nq, Nk, window, sinks, KIND), s, -float("inf"))
    return s


@triton.jit
def anchored_row(
    q, k_ptr, v_ptr, stride_k, stride_v, keys, offs_m, steps, interval, scale_log2, limits,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """A row of tiles with one reference, the maximum of its first tile, as lab 3's: each step adds the values of one
    tile and multiplies the keys of the next.

    ``interval`` is the tile of which each query sees a key, with which the row begins, and the first tile and the end
    of the interval. The scale is positive.

    Returns:
        acc (BLOCK_M, BLOCK_D), m_i and l_i (BLOCK_M,), as the loop with a running maximum leaves them, and whether they
        are usable: one truth value, false if any value came near overflow.
    """
    anchor, first, end = interval
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start_n = key_of(0, anchor, first, end, KIND)
    s = scores(q, k_ptr, stride_k, keys, start_n, offs_m, 1.0, limits, BLOCK_D, BLOCK_N, KIND, ACCESS)
    m_i = tl.maximum(tl.max(s, 1), -1e30) * scale_log2  # finite: a row that sees no key subtracts it from -inf
    # without a tail of its own the last step takes less time, although it multiplies keys that nobody asks for
    TAIL: tl.constexpr = not KIND.window or BLOCK_D > 64
    for step in range(BLOCK_N, steps if TAIL else steps + BLOCK_N, BLOCK_N):
        p = tl.exp2(s * scale_log2 - m_i[:, None])
        l_i += tl.sum(p, 1)
        start_n = key_of(step - BLOCK_N, anchor, first, end, KIND)
        v = load_tile(v_ptr, stride_v, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
        acc = add_product(acc, p.to(v.dtype), v)
        start_n = key_of(step, anchor, first, end, KIND)
        s = scores(q, k_ptr, stride_k, keys, start_n, offs_m, 1.0, limits, BLOCK_D, BLOCK_N, KIND, ACCESS)
    if TAIL and steps > 0:
        p = tl.exp2(s * scale_log2 - m_i[:, None])
        l_i += tl.sum(p, 1)
        start_n = key_of(steps - BLOCK_N, anchor, first, end, KIND)
        v = load_tile(v_ptr, stride_v, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
        acc = add_product(acc, p.to(v.dtype), v)
    # no p is larger than l_i: below the limit all are finite in v's dtype; acc * 0 is 0 where acc is finite
    limit: tl.constexpr = 32768.0 if q.dtype == tl.float16 else 18446744073709551616.0
    usable = (l_i < limit) & (tl.sum(acc * 0.0, 1) == 0.0)
    return acc, m_i, l_i, tl.sum(1 - usable.to(tl.int32), 0) == 0


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, plan_ptr,
    stride_q, stride_k, stride_v, stride_o, sizes, scale, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr, ANCHORED: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` queries of one head of one sequence, against the tiles of keys that they see."""
    heads, tiles, rows, window, sinks = sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]
    t, head = swizzle_tile(tl.program_id(0), tiles, heads, nheads_in_l2)
    # causal: the longest first, so that short ones fill the end
    batch, start_m, first_q, Nq, first_k, Nk, place = tile_of(t, plan_ptr, sizes, KIND.causal, BLOCK_M, KIND)
    keys = (batch, head // GQA_GROUP_SIZE, first_k, Nk)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # (BLOCK_M, BLOCK_D), stays on chip for the whole row of tiles
    q = load_tile(q_ptr, stride_q, (batch, head, first_q, Nq), start_m, BLOCK_M, BLOCK_D, KIND, ACCESS)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a row that sees no key subtracts it from -inf
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    scale_log2 = scale * 1.4426950408889634
    steps, anchor, first, end, unmasked_from, unmasked_end = key_tiles(
        start_m, Nq, Nk, window, sinks, BLOCK_M, BLOCK_N, KIND
    )
    limits = (unmasked_from, unmasked_end, Nq, Nk, window, sinks)
    todo = steps
    if ANCHORED:
        acc, m_i, l_i, done = anchored_row(
            q, k_ptr, v_ptr, stride_k, stride_v, keys, offs_m, steps, (anchor, first, end), scale_log2, limits,
            BLOCK_D, BLOCK_M, BLOCK_N, KIND, ACCESS,
        )  # fmt: skip
        if done:
            todo = 0
        else:  # something overflowed: the whole row again
            m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for step in range(0, todo, BLOCK_N):
        start_n = key_of(step, anchor, first, end, KIND)
        s = scores(q, k_ptr, stride_k, keys, start_n, offs_m, scale_log2, limits, BLOCK_D, BLOCK_N, KIND, ACCESS)
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_tile(v_ptr, stride_v, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
        acc = add_product(acc * alpha[:, None], p.to(v.dtype), v)
        m_i = m_ij
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = tl.where(l_i == 0, -float("inf"), (m_i + tl.log2(l_i)) * 0.6931471805599453)  # back to powers of e
    store_rows(o_ptr, stride_o, acc, batch, head, first_q + start_m, first_q + Nq, BLOCK_M, BLOCK_D, ACCESS)
    store_numbers(lse_ptr + (batch * heads + head).to(tl.int64) * rows + place, offs_m, lse, Nq, BLOCK_M)


@triton.jit
def store_numbers(ptr, row, numbers, N, BLOCK_M: tl.constexpr):
    """Store L or delta of the queries ``row`` (BLOCK_M,) of a sequence, which has N; of its last tile all rows."""
    tl.store(ptr + row, numbers, mask=row < tl.cdiv(N, BLOCK_M) * BLOCK_M)


@triton.jit
def flash_delta_kernel(
    o_ptr, do_ptr, delta_ptr, plan_ptr, stride_o, stride_do, sizes,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: delta of ``BLOCK_M`` queries of one head of one sequence, stored as L is."""
    heads, rows = sizes[3], sizes[5]
    t, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    batch, start_m, first, Nq, _, _, place = tile_of(t, plan_ptr, sizes, False, BLOCK_M, KIND)
    o = load_rows(o_ptr, stride_o, batch, head, first + start_m, first + Nq, BLOCK_M, BLOCK_D, False, ACCESS)
    do = load_rows(do_ptr, stride_do, batch, head, first + start_m, first + Nq, BLOCK_M, BLOCK_D, False, ACCESS)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # (BLOCK_M,)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    store_numbers(delta_ptr + (batch * heads + head).to(tl.int64) * rows + place, offs_m, delta, Nq, BLOCK_M)


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, plan_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, sizes, scale, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of ``BLOCK_N`` keys of one key head, from all queries of its group that see one of them.

    Scores are kept transposed, (BLOCK_N, BLOCK_M), as dV = P^T dO and dK = dS^T Q want them. Without
    ``ACCESS.masked`` whole tiles of L and delta are loaded: masks take registers.
    """
    heads, tiles, rows, window, sinks = sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]
    t, key_head = swizzle_tile(tl.program_id(0), tiles, heads, nheads_in_l2)
    batch, start_n, first_q, Nq, first_k, Nk, place = tile_of(t, plan_ptr, sizes, False, BLOCK_N, KIND)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    keys = (batch, key_head, first_k, Nk)
    k = load_tile(k_ptr, stride_k, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
    v = load_tile(v_ptr, stride_v, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin, end, unmasked_from, unmasked_end = query_range(start_n, Nq, Nk, window, sinks, BLOCK_M, BLOCK_N, KIND)
    for member in range(0, GQA_GROUP_SIZE):
        queries = (batch, key_head * GQA_GROUP_SIZE + member, first_q, Nq)
        before = ((batch * heads + key_head) * GQA_GROUP_SIZE + member).to(tl.int64) * rows + place
        for start_m in range(begin, end, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_ptr, stride_q, queries, start_m, BLOCK_M, BLOCK_D, KIND, ACCESS)
            # beyond the last query they are 0, or any number if loads are not masked: what they give is masked
            lse = load_numbers(lse_ptr + before, offs_m, Nq, ACCESS.masked)  # (BLOCK_M,)
            do = load_tile(do_ptr, stride_do, queries, start_m, BLOCK_M, BLOCK_D, KIND, ACCESS)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            delta = load_numbers(delta_ptr + before, offs_m, Nq, ACCESS.masked)  # (BLOCK_M,)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            p = probabilities(s, lse[None, :], scale, scale * 1.4426950408889634, q.dtype)
            cut = (start_m < unmasked_from) | (start_m + BLOCK_M > unmasked_end)
            if not ACCESS.masked:
                ds = p * (dp - delta[None, :])
                if cut:
                    seen = visible(offs_m[None, :], offs_n[:, None], Nq, Nk, window, sinks, KIND)
                    seen = seen & (offs_m < Nq)[None, :]
                    p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
            else:
                if KIND.causal and cut:
                    seen = visible(offs_m[None, :], offs_n[:, None], Nq, Nk, window, sinks, KIND)
                    p = tl.where(seen, p, 0.0)
                ds = p * (dp - delta[None, :])
            # always true; yet what stands under a condition, the compiler puts behind the loads of the next tile
            if not ACCESS.loads_first or start_m < Nq:
                dv = add_product(dv, p.to(do.dtype), do)
                dk = add_product(dk, ds.to(q.dtype), q)
    row, past = first_k + start_n, first_k + Nk
    store_rows(dk_ptr, stride_dk, dk * scale, batch, key_head, row, past, BLOCK_N, BLOCK_D, ACCESS)
    store_rows(dv_ptr, stride_dv, dv, batch, key_head, row, past, BLOCK_N, BLOCK_D, ACCESS)


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, plan_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq, sizes, scale, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: dQ of ``BLOCK_M`` queries of one head, from the tiles of the forward pass."""
    heads, tiles, rows, window, sinks = sizes[3], sizes[4], sizes[5], sizes[6], sizes[7]
    t, head = swizzle_tile(tl.program_id(0), tiles, heads, nheads_in_l2)
    batch, start_m, first_q, Nq, first_k, Nk, place = tile_of(t, plan_ptr, sizes, KIND.causal, BLOCK_M, KIND)
    queries, keys = (batch, head, first_q, Nq), (batch, head // GQA_GROUP_SIZE, first_k, Nk)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, stride_q, queries, start_m, BLOCK_M, BLOCK_D, KIND, ACCESS)
    do = load_tile(do_ptr, stride_do, queries, start_m, BLOCK_M, BLOCK_D, KIND, ACCESS)
    before = (batch * heads + head).to(tl.int64) * rows + place
    lse = load_numbers(lse_ptr + before, offs_m, Nq, True)  # (BLOCK_M,)
    delta = load_numbers(delta_ptr + before, offs_m, Nq, True)  # (BLOCK_M,)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    steps, anchor, first, end, unmasked_from, unmasked_end = key_tiles(
        start_m, Nq, Nk, window, sinks, BLOCK_M, BLOCK_N, KIND
    )
    for step in range(0, steps, BLOCK_N):
        start_n = key_of(step, anchor, first, end, KIND)
        k = load_tile(k_ptr, stride_k, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
        v = load_tile(v_ptr, stride_v, keys, start_n, BLOCK_N, BLOCK_D, KIND, ACCESS)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        p = probabilities(s, lse[:, None], scale, scale * 1.4426950408889634, q.dtype)
        if (start_n + BLOCK_N > unmasked_end) | (start_n < unmasked_from):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            seen = visible(offs_m[:, None], offs_n[None, :], Nq, Nk, window, sinks, KIND)
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = add_product(dq, ds.to(k.dtype), k)
    store_rows(dq_ptr, stride_dq, dq * scale, batch, head, first_q + start_m, first_q + Nq, BLOCK_M, BLOCK_D, ACCESS)
