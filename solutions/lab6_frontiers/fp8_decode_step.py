"""The loop of the decode kernel over an fp8 cache: each warp attends to tokens of its own.

Letters: W warps, M rows of queries (8 or 16), N tokens of a warp, D head dimension. Every tensor has the warps on its
first axis, and every product is W products of one shape, of which Triton gives each warp one.
"""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .fp8_codes import inverse_of_power, widen

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def first_rows(x, M: tl.constexpr):
    """The first ``M`` of 16 rows, (W, 16, N) -> (W, M, N): a tensor core takes 16, half of which may be padding."""
    if M == 8:
        halves = tl.reshape(x, (x.shape[0], 2, 8, x.shape[2]))
        x, _ = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return x


@triton.jit
def per_token(per_piece, PIECE: tl.constexpr):
    """A number of each piece (W, PIECES) for each of its tokens, (W, 1, PIECES * PIECE)."""
    W: tl.constexpr = per_piece.shape[0]
    PIECES: tl.constexpr = per_piece.shape[1]
    return tl.reshape(tl.broadcast_to(per_piece[:, :, None], (W, PIECES, PIECE)), (W, 1, PIECES * PIECE))


@triton.jit
def key_order(PIECE: tl.constexpr):
    """Which token of a piece each column of the scores belongs to: column 8 j + 2 l + r to token 4 l + 2 j + r.

    Of each 16 columns lane l of four computes those with j and r from 0 to 1, whatever tokens their keys belong to. In
    this order they are four tokens side by side, and these are the tokens whose values the lane multiplies, since it
    reads four values, of a byte each, at once.
    """
    column = tl.arange(0, PIECE)
    if PIECE >= 16:
        column = (column & ~15) + ((column >> 1) & 3) * 4 + ((column >> 3) & 1) * 2 + (column & 1)
    return column


