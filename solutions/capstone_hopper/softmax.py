"""The softmax of a warpgroup's tile of scores: the mask, and lab 3's recurrence."""

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


#: Powers of two by which a row's weights may exceed 1 before its maximum is taken anew.
SLACK = gl.constexpr(8.0)


@gluon.constexpr_function
def multiply_if_any_shrinks(count: int) -> str:
    """PTX: ``count`` numbers, times as many factors if one of a warp's rows shrinks; else the numbers.

    A thread has two rows, of which numbers 0 and 2 are.
    """
    lines = "".join(f"mov.f32 ${i}, ${count + i}; " for i in range(count))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count))
    return (
        "{ .reg .pred any, other; " + lines + f"setp.neu.f32 any, ${2 * count}, 0f3F800000; "
        f"setp.neu.f32 other, ${2 * count + 2}, 0f3F800000; or.pred any, any, other; "
        "vote.sync.any.pred any, any, 0xffffffff; @!any bra done; " + products + "done: }"
    )


@gluon.constexpr_function
def operands(count: int) -> str:
    """Constraints: as many results, of which the first operands are the places, and factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(out, shrink, LAZY: gl.constexpr):
    """out (64, D) times shrink (64,); with ``LAZY`` a warp none of whose rows shrinks does nothing."""
    factors = gl.convert_layout(shrink, gl.SliceLayout(1, out.type.layout))[:, None]
    if LAZY:
        result = gl.inline_asm_elementwise(multiply_if_any_shrinks(32), operands(32), [out, factors], gl.float32,
                                           is_pure=False, pack=32)  # fmt: skip
    else:
        result = out * factors
    return result


@gluon.jit
def online_softmax(scores, maximum, total, scale, PARTIAL: gl.constexpr, LAZY: gl.constexpr):
    """Weights of this tile, and what the step does to output, maximum and sum: lab 3's recurrence.

    With ``LAZY`` a row keeps its maximum until one exceeds it by ``SLACK`` powers of two. The softmax is the same for
    any number in the maximum's place.
    """
    new = gl.max(scores, 1)
    if LAZY:
        grows = (new - maximum) * scale > SLACK
        new = gl.where(grows, new, maximum)
    else:
        new = gl.maximum(maximum, new)
    base = gl.where(new == float("-inf"), 0.0, new) * scale
    weights = exp2(scores * scale - base[:, None])
    shrink = exp2(maximum * scale - base)
    if LAZY:
        shrink = gl.where(grows, shrink, 1.0)
    if PARTIAL:
        part = gl.sum(gl.reshape(weights, [64, weights.shape[1] // 8, 8]), 1)
        rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        total = total * gl.convert_layout(shrink, rows)[:, None] + gl.convert_layout(part, total.type.layout)
    else:
        total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new, total
