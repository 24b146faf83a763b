"""FlashAttention's three kernels for sequences of different lengths in one launch, with windows and sinks.

They are lab 3's in the order of their products, and load, store and add with its functions. Tiles come through
pointers: a descriptor would read past a document's last row into the next. ``sizes`` holds the number of sequences, the
tiles of each, its queries and its keys (where rows are not packed), heads, tiles of all sequences, rows of the
logsumexp of a head, the window and the sinks.
"""

from __future__ import annotations

from solutions.lab3_flash_attention.flash_backward import load_numbers, probabilities
from solutions.lab3_flash_attention.tiles import add_product, load_rows, store_rows, swizzle_tile
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .visible_tiles import key_of, key_tiles, query_range, sequence_of, visible

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr,
    stride_q, stride_k, stride_v, stride_o, sizes, scale, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_M`` queries of one head of one sequence, against the tiles of keys that they see."""
    heads, tiles, rows, window, sinks = sizes[4], sizes[5], sizes[6], sizes[7], sizes[8]
    t, head = swizzle_tile(tl.program_id(0), tiles, heads, nheads_in_l2)
    batch, tile, own_tiles, first_q, Nq, first_k, Nk = sequence_of(t, table_ptr, sizes, KIND)
    past_q, past_k = first_q + Nq, first_k + Nk
    key_head = head // GQA_GROUP_SIZE
    if KIND.causal:
        tile = own_tiles - 1 - tile  # the longest first, so that short ones fill the end
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # (BLOCK_M, BLOCK_D), stays on chip for the whole row of tiles
    q = load_rows(q_ptr, stride_q, batch, head, first_q + start_m, past_q, BLOCK_M, BLOCK_D, False, ACCESS)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a row that sees no key subtracts it from -inf
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sink_tiles, first, end, unmasked_from, unmasked_end = key_tiles(
        start_m, Nq, Nk, window, sinks, BLOCK_M, BLOCK_N, KIND
    )
    for step in range(0, sink_tiles + end - first):
        start_n = key_of(step, sink_tiles, first, BLOCK_N, KIND)
        k = load_rows(k_ptr, stride_k, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, False, ACCESS)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)  # (BLOCK_M, BLOCK_N)
        if (start_n + BLOCK_N > unmasked_end) | (start_n < unmasked_from):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            seen = visible(offs_m[:, None], offs_n[None, :], Nq, Nk, window, sinks, KIND)
            s = tl.where(seen, s, -float("inf"))
        m_ij = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_ij[:, None])
        alpha = tl.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_rows(v_ptr, stride_v, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, False, ACCESS)
        acc = add_product(acc * alpha[:, None], p.to(v.dtype), v)
        m_i = m_ij
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    lse = tl.where(l_i == 0, -float("inf"), (m_i + tl.log2(l_i)) * 0.6931471805599453)  # back to powers of e
    store_rows(o_ptr, stride_o, acc, batch, head, first_q + start_m, past_q, BLOCK_M, BLOCK_D, ACCESS)
    before = (batch * heads + head).to(tl.int64) * rows + first_q
    tl.store(lse_ptr + before + offs_m, lse, mask=offs_m < Nq)


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, table_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, sizes, scale, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of ``BLOCK_N`` keys of one key head, from all queries of its group that see one of them.

    Scores are kept transposed, (BLOCK_N, BLOCK_M), as dV = P^T dO and dK = dS^T Q want them.
    """
    heads, tiles, rows, window, sinks = sizes[4], sizes[5], sizes[6], sizes[7], sizes[8]
    t, key_head = swizzle_tile(tl.program_id(0), tiles, heads, nheads_in_l2)
    batch, tile, _, first_q, Nq, first_k, Nk = sequence_of(t, table_ptr, sizes, KIND)
    past_q, past_k = first_q + Nq, first_k + Nk
    start_n = tile * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, stride_k, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, False, ACCESS)
    v = load_rows(v_ptr, stride_v, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, False, ACCESS)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin, end, unmasked_from, unmasked_end = query_range(start_n, Nq, Nk, window, sinks, BLOCK_M, BLOCK_N, KIND)
    for member in range(0, GQA_GROUP_SIZE):
        head = key_head * GQA_GROUP_SIZE + member
        before = ((batch * heads + key_head) * GQA_GROUP_SIZE + member).to(tl.int64) * rows + first_q
        for start_m in range(begin, end, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            row = first_q + start_m
            q = load_rows(q_ptr, stride_q, batch, head, row, past_q, BLOCK_M, BLOCK_D, False, ACCESS)
            # beyond the last query q, dO, L and delta are 0: p is 1, and adds 0 to both gradients
            lse = load_numbers(lse_ptr + before, offs_m, Nq, True)  # (BLOCK_M,)
            do = load_rows(do_ptr, stride_do, batch, head, row, past_q, BLOCK_M, BLOCK_D, False, ACCESS)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            p = probabilities(s, lse[None, :], scale, scale * 1.4426950408889634, q.dtype)
            if KIND.causal:  # noqa: SIM102  (the first decides what is compiled, the second what runs)
                if (start_m < unmasked_from) | (start_m + BLOCK_M > unmasked_end):
                    seen = visible(offs_m[None, :], offs_n[:, None], Nq, Nk, window, sinks, KIND)
                    p = tl.where(seen, p, 0.0)
            delta = load_numbers(delta_ptr + before, offs_m, Nq, True)  # (BLOCK_M,)
            ds = p * (dp - delta[None, :])
            dv = add_product(dv, p.to(do.dtype), do)
            dk = add_product(dk, ds.to(q.dtype), q)
    store_rows(dk_ptr, stride_dk, dk * scale, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, ACCESS)
    store_rows(dv_ptr, stride_dv, dv, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, ACCESS)


@triton.jit(do_not_specialize=["nheads_in_l2"])
def flash_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, table_ptr,
    stride_q, stride_k, stride_v, stride_do, stride_dq, sizes, scale, nheads_in_l2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GQA_GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """One program: dQ of ``BLOCK_M`` queries of one head, from the tiles of the forward pass."""
    heads, tiles, rows, window, sinks = sizes[4], sizes[5], sizes[6], sizes[7], sizes[8]
    t, head = swizzle_tile(tl.program_id(0), tiles, heads, nheads_in_l2)
    batch, tile, own_tiles, first_q, Nq, first_k, Nk = sequence_of(t, table_ptr, sizes, KIND)
    past_q, past_k = first_q + Nq, first_k + Nk
    key_head = head // GQA_GROUP_SIZE
    if KIND.causal:
        tile = own_tiles - 1 - tile  # the longest first
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, stride_q, batch, head, first_q + start_m, past_q, BLOCK_M, BLOCK_D, False, ACCESS)
    do = load_rows(do_ptr, stride_do, batch, head, first_q + start_m, past_q, BLOCK_M, BLOCK_D, False, ACCESS)
    before = (batch * heads + head).to(tl.int64) * rows + first_q
    lse = load_numbers(lse_ptr + before, offs_m, Nq, True)  # (BLOCK_M,)
    delta = load_numbers(delta_ptr + before, offs_m, Nq, True)  # (BLOCK_M,)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sink_tiles, first, end, unmasked_from, unmasked_end = key_tiles(
        start_m, Nq, Nk, window, sinks, BLOCK_M, BLOCK_N, KIND
    )
    for step in range(0, sink_tiles + end - first):
        start_n = key_of(step, sink_tiles, first, BLOCK_N, KIND)
        k = load_rows(k_ptr, stride_k, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, False, ACCESS)
        v = load_rows(v_ptr, stride_v, batch, key_head, first_k + start_n, past_k, BLOCK_N, BLOCK_D, False, ACCESS)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        p = probabilities(s, lse[:, None], scale, scale * 1.4426950408889634, q.dtype)
        if (start_n + BLOCK_N > unmasked_end) | (start_n < unmasked_from):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            seen = visible(offs_m[:, None], offs_n[None, :], Nq, Nk, window, sinks, KIND)
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = add_product(dq, ds.to(k.dtype), k)
    store_rows(dq_ptr, stride_dq, dq * scale, batch, head, first_q + start_m, past_q, BLOCK_M, BLOCK_D, ACCESS)
