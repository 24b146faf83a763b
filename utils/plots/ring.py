"""Collectives, drawn from the data that real ranks held: which rank's numbers are in which chunk, and when it moved.

Ranks fill their tensors with powers of two (rank r with 2^r), so that each chunk's value says in binary whose numbers
are in its sum: 13 = 1101 in binary is the sum over ranks 0, 2 and 3. A chunk of 0 is memory that holds nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.plots.animate import Animation, animate
from utils.plots.style import ARITHMETIC, INK, LINK, MUTED, SMALL, TEXT, WASTE, bare, figure, mix, styled
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity

#: Chunks of one rank: a list of whole numbers.
Chunks = Sequence[int]


def _draw_ranks(ax: Axes, ranks: Sequence[Chunks], changed: set[tuple[int, int]], left: float, heading: str) -> None:
    """Each rank's chunks as a row of boxes; stripe r of a box is there when rank r's numbers are in it."""
    world_size, width = len(ranks), len(ranks[0])
    ax.text(left + width / 2, -0.72, heading, ha="center", va="center", size=TEXT, color=INK)
    for rank, chunks in enumerate(ranks):
        for column, value in enumerate(chunks):
            x, y = left + column, rank
            complete = value == 2**world_size - 1
            ground = mix(LINK, 0.18) if complete else "white"
            ax.add_patch(Rectangle((x + 0.05, y - 0.4), 0.9, 0.8, facecolor=ground, edgecolor=WASTE, linewidth=0.8))
            for source in range(world_size):
                if value >> source & 1:
                    stripe = Rectangle((x + 0.12 + source * 0.76 / world_size, y - 0.3), 0.76 / world_size - 0.03, 0.38)
                    stripe.set(facecolor=_shade(source, world_size), edgecolor="none")
                    ax.add_patch(stripe)
            text = str(value) if value else "–"
            ax.text(x + 0.5, y + 0.245, text, ha="center", va="center", size=SMALL, color=INK if value else MUTED)
            if (rank, column) in changed:
                frame = Rectangle((x + 0.05, y - 0.4), 0.9, 0.8, facecolor="none", edgecolor=LINK, linewidth=2.4)
                ax.add_patch(frame)


def _shade(rank: int, world_size: int) -> str:
    """A rank's own shade of the colour of arithmetic."""
    return mix(ARITHMETIC, 1 - 0.75 * rank / max(1, world_size - 1))


def _frame(ax: Axes, groups: Sequence[tuple[float, str, Sequence[Chunks], set[tuple[int, int]]]], right: float) -> None:
    bare(ax)
    world_size = len(groups[0][2])
    for left, heading, ranks, changed in groups:
        _draw_ranks(ax, ranks, changed, left, heading)
    for rank in range(world_size):
        ax.text(-0.25, rank, f"rank {rank}", ha="right", va="center", size=TEXT, color=INK)
        ax.add_patch(Rectangle((-1.35, rank - 0.16), 0.22, 0.32, facecolor=_shade(rank, world_size), edgecolor="none"))
    ax.set_xlim(-1.5, right)
    ax.set_ylim(world_size - 0.45, -1.05)


def _changed(before: Sequence[Chunks], after: Sequence[Chunks]) -> set[tuple[int, int]]:
    """(rank, chunk) of what is not the same any more."""
    return {
        (rank, column)
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        for column, (a, b) in enumerate(zip(old, new, strict=True))
        if a != b
    }


def _checked(states: Sequence[Sequence[Chunks]]) -> None:
    sizes = {(len(ranks), len(chunks)) for ranks in states for chunks in ranks}
    if len(sizes) != 1:
        raise ValueError(f"every rank must have the same number of chunks in every state, got {sorted(sizes)}")
    ((world_size, _),) = sizes
    values = {value for ranks in states for chunks in ranks for value in chunks}
    if not all(isinstance(value, int) and 0 <= value < 2**world_size for value in values):
        raise ValueError(f"with {world_size} ranks a chunk's value is 0 to {2**world_size - 1}, got {sorted(values)}")


def before_and_after(found: Mapping[str, Sequence[tuple[Chunks, Chunks]]], *, title: str) -> Animation:
    """One frame for each collective: every rank's chunks before it and after it.

    Args:
        found: name -> for each rank its chunks before and after, as whole numbers (see the module's text).

    Raises:
        ValueError: numbers of chunks that differ, or values that no sum of powers of two gives.
    """
    frames, captions, said = [], [], []
    for name, ranks in found.items():
        before, after = ([pair[k] for pair in ranks] for k in (0, 1))
        _checked([before, after])
        width = len(before[0])
        groups = [(0.0, "before", before, set()), (width + 1.2, f"after {name}", after, _changed(before, after))]
        frames.append(partial(_frame, groups=groups, right=2 * width + 1.6))
        captions.append(f"{name}: {len(_changed(before, after))} of {len(ranks) * width} chunks are new afterwards")
        said.append(f"{name}: {[list(c) for c in before]} becomes {[list(c) for c in after]}")
    subtitle = "a box is a chunk; its stripes say whose numbers are in it; a pink frame marks what changed"
    alt = f"{title.rstrip('.')}. Chunks of each rank, rank r starting with 2 to the r. {'; '.join(said)}."
    return animate(
        frames, title=title, subtitle=subtitle, captions=captions, alt=alt, height=2.5, seconds_per_frame=2.5, poster=-1
    )


