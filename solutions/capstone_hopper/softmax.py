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


@gluon.jit
def online_softmax(scores, maximum, total, scale, PARTIAL: gl.constexpr):
    """Weights of this tile, and what the step does to output, maximum and sum: lab 3's recurrence."""
    new = gl.maximum(maximum, gl.max(scores, 1))
    base = gl.where(new == float("-inf"), 0.0, new) * scale
    weights = exp2(scores * scale - base[:, None])
    shrink = exp2(maximum * scale - base)
    if PARTIAL:
        part = gl.sum(gl.reshape(weights, [64, weights.shape[1] // 8, 8]), 1)
        rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        total = total * gl.convert_layout(shrink, rows)[:, None] + gl.convert_layout(part, total.type.layout)
    else:
        total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new, total
