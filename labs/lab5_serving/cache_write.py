"""Writing the keys and values of a step's tokens into their slots of the paged cache."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .paged_arguments import FLOATS, INTEGERS, check_cache, check_same, check_tensor, dtype_name

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    stride_kt, stride_kg, stride_kd, stride_vt, stride_vg, stride_vd,
    stride_kcb, stride_kct, stride_kcg, stride_kcd, stride_vcb, stride_vct, stride_vcg, stride_vcd, stride_slot,
    G,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_G`` heads of one token, from the step's keys and values to the slot of that token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * stride_slot).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        head = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)).to(tl.int64)[:, None]
        column = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        inside = (head < G) & (column < HEAD_DIM)
        k = tl.load(
            k_ptr + token * stride_kt + head * stride_kg + column * stride_kd, mask=inside
        )  # (BLOCK_G, BLOCK_D)
        v = tl.load(v_ptr + token * stride_vt + head * stride_vg + column * stride_vd, mask=inside)
        k_slot = k_cache_ptr + block * stride_kcb + offset * stride_kct
        v_slot = v_cache_ptr + block * stride_vcb + offset * stride_vct
        tl.store(k_slot + head * stride_kcg + column * stride_kcd, k, mask=inside)
        tl.store(v_slot + head * stride_vcg + column * stride_vcd, v, mask=inside)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store each token's key and value in its slot of the cache: ``cache[slot // block_size, slot % block_size]``.

    Args:
        k, v: (T, G, D), float32, float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, G, D) of k's dtype, any strides; block_size is a power of two.
        slots: (T,) int64 or int32, different from one another; a token whose slot is -1 is stored nowhere.

    Raises:
        TypeError, ValueError: an argument does not fit. That a slot lies in the cache cannot be checked without
            waiting for the GPU.
    """
    check_tensor("k", k, "(T, G, D)", FLOATS)
    check_tensor("v", v, "(T, G, D)", FLOATS)
    check_same("v", v, tuple(k.shape), "as k")
    check_cache("k", k, k_cache, v_cache)
    if v.dtype != k.dtype:
        raise TypeError(f"v must have k's dtype {dtype_name(k.dtype)}, got {dtype_name(v.dtype)}")
    T, G, D = k.shape
    block_size = k_cache.shape[1]
    check_same("k", k, (T, k_cache.shape[2], D), "as the caches have heads")
    check_tensor("slots", slots, "(T,)", INTEGERS)
    check_same("slots", slots, (T,), f"for {T} tokens")
    if not T:
        return
    block_d = tuning.block_d(D)
    tile = tuning.write(G, block_d)
    write_kv_kernel[(T, triton.cdiv(G, tile.n))](
        k, v, k_cache, v_cache, slots,
        *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(), slots.stride(0), G,
        BLOCK_SIZE=block_size, HEAD_DIM=D, BLOCK_D=block_d, BLOCK_G=tile.n, num_warps=tile.warps,
    )  # fmt: skip
