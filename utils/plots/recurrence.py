"""The recurrence of online softmax as still figures: the surrogate of its sum, and its merges as a tree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from utils.plots.marks import centred
from utils.plots.online import near
from utils.plots.style import ARITHMETIC, HBM, LIMIT, MUTED, ON_CHIP, SMALL, WASTE, bare, figure, ink, mix, styled
from utils.units import number

#: More leaves of a tree than these do not fit side by side.
MOST_LEAVES = 8


@styled
def surrogate_plot(
    scores: Sequence[float],
    maxima: Sequence[float],
    surrogate: Sequence[float],
    final: Sequence[float],
    *,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw scores under their running maximum, and below them the two sums: the surrogate and the one it replaces.

    Args:
        scores: x_1 .. x_N.
        maxima: m_i, the largest of the first i scores.
        surrogate: d'_i = sum over j <= i of exp(x_j - m_i).
        final: d_i = sum over j <= i of exp(x_j - m_N), which needs the maximum of the whole row.

    Raises:
        ValueError: sequences of different lengths or shorter than 2, a sum that is not positive, or two sequences that
            do not end at the same sum.
    """
    series = {"maxima": maxima, "surrogate": surrogate, "final": final}
    for name, values in series.items():
        if len(values) != len(scores) or len(scores) < 2:
            raise ValueError(f"{name} must have one entry for each of the {len(scores)} scores (2 at least)")
    if min(*surrogate, *final) <= 0:
        raise ValueError("both sums are drawn on a logarithmic axis and must be positive")
    if not near(float(surrogate[-1]), float(final[-1])):
        ends = [number(float(v[-1])) for v in (surrogate, final)]
        raise ValueError(f"surrogate and final must end at the same sum, got {ends[0]} and {ends[1]}")
    place = range(1, len(scores) + 1)
    moved = [i for i in place if i == 1 or maxima[i - 1] > maxima[i - 2]]
    fig, (top, low) = figure(title, subtitle=subtitle, rows=2, height=4.2, sharex=True, height_ratios=(1, 1.15))
    top.vlines(place, min(scores) - 1, scores, color=WASTE, linewidth=1)
    top.plot(place, scores, "o", color=HBM, markersize=4)
    top.step(place, maxima, where="post", color=LIMIT, linewidth=1.2)
    top.annotate(
        "running maximum $m_i$", (len(scores), maxima[-1]), (0, 5), textcoords="offset points", ha="right", size=SMALL
    )
    top.set_ylim(min(scores) - 1, max(scores) + 1.6)
    top.set_ylabel("score $x_i$")
    for i in moved[1:]:
        low.axvline(i, color=mix(ON_CHIP, 0.35), linewidth=5, zorder=0)
    low.plot(place, final, color=mix(ARITHMETIC, 0.45), linewidth=1.6)
    low.plot(place, surrogate, color=ARITHMETIC, linewidth=2.6, marker="o", markersize=3)
    right, left = round(0.75 * len(scores)), min(moved[-1] + 1, len(scores))
    low.annotate(
        "surrogate $d'_i$", (right, surrogate[right - 1]), (0, 7), textcoords="offset points", ha="center",
        color=ARITHMETIC,
    )  # fmt: skip
    low.annotate(
        "$d_i$, with the final maximum", (left, final[moved[-1] // 2]), (6, 0), textcoords="offset points", va="top",
        color=ink(mix(ARITHMETIC, 0.45)),
    )  # fmt: skip
    low.margins(y=0.12)
    low.set(yscale="log", xlabel="scores read, $i$", ylabel="sum")
    rescaled = ", ".join(str(i) for i in moved[1:])
    fig.alt = (
        f"{len(scores)} scores under a staircase, their running maximum. Below, two sums on a logarithmic axis: the "
        f"surrogate drops where the maximum rises (scores {rescaled or 'none'}), the sum relative to the final maximum "
        f"climbs from far below; both end at {number(float(final[-1]), 4)}."
    )
    return fig


@styled
def merge_tree(levels: Sequence[Sequence[tuple[float, float]]], *, title: str) -> Figure:
    """Draw a tree of merges: each box holds a pair (m, d), each level the merges of neighbours of the one above it.

    Args:
        levels: pairs of each level, leaves first; an odd one out goes down unchanged. The last level is one pair.

    Raises:
        ValueError: more than 8 leaves, a level of the wrong length, or a pair that is not the merge of its parents.
    """
    levels = [list(level) for level in levels]
    if not levels or not 2 <= len(levels[0]) <= MOST_LEAVES or len(levels[-1]) != 1:
        raise ValueError(f"a tree of merges has 2 to {MOST_LEAVES} leaves and ends in one pair")
    for depth, (above, below) in enumerate(itertools.pairwise(levels), 1):
        if len(below) != (len(above) + 1) // 2:
            raise ValueError(f"level {depth} must hold {(len(above) + 1) // 2} pairs, got {len(below)}")
        for k, pair in enumerate(below):
            wanted = _merged(above[2 * k : 2 * k + 2])
            if not all(map(near, pair, wanted)) and tuple(pair) != wanted:
                raise ValueError(f"level {depth}, pair {k} must be {wanted}, got {tuple(pair)}")
    fig, ax = figure(title, height=0.30 + 0.68 * len(levels), grid="none")
    bare(ax)
    centres = [[float(k) for k in range(len(levels[0]))]]
    for below in levels[1:]:
        above = centres[-1]
        centres.append([sum(above[2 * k : 2 * k + 2]) / len(above[2 * k : 2 * k + 2]) for k in range(len(below))])
    for depth, level in enumerate(levels):
        for k, (m, d) in enumerate(level):
            x, leaf = centres[depth][k], depth == 0
            half = 0.40 if leaf else 0.56
            if not leaf:
                for parent in centres[depth - 1][2 * k : 2 * k + 2]:
                    ax.plot([parent, x], [depth - 1 + 0.27, depth - 0.27], color=ARITHMETIC, linewidth=1.4, zorder=0)
            box = FancyBboxPatch(
                (x - half, depth - 0.25), 2 * half, 0.50, boxstyle="round,pad=0.02,rounding_size=0.08",
                facecolor=mix(HBM, 0.22) if leaf else mix(ON_CHIP, 0.25), edgecolor="none",
            )  # fmt: skip
            ax.add_patch(box)
            centred(ax, x, depth, f"m = {number(m)}\nd = {number(d, 4)}", linespacing=1.2)
        merges = len(levels[depth - 1]) // 2 if depth else 0
        note = "leaves" if not depth else f"step {depth}:\n{merges} merge{'s' * (merges > 1)}"
        ax.text(-0.62, depth, note, ha="right", va="center", size=SMALL, color=MUTED)
    ax.set_xlim(-1.25, len(levels[0]) - 0.5)
    ax.set_ylim(len(levels) - 0.65, -0.35)
    m, d = levels[-1][0]
    fig.alt = (
        f"A tree: {len(levels[0])} leaves, each a pair of maximum and sum, are merged in pairs in {len(levels) - 1} "
        f"steps to one pair, m = {number(m)} and d = {number(d)}."
    )
    return fig


def _merged(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    m = max(pair[0] for pair in pairs)
    return m, sum(d * (math.exp(own - m) if m > -math.inf else 1.0) for own, d in pairs)
