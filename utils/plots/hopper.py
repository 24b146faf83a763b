"""Hopper's kernels drawn: who of an SM works when, a ladder of versions, and ratios beside a peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.plots import marks
from utils.plots.check import require_data, require_known
from utils.plots.labels import legend_below
from utils.plots.style import (
    ARITHMETIC,
    GRID,
    HBM,
    IDLE,
    INK,
    LIMIT,
    SMALL,
    TEXT,
    WASTE_HATCH,
    figure,
    mix,
    styled,
)
from utils.units import number

#: What an SM's parts do, and how it is drawn. All arithmetic is blue: products dark, the softmax pale.
KINDS = {
    "scores": (mix(ARITHMETIC, 0.72, "#000000"), "product: scores"),
    "output": (ARITHMETIC, "product: output"),
    "softmax": ("#9AD0F0", "softmax"),
    "copy": (HBM, "copy into shared memory"),
    "waiting": ("white", "waits"),
}
#: Looks of up to four series: a shade of blue per pair, the first of a pair solid, the second dashed.
_SERIES = (
    {"color": mix(ARITHMETIC, 0.5), "marker": "o", "linestyle": "-"},
    {"color": mix(ARITHMETIC, 0.5), "marker": "s", "linestyle": "--"},
    {"color": ARITHMETIC, "marker": "^", "linestyle": "-"},
    {"color": ARITHMETIC, "marker": "D", "linestyle": "--"},
)
#: Kinds that the tensor cores do.
PRODUCTS = ("scores", "output")
#: (what, tile, start, end), what being one of ``KINDS``.
Interval = tuple[str, int, float, float]
#: Lane -> what happened there.
Lanes = Mapping[str, Sequence[Interval]]


def under_way(lanes: Lanes, kinds: Sequence[str] = PRODUCTS) -> float:
    """How long at least one interval of these kinds was going on, anywhere, in the intervals' unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((a, b) for own in lanes.values() for what, _, a, b in own if what in kinds):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def clipped(lanes: Lanes, start: float, end: float) -> dict[str, list[Interval]]:
    """What happened between two times, counted from the first of them."""
    return {
        lane: [(what, tile, max(a, start) - start, min(b, end) - start) for what, tile, a, b in own
               if min(b, end) > max(a, start)]
        for lane, own in lanes.items()
    }  # fmt: skip


@styled
def sm_timeline(panels: Mapping[str, Lanes], *, title: str, subtitle: str = "") -> Figure:
    """Who of an SM works when, in one panel a version: warpgroups and producer as lanes, and the tensor cores below.

    In a lane asynchronous products have the upper half and everything that the warps themselves do, or wait for, the
    lower. The last lane of a panel is the union of all products.

    Args:
        panels: name -> lane -> (what, tile, start, end); all panels are drawn to one scale.
    """
    for name, lanes in panels.items():
        require_data(f"panel {name!r}", [each for own in lanes.values() for each in own])
        require_known("an interval", (what for own in lanes.values() for what, *_ in own), KINDS)
        for what, _, start, end in (each for own in lanes.values() for each in own):
            if not start <= end:
                raise ValueError(f"an interval of {what!r} ends before it starts: {start} to {end}")
    rows = [len(lanes) + 1 for lanes in panels.values()]
    fig, axes = figure(
        title, subtitle=subtitle, height=0.75 + sum(0.36 * n + 0.34 for n in rows), rows=len(panels), sharex=True,
        grid="none", height_ratios=[n + 0.9 for n in rows],
    )  # fmt: skip
    axes = [axes] if isinstance(axes, Axes) else list(axes)
    end, said = max(map(_last, panels.values())), []
    for ax, (name, lanes) in zip(axes, panels.items(), strict=True):
        said.append(_timeline_panel(ax, name, lanes, end))
    axes[-1].set_xlabel("time (cycles)", size=SMALL)
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    found = {what for lanes in panels.values() for own in lanes.values() for what, *_ in own}
    handles = [
        Patch(facecolor=colour, label=label, edgecolor="#8A8A8A" if kind == "waiting" else "none",
              hatch=WASTE_HATCH if kind == "waiting" else "", linewidth=0.6)
        for kind, (colour, label) in KINDS.items() if kind in found
    ]  # fmt: skip
    legend_below(axes[-1], handles, loc="upper left")
    fig.alt = f"{title.rstrip('.')}. Timelines of one SM over {number(end, 4)} cycles. {' '.join(said)}"
    return fig


def _last(lanes: Lanes) -> float:
    return max(end for own in lanes.values() for *_, end in own)


