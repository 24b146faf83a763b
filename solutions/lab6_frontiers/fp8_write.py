"""Writing the keys and values of a step's tokens, quantised, into their slots of an fp8 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.lab5_serving.paged_arguments import INTEGERS, check_same, check_tensor
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import fp8_tuning
from .fp8_arguments import HALVES, check_fp8_cache
from .fp8_codes import inverse_of_power, narrow, power_below, widen

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: :data:`.fp8_cache.SMALLEST_SCALE`.
SMALLEST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def write_block(
    x_ptr, cache_ptr, scale_ptr, token, offset, written, first, stride_x, stride_c,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head into one block, which holds ``first`` tokens already.

    Args:
        token, offset, written: (BLOCK_SIZE,): where in the step, and where in the block, each of them is, if it is one.
    """
    column = tl.arange(0, BLOCK_D)
    narrower = (column < HEAD_DIM)[None, :]
    place = token.to(tl.int64)[:, None] * stride_x[0] + column.to(tl.int64)[None, :] * stride_x[2]
    mine = written[:, None] & narrower
    x = tl.load(x_ptr + place, mask=mine, other=0.0).to(tl.float32)  # (BLOCK_SIZE, BLOCK_D)
    amax = tl.max(tl.max(tl.abs(x), 1), 0)
    power = power_below(amax)  # 448 = 1.75 * 2^8
    scale = tl.maximum(tl.where(amax <= 1.75 * power, power * 0.00390625, power * 0.0078125), SMALLEST_SCALE)
    scale = tl.where(amax > 0, scale, SMALLEST_SCALE)
    if first > 0:
        held = tl.load(scale_ptr)
        if scale > held:  # a division by a power of two: what is there is rounded again only if it becomes subnormal
            row = tl.arange(0, BLOCK_SIZE)
            there = (row < first)[:, None] & narrower
            old_ptrs = cache_ptr + row.to(tl.int64)[:, None] * stride_c[1] + column.to(tl.int64)[None, :] * stride_c[3]
            old = tl.load(old_ptrs, mask=there, other=0.0 if NATIVE else 0)  # (BLOCK_SIZE, BLOCK_D)
            old = widen(old, NATIVE).to(tl.float32) * ((1.0 if NATIVE else 256.0) * held * inverse_of_power(scale))
            tl.store(old_ptrs, narrow(old, NATIVE), mask=there)
        scale = tl.maximum(scale, held)
    tl.store(scale_ptr, scale)
    cache_ptrs = cache_ptr + offset.to(tl.int64)[:, None] * stride_c[1] + column.to(tl.int64)[None, :] * stride_c[3]
    tl.store(cache_ptrs, narrow(x * inverse_of_power(scale), NATIVE), mask=mine)


@triton.jit(do_not_specialize=["T"])
def write_kv_fp8_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    stride_k, stride_v, stride_kc, stride_vc, stride_slot, T,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: keys or values of one head, of all tokens that a step brings to a block, if its own is the first."""
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token.to(tl.int64) * stride_slot).to(tl.int64)
    before = tl.load(slots_ptr + (token - 1).to(tl.int64) * stride_slot, mask=token > 0, other=-1).to(tl.int64)
    block = slot // BLOCK_SIZE
    leads = (before < 0) | (before // BLOCK_SIZE != block)
    if (slot >= 0) & leads:
        near = token + tl.arange(0, BLOCK_SIZE)
        slots = tl.load(slots_ptr + near.to(tl.int64) * stride_slot, mask=near < T, other=-1).to(tl.int64)
        written = (slots >= 0) & (slots // BLOCK_SIZE == block)
        offset, first = slots % BLOCK_SIZE, (slot % BLOCK_SIZE).to(tl.int32)
        if tl.program_id(2) == 0:
            write_block(
                k_ptr + head * stride_k[1], k_cache_ptr + block * stride_kc[0] + head * stride_kc[2],
                k_scale_ptr + block * stride_kc[4] + head * stride_kc[5], near, offset, written, first,
                stride_k, stride_kc, BLOCK_SIZE, HEAD_DIM, BLOCK_D, NATIVE,
            )  # fmt: skip
        else:
            write_block(
                v_ptr + head * stride_v[1], v_cache_ptr + block * stride_vc[0] + head * stride_vc[2],
                v_scale_ptr + block * stride_vc[4] + head * stride_vc[5], near, offset, written, first,
                stride_v, stride_vc, BLOCK_SIZE, HEAD_DIM, BLOCK_D, NATIVE,
            )  # fmt: skip


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Store each token's key and value, quantised, in its slot, and raise the scales of blocks that they outgrow.

    A token in the first slot of a block begins it anew, with a scale of its own; one in a later slot finds those before
    it in use. Where the scale grows, they are brought to the new one (:mod:`.fp8_cache`).

    Args:
        k, v: (T, G, D), float16 or bfloat16, finite, any strides, D from 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, G, D) float8_e4m3fn, any strides; block_size is a power of two.
        slots: (T,) int64 or int32, different from one another; a token whose slot is -1 is stored nowhere. Tokens of
            one block stand side by side, in the order of their slots.
        k_scale, v_scale: (num_blocks, G) float32.

    Raises:
        TypeError, ValueError: an argument does not fit. That a slot lies in the cache cannot be checked without
            waiting for the GPU.
    """
    check_tensor("k", k, "(T, G, D)", HALVES)
    check_tensor("v", v, "(T, G, D)", (k.dtype,))
    check_same("v", v, tuple(k.shape), "as k")
    check_fp8_cache("k", k, k_cache, v_cache, k_scale, v_scale)
    T, G, D = k.shape
    block_size = k_cache.shape[1]
    check_same("k", k, (T, k_cache.shape[2], D), "as the caches have heads")
    check_tensor("slots", slots, "(T,)", INTEGERS)
    check_same("slots", slots, (T,), f"for {T} tokens")
    if not T:
        return
    native = fp8_tuning.converts_e4m3(k.device)
    if not native:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    write_kv_fp8_kernel[(T, G, 2)](
        k, v, k_cache, v_cache, k_scale, v_scale, slots,
        k.stride(), v.stride(), k_cache.stride() + k_scale.stride(), v_cache.stride() + v_scale.stride(),
        slots.stride(0), T, BLOCK_SIZE=block_size, HEAD_DIM=D, BLOCK_D=fp8_tuning.block_d(D), NATIVE=native,
        num_warps=2,
    )  # fmt: skip
