"""Pipeline schedules to scale: who works on which micro-batch when, where stages idle, and what they must remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.plots.check import require_between, require_data, require_positive, require_same_length
from utils.plots.labels import legend_below, spread
from utils.plots.marks import box, centred, heading, lanes, readable
from utils.plots.style import (
    ARITHMETIC,
    HBM,
    INK,
    LIMIT,
    SMALL,
    TEXT,
    WASTE,
    WASTE_HATCH,
    figure,
    ink,
    mix,
    styled,
    tidy,
)
from utils.plots.ticks import quantity_axis
from utils.units import number

if TYPE_CHECKING:
    from utils.schedules import Action, Timeline

#: All three are arithmetic: shades of its blue, far enough apart to be told without colour.
KIND_COLOURS = {"F": ARITHMETIC, "B": "#7CC4EE", "W": mix(ARITHMETIC, 0.50, "#000000")}
KIND_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
_IDLE = mix(WASTE, 0.35)
_HALF = 0.44  # of a stage's row


@styled
def pipeline_timeline(
    timelines: Timeline | Sequence[Timeline],
    *,
    title: str = "",
    names: Sequence[str] = (),
) -> Figure:
    """Draw one or several simulated schedules on a common time axis, each action with its micro-batch's number.

    Idle time is hatched. Chunks of an interleaved schedule have lighter shades from chunk to chunk.

    Args:
        timelines: what :func:`utils.schedules.simulate` returned; of several, each gets a panel.
        names: of the panels, by default the schedules' own.
    """
    timelines = [timelines] if hasattr(timelines, "schedule") else list(timelines)
    require_between("the number of timelines", [len(timelines)], 1, 6)
    names = list(names) or [t.schedule.name for t in timelines]
    require_same_length("names and timelines", names, timelines)
    said = [f"{name}: {_verdict(t)}" for name, t in zip(names, timelines, strict=True)]
    title = title or f"{names[0]} idles for {number(100 * timelines[0].bubble, 3)} % of the time it works"
    rows = [t.schedule.stages for t in timelines]
    height = 0.62 + sum(0.245 * p + 0.30 for p in rows)
    fig, axes = figure(
        title, height=height, rows=len(timelines), sharex=True, grid="none",
        height_ratios=[p + 1.1 for p in rows],
    )  # fmt: skip
    axes = [axes] if isinstance(axes, Axes) else list(axes)
    end = max(t.makespan for t in timelines)
    for ax, t, name in zip(axes, timelines, names, strict=True):
        _panel(ax, t, end)
        heading(ax, name, _verdict(t))
    quantity_axis(axes[-1].xaxis, "forward passes of a stage", "time")
    kinds = [k for k in "FBW" if any(w.action.kind == k for t in timelines for w in t.work)]
    handles = [Patch(facecolor=KIND_COLOURS[k], label=KIND_NAMES[k]) for k in kinds]
    chunks = max(t.schedule.chunks for t in timelines)
    if chunks > 1:
        last = mix(KIND_COLOURS["F"], 0.55)
        handles.append(Patch(facecolor=last, label="lighter: later chunk of layers"))
    handles.append(Patch(facecolor=_IDLE, edgecolor="#8A8A8A", hatch=WASTE_HATCH, linewidth=0, label="idle"))
    legend_below(axes[-1], handles, loc="upper right")
    fig.alt = f"{title.rstrip('.')}. Pipeline timelines to scale. " + "; ".join(
        f"{text}; makespan {number(t.makespan, 4)}, p = {t.schedule.stages}, m = {t.schedule.micro_batches}"
        for text, t in zip(said, timelines, strict=True)
    )
    return fig


def _verdict(timeline: Timeline) -> str:
    """The bubble and the peak in flight, in words."""
    peak, chunks = max(timeline.peak_in_flight), timeline.schedule.chunks
    held = f"{number(peak / chunks, 3)} micro-batches" if peak > chunks else "1 micro-batch"
    own = timeline.own_bubble
    apart = (
        f" (between a stage's first and last action {number(100 * own, 3)} %)" if own < timeline.bubble - 1e-9 else ""
    )
    return f"bubble {number(100 * timeline.bubble, 3)} %{apart}, up to {held} in flight"


def _panel(ax: Axes, timeline: Timeline, end: float) -> None:
    p = timeline.schedule.stages
    size = ax.figure.get_figwidth() * 0.88 / end  # inches of a unit of time
    for stage in range(p):
        box(ax, 0, stage - _HALF, timeline.makespan, 2 * _HALF, _IDLE, hatch=WASTE_HATCH, edgecolor="#B5B5B5", lw=0)
    for w in timeline.work:
        colour = _colour(w.action, timeline.schedule.chunks)
        long = w.end - w.start
        line = 0.8 if long * size > 0.06 else 0.25
        box(ax, w.start, w.stage - _HALF, long, 2 * _HALF, colour, edgecolor="white", linewidth=line)
        text = str(w.action.micro_batch)
        if long * size > 0.08 * len(text) + 0.01:
            centred(ax, (w.start + w.end) / 2, w.stage + 0.03, text, color=readable(colour))
    lanes(ax, [f"stage {s}" for s in range(p)], end, margin=0.5)


def _colour(action: Action, chunks: int) -> str:
    """The kind's colour, lighter from chunk to chunk."""
    return mix(KIND_COLOURS[action.kind], 1 - 0.45 * action.chunk / max(1, chunks - 1))