def _timeline_panel(ax: Axes, name: str, lanes: Lanes, end: float) -> str:
    """Draw one version; return what it shows in words."""
    last = _last(lanes)
    for y, own in enumerate(lanes.values()):
        for what, _tile, a, b in own:
            low, high = (-0.4, 0.0) if what in PRODUCTS else (-0.2, 0.2) if what == "copy" else (0.0, 0.4)
            edge = {"edgecolor": "white", "linewidth": 0.3}
            if what == "waiting":
                edge = {"hatch": WASTE_HATCH, "edgecolor": "#B5B5B5", "linewidth": 0}
            marks.box(ax, a, y + low, b - a, high - low, KINDS[what][0], **edge)
    y = len(lanes)
    marks.box(ax, 0, y - 0.3, last, 0.6, IDLE)
    for what, _tile, a, b in (each for own in lanes.values() for each in own):
        if what in PRODUCTS:
            marks.box(ax, a, y - 0.3, b - a, 0.6, ARITHMETIC)
    share, softmax = under_way(lanes) / last, under_way(lanes, ("softmax",)) / last
    marks.lanes(ax, [*lanes, "tensor cores"], end, margin=0.5)
    said = f"a product is under way {number(100 * share, 3)} % of the time"
    marks.heading(ax, name, said.replace("a product is", "product"))
    return f"{name}: {said}, a softmax {number(100 * softmax, 3)} %."


@styled
def ladder(
    panels: Mapping[str, Mapping[str, Sequence[float]]], steps: Sequence[str], *, title: str, subtitle: str = "",
) -> Figure:  # fmt: skip
    """Ratios over the steps of a ladder: a panel a group, a line a series, a colour a pair of series; 1 is the limit.

    Args:
        panels: group -> series -> one ratio a step (None where a step has none).
        steps: names of the steps, in order.

    Raises:
        ValueError: a series of another length than ``steps``.
    """
    for name, value in ((n, v) for series in panels.values() for n, v in series.items()):
        if len(value) != len(steps):
            raise ValueError(f"{name!r} must have one value for each of {len(steps)} steps, got {len(value)}")
    fig, axes = figure(
        title, subtitle=subtitle, height=2.3 * len(panels) + 0.9, rows=len(panels), sharex=True, sharey=True, grid="y"
    )
    axes = [axes] if isinstance(axes, Axes) else list(axes)
    said = []
    for ax, (group, series) in zip(axes, panels.items(), strict=True):
        ax.axhline(1, color=LIMIT, linewidth=0.9)
        ax.annotate("cuDNN", (0, 1), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", size=SMALL,
                    color=INK)  # fmt: skip
        for (name, values), look in zip(series.items(), _SERIES):
            at = [i for i, v in enumerate(values) if v is not None]
            ax.plot(at, [values[i] for i in at], **look, linewidth=1.8, markersize=4.5, label=name)
            said.append(f"{group}, {name}: " + ", ".join(number(values[i], 3) for i in at))
        ax.set_title(group, loc="left", size=TEXT, weight="bold", color=INK)
        ax.set_xticks(range(len(steps)), steps, rotation=62, ha="right", rotation_mode="anchor")
        ax.set_xlim(-0.4, len(steps) - 0.6)
        ax.grid(True, axis="x", color=GRID, linewidth=0.4)
        ax.set_ylabel("rate over cuDNN's")
    axes[0].legend(loc="lower right", frameon=False, fontsize=SMALL)
    fig.alt = f"{title.rstrip('.')}. rate over cuDNN's, in the order {', '.join(steps)}. {'; '.join(said)}."
    return fig


@styled
def speedup_bars(
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float]]]], *, title: str, subtitle: str = "",
) -> Figure:  # fmt: skip
    """Ratios with their spread, a row a shape, a dot a series, a panel a direction; the line at 1 is a tie.

    Args:
        panels: panel -> row -> series -> (ratio, low, high), at most two series.
    """
    for name, rows in panels.items():
        require_data(f"panel {name!r}", rows)
    names = list(dict.fromkeys(row for rows in panels.values() for row in rows))
    fig, axes = figure(
        title, subtitle=subtitle, height=0.85 + 0.27 * len(names), columns=len(panels), sharex=True, sharey=True,
        grid="x",
    )  # fmt: skip
    axes = [axes] if isinstance(axes, Axes) else list(axes)
    said, kinds = [], list(dict.fromkeys(s for rows in panels.values() for row in rows.values() for s in row))
    colours = dict(zip(kinds, (ARITHMETIC, mix(ARITHMETIC, 0.5)), strict=False))
    for ax, (panel, rows) in zip(axes, panels.items(), strict=True):
        ax.axvline(1, color=LIMIT, linewidth=0.9)
        for row, series in rows.items():
            for k, (name, (ratio, low, high)) in enumerate(series.items()):
                y = names.index(row) + (k - (len(series) - 1) / 2) * 0.26
                ax.plot([low, high], [y, y], color=colours[name], linewidth=1.3)
                ax.plot(ratio, y, "o" if k == 0 else "s", color=colours[name], markersize=5)
                said.append(f"{panel}, {row}, {name}: {number(ratio, 3)}")
        ax.set_title(panel.replace(", ", ",\n"), loc="left", size=TEXT, weight="bold", color=INK)
    axes[len(axes) // 2].set_xlabel("our rate over cuDNN's", size=SMALL)
    axes[0].set_yticks(range(len(names)), names, color=INK)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    handles = [Patch(facecolor=colours[name], label=name) for name in kinds]
    legend_below(axes[-1], handles, loc="upper right")
    fig.alt = f"{title.rstrip('.')}. our rate over cuDNN's. {'; '.join(said)}."
    return fig
