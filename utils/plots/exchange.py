"""Who holds whose numbers before a collective and after it, drawn from what real ranks held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from utils.plots.animate import Animation, animate
from utils.plots.check import require_data
from utils.plots.collectives import RANK_COLOURS, Held, check_states, contributions
from utils.plots.marks import box, centred
from utils.plots.style import INK, LINK, MUTED, TEXT, WASTE, bare, ink

#: Chunks of one rank before and after: numbers in which rank r's contribution is 2**r; 0 is memory without contents.
Pair = tuple[Sequence[float], Sequence[float]]


def before_and_after(found: Mapping[str, Sequence[Pair]], *, title: str) -> Animation:
    """One frame for each collective: every rank's chunks before it and after it.

    Args:
        found: name -> for each rank its chunks before and after; see :func:`utils.plots.collectives.contributions`.
    """
    require_data("before_and_after", found)
    frames, captions, said = [], [], []
    for name, ranks in found.items():
        states = contributions([[pair[k] for pair in ranks] for k in (0, 1)])
        check_states(states)
        changed = [(r, c) for r, row in enumerate(states[1]) for c, held in enumerate(row) if held != states[0][r][c]]
        frames.append(partial(_frame, states=states, name=name, changed=changed))
        captions.append(f"{name}: {len(changed)} of {sum(map(len, states[1]))} chunks hold something else afterwards")
        said.append(f"{name}: ranks hold {_listed(states[0])} before and {_listed(states[1])} after")
    subtitle = "a box is a chunk; its stripes say whose numbers are in it; a pink frame marks what changed"
    alt = f"{title.rstrip('.')}. Each chunk with the ranks whose numbers it holds. {'. '.join(said)}."
    return animate(
        frames, title=title, subtitle=subtitle, captions=captions, alt=alt, height=2.5, seconds_per_frame=2.5
    )


def _listed(ranks: Sequence[Sequence[Held]]) -> str:
    """Chunk by chunk: "012 | - | 3; ..." with ranks separated by semicolons."""
    return "; ".join(" | ".join("".join(map(str, sorted(held))) or "-" for held in row) for row in ranks)


def _frame(ax: Axes, states: Sequence[Sequence[Sequence[Held]]], name: str, changed: Sequence[tuple[int, int]]) -> None:
    bare(ax)
    n, width = len(states[0]), len(states[0][0])
    for k, (heading, ranks) in enumerate((("before", states[0]), (f"after {name}", states[1]))):
        left = k * (width + 1.2)
        centred(ax, left + width / 2, -0.72, heading, size=TEXT)
        for rank, row in enumerate(ranks):
            for column, held in enumerate(row):
                _chunk(ax, left + column, rank, held, n, framed=k == 1 and (rank, column) in changed)
    for rank in range(n):
        colour = ink(RANK_COLOURS[rank])
        ax.text(-0.25, rank, f"rank {rank}", ha="right", va="center", size=TEXT, weight="bold", color=colour)
    ax.set_xlim(-1.4, 2 * width + 1.4)
    ax.set_ylim(n - 0.45, -1.05)


def _chunk(ax: Axes, x: float, y: float, held: Held, n: int, framed: bool) -> None:
    """A box with a slot for each of n ranks, filled where that rank's numbers are in it, and their sum below."""
    edge, line = (LINK, 2.4) if framed else (WASTE, 0.8)
    box(ax, x + 0.05, y - 0.4, 0.9, 0.8, "white", edgecolor=edge, linewidth=line)
    for rank in held:
        slot = 0.76 / n
        box(ax, x + 0.12 + rank * slot, y - 0.31, slot - 0.02, 0.4, RANK_COLOURS[rank])
    text = str(sum(2**rank for rank in held)) if held else "–"
    centred(ax, x + 0.5, y + 0.25, text, color=INK if held else MUTED)
