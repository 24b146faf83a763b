"""Activations of 16 bits times weights of 4, unpacked in registers: the product of a decode step.

Letters: M rows of activations, N rows of the weight, K columns of both, in groups of 128 that share a scale.

In a decode step each weight is read once and used M times, so that with few rows the product takes as long as its
weights take to read. Four bits are a quarter of sixteen, as long as unpacking keeps up: an H100 reads some 13 bytes in
a cycle of each multiprocessor, 27 codes, and can issue 128 operations on them, fewer than five a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils import runtime  # before triton: it decides between GPU and interpreter
from utils.formats import Quantized

from . import int4_tuning
from .int4_packing import GROUP, PackedInt4, pack_int4
from .int4_unpack import prefetch_lines, unpack_nibbles
from .int4_wide import int4_matmul_wide_kernel
from .tuning import multiprocessors

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["M", "groups", "splits"])
def int4_matmul_kernel(
    x_ptr, codes_ptr, scales_ptr, o_ptr, stride_xm, stride_xk, M, N, groups, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    ASSEMBLY: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_N`` rows of the weight times ``BLOCK_M`` activations, in one of ``splits`` parts of K.

    A step takes ``BLOCK_G`` groups side by side, a warp or more to each, and adds them up at the end. ``EVEN``: the
    tiles divide N and the groups. With ``EARLY`` the program starts while the kernel before it ends: it asks for
    its first ``AHEAD`` groups of weights, which no kernel writes, and only then waits for what that kernel computed.
    """
    dtype = x_ptr.dtype.element_ty
    part, tile_m = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    halfword = tl.arange(0, 32)
    steps = tl.cdiv(groups, BLOCK_G)
    first = steps * part // splits * BLOCK_G
    end = tl.minimum(steps * (part + 1) // splits * BLOCK_G, groups)
    group = first + tl.arange(0, BLOCK_G)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch_lines(codes_ptr, first, end, tl.program_id(0) * BLOCK_N, N, AHEAD, BLOCK_N)
        tl.extra.cuda.gdc_wait()

    place = group[:, None] * tl.cast(N, tl.int64) + row[None, :]  # (BLOCK_G, BLOCK_N)
    codes_ptrs = codes_ptr + place[:, :, None] * 32 + halfword[None, None, :]
    scales_ptrs = scales_ptr + place
    x_ptrs = x_ptr + token.to(tl.int64)[None, None, :] * stride_xm
    x_ptrs += (group[:, None, None] * 128 + halfword[None, :, None]).to(tl.int64) * stride_xk
    inside = (row < N)[None, :]
    asked = (token < M)[None, None, :]

    acc = tl.zeros((BLOCK_G, BLOCK_N, BLOCK_M), tl.float32)
    scales = tl.load(scales_ptrs, mask=inside & (group < end)[:, None], other=0.0)  # (BLOCK_G, BLOCK_N)
    for _ in range(first, end, BLOCK_G):
        present = (group < end)[:, None, None]
        if EVEN:
            codes = tl.load(codes_ptrs)  # (BLOCK_G, BLOCK_N, 32) int16, one piece of memory for each group
        else:
            codes = tl.load(codes_ptrs, mask=inside[:, :, None] & present, other=0)
        group += BLOCK_G
        scales_ptrs += BLOCK_G * tl.cast(N, tl.int64)
        # A step ahead: the compiler loads ahead only what a product reads.
        next_scales = tl.load(scales_ptrs, mask=inside & (group < end)[:, None], other=0.0)
        weights = unpack_nibbles(codes, dtype, ASSEMBLY)
        sums = tl.zeros((BLOCK_G, BLOCK_N, BLOCK_M), tl.float32)
        for j in tl.static_range(4):
            if EVEN:
                x = tl.load(x_ptrs + 32 * j * stride_xk, mask=asked, other=0.0)  # (BLOCK_G, 32, BLOCK_M), from the L2
            else:
                x = tl.load(x_ptrs + 32 * j * stride_xk, mask=asked & present, other=0.0)
            sums = tl.dot(weights[j], x, sums)
        acc += sums * scales[:, :, None]
        scales = next_scales
        codes_ptrs += BLOCK_G * tl.cast(N, tl.int64) * 32
        x_ptrs += BLOCK_G * 128 * stride_xk
    o = tl.sum(acc, 0)  # (BLOCK_N, BLOCK_M)
    o_ptrs = o_ptr + token.to(tl.int64)[None, :] * N + row[:, None]
    if SPLIT:
        o_ptrs += part.to(tl.int64) * M * N
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=(token < M)[None, :] & (row < N)[:, None])


