"""Softmax of long rows at the speed of short ones: several programs share a row and exchange (maximum, sum).

Not an exercise: it goes beyond what a kernel may usually do. Programs normally know nothing of each other, because
nothing says in which order they start, nor that two of them run at the same time. Here each program first draws a
*ticket*, the next number of a counter in memory, and works on the part of a row that the ticket names. Parts are then
begun in order, so that whoever waits for another part of its row waits for a program that runs already, or that starts
as soon as an earlier row is done. It is enough that the GPU holds as many programs as a row has parts.

A program keeps its part in registers, so that HBM is read once. It publishes the maximum of its part and the sum of
exponentials relative to it in one 64-bit word, which memory reads and writes whole; a word of zeros says "not yet".
When the words of all parts of its row are there, they give the maximum and the sum of the row, and it scales its part.

What hides the waiting is that other programs of the SM load their parts meanwhile: the more of them fit, the better.
Therefore two 16-bit elements stay together in a 32-bit register where rows allow it, and every exponential is computed
twice rather than kept.
"""

from __future__ import annotations

import torch

from utils import runtime

from . import tuning
from .rows import Rows, col_offset, row_offset

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: The lowest finite maximum, so that a part of nothing but -inf adds up to 0 instead of NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
#: log2(e) less its nearest float32.
LOG2_E_REST = tl.constexpr(1.925963033500011e-08)


@triton.jit
def publish(words_ptr, turn, reference, total):
    """Write as word ``turn`` the sum of the powers 2^(x log2(e) - reference) of a part, and their reference."""
    high = reference.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(words_ptr + turn, high | low, sem="relaxed")


@triton.jit
def exponential(x):
    """exp(x) for x <= 0 to about a unit in the last place.

    The hardware has powers of 2 only, and x log2(e) rounded is off by up to x / 2^24. What rounding and the constant
    lose is worked out and put back: 2^(high + low) = 2^high + 2^high ln(2) low for a tiny low.
    """
    high = x * LOG2_E
    low = tl.fma(x, LOG2_E, -high) + x * LOG2_E_REST
    power = tl.exp2(high)
    return tl.where(power > 0, tl.fma(power, 0.6931471805599453 * low, power), power)  # of -inf, low is NaN