@styled
def in_flight_plot(timelines: Mapping[str, Timeline], *, title: str, subtitle: str = "") -> Figure:
    """Draw how many micro-batches wait for their backward pass: on stage 0 over time, and the peak of every stage.

    That many sets of activations are in memory. Micro-batches that wait on one of v chunks count 1/v.

    Args:
        timelines: label -> what :func:`utils.schedules.simulate` returned, all with as many stages; at most five.
    """
    require_between("the number of timelines", [len(timelines)], 1, 5)
    stages = {t.schedule.stages for t in timelines.values()}
    if len(stages) > 1:
        raise ValueError(f"all timelines must have the same number of stages, got {sorted(stages)}")
    (p,) = stages
    fig, (left, right) = figure(title, subtitle=subtitle, height=2.9, columns=2, width_ratios=(1.9, 1))
    colours = dict(zip(timelines, (HBM, ARITHMETIC, "#009E73", "#CC79A7", "#E69F00"), strict=False))
    said, ends = [], {}
    for k, (name, t) in enumerate(timelines.items()):  # later ones thinner, so that none hides where they meet
        v = t.schedule.chunks
        times, counts = t.in_flight(0)
        counts = [n / v for n in counts]
        left.step(
            [*times, t.makespan], [*counts, counts[-1]], where="post", color=colours[name], linewidth=3.8 - 0.7 * k
        )
        peaks = [n / v for n in t.peak_in_flight]
        right.plot(range(p), peaks, "-o", color=colours[name], linewidth=1.6, markersize=4.5)
        ends[name] = peaks[-1]
        said.append(f"{name}: peaks {', '.join(number(n, 3) for n in peaks)} on stages 0 to {p - 1}")
    top = max(max(t.peak_in_flight) / t.schedule.chunks for t in timelines.values())
    for ax in (left, right):
        ax.set_ylim(0, 1.12 * top)
        ax.locator_params(axis="y", integer=True, nbins=8)
    left.set_xlim(0, max(t.makespan for t in timelines.values()))
    left.set_ylabel("micro-batches in flight")
    left.set_xlabel("time (forward passes of a stage)")
    left.set_title("stage 0 over time", loc="left", size=TEXT, color=INK)
    right.set_title("peak of each stage", loc="left", size=TEXT, color=INK)
    right.set_xlabel("stage")
    right.set_xticks(range(p))
    right.set_xlim(-0.25, p - 0.75)
    tidy(right)
    _name_ends(right, ends, colours)
    fig.alt = f"{title.rstrip('.')}. Micro-batches in flight. {'; '.join(said)}."
    return fig


def _name_ends(ax: Axes, ends: Mapping[str, float], colours: Mapping[str, str]) -> None:
    """Write the curves' names to the right of their ends, none over another."""
    heights = [float(ax.transLimits.transform((0, ax.transScale.transform((1, y))[1]))[1]) for y in ends.values()]
    lines = {name: name.replace(", ", ",\n") for name in ends}
    gap = 0.085 * max(1 + text.count("\n") for text in lines.values())
    places = spread(heights, gap, gap / 2, 1 - gap / 2)
    for name, y in zip(ends, places, strict=True):
        ax.annotate(
            lines[name], (1, y), (7, 0), xycoords="axes fraction", textcoords="offset points",
            va="center", size=SMALL, color=ink(colours[name]), linespacing=1.05,
        )  # fmt: skip


@styled
def bubble_plot(
    bubbles: Mapping[str, Mapping[int, float]],
    *,
    formulas: Mapping[str, Mapping[int, float]] | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw simulated bubbles over the number of micro-batches as points, and the formulas as thin lines through them.

    Args:
        bubbles: label -> micro-batches m -> idle over ideal time, from simulations.
        formulas: label -> m -> what a formula says.

    Raises:
        ValueError: a label in ``formulas`` that ``bubbles`` does not have.
    """
    for label, curve in bubbles.items():
        require_data(f"bubble {label!r}", curve)
        require_positive(f"bubble {label!r}", curve.values())
    if unknown := set(formulas or {}) - set(bubbles):
        raise ValueError(f"formulas for {', '.join(sorted(unknown))}, which bubbles does not have")
    fig, ax = figure(title, subtitle=subtitle, height=3.2)
    colours = dict(zip(bubbles, (HBM, ARITHMETIC, "#009E73", "#CC79A7", "#E69F00"), strict=False))
    said, ends = [], {}
    for name, curve in bubbles.items():
        ms = sorted(curve)
        ax.plot(ms, [100 * curve[m] for m in ms], "o", color=colours[name], markersize=5.5)
        line = sorted((formulas or {}).get(name, {}).items())
        ax.plot(
            [m for m, _ in line], [100 * value for _, value in line], color=LIMIT, linewidth=0.9, linestyle=(0, (5, 3))
        )
        ends[name] = 100 * curve[ms[-1]]
        said.append(f"{name}: " + ", ".join(f"{number(100 * curve[m], 3)} % at {m}" for m in ms))
    every = sorted({m for curve in bubbles.values() for m in curve})
    ax.set_xscale("log", base=2)
    ax.set_xticks(every, [number(m) for m in every])
    ax.minorticks_off()
    ax.set_xlim(every[0] / 1.15, every[-1] * 1.15)
    ax.set_yscale("log")
    quantity_axis(ax.yaxis, "%", "bubble, idle over ideal time")
    ax.set_xlabel("micro-batches, m")
    _name_ends(ax, ends, colours)
    fig.alt = f"{title.rstrip('.')}. Bubbles over micro-batches, simulated. {'; '.join(said)}."
    return fig
