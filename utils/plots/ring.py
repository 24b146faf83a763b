"""A ring of tiles and its barriers, drawn from a simulated run: what is where, which phase, who waits for what."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between
from utils.plots.marks import box, centred
from utils.plots.style import ARITHMETIC, HBM, INK, LIMIT, MUTED, ON_CHIP, SMALL, TEXT, WASTE, bare, mix
from utils.simt.ring import Frame, RingRun, Stage


def ring_animation(run: RingRun, *, title: str, alt: str, most: int = 30) -> Animation:
    """Play a simulated ring moment by moment: its stages, their two barriers, and what everybody does.

    Args:
        run: what :func:`utils.simt.run_ring` returned.
        most: moments drawn, from the first on.
    """
    require_between("the number of stages", [len(run.frames[0].stages)], 1, 5)
    frames = run.frames[:most]
    return animate(
        [partial(draw_ring, frame=frame) for frame in frames], title=title, alt=alt,
        captions=[_ring_caption(frame) for frame in frames], height=2.75, seconds_per_frame=1.6,
        poster=min(len(frames) - 1, 8),
    )  # fmt: skip


def _actors(frame: Frame) -> list[str]:
    return ["producer", *(f"consumer {c}" for c in range(len(frame.doing) - 1))]


def _ring_caption(frame: Frame) -> str:
    said = "; ".join(f"{name} {doing}" for name, doing in zip(_actors(frame), frame.doing, strict=True))
    return f"Tick {frame.time}: {said}."


def draw_ring(ax: Axes, *, frame: Frame) -> None:
    """Draw one moment: the stages with their barriers, and on the right what everybody does."""
    bare(ax)
    wide, gap = 1.0, 0.16
    for s, stage in enumerate(frame.stages):
        _stage(ax, s * (wide + gap), wide, s, stage)
    right = len(frame.stages) * (wide + gap)
    names = _actors(frame)
    step = 1.62 / max(len(names) - 1, 1)
    for k, (name, doing) in enumerate(zip(names, frame.doing, strict=True)):
        y = 0.32 + k * step
        waits = doing.startswith("waits")
        face = mix(WASTE, 0.5) if waits else "white" if doing == "done" else mix(HBM if k == 0 else ARITHMETIC, 0.22)
        edge = "#8A8A8A" if waits or doing == "done" else HBM if k == 0 else ARITHMETIC
        box = FancyBboxPatch((right + 0.1, y - 0.26), 1.62, 0.52, boxstyle="round,pad=0,rounding_size=0.06",
                             facecolor=face, edgecolor=edge, linewidth=1.0)  # fmt: skip
        ax.add_patch(box)
        ax.text(right + 0.18, y - 0.08, name, size=SMALL, weight="bold", va="center", color=INK)
        ax.text(right + 0.18, y + 0.12, doing, size=SMALL, va="center", color=INK)
    ax.text(right + 1.72, -0.2, f"tick {frame.time}", ha="right", size=SMALL, color=MUTED)
    ax.set_xlim(-0.05, right + 1.78)
    ax.set_ylim(2.35, -0.35)


def _stage(ax: Axes, x: float, wide: float, s: int, stage: Stage) -> None:
    """One stage: the tile in it, and below it the two barriers with phase, parity and what is missing."""
    ax.text(x + wide / 2, -0.1, f"stage {s}", ha="center", size=SMALL, color=MUTED)
    free = stage.tile is None or (not stage.filling and stage.full[0] == stage.empty[0])
    face = mix(HBM, 0.25) if stage.filling else mix(ON_CHIP, 0.75 if stage.readers else 0.4)
    edge = HBM if stage.filling else "#8A8A8A"
    style = (0, (4, 2)) if stage.filling else "solid"
    box(ax, x, 0, wide, 0.8, "white" if free else face, edgecolor=edge, linewidth=1.2, linestyle=style)
    if stage.tile is not None:
        words = "arriving" if stage.filling else "free again" if free else "full"
        if stage.readers:
            words = "read by " + ", ".join(map(str, stage.readers))
        colour = MUTED if free else INK
        centred(ax, x + wide / 2, 0.32, f"tile {stage.tile}", size=TEXT, weight="bold", color=colour)
        centred(ax, x + wide / 2, 0.58, words, color=colour)
    else:
        centred(ax, x + wide / 2, 0.42, "empty", color=MUTED)
    for row, (name, (completed, pending)) in enumerate((("full", stage.full), ("empty", stage.empty))):
        y = 1.06 + 0.62 * row
        ax.text(x, y, f"{name}[{s}]", size=SMALL, weight="bold", color=INK, va="center")
        for parity in (0, 1):
            now = parity == completed & 1
            face = LIMIT if now else "white"
            box(ax, x + wide - 0.34 + 0.17 * parity, y - 0.1, 0.17, 0.2, face, edgecolor=LIMIT, linewidth=0.7)
            centred(ax, x + wide - 0.255 + 0.17 * parity, y, str(parity), color="white" if now else MUTED)
        if pending:
            lacks = f"lacks {pending} arrival{'s' if pending > 1 else ''}"
        else:
            lacks = "lacks bytes"
        ax.text(x, y + 0.14, f"phase {completed}\n{lacks}", size=SMALL, color=MUTED, va="top", linespacing=1.2)
