"""The softmax of a warpgroup's tile of scores: the mask, and lab 3's recurrence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .parts import exp2


@gluon.jit
def hide(scores, column, row, keys, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where query ``row + i`` (counted so that it sees keys up to its own number) must not see a key."""
    offset = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    last = keys - 1 - column
    if CAUSAL:
        own = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)) + (row - column)
        scores = gl.where(offset[None, :] <= gl.minimum(own, last)[:, None], scores, float("-inf"))
    else:
        scores = gl.where((offset <= last)[None, :], scores, float("-inf"))
    return scores


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
