"""What lies between the matrix products of a decoder layer, as three kernels instead of some twenty.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head dimension, I intermediate size.

Each of these operations reads and writes its operands once and computes next to nothing: what it costs is its traffic,
and in a decode step, where a tensor has a few hundred rows, mostly its launch. Sums are in float32; what is rounded is
rounded where :class:`utils.serving.Decoder` rounds, but for the rotation, which is in float32 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Elements of a tile of heads, and of gates, that one program takes.
HEAD_TILE = 4096
GATE_TILE = 1024


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, stride_x, stride_r, stride_y, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One program: one row of C; with ``ADD`` the residual stream takes x up, and the sum is normalised."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)  # (BLOCK,)
    dtype = x.dtype
    if ADD:
        residual = tl.load(residual_ptr + row * stride_r + column, mask=inside, other=0.0)  # (BLOCK,)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + row * stride_r + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)  # (BLOCK,)
    y = (wide * scale).to(dtype).to(tl.float32) * weight
    tl.store(y_ptr + row * stride_y + column, y.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm of x (T, C), or of ``residual + x``, which then replaces ``residual`` (T, C) in place: (T, C)."""
    y = torch.empty_like(x)
    tokens, size = x.shape
    if not tokens:
        return y
    stream = x if residual is None else residual
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(tokens,)](
        x, stream, weight, y, x.stride(0), stream.stride(0), y.stride(0), eps,
        SIZE=size, BLOCK=block, ADD=residual is not None, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return y


@triton.jit
def rotate_and_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, k_cache_ptr, v_cache_ptr,
    stride_t, stride_k, stride_v, eps,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_HEADS`` of the H + G + G heads of one token, as two halves (BLOCK_HEADS, BLOCK_HALF)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)
    narrow = column < HALF
    inside = (head < H + 2 * G) & narrow[None, :]
    place = qkv_ptr + token * stride_t + head * (2 * HALF) + column[None, :]
    low = tl.load(place, mask=inside, other=0.0)  # (BLOCK_HEADS, BLOCK_HALF)
    high = tl.load(place + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    turned_low, turned_high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        squares = tl.sum(turned_low * turned_low, 1) + tl.sum(turned_high * turned_high, 1)  # (BLOCK_HEADS,)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_query = head < H
        low_weight = tl.where(
            is_query,
            tl.load(q_weight_ptr + column, mask=narrow, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight_ptr + column, mask=narrow, other=0.0).to(tl.float32)[None, :],
        )
        high_weight = tl.where(
            is_query,
            tl.load(q_weight_ptr + HALF + column, mask=narrow, other=0.0).to(tl.float32)[None, :],
            tl.load(k_weight_ptr + HALF + column, mask=narrow, other=0.0).to(tl.float32)[None, :],
        )
        turned_low = ((turned_low * scale).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        turned_high = ((turned_high * scale).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + column, mask=narrow, other=0.0)[None, :]  # (1, BLOCK_HALF)
    sin = tl.load(sin_ptr + position * HALF + column, mask=narrow, other=0.0)[None, :]
    first = (turned_low * cos - turned_high * sin).to(dtype)
    second = (turned_high * cos + turned_low * sin).to(dtype)
    tl.store(place, first, mask=inside & (head < H))
    tl.store(place + HALF, second, mask=inside & (head < H))
    slot = tl.load(slots_ptr + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    written = inside & (slot >= 0)
    is_key, is_value = (head >= H) & (head < H + G), head >= H + G
    key = (
        k_cache_ptr
        + block * stride_k[0]
        + offset * stride_k[1]
        + (head - H) * stride_k[2]
        + column[None, :] * stride_k[3]
    )
    tl.store(key, first, mask=written & is_key)
    tl.store(key + HALF * stride_k[3], second, mask=written & is_key)
    value = v_cache_ptr + block * stride_v[0] + offset * stride_v[1]
    value += (head - H - G) * stride_v[2] + column[None, :] * stride_v[3]
    tl.store(value, low, mask=written & is_value)
    tl.store(value + HALF * stride_v[3], high, mask=written & is_value)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """The queries (T, H, D), normalised and turned; keys, likewise, and values go to their slots of the cache.

    Args:
        qkv: (T, (H + 2 G) D): queries, keys and values of each token; the queries are changed in place.
        positions, slots: (T,) int32; a slot of -1 is written nowhere.
        cos, sin: (positions, D/2) float32.
        k_cache, v_cache: (num_blocks, block_size, G, D) of one layer, any strides.
        num_heads: H.
        norms: the weights of queries' and keys' RMSNorm, (D,) each, and its epsilon, where the model has them.
    """
    tokens, half, (_, block_size, groups, head_dim) = len(qkv), cos.shape[1], k_cache.shape
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    heads, block_half = num_heads + 2 * groups, triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(heads), max(1, HEAD_TILE // (2 * block_half)))
    if tokens:
        rotate_and_store_kernel[(tokens, triton.cdiv(heads, block_heads))](
            qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache,
            qkv.stride(0), k_cache.stride(), v_cache.stride(), eps,
            H=num_heads, G=groups, HALF=half, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half,
            BLOCK_SIZE=block_size, NORM=norms is not None, num_warps=4,
        )  # fmt: skip
    return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


@triton.jit
def silu_and_multiply_kernel(
    x_ptr, y_ptr, stride_x, stride_y, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: ``BLOCK`` gates of one token and what they let through."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)  # (BLOCK,)
    up = tl.load(x_ptr + row * stride_x + SIZE + column, mask=inside, other=0.0).to(tl.float32)  # (BLOCK,)
    wide = gate.to(tl.float32)
    opened = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + row * stride_y + column, (opened * up).to(gate.dtype), mask=inside)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of (T, 2 I), gates first: (T, I)."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(GATE_TILE, triton.next_power_of_2(size))
        silu_and_multiply_kernel[(tokens, triton.cdiv(size, block))](
            gate_up, y, gate_up.stride(0), y.stride(0), SIZE=size, BLOCK=block, num_warps=4
        )
    return y
