"""Softmax of long rows at the speed of short ones: many programs share a row and tell each other what they saw.

Not an exercise: it goes beyond what a kernel may usually do. Programs normally know nothing of each other, because
nothing says that two of them run at the same time. A *cooperative* launch does: either all programs of the grid are on
the GPU together or the launch fails. Then one may wait for another.

A row is cut into parts that fit a program's registers. Each program finds the maximum and the sum of exponentials of
its part and publishes both, as one 64-bit word, which memory reads and writes whole; a word of zeros says "not yet".
Then it turns to the row before, whose words have arrived in the meantime, and scales its part of that. It reads that
part a second time, but so soon that most of it still lies in the L2 cache: HBM is read once.
"""

from __future__ import annotations

import torch

from utils import runtime

from . import tuning
from .rows import Rows, along, row_offset

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def publish(words_ptr, row, part, parts, x):
    """Write the maximum of ``x`` and the sum of exponentials relative to it as word ``part`` of ``row``."""
    maximum = tl.maximum(tl.max(x, axis=0), -3.4028234663852886e38)  # finite, so that a part of -inf adds up to 0
    total = tl.sum(tl.exp(x - maximum), axis=0)
    high = maximum.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(words_ptr + row * parts + part, high | low, sem="relaxed")


@triton.jit
def gather(words, place, mask):
    """Maximum of a whole row and the reciprocal of its sum, once every part has published its word at ``place``."""
    while tl.sum((words == 0).to(tl.int32), axis=0) > 0:  # some part is not there yet: look again
        words = tl.load(place, mask=mask, other=-1, volatile=True)
    maxima = tl.where(mask, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    totals = tl.where(mask, (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    maximum = tl.max(maxima, axis=0)
    return maximum, 1 / tl.sum(totals * tl.exp(maxima - maximum), axis=0)


@triton.jit
def spread_softmax_kernel(
    x_ptr, out_ptr, words_ptr, num_rows, columns, parts, size_1, size_2, stride_0, stride_1, stride_2, step,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: part ``program_id % parts`` of every ``groups``-th row; ``parts`` programs make up a group.

    While it works on ``row``, its part of the next row is loading, and its part of the row before waits to be scaled.
    """
    part = tl.program_id(0) % parts
    first = (tl.program_id(0) // parts).to(tl.int64)
    groups = tl.num_programs(0) // parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    place = along(column, step, WIDE)
    word = tl.arange(0, PARTS)
    first_row = x_ptr + row_offset(first, size_1, size_2, stride_0, stride_1, stride_2)
    x = tl.load(first_row + place, mask=mask, other=-float("inf"), eviction_policy="evict_last")  # (BLOCK,)
    for row in range(first, num_rows + groups, groups):
        before = row - groups
        next_row = x_ptr + row_offset(row + groups, size_1, size_2, stride_0, stride_1, stride_2)
        row_before = x_ptr + row_offset(before, size_1, size_2, stride_0, stride_1, stride_2)
        if EARLY:  # its latency overlaps with the next row's, at the price of registers
            again = tl.load(
                row_before + place, mask=mask & (before >= 0), eviction_policy="evict_first"
            )  # (BLOCK,), from L2
        words_before = words_ptr + before * parts + word
        ahead = tl.load(
            next_row + place, mask=mask & (row + groups < num_rows), other=-float("inf"), eviction_policy="evict_last"
        )  # (BLOCK,), to stay in the L2 cache
        words = tl.load(words_before, mask=(word < parts) & (before >= 0), other=-1, volatile=True)  # (PARTS,)
        if row < num_rows:
            publish(words_ptr, row, part, parts, x.to(tl.float32))
        x = ahead
        if before >= 0:
            if not EARLY:
                again = tl.load(row_before + place, mask=mask, eviction_policy="evict_first")  # (BLOCK,), from L2
            maximum, scale = gather(words, words_before, word < parts)
            y = (tl.exp(again.to(tl.float32) - maximum) * scale).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + before * columns + column, y, mask=mask, eviction_policy="evict_first")


def _programs_at_once(x: torch.Tensor, shared: tuning.Shared) -> int:
    """How many programs of :func:`spread_softmax` the GPU of ``x`` holds at the same time."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count * shared.programs_per_sm


def spread_fits(x: torch.Tensor, columns: int) -> bool:
    """Whether rows of ``columns`` elements are shared out to no more programs than the GPU holds at once."""
    if runtime.INTERPRET:  # one program at a time: nobody to wait for
        return False
    shared = tuning.spread_softmax(columns, x.element_size())
    return triton.cdiv(columns, shared.block) <= _programs_at_once(x, shared)


def spread_softmax(x: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Write the softmax of the ``rows`` of ``x`` to ``out`` (contiguous).

    The caller has seen that :func:`spread_fits`; needs a GPU.
    """
    shared = tuning.spread_softmax(rows.columns, x.element_size())
    parts = triton.cdiv(rows.columns, shared.block)
    groups = min(rows.count, _programs_at_once(x, shared) // parts)
    words = torch.zeros(rows.count, parts, dtype=torch.int64, device=x.device)
    spread_softmax_kernel[(groups * parts,)](
        x, out, words, rows.count, rows.columns, parts, *rows.place,
        PARTS=tuning.power_of_two(parts), BLOCK=shared.block, WIDE=rows.wide, EARLY=shared.early,
        num_warps=shared.warps, maxnreg=shared.registers, launch_cooperative_grid=True,
    )  # fmt: skip
    return out
