"""Decoding drawn: what each step computes and reads with and without a cache, and the times that a request sees."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.plots.animate import Animation, animate
from utils.plots.check import require_same_length
from utils.plots.marks import box
from utils.plots.style import (
    ARITHMETIC,
    HBM,
    INK,
    LIMIT,
    MUTED,
    SMALL,
    TEXT,
    WASTE,
    WASTE_HATCH,
    bare,
    figure,
    mix,
    styled,
)
from utils.plots.ticks import quantity_axis
from utils.units import quantity


@dataclass(frozen=True)
class DecodeStep:
    """What one pass through the model did in a layer's attention.

    ``queries`` positions went through the model, the last ``queries`` of ``keys`` that attention saw; the keys of the
    others came out of a cache.
    """

    queries: int
    keys: int

    def __post_init__(self) -> None:
        if not 1 <= self.queries <= self.keys:
            raise ValueError(f"a step has between 1 and {self.keys} queries (its keys), got {self.queries}")

    @property
    def first(self) -> int:
        """The first position that was computed."""
        return self.keys - self.queries

    @property
    def cached(self) -> int:
        """Keys that were read and not computed."""
        return self.keys - self.queries


def decode_animation(
    tokens: Sequence[str],
    runs: Mapping[str, Sequence[DecodeStep]],
    *,
    title: str,
    alt: str,
) -> Animation:
    """Play several ways of generating the same text side by side: a grid of scores for each, queries by keys.

    A row that is computed though it was before is hatched. Below a grid lie the keys and values of its columns: from
    the cache, or computed in this step.

    Args:
        tokens: the text, token by token: prompt, then what is generated.
        runs: name -> its steps, as an ``attend`` saw them. Step i of every run generates the same token.

    Raises:
        ValueError: runs of other lengths, a step whose keys do not follow the one before.
    """
    require_same_length("the steps of the runs", *runs.values())
    for name, steps in runs.items():
        for before, after in itertools.pairwise(steps):
            if after.keys != before.keys + 1:
                raise ValueError(f"{name!r}: a step of {before.keys} keys is followed by one of {after.keys}")
    last, count = max(steps[-1].keys for steps in runs.values()), len(next(iter(runs.values())))
    if not last < len(tokens) <= 24:
        raise ValueError(f"tokens must name the {last} positions and the one after, 24 at most, got {len(tokens)}")
    captions = []
    for k in range(count):
        said = [f"{name}: {_did(steps[k])}" for name, steps in runs.items()]
        captions.append(f"Step {k + 1} gives “{tokens[next(iter(runs.values()))[k].keys].strip()}”. " + "; ".join(said))
    draws = [partial(_draw_step, tokens=tokens, runs=runs, k=k) for k in range(count)]
    return animate(draws, title=title, alt=alt, captions=captions, height=3.9, seconds_per_frame=1.0)


def _did(step: DecodeStep) -> str:
    rows = "1 row" if step.queries == 1 else f"{step.queries} rows"
    return f"{rows} computed" + (f", {step.cached} keys and values read" if step.cached else "")


def _draw_step(ax: Axes, *, tokens: Sequence[str], runs: Mapping[str, Sequence[DecodeStep]], k: int) -> None:
    bare(ax)
    side = max(steps[-1].keys for steps in runs.values())
    left = 4.2  # room for the tokens' names
    for panel, (name, steps) in enumerate(runs.items()):
        x0 = panel * (side + 1.6)
        known = steps[k - 1].keys if k else 0  # rows that an earlier step computed
        ax.text(x0, -0.75, name, size=TEXT, weight="bold", color=INK, va="bottom")
        for row in range(steps[k].keys):
            computed = row >= steps[k].first
            for column in range(row + 1):
                if computed and row < known:
                    look = {"facecolor": mix(WASTE, 0.55), "edgecolor": "#8A8A8A", "hatch": WASTE_HATCH, "linewidth": 0}
                elif computed:
                    look = {"facecolor": ARITHMETIC, "edgecolor": "white", "linewidth": 0.5}
                else:
                    look = {"facecolor": "white", "edgecolor": "#DDDDDD", "linewidth": 0.5}
                box(ax, x0 + column, row, 1, 1, **look)
        for column in range(steps[k].keys):
            read = column < steps[k].cached
            again = not read and column < known
            colour = HBM if read else mix(WASTE, 0.55) if again else ARITHMETIC
            hatch = {"hatch": WASTE_HATCH, "edgecolor": "#8A8A8A", "linewidth": 0} if again else {"edgecolor": "white"}
            for line in range(2):
                box(ax, x0 + column, side + 0.6 + line, 1, 0.85, colour, **hatch)
        if panel == 0:
            for line, label in enumerate(("keys", "values")):
                ax.text(x0 - 0.35, side + 1.05 + line, label, size=SMALL, ha="right", va="center", color=INK)
    for row in range(side):
        new = row >= runs[next(iter(runs))][0].keys
        here = row < next(iter(runs.values()))[k].keys
        ax.text(
            -0.35, row + 0.5, tokens[row].strip() or "·", size=SMALL, ha="right", va="center",
            color=(LIMIT if new else MUTED) if here else "#C4C4C4", weight="bold" if new and here else "normal",
        )  # fmt: skip
    ax.text(
        -left, -2.0, f"next: “{tokens[next(iter(runs.values()))[k].keys].strip()}”", size=SMALL, color=INK, va="bottom"
    )
    entries = (
        (ARITHMETIC, "", "computed"),
        (mix(WASTE, 0.55), WASTE_HATCH, "computed again"),
        (HBM, "", "read from the cache"),
    )
    at = 0.0
    for colour, hatch, label in entries:
        box(ax, at, side + 3.2, 0.9, 0.7, colour, hatch=hatch, edgecolor="#8A8A8A", linewidth=0)
        ax.text(at + 1.15, side + 3.55, label, size=SMALL, va="center", color=INK)
        at += 3.0 + 0.42 * len(label)
    ax.set_xlim(-left, len(runs) * (side + 1.6))
    ax.set_ylim(side + 4.0, -3.0)


@styled
def request_timeline(requests: Mapping[str, Sequence[float]], *, title: str, subtitle: str = "") -> Figure:
    """Draw what a request sees, from its arrival at 0 s: the time to its first token, then each token's.

    Args:
        requests: name -> seconds after its arrival at which each of its tokens came; at least two tokens.

    Raises:
        ValueError: fewer than two tokens, or times that do not rise from above 0.
    """
    for name, times in requests.items():
        if len(times) < 2 or any(b <= a for a, b in itertools.pairwise([0.0, *times])):
            raise ValueError(f"{name!r} needs at least two times that rise from above 0, got {list(times)[:4]}")
    end = max(times[-1] for times in requests.values())
    fig, ax = figure(title, subtitle=subtitle, height=0.5 + 0.92 * len(requests), grid="none")
    said = []
    for y, (name, times) in enumerate(requests.items()):
        narrow = times[0] < 0.16 * end
        box(ax, 0, y - 0.2, times[0], 0.4, ARITHMETIC, edgecolor="white", linewidth=0.9)
        for a, b in itertools.pairwise(times):
            box(ax, a, y - 0.2, b - a, 0.4, HBM, edgecolor="white", linewidth=0.9)
        ax.plot(times, [y - 0.27] * len(times), "v", ms=4, color=INK, clip_on=False)
        tpot = (times[-1] - times[0]) / (len(times) - 1)
        first, rest = f"TTFT {quantity(times[0], 's', 3)}", f"{len(times) - 1} x TPOT, {quantity(tpot, 's', 3)} each"
        if narrow:  # both texts begin at the left
            first, rest = f"{first}, then {rest}", ""
        _bracket(ax, 0, times[0], y + 0.27, first, "left" if narrow else "center")
        _bracket(ax, times[0], times[-1], y + 0.27, rest)
        said.append(
            f"{name}: first token after {quantity(times[0], 's', 3)}, then {len(times) - 1} tokens, one every "
            f"{quantity(tpot, 's', 3)}, the last after {quantity(times[-1], 's', 3)}"
        )
    ax.set_xlim(0, 1.02 * end)
    ax.set_ylim(len(requests) - 0.38, -0.5)
    ax.set_yticks(range(len(requests)), list(requests), color=INK)
    ax.spines["bottom"].set_visible(False)
    quantity_axis(ax.xaxis, "s", "time since the request's arrival")
    fig.alt = f"{title.rstrip('.')}. {'; '.join(said)}."
    return fig


def _bracket(ax: Axes, start: float, end: float, y: float, text: str, side: str = "center") -> None:
    ax.annotate("", (start, y), (end, y), arrowprops={"arrowstyle": "|-|,widthA=0.22,widthB=0.22", "lw": 0.8})
    at = {"left": start, "center": (start + end) / 2, "right": end}[side]
    ax.text(at, y + 0.06, text, ha=side, va="top", size=SMALL, color=INK)