def ring(states: Sequence[Sequence[Chunks]], *, title: str) -> Animation:
    """A ring all-reduce step by step.

    Args:
        states: for each rank its chunks at the start and after each of the 2 (N - 1) steps.

    Raises:
        ValueError: another number of steps, or as :func:`before_and_after`.
    """
    world_size = len(states)
    if any(len(rank) != 2 * world_size - 1 for rank in states):
        raise ValueError(f"{world_size} ranks take {2 * world_size - 2} steps, got {[len(r) - 1 for r in states]}")
    steps = [list(each) for each in zip(*states, strict=True)]
    _checked(steps)
    frames, captions = [], []
    for step, ranks in enumerate(steps):
        changed = _changed(steps[step - 1], ranks) if step else set()
        half = "reduce-scatter" if step < world_size else "all-gather"
        heading = f"{half}, step {step if step < world_size else step - world_size + 1}" if step else "start"
        frames.append(partial(_ring_frame, ranks=ranks, changed=changed, heading=heading))
        complete = sum(value == 2**world_size - 1 for chunks in ranks for value in chunks)
        captions.append(f"{heading}: {complete} of {world_size**2} chunks hold the whole sum")
    alt = (
        f"{title.rstrip('.')}. {world_size} ranks with {world_size} chunks each. In each step every rank gets one "
        f"chunk from its left neighbour: {'; '.join(captions)}."
    )
    subtitle = "a box is a chunk; its stripes say whose numbers are in it; a pink frame marks what came in this step"
    return animate(
        frames, title=title, subtitle=subtitle, captions=captions, alt=alt, height=2.9, seconds_per_frame=1.6, poster=3
    )


def _ring_frame(ax: Axes, ranks: Sequence[Chunks], changed: set[tuple[int, int]], heading: str) -> None:
    """The ranks' chunks, and an arrow for each message of the step, from the rank above (the last one's to rank 0)."""
    world_size = len(ranks)
    _frame(ax, [(0.0, heading, ranks, changed)], right=2.0 * world_size)
    for rank, column in changed:
        style = {"arrowstyle": "-|>", "color": LINK, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        x = column + 0.5
        if rank > 0:
            ax.annotate("", (x, rank - 0.4), (x, rank - 0.62), arrowprops=style)
        else:  # from the last rank, round the outside
            right = world_size + 0.35
            ax.plot([x, x, right, right, x], [world_size - 0.6, world_size - 0.5, world_size - 0.5, -0.52, -0.52],
                    color=LINK, linewidth=1.6)  # fmt: skip
            ax.annotate("", (x, -0.4), (x, -0.53), arrowprops=style)
    notes = [f"chunk {column} to rank {rank}" for rank, column in sorted(changed)]
    for k, note in enumerate(notes):
        ax.text(world_size + 0.75, k, note, va="center", size=TEXT, color=MUTED)


@styled
def overlap(steps: Mapping[str, Sequence[tuple[str, float, float]]], *, title: str, subtitle: str = "") -> Figure:
    """Training steps on one axis of time: the computation on one lane, the collectives beside it on another.

    Args:
        steps: label -> spans (name, start, end) in seconds. Spans whose name holds "reduce", "gather" or "broadcast"
            (in any case) are communication, all others computation.

    Raises:
        ValueError: no spans, or a step without communication.
    """
    if not steps:
        raise ValueError("overlap needs the spans of at least one step")
    fig, ax = figure(title, subtitle=subtitle, height=0.75 + 0.92 * len(steps), grid="x")
    longest, said = 0.0, []
    for k, (label, spans) in enumerate(steps.items()):
        talk = [s for s in spans if any(word in s[0].lower() for word in ("reduce", "gather", "broadcast"))]
        if not talk:
            raise ValueError(f"{label!r} has no span of a collective")
        work = [s for s in spans if s not in talk]
        first = min(s[1] for s in spans)
        end = max(s[2] for s in spans) - first
        longest = max(longest, end)
        ax.text(0, k - 0.36, label, size=TEXT, weight="bold", color=INK, va="bottom")
        for shift, part, colours in ((-0.17, work, (ARITHMETIC, mix(ARITHMETIC, 0.35))), (0.17, talk, (LINK,))):
            for number_, (name, start, stop) in enumerate(sorted(part, key=lambda s: s[1])):
                box = Rectangle((start - first, k + shift - 0.15), stop - start, 0.3, edgecolor="white", linewidth=0.5)
                box.set_facecolor(colours[number_ % len(colours)])
                ax.add_patch(box)
                if len(part) < 4 and stop - start > 0.1 * end:
                    ink = "white" if colours[number_ % len(colours)] == ARITHMETIC else INK
                    ax.text(
                        (start + stop) / 2 - first, k + shift, name, ha="center", va="center", size=SMALL, color=ink
                    )
        behind = sum(max(0.0, min(b, f) - max(a, e)) for _, a, b in talk for name, e, f in work if "backward" in name)
        share = 100 * behind / sum(b - a for _, a, b in talk)
        said.append(
            f"{label}: {len(talk)} collectives in a step of {quantity(end, 's', 3)}, {number(share, 2)} % of their "
            "time during the backward pass"
        )
    ax.set_xlim(0, longest * 1.01)
    ax.set_ylim(len(steps) - 0.55, -0.75)
    ax.set_yticks([])
    quantity_axis(ax.xaxis, "s", "time")
    fig.alt = f"{title.rstrip('.')}. Timelines. {'; '.join(said)}."
    return fig
