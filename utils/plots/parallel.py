"""Training on many ranks: what each keeps, where each part of a model lives, and what hides behind what."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.plots.bars import parts_of
from utils.plots.check import require_between
from utils.plots.curves import Series, sweep
from utils.plots.labels import legend_below
from utils.plots.marks import box, centred, readable
from utils.plots.style import (
    ARITHMETIC,
    HBM,
    INK,
    LIMIT,
    LINK,
    MUTED,
    SMALL,
    TEXT,
    WASTE,
    WIDTH,
    bare,
    figure,
    mix,
    styled,
)
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity

#: What a rank keeps lies in its HBM: one colour, darkest for what the forward pass reads. Activations are apart.
STATE_COLOURS = {
    "parameters": mix(HBM, 0.62, "#000000"),
    "gradients": HBM,
    "master": mix(HBM, 0.70),
    "momentum": mix(HBM, 0.48),
    "variance": mix(HBM, 0.28),
    "activations": mix(ARITHMETIC, 0.55),
}
#: A curve for each stage of ZeRO.
STAGE_COLOURS = (mix(HBM, 0.4, "#000000"), mix(HBM, 0.7, "#000000"), HBM, mix(HBM, 0.55))
#: Groups of a rank in a mesh; its tensor group, which talks most, has the colour of links.
_REPLICAS, _PIPELINE = mix(ARITHMETIC, 0.65), mix(HBM, 0.6)


@styled
def state_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    limit: tuple[float, str] | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw the bytes that a rank keeps, one bar a row, divided by component with the amount written where it fits.

    Args:
        rows: label ("ZeRO-1", "stage 3 of the pipeline") -> component -> bytes, such as
            :func:`utils.transformer_math.memory_per_rank` gives. Components are those of ``STATE_COLOURS``; another one
            gets a shade of grey.
        limit: (bytes, label) of a thin black line: what a GPU has.

    Raises:
        ValueError: a negative amount, a row of nothing.
    """
    parts = [part for part in parts_of(rows) if any(row.get(part) for row in rows.values())]
    others = [p for p in parts if p not in STATE_COLOURS]
    palette = STATE_COLOURS | {p: mix(WASTE, 1 - 0.3 * k / len(others)) for k, p in enumerate(others)}
    fig, ax = figure(title, subtitle=subtitle, height=0.40 * len(rows) + 1.0, grid="x")
    longest = max([sum(r.values()) for r in rows.values()] + ([limit[0]] if limit else []))
    said, paper = [], {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the limit runs behind what is written
    for y, (label, amounts) in enumerate(rows.items()):
        left = 0.0
        for part in parts:
            amount = amounts.get(part, 0.0)
            ax.barh(y, amount, left=left, height=0.68, color=palette[part], edgecolor="white", linewidth=0.9)
            text = quantity(float(amount), "B", 3)
            if amount / longest > 0.0215 * len(text):
                ax.text(
                    left + amount / 2, y, text, ha="center", va="center", size=SMALL,
                    color=readable(palette[part]), bbox={"facecolor": palette[part], "edgecolor": "none", "pad": 0.8},
                )  # fmt: skip
            left += amount
        total = quantity(float(left), "B", 3)
        ax.annotate(
            total, (left, y), (5, 0), textcoords="offset points", va="center", size=TEXT, weight="bold", bbox=paper
        )
        named = ", ".join(f"{p} {quantity(float(a), 'B', 3)}" for p, a in amounts.items() if a)
        said.append(f"{label}: {total} ({named})")
    ax.set_xlim(0, longest * (1.13 if not limit or longest > limit[0] else 1.02))
    ax.set_ylim(len(rows) - 0.5, -0.75 if limit else -0.5)
    ax.set_yticks(range(len(rows)), [textwrap.fill(label, 18) for label in rows], color=INK)
    quantity_axis(ax.xaxis, "B", "memory of each GPU")
    if limit:
        ax.axvline(limit[0], color=LIMIT, linewidth=1.1)
        ax.annotate(
            limit[1], (limit[0], -0.72), (-4, 0), textcoords="offset points", ha="right", va="top", size=SMALL,
            color=LIMIT,
        )  # fmt: skip
        said.append(f"limit: {limit[1]}")
    legend_below(ax, [Patch(facecolor=palette[p], label=p) for p in parts])
    fig.alt = f"{title.rstrip('.')}. Memory by component. {'; '.join(said)}."
    return fig


@styled
def memory_over_ranks(
    memory: Mapping[str, Mapping[int, float]],
    *,
    limits: Mapping[str, float] | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw bytes of each rank over the number of ranks, a curve for each stage of ZeRO, and what GPUs have as lines.

    Where a curve first comes below the lowest limit that it reaches, a ring marks the number of ranks that suffices.

    Args:
        memory: label -> number of ranks -> bytes of each, up to four curves.
        limits: label -> bytes of a GPU.
    """
    require_between("the number of curves", [len(memory)], 1, len(STAGE_COLOURS))
    curves = {name: dict(sorted(curve.items())) for name, curve in memory.items()}
    series = [
        Series(name, list(curve.values()), x=list(curve), colour=colour, kind="live", markers=False)
        for (name, curve), colour in zip(curves.items(), STAGE_COLOURS, strict=False)
    ]
    ranks = sorted({n for curve in curves.values() for n in curve})
    fig = sweep(
        ranks, series, title=title, subtitle=subtitle, xlabel="GPUs that share the model's state",
        ylabel="memory of each GPU", y_unit="B", xscale="log2", yscale="log", limits=limits, height=3.6,
    )  # fmt: skip
    ax, said = fig.axes[0], []
    for (name, curve), colour in zip(curves.items(), STAGE_COLOURS, strict=False):
        for label, room in (limits or {}).items():
            first = next((n for n, size in curve.items() if size <= room), None)
            said.append(
                f"{name} fits into {label} from {number(first)} on" if first else f"{name} never fits into {label}"
            )
            if first and first > ranks[0]:
                ax.plot(first, curve[first], "o", ms=6, mfc="white", mec=colour, mew=1.8, zorder=6)
    fig.alt += "".join(f" {text}." for text in said)
    return fig


@styled
def mesh_plot(
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw a mesh of ranks, each a square, and the three groups to which rank 0 belongs.

    Columns are stages of the pipeline, rows replicas of data parallelism; the squares of a cell share each layer.

    Args:
        ranks: ranks[stage][replica][part], such as :attr:`utils.transformer_math.Placement.ranks`, or a
            ``DeviceMesh.mesh`` of three dimensions in that order.
    """
    mesh = np.asarray(ranks)
    if mesh.ndim != 3 or not mesh.size or len(np.unique(mesh)) != mesh.size:
        raise ValueError(f"ranks must be distinct numbers, ranks[stage][replica][part], got shape {mesh.shape}")
    p, d, t = mesh.shape
    at = (0, 0, 0)
    across = min(t, max(k for k in range(1, 5) if t % k == 0)) if t > 4 else t
    down = -(-t // across)
    wide, high = across + 0.7, down + 0.55
    size = min((WIDTH - 1.1) / (p * wide), 4.6 / (d * high), 0.62)  # inches of a square
    fig, ax = figure(title, subtitle=subtitle, height=max(1.6, size * d * high + 0.95), grid="none")
    bare(ax)
    ax.set_aspect("equal")
    _draw_ranks(ax, mesh, at, across, wide, high, size)
    for stage, replica in np.ndindex(p, d):
        corner = (stage * wide - 0.12, replica * high - 0.12)
        box(ax, *corner, across + 0.24, down + 0.24, edgecolor="#BDBDBD", linewidth=0.7, zorder=1)
    every = max(1, round(0.16 / (size * high)))
    for replica in range(0, d, every):
        ax.text(
            -0.45, replica * high + down / 2, f"replica {replica}", ha="right", va="center", size=SMALL, color=MUTED
        )
    names = [f"stage {s}" if size * wide > 0.5 else str(s) for s in range(p)]
    for stage, name in enumerate(names if p > 1 else ()):
        ax.text(stage * wide + across / 2, -0.3, name, ha="center", va="bottom", size=SMALL, color=MUTED)
    ax.set_xlim(-0.5, p * wide)
    ax.set_ylim(d * high - 0.2, -0.5)
    groups = [(LINK, "rank 0", 2), (mix(LINK, 0.62), f"its tensor group ({t})", t)]
    groups += [(_REPLICAS, f"its replicas ({d})", d), (_PIPELINE, f"its pipeline ({p})", p)]
    legend_below(ax, [Patch(facecolor=colour, label=text) for colour, text, size in groups if size > 1], drop=0.06)
    near, replicas, line = mesh[at[0], at[1]], mesh[at[0], :, at[2]], mesh[:, at[1], at[2]]
    fig.alt = (
        f"{title.rstrip('.')}. A mesh of {mesh.size} ranks: {p} stages of the pipeline, {d} replicas, {t} parts "
        f"of each layer. Rank 0 shares its layers with ranks {_listed(near)}, sums gradients with "
        f"{_listed(replicas)}, and passes activations along {_listed(line)}."
    )
    return fig


def _draw_ranks(
    ax: Axes, mesh: np.ndarray, at: tuple[int, ...], across: int, wide: float, high: float, size: float
) -> None:
    """A square for each rank of ``mesh`` (stages, replicas, parts), coloured by what it shares with the one ``at``.

    A cell has ``across`` squares in a row and takes ``wide`` by ``high`` of them; a square has ``size`` inches.
    """
    numbered = size > 0.058 * max(2, len(str(mesh.max()))) + 0.03
    corners, colours = [], []
    for place in np.ndindex(mesh.shape):
        stage, replica, part = place
        x, y = stage * wide + part % across, replica * high + part // across
        colour = _group_colour([index == mine for index, mine in zip(place, at)])
        corners.append([(x + 0.06, y + 0.06), (x + 0.94, y + 0.06), (x + 0.94, y + 0.94), (x + 0.06, y + 0.94)])
        colours.append(colour)
        if place == at:
            box(ax, x, y, 1, 1, edgecolor=LIMIT, linewidth=1.6, zorder=4)
        if numbered:
            text, points = str(mesh[place]), min(SMALL, 30 * size)
            centred(ax, x + 0.5, y + 0.53, text, size=points, color=readable(colour))
    ax.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none", zorder=2))


def _group_colour(same: Sequence[bool]) -> str:
    stage, replica, part = same
    if stage and replica:
        return LINK if part else mix(LINK, 0.62)
    if stage and part:
        return _REPLICAS
    return _PIPELINE if replica and part else mix(WASTE, 0.55)


def _listed(ranks: np.ndarray) -> str:
    texts = [str(int(r)) for r in ranks]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:3], "...", texts[-1]])
