"""Activations of 16 bits times weights of 4, unpacked in registers: the product of a decode step.

Letters: M rows of activations, N rows of the weight, K columns of both, in groups of 128 that share a scale.

In a decode step each weight is read once and used M times, so that with few rows the product takes as long as its
weights take to read. Four bits are a quarter of sixteen, as long as unpacking keeps up: an H100 reads some 13 bytes in
a cycle of each multiprocessor, 27 codes, and can issue 128 operations on them, fewer than five a code.

Up to 8 activations go one way (:mod:`.int4_rows`), more, and few in the interpreter, another (:mod:`.int4_wide`). With
hundreds, the tensor cores set the time, and the weights become 16 bits wide before an ordinary product
(:mod:`.int4_expand`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from utils import runtime  # before triton: it decides between GPU and interpreter
from utils.formats import Quantized

from . import int4_tuning
from .int4_expand import expand_int4
from .int4_packing import GROUP, PackedInt4, arranged
from .int4_rows import AFTER, MOST, ROWS, int4_rows_kernel
from .int4_wide import int4_matmul_wide_kernel
from .tuning import capability_of, multiprocessors

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["size"])
def add_parts_kernel(parts_ptr, o_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: ``BLOCK`` elements of the sum over ``PARTS`` tensors of ``size`` elements, always in one order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * tl.cast(size, tl.int64) + place, mask=place < size, other=0.0)  # (BLOCK,)
    tl.store(o_ptr + place, total.to(o_ptr.dtype.element_ty), mask=place < size)


def int4_matmul(x: Tensor, weight: Quantized | PackedInt4, *, tile: int4_tuning.Int4Tile | None = None) -> Tensor:
    """``x @ weight.T`` for a weight of 4 bits: for batches of 1 to 64, which wait for the weights, and for others.

    Codes become numbers of x's dtype, exactly, on their way to the tensor cores; products are summed in float32 within
    a group of 128 columns, and the sums are multiplied by the group's scale in float32. For more than
    ``int4_tuning.EXPANDED`` activations, weights are rounded to x's dtype.

    Args:
        x: (M, K) float16 or bfloat16, any strides.
        weight: (N, K), int4 in blocks of 128. A :class:`utils.formats.Quantized` is packed anew in every call:
            :func:`.int4_packing.pack_int4` does so once.
        tile: instead of :func:`.int4_tuning.int4`'s, and for few activations, too.

    Returns:
        (M, N) of x's dtype, contiguous.

    Raises:
        TypeError: a dtype, or a weight, that is neither.
        ValueError: shapes, devices or a format that do not fit.
    """
    ready = isinstance(weight, PackedInt4)
    packed = weight if ready else arranged(weight)
    _check(x, packed)
    M, N = x.shape[0], packed.shape[0]
    if tile is None and M > int4_tuning.EXPANDED:
        return F.linear(x, expand_int4(packed, x.dtype))
    o = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if not M * N:
        return o
    if M <= MOST and tile is None and not runtime.INTERPRET:
        _few(x, packed, o, ready)
        return o
    tile = tile or int4_tuning.int4(M, N, x.shape[1] // GROUP, multiprocessors(x.device))
    split = tile.splits > 1
    target = torch.empty((tile.splits, M, N), dtype=torch.float32, device=x.device) if split else o
    _many(x, packed, target, tile)
    if split:
        block = 1024
        add_parts_kernel[(triton.cdiv(M * N, block),)](target, o, M * N, PARTS=tile.splits, BLOCK=block, num_warps=4)
    return o


def _few(x: Tensor, packed: PackedInt4, o: Tensor, ready: bool) -> None:
    """Run the kernel for few activations; ``ready``: the weight has not been written just now."""
    (M, K), N = x.shape, packed.shape[0]
    tile = int4_tuning.few(N, multiprocessors(x.device))
    early = ready and capability_of(x.device) >= (9, 0)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    words = x.view(torch.int32), packed.codes.view(torch.int32)  # two numbers, or eight codes
    options = {"num_warps": tile.warps} | ({"launch_pdl": True} if early else {})
    int4_rows_kernel[(triton.cdiv(N, ROWS),)](
        *words, packed.scales, o, M, N, K // GROUP,
        BLOCK_G=tile.groups, STAGES=tile.stages, DTYPE="bf16" if x.dtype == torch.bfloat16 else "f16",
        NEXT=tile.next if early else AFTER, WARPS=tile.warps, **options,
    )  # fmt: skip


def _many(x: Tensor, packed: PackedInt4, target: Tensor, tile: int4_tuning.Int4Tile) -> None:
    """Run the kernel for any number of activations; ``target`` is (M, N), or (splits, M, N)."""
    (M, K), N = x.shape, packed.shape[0]
    grid = triton.cdiv(N, tile.n), tile.splits, triton.cdiv(M, tile.m)
    int4_matmul_wide_kernel[grid](
        x, packed.codes, packed.scales, target, *x.stride(), M, N, K // GROUP, tile.splits,
        BLOCK_M=tile.m, BLOCK_N=tile.n, EVEN=N % tile.n == 0, SPLIT=tile.splits > 1, ASSEMBLY=not runtime.INTERPRET,
        num_warps=tile.warps, num_stages=tile.stages,
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