@triton.jit(do_not_specialize=["size"])
def add_parts_kernel(parts_ptr, o_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: ``BLOCK`` elements of the sum over ``PARTS`` tensors of ``size`` elements, always in one order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * tl.cast(size, tl.int64) + place, mask=place < size, other=0.0)  # (BLOCK,)
    tl.store(o_ptr + place, total.to(o_ptr.dtype.element_ty), mask=place < size)


def int4_matmul(x: Tensor, weight: Quantized | PackedInt4, *, tile: int4_tuning.Int4Tile | None = None) -> Tensor:
    """``x @ weight.T`` for a weight of 4 bits: for batches of 1 to 64, which wait for the weights.

    Codes become numbers of x's dtype, exactly, on their way to the tensor cores; products are summed in float32 within
    a group of 128 columns, and the sums are multiplied by the group's scale in float32.

    Args:
        x: (M, K) float16 or bfloat16, any strides.
        weight: (N, K), int4 in blocks of 128. A :class:`utils.formats.Quantized` is packed anew in every call:
            :func:`.int4_packing.pack_int4` does so once.
        tile: instead of :func:`.int4_tuning.int4`'s.

    Returns:
        (M, N) of x's dtype, contiguous.

    Raises:
        TypeError: a dtype, or a weight, that is neither.
        ValueError: shapes, devices or a format that do not fit.
    """
    packed = weight if isinstance(weight, PackedInt4) else pack_int4(weight)
    _check(x, packed)
    M, N = x.shape[0], packed.shape[0]
    o = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if not M * N:
        return o
    tile = tile or int4_tuning.int4(M, N, x.shape[1] // GROUP, multiprocessors(x.device))
    split = tile.splits > 1
    target = torch.empty((tile.splits, M, N), dtype=torch.float32, device=x.device) if split else o
    _launch(x, packed, target, tile)
    if split:
        block = 1024
        add_parts_kernel[(triton.cdiv(M * N, block),)](target, o, M * N, PARTS=tile.splits, BLOCK=block, num_warps=4)
    return o


def _launch(x: Tensor, packed: PackedInt4, target: Tensor, tile: int4_tuning.Int4Tile) -> None:
    """Run the kernel; ``target`` is (M, N), or (splits, M, N)."""
    (M, K), (N, _) = x.shape, packed.shape
    groups = K // GROUP
    grid = triton.cdiv(N, tile.n), tile.splits, triton.cdiv(M, tile.m)
    wide = tile.groups == 1
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.early:
        options["launch_pdl"] = True
    constants = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "SPLIT": tile.splits > 1, "ASSEMBLY": not runtime.INTERPRET}
    constants |= {"EARLY": tile.early, "AHEAD": tile.groups * tile.stages if not wide else 4 * tile.stages}
    constants["AHEAD"] = int4_tuning.power_of_two(constants["AHEAD"])
    if not wide:
        constants["BLOCK_G"] = tile.groups
    kernel = int4_matmul_wide_kernel if wide else int4_matmul_kernel
    kernel[grid](
        x, packed.codes, packed.scales, target, *x.stride(), M, N, groups, tile.splits,
        EVEN=N % tile.n == 0 and groups % tile.groups == 0, **constants, **options,
    )  # fmt: skip


def _check(x: Tensor, packed: PackedInt4) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float16 or bfloat16 tensor, got {got}")
    N, K = packed.shape
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x must have shape (M, {K}) for a weight of shape {(N, K)}, got {tuple(x.shape)}")
    for name, value in (("x", x), ("weight", packed.codes)):
        if value.device.type != runtime.DEVICE.type:
            raise ValueError(f"{name} must be on {runtime.DEVICE} (utils.runtime.DEVICE), got {value.device}")
