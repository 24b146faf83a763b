"""Who does what when: spans on lanes, for streams, ranks, requests and pipeline stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from utils.plots.marks import box, centred, lanes, readable
from utils.plots.style import ARITHMETIC, IDLE, figure, styled
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity


@dataclass(frozen=True)
class Span:
    """Work on a lane from ``start`` to ``end``; ``text`` is written inside where it fits."""

    lane: str
    start: float
    end: float
    text: str = ""
    colour: str = ARITHMETIC

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start < self.end < math.inf):
            raise ValueError(f"a span on {self.lane!r} needs start < end, got {self.start} to {self.end}")


@styled
def timeline(spans: Sequence[Span], *, title: str) -> Figure:
    """Draw spans on their lanes (in order of first appearance); between them a lane waits, in light grey.

    Raises:
        ValueError: two spans that overlap on one lane.
    """
    names = list(dict.fromkeys(s.lane for s in spans))
    first, last = min(s.start for s in spans), max(s.end for s in spans)
    fig, ax = figure(title, height=0.34 * len(names) + 0.75, grid="none")
    said = []
    for y, lane in enumerate(names):
        own = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        for a, b in itertools.pairwise(own):
            if b.start < a.end - 1e-9 * (last - first):
                raise ValueError(f"spans overlap on {lane!r}: one until {a.end}, the next from {b.start}")
        box(ax, first, y - 0.36, last - first, 0.72, IDLE)
        for s in own:
            box(ax, s.start, y - 0.36, s.end - s.start, 0.72, s.colour, edgecolor="white", linewidth=0.9)
            if s.text and 6.0 * (s.end - s.start) / (last - first) > 0.082 * len(s.text):
                centred(ax, (s.start + s.end) / 2, y, s.text, color=readable(s.colour))
        busy = sum(s.end - s.start for s in own) / (last - first)
        said.append(f"{lane} busy {number(100 * busy, 3)} %")
    lanes(ax, names, last, start=first)
    quantity_axis(ax.xaxis, "s", "time")
    fig.alt = f"{title.rstrip('.')}. Timeline of {quantity(float(last - first), 's', 3)}: {'; '.join(said)}."
    return fig
