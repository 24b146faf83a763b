"""Communication beside computation, from spans of a profiler: what hides, and what everybody waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.plots.check import require_data
from utils.plots.labels import legend_below
from utils.plots.marks import box, centred, lanes, readable
from utils.plots.style import ARITHMETIC, INK, LINK, TEXT, WASTE, WASTE_HATCH, WIDTH, figure, mix, styled
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity

#: Words by which names of kernels, operators and profiler ranges of communication are known, in lower case.
COMMUNICATION = (
    "nccl", "gloo", "all_reduce", "allreduce", "all-reduce", "reduce_scatter", "reducescatter", "reduce-scatter",
    "all_gather", "allgather", "all-gather", "broadcast", "all_to_all", "alltoall", "sendrecv", "isend", "irecv",
)  # fmt: skip

Interval = tuple[float, float]


class StreamSpan(NamedTuple):
    """Something that ran on a stream, thread or rank, in seconds from ``start`` to ``end``."""

    name: str
    lane: str
    start: float
    end: float

    @property
    def communicates(self) -> bool:
        """Its name is one of communication."""
        return any(word in self.name.lower() for word in COMMUNICATION)


class Overlap(NamedTuple):
    """How long some spans communicated and computed, and how much of the communication was hidden. In their unit."""

    communication: float
    computation: float
    hidden: float

    @property
    def hidden_share(self) -> float:
        """Of the time in which something is communicated, the share in which something is computed too."""
        return self.hidden / self.communication if self.communication else 1.0

    @property
    def exposed(self) -> float:
        """Time of communication during which nothing is computed."""
        return self.communication - self.hidden


def overlap_of(spans: Iterable[tuple[str, str, float, float]]) -> Overlap:
    """How much of the communication among ``spans`` (name, lane, start, end) runs beside computation."""
    spans = _checked(spans)
    talk = _union([(s.start, s.end) for s in spans if s.communicates])
    work = _union([(s.start, s.end) for s in spans if not s.communicates])
    return Overlap(_length(talk), _length(work), _length(_common(talk, work)))


@styled
def overlap_timeline(spans: Iterable[tuple[str, str, float, float]], *, title: str, subtitle: str = "") -> Figure:
    """Draw spans on their lanes (in order of first appearance), communication in pink, and below them what is exposed.

    Thousands of kernels may be drawn. Times start at the first span. Spans are communication when their name contains a
    word of ``COMMUNICATION``, everything else is computation.

    Args:
        spans: (name, lane, start, end), in seconds; lanes such as "compute stream", "NCCL stream" or "rank 0".
    """
    spans = _checked(spans)
    require_data("overlap_timeline", spans)
    found = overlap_of(spans)
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    whole = (last - first) or 1.0
    names = list(dict.fromkeys(s.lane for s in spans))
    fig, ax = figure(title, subtitle=subtitle, height=0.38 * len(names) + 1.38, grid="none")
    for y, lane in enumerate(names):
        box(ax, 0, y - 0.36, whole, 0.72, mix(WASTE, 0.30))
        for talks in (False, True):
            own = sorted((s for s in spans if s.lane == lane and s.communicates == talks), key=lambda s: s.start)
            _boxes(ax, own, first, whole, y, LINK if talks else ARITHMETIC)
    talk = _union([(s.start, s.end) for s in spans if s.communicates])
    work = _union([(s.start, s.end) for s in spans if not s.communicates])
    hidden = _common(talk, work)
    y, exposed = len(names), {"facecolor": "white", "edgecolor": "#8A8A8A", "hatch": WASTE_HATCH, "linewidth": 0.6}
    for start, end in talk:
        box(ax, start - first, y - 0.2, end - start, 0.4, **exposed)
    for start, end in hidden:
        box(ax, start - first, y - 0.2, end - start, 0.4, mix(LINK, 0.55))
    lanes(ax, [*names, "communication"], whole, margin=0.5)
    ax.tick_params(labelsize=TEXT)
    quantity_axis(ax.xaxis, "s", "time")
    ax.xaxis.label.set_size(TEXT)
    handles = [
        Patch(facecolor=ARITHMETIC, label="computation"),
        Patch(facecolor=LINK, label="communication"),
        Patch(facecolor=mix(LINK, 0.55), label="hidden"),
        Patch(label="exposed", **exposed),
    ]
    legend_below(ax, handles, drop=0.5)
    share = f"{number(100 * found.hidden_share, 3)} %"
    ax.annotate(
        f"{share} of {quantity(float(found.communication), 's', 3)} hidden", (1, y - 0.21),
        xycoords=("axes fraction", "data"), ha="right", va="bottom", size=TEXT, color=INK,
    )  # fmt: skip
    busy = ", ".join(f"{lane} {_busy(spans, lane, whole)}" for lane in names)
    fig.alt = (
        f"{title.rstrip('.')}. Timeline of {quantity(float(whole), 's', 3)}; busy: {busy}. Communication takes "
        f"{quantity(float(found.communication), 's', 3)}, {share} of it beside computation, "
        f"{quantity(float(found.exposed), 's', 3)} exposed."
    )
    return fig


def _boxes(ax, own: Sequence[StreamSpan], first: float, whole: float, y: float, colour: str) -> None:
    """All boxes of a lane at once, in one colour; names are written where they fit."""
    corners = []
    for s in own:
        a, b = s.start - first, s.end - first
        corners.append([(a, y - 0.36), (b, y - 0.36), (b, y + 0.36), (a, y + 0.36)])
        name = s.name if len(s.name) <= 40 else ""
        if name and (WIDTH - 1.4) * (b - a) / whole > 0.086 * len(name) + 0.05:
            centred(ax, (a + b) / 2, y, name, size=TEXT, color=readable(colour), zorder=4)
    edge = "white" if len(own) <= 60 else "none"
    ax.add_collection(PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=0.4, zorder=2))


def _busy(spans: Sequence[StreamSpan], lane: str, whole: float) -> str:
    share = _length(_union([(s.start, s.end) for s in spans if s.lane == lane])) / whole
    return f"{number(100 * share, 3)} %"


def _checked(spans: Iterable[tuple[str, str, float, float]]) -> list[StreamSpan]:
    found = [StreamSpan(*span) for span in spans]
    for s in found:
        if not (math.isfinite(s.start) and s.start <= s.end < math.inf):
            raise ValueError(f"span {s.name!r} on {s.lane!r} needs start <= end, got {s.start} to {s.end}")
    return found


def _union(intervals: list[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Times in both of two unions."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: list[Interval]) -> float:
    return math.fsum(end - start for start, end in intervals)