@triton.jit
def by_token(p, PIECE: tl.constexpr):
    """Weights (W, M, N) from :func:`key_order` to the order of tokens: each stays in its register."""
    if PIECE >= 16:
        W: tl.constexpr = p.shape[0]
        M: tl.constexpr = p.shape[1]
        N: tl.constexpr = p.shape[2]
        p = tl.permute(tl.reshape(p, (W, M, N // 16, 2, 4, 2)), (0, 1, 2, 4, 3, 5))
        p = tl.reshape(p, (W, M, N))
    return p


@triton.jit
def power_of_largest(v_scale):
    """The power of two at or below the largest scale of each warp, (W, PIECES) -> (W, 1), but at most 2^126.

    Dividing by it is multiplying by its inverse, which float32 holds.
    """
    bits = tl.max(v_scale, 1, keep_dims=True).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(bits, 0x7E800000).to(tl.float32, bitcast=True)


@triton.jit
def attend_by_warps(
    q, m, d, o, largest, start, end, factor, k_head_ptr, v_head_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    stride_k: tl.constexpr, stride_v: tl.constexpr,
    N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One step of the loop: the W * N tokens from ``start`` on; with ``MASKED`` none is there from ``end`` on.

    ``q`` is (W, 16, D), ``m`` and ``d`` are (W, M), ``factor`` is (1, M, 1). Strides are those of a cache's four axes,
    then those of its scales' two. A piece is a block, or N tokens of a larger one.

    ``o`` (W, D, M) is a multiple of ``largest`` (W, 1), a power of two near the largest scale of values so far: a
    weight times its own scale over this is below 4, whatever the scales are, and does not vanish in float16.
    """
    W: tl.constexpr = m.shape[0]
    M: tl.constexpr = m.shape[1]
    PIECE: tl.constexpr = min(N, BLOCK_SIZE)
    PIECES: tl.constexpr = N // PIECE
    PER_BLOCK: tl.constexpr = BLOCK_SIZE // PIECE
    piece = start // PIECE + tl.arange(0, W)[:, None] * PIECES + tl.arange(0, PIECES)[None, :]  # (W, PIECES)
    present = piece * PIECE < end
    if MASKED:
        block = tl.load(table_ptr + piece // PER_BLOCK, mask=present, other=0).to(tl.int64)
        k_scale = tl.load(k_scale_ptr + block * stride_k[4], mask=present, other=0.0)
        v_scale = tl.load(v_scale_ptr + block * stride_v[4], mask=present, other=0.0)
    else:
        block = tl.load(table_ptr + piece // PER_BLOCK).to(tl.int64)
        k_scale = tl.load(k_scale_ptr + block * stride_k[4])
        v_scale = tl.load(v_scale_ptr + block * stride_v[4])
    offset_k, offset_v = key_order(PIECE), tl.arange(0, PIECE)
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    slot_k = offset_k.to(tl.int64)[:, None] * stride_k[1] + column[None, :] * stride_k[3]  # (PIECE, BLOCK_D)
    slot_v = offset_v.to(tl.int64)[:, None] * stride_v[1] + column[None, :] * stride_v[3]
    inside = (piece % PER_BLOCK * PIECE).to(tl.int64)
    k_ptrs = k_head_ptr + (block * stride_k[0] + inside * stride_k[1])[:, :, None, None] + slot_k[None, None, :, :]
    v_ptrs = v_head_ptr + (block * stride_v[0] + inside * stride_v[1])[:, :, None, None] + slot_v[None, None, :, :]
    token_k = (piece * PIECE)[:, :, None] + offset_k[None, None, :]  # (W, PIECES, PIECE)
    token_v = (piece * PIECE)[:, :, None] + offset_v[None, None, :]
    narrow = (column < HEAD_DIM)[None, None, None, :]
    zero = 0.0 if NATIVE else 0
    if MASKED:  # keys of tokens that are there, and values of pieces: a mask by token would make a load of each byte
        k = tl.load(k_ptrs, mask=(token_k < end)[:, :, :, None] & narrow, other=zero)
        v = tl.load(v_ptrs, mask=present[:, :, None, None] & narrow, other=zero)
    elif HEAD_DIM == BLOCK_D:
        k = tl.load(k_ptrs)  # (W, PIECES, PIECE, BLOCK_D)
        v = tl.load(v_ptrs)  # (W, PIECES, PIECE, BLOCK_D)
    else:
        k = tl.load(k_ptrs, mask=narrow, other=zero)
        v = tl.load(v_ptrs, mask=narrow, other=zero)
    k = widen(tl.reshape(k, (W, N, BLOCK_D)), NATIVE)
    s = first_rows(tl.dot(q, tl.permute(k, (0, 2, 1))), M)  # (W, M, N)
    s = s * per_token(k_scale, PIECE) * factor
    if MASKED:
        s = tl.where(tl.reshape(token_k < end, (W, 1, N)), s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 2))
    p = tl.exp2(s - m_new[:, :, None])
    rescale = tl.exp2(m - m_new)
    d = d * rescale + tl.sum(p, 2)
    largest_new = tl.maximum(largest, power_of_largest(v_scale))
    inverse = inverse_of_power(largest_new)
    p = (p * per_token(v_scale * inverse, PIECE)).to(tl.float16)
    v = widen(tl.reshape(v, (W, N, BLOCK_D)), NATIVE)
    if MASKED:  # what lies behind the context may be NaN, and a weight of 0 does not remove that
        v = tl.where(tl.reshape(token_v < end, (W, N, 1)), v, 0.0)
    o = o * (rescale * (largest * inverse))[:, None, :]
    o = tl.dot(tl.permute(v, (0, 2, 1)), tl.permute(by_token(p, PIECE), (0, 2, 1)), o)
    return m_new, d, o, largest_new


@triton.jit
def merge_warps(m, d, o, largest):
    """What the warps found, as if one had seen all tokens: m (M,), d (M,), o (D, M) and the largest, a number."""
    m_all = tl.max(m, 0)
    largest_all = tl.max(largest)
    weight = tl.exp2(m - m_all[None, :])  # (W, M)
    o = tl.sum(o * (weight * (largest * inverse_of_power(largest_all)))[:, None, :], 0)
    return m_all, tl.sum(d * weight, 0), o, largest_all