@triton.jit
def gather(words_ptr, parts, PARTS: tl.constexpr, NATURAL: tl.constexpr):
    """Reference and sum of a whole row, once all its parts have published at ``words_ptr``.

    ``NATURAL``: references are exponents of e, not of 2.
    """
    word = tl.arange(0, PARTS)
    words = tl.load(words_ptr + word, mask=word < parts, other=-1, volatile=True)
    while tl.sum((words == 0).to(tl.int32), axis=0) > 0:  # some part is not there yet: look again
        words = tl.load(words_ptr + word, mask=word < parts, other=-1, volatile=True)
    references = tl.where(word < parts, (words >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    totals = tl.where(word < parts, (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    reference = tl.max(references, axis=0)
    share = exponential(references - reference) if NATURAL else tl.exp2(references - reference)
    return reference, tl.sum(totals * share, axis=0)


@triton.jit
def unpair(pairs, BF16: tl.constexpr):
    """The two elements of each 32-bit word, in float32.

    In assembly, because the compiler would otherwise unpack once and keep both in registers of their own.
    """
    if BF16:  # the upper half of a float32
        low, high = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r", [pairs], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=r,=r,r", [pairs], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def pair(low, high, BF16: tl.constexpr):
    """Two float32 numbers, rounded to 16 bits, in one 32-bit word."""
    if BF16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def multi_cta_softmax_kernel(
    x_ptr, out_ptr, words_ptr, columns, parts, size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: the part of ``BLOCK`` columns that its ticket names. ``words_ptr``: the counter, then the words."""
    turn = tl.atomic_add(words_ptr, 1, sem="relaxed").to(tl.int32)
    row, part = (turn // parts).to(tl.int64), turn % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    x = tl.load(
        x_row + col_offset(column, stride_col, INT64), mask=mask, other=-float("inf"), eviction_policy="evict_first"
    )  # (BLOCK,), once
    x = x.to(tl.float32)
    maximum = tl.maximum(tl.max(x, axis=0), LOWEST)
    numerator = exponential(x - maximum)
    publish(words_ptr + 1, turn, maximum, tl.sum(numerator, axis=0))
    reference, total = gather(words_ptr + 1 + row * parts, parts, PARTS, True)
    y = numerator * (exponential(maximum - reference) / total)
    tl.store(out_ptr + row * columns + column, y.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def multi_cta_pairs_softmax_kernel(
    x_ptr, out_ptr, words_ptr, columns, parts, size_1, size_2, stride_0, stride_1, stride_2,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """The same for rows of pairs of 16-bit elements; ``NOTHING`` is a pair of -inf, ``BLOCK`` still counts elements.

    The exponent is one multiplication and subtraction, x log2(e) - reference, rounded once: any reference will do as
    long as numerator and sum share it. (A maximum beyond 2.3e38, which only bfloat16 holds, overflows it to NaN.)
    """
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    turn = tl.atomic_add(words_ptr, 1, sem="relaxed").to(tl.int32)
    row, part = (turn // parts).to(tl.int64), turn % parts
    column = part * (BLOCK // 2) + tl.arange(0, BLOCK // 2)  # of pairs
    mask = column < columns // 2
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    x_ptrs = x_row.to(tl.pointer_type(tl.int32), bitcast=True) + column
    x = tl.load(x_ptrs, mask=mask, other=NOTHING, eviction_policy="evict_first")  # (BLOCK // 2,) pairs, once
    low, high = unpair(x, BF16)
    reference = tl.maximum(tl.max(tl.maximum(low, high), axis=0) * LOG2_E, LOWEST)
    low, high = unpair(x, BF16)
    powers = tl.exp2(low * LOG2_E - reference) + tl.exp2(high * LOG2_E - reference)
    publish(words_ptr + 1, turn, reference, tl.sum(powers, axis=0))
    reference, total = gather(words_ptr + 1 + row * parts, parts, PARTS, False)
    scale = 1 / total
    low, high = unpair(x, BF16)
    y = pair(tl.exp2(low * LOG2_E - reference) * scale, tl.exp2(high * LOG2_E - reference) * scale, BF16)
    out_row = (out_ptr + row * columns).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(out_row + column, y, mask=mask, eviction_policy="evict_first")


#: Two elements of -inf as one 32-bit integer.
_NOTHING = {torch.float16: 0xFC00FC00 - (1 << 32), torch.bfloat16: 0xFF80FF80 - (1 << 32)}


def in_pairs(x: torch.Tensor, rows: Rows) -> bool:
    """Whether every row of ``x`` is a row of 32-bit words, each two elements that follow one another in memory."""
    even = (rows.columns, *rows.strides, x.storage_offset())
    return x.element_size() == 2 and rows.stride_col == 1 and x.data_ptr() % 4 == 0 and all(n % 2 == 0 for n in even)


def multi_cta_fits(x: torch.Tensor, columns: int) -> bool:
    """Whether the GPU of ``x`` holds as many programs at once as a row of ``columns`` elements has parts."""
    if runtime.INTERPRET:  # one program at a time: nobody to wait for
        return False
    shared = tuning.multi_cta_softmax(columns, pairs=False)  # the fewest programs
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count * shared.programs_per_sm
    return triton.cdiv(columns, shared.block) <= programs


def multi_cta_softmax(x: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Write the softmax of the ``rows`` of ``x`` to ``out`` (contiguous).

    The caller has seen that :func:`multi_cta_fits`; needs a GPU.
    """
    pairs = in_pairs(x, rows)
    shared = tuning.multi_cta_softmax(rows.columns, pairs)
    parts = triton.cdiv(rows.columns, shared.block)
    words = torch.zeros(1 + rows.count * parts, dtype=torch.int64, device=x.device)
    options = {"num_warps": shared.warps, "maxnreg": shared.registers}
    several = tuning.power_of_two(parts)
    grid = (rows.count * parts,)
    if pairs:
        multi_cta_pairs_softmax_kernel[grid](
            x, out, words, rows.columns, parts, *rows.sizes, *rows.strides,
            PARTS=several, BLOCK=shared.block, NOTHING=_NOTHING[x.dtype], **options,
        )  # fmt: skip
    else:
        multi_cta_softmax_kernel[grid](
            x, out, words, rows.columns, parts, *rows.layout_args,
            PARTS=several, BLOCK=shared.block, INT64=rows.needs_int64, **options,
        )  # fmt: skip
    return out
