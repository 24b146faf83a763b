"""The softmax of a warpgroup's tile of scores: the mask, and lab 3's recurrence with a maximum that may lag behind."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .parts import by_eights, exp2


@gluon.jit
def apply_mask(scores, column, row, keys, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where query ``row + i`` (counted so that it sees keys up to its own number) must not see a key."""
    eights, query, eight, place = by_eights(scores)
    last = keys - 1 - column
    if CAUSAL:
        last = gl.minimum(query + (row - column), last)
    eights = gl.where(8 * eight <= last - place, eights, float("-inf"))
    return gl.convert_layout(gl.reshape(eights, scores.shape), LAYOUT)


@gluon.jit
def online_softmax(scores, maximum, total, scale, PARTIAL: gl.constexpr, SLACK: gl.constexpr = 8):
    """Weights of this tile, and what the step does to output, maximum and sum: lab 3's recurrence.

    A row keeps its maximum until a score exceeds it by more than ``SLACK`` powers of two: the softmax is the same for
    any number in the maximum's place, and weights up to 2^8 do no harm. With 0 it is the running maximum.
    """
    highest = gl.max(scores, 1)
    grows = (highest - maximum) * scale > SLACK
    new = gl.where(grows, highest, maximum)
    base = gl.where(new == float("-inf"), 0.0, new) * scale
    weights = exp2(scores * scale - base[:, None])
    shrink = gl.where(grows, exp2(maximum * scale - base), 1.0)
    if PARTIAL:
        part = gl.sum(gl.reshape(weights, [64, weights.shape[1] // 8, 8]), 1)
        rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        total = total * gl.convert_layout(shrink, rows)[:, None] + gl.convert_layout(part, total.type.layout)
    else:
        total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new, total


@gluon.constexpr_function
def multiply_if_needed(count: int) -> str:
    """PTX: multiplies ``count`` numbers, if any row of the warp has a factor other than 1.

    A thread has numbers of two rows; 0 and 2 are not of the same one. Operands: results, numbers, factors.
    """
    copies = " ".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"""{{ .reg .pred needed; .reg .pred other; {copies}
        setp.neu.f32 needed, ${2 * count}, 0f3F800000; setp.neu.f32 other, ${2 * count + 2}, 0f3F800000;
        or.pred needed, needed, other; vote.sync.any.pred needed, needed, 0xffffffff;
        @!needed bra done; {products} done: }}"""


@gluon.constexpr_function
def in_place(count: int) -> str:
    """Constraints of so many results, of as many numbers in the same registers, and of as many factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(out, shrink):
    """out (64, D) times shrink (64,). A warp whose rows all have a factor of 1 skips the products."""
    factors = gl.convert_layout(shrink, gl.SliceLayout(1, out.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        multiply_if_needed(32), in_place(32), [out, factors], gl.float32, is_pure=False, pack=32
    )
