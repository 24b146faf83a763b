"""A serving engine at work, drawn from its own history: slots over iterations, the pool, ragged batches, reservations.

Colours: a prompt's tokens dark blue, a generated token light blue, an idle slot grey and hatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between, require_data, require_known, require_positive
from utils.plots.marks import box, centred, lanes
from utils.plots.style import (
    ARITHMETIC,
    IDLE,
    INK,
    LIMIT,
    MUTED,
    ON_CHIP,
    SMALL,
    TEXT,
    WASTE,
    WASTE_HATCH,
    bare,
    figure,
    mix,
    styled,
)

PROMPT_COLOUR, TOKEN_COLOUR, LAST_COLOUR = mix(ARITHMETIC, 0.85), mix(ARITHMETIC, 0.38), mix(ON_CHIP, 0.55)
_IDLE = {"facecolor": IDLE, "edgecolor": WASTE, "hatch": WASTE_HATCH}


class Step(Protocol):
    """An entry of an engine's history: (request, first token, number of tokens) of each chunk; who ended."""

    chunks: Sequence[tuple[str, int, int]]
    finished: Sequence[str]


@dataclass(frozen=True)
class Cell:
    """What a slot of the batch does in an iteration: ``tokens`` of a request, of which it is perhaps the last step."""

    request: str
    tokens: int
    last: bool
    first: bool


@dataclass(frozen=True)
class SlotGrid:
    """``rows[slot][iteration]``: a :class:`Cell`, or None where the slot idles."""

    rows: tuple[tuple[Cell | None, ...], ...]

    @property
    def slots(self) -> int:
        """Places in the batch."""
        return len(self.rows)

    @property
    def iterations(self) -> int:
        """Steps of the engine."""
        return len(self.rows[0])

    @property
    def busy(self) -> int:
        """Slots times iterations in which something was computed."""
        return sum(cell is not None for row in self.rows for cell in row)

    @property
    def utilisation(self) -> float:
        """Busy slots over all slots."""
        return self.busy / (self.slots * self.iterations)

    def until(self, iteration: int) -> SlotGrid:
        """The first iterations only."""
        return SlotGrid(tuple(row[:iteration] for row in self.rows))


def slots_of(history: Sequence[Step], slots: int) -> SlotGrid:
    """Who sat in which slot of the batch in which iteration: a request takes the lowest free slot and keeps it."""
    require_data("slots_of", history)
    for step in history:
        require_between("the number of requests in a step", [len({id for id, _, _ in step.chunks})], 0, slots)
    seat: dict[str, int] = {}
    seen: set[str] = set()
    rows: list[list[Cell | None]] = [[] for _ in range(slots)]
    for step in history:
        present = {id: tokens for id, _, tokens in step.chunks}
        seat = {id: place for id, place in seat.items() if id in present}
        free = sorted(set(range(slots)) - set(seat.values()))
        for id in present:
            if id not in seat:
                seat[id] = free.pop(0)
        column: list[Cell | None] = [None] * slots
        for id, place in seat.items():
            column[place] = Cell(id, present[id], id in step.finished, id not in seen)
            seen.add(id)
        for row, cell in zip(rows, column, strict=True):
            row.append(cell)
    return SlotGrid(tuple(map(tuple, rows)))


@styled
def slot_timeline(panels: Mapping[str, SlotGrid], *, title: str, subtitle: str = "") -> Figure:
    """Slots over iterations, one panel a scheduler: a box is what a slot computed, grey is a slot that idled.

    The green box is a request's last step. Utilisation is written above each panel.
    """
    longest = max(grid.iterations for grid in panels.values())
    heights = [grid.slots for grid in panels.values()]
    fig, axes = figure(
        title, subtitle=subtitle, height=0.27 * sum(heights) + 0.62 * len(panels) + 0.15, rows=len(panels),
        height_ratios=heights, grid="none",
    )  # fmt: skip
    said = []
    for ax, (name, grid) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        share = f"{grid.busy} of {grid.slots * grid.iterations} slots used, {grid.utilisation:.1%}"
        ax.set_title(f"{name}: {share}", loc="left", size=TEXT, color=INK)
        _draw_grid(ax, grid, longest)
        said.append(f"{name}, {share}")
    np.atleast_1d(axes)[-1].set_xlabel("iteration", size=TEXT)
    fig.alt = f"{title.rstrip('.')}. Slots of a batch over iterations. {'; '.join(said)}."
    return fig


def _draw_grid(ax: Axes, grid: SlotGrid, longest: int) -> None:
    names = grid.iterations <= 28
    for y, row in enumerate(grid.rows):
        for x, cell in enumerate(row):
            if cell is None:
                box(ax, x + 0.03, y - 0.42, 0.94, 0.84, linewidth=0.0, **_IDLE)
                continue
            colour = LAST_COLOUR if cell.last else PROMPT_COLOUR if cell.tokens > 1 or cell.first else TOKEN_COLOUR
            box(ax, x + 0.03, y - 0.42, 0.94, 0.84, colour)
            if names or cell.first:
                ink = "white" if colour == PROMPT_COLOUR else INK
                centred(ax, x + 0.5, y, cell.request, color=ink, clip_on=True)
    lanes(ax, [f"slot {y + 1}" for y in range(grid.slots)], longest)
    every = 1 if longest <= 16 else 2 if longest <= 28 else 5 if longest <= 60 else 20
    ticks = [x for x in range(grid.iterations) if (x + 1) % every == 0 or x == 0]
    ax.set_xticks([x + 0.5 for x in ticks], [f"T{x + 1}" if longest <= 28 else str(x + 1) for x in ticks])


# ---- the pool and the engine --------------------------------------------------------------------------------------


def pool_animation(
    history: Sequence[Step], arrivals: Mapping[str, int], lengths: Mapping[str, int], slots: int, *, title: str
) -> Animation:
    """Requests move from the pool into the engine and out of it, one frame an iteration.

    Args:
        history: the engine's, one entry an iteration.
        arrivals: the iteration (from 0) before which each request came, in the order in which they came.
        lengths: tokens that each request will generate; nobody tells the engine.
        slots: places in the batch.
    """
    require_known("a request that runs", (id for step in history for id, _, _ in step.chunks), arrivals)
    grid = slots_of(history, slots)
    frames, captions, done = [], [], []
    made: dict[str, int] = dict.fromkeys(arrivals, 0)
    admitted: set[str] = set()
    for k, step in enumerate(history):
        came = [id for id, at in arrivals.items() if at == k or (k == 0 and at < 0)]
        present = [id for id, _, _ in step.chunks]
        joined = [id for id in present if id not in admitted]
        admitted |= set(present)
        for id in present:
            made[id] += 1
        ended = [id for id in step.finished if id in present]
        waiting = [id for id, at in arrivals.items() if at <= k and id not in admitted]
        seats = [row[k] for row in grid.rows]
        frames.append(
            partial(_draw_pool, waiting=waiting, seats=seats, done=list(done), made=dict(made), lengths=lengths)
        )
        done += ended
        captions.append(_told(k, came, joined, present, ended, waiting))
    alt = f"{title.rstrip('.')}. {' '.join(captions)}"
    subtitle = "left: the pool of waiting requests; middle: the batch of this iteration; right: answered"
    return animate(
        frames, title=title, subtitle=subtitle, captions=captions, alt=alt, height=0.42 * slots + 0.75,
        seconds_per_frame=1.8,
    )  # fmt: skip


def _told(
    k: int, came: Sequence[str], joined: Sequence[str], present: Sequence[str], ended: Sequence[str],
    waiting: Sequence[str],
) -> str:  # fmt: skip
    said = [f"Iteration {k + 1} computes {', '.join(present)}" if present else f"Iteration {k + 1} computes nothing"]
    for what, who in (("new in the pool", came), ("joins" if len(joined) == 1 else "join", joined), ("done", ended)):
        if who:
            said.append(f"{', '.join(who)} {what}" if what.startswith("join") else f"{what}: {', '.join(who)}")
    if waiting:
        said.append(f"{', '.join(waiting)} must wait")
    return "; ".join(said) + "."


def _draw_pool(
    ax: Axes,
    *,
    waiting: Sequence[str],
    seats: Sequence[Cell | None],
    done: Sequence[str],
    made: Mapping[str, int],
    lengths: Mapping[str, int],
) -> None:
    bare(ax)
    rows = len(seats)
    for x, heading in ((0.0, "request pool"), (3.0, "execution engine"), (9.6, "answered")):
        ax.text(x, -0.85, heading, ha="left", va="center", size=TEXT, weight="bold", color=INK)
    for n, id in enumerate(waiting):
        x, y = n % 2, n // 2
        if y < rows:
            box(ax, x, y - 0.36, 0.9, 0.72, "white", edgecolor=MUTED, linewidth=1.0)
            centred(ax, x + 0.45, y, id)
    most = max(lengths.values())
    for y, cell in enumerate(seats):
        box(ax, 3.0, y - 0.36, 6.0, 0.72, mix(WASTE, 0.25))
        if cell is None:
            ax.text(3.15, y, "idle", ha="left", va="center", size=SMALL, color=MUTED)
            continue
        unit = 4.65 / most
        for t in range(made[cell.request]):
            new = t == made[cell.request] - 1
            colour = (LAST_COLOUR if cell.last else PROMPT_COLOUR) if new else TOKEN_COLOUR
            box(ax, 4.3 + t * unit, y - 0.3, unit * 0.9, 0.6, colour)
        text = f"{cell.request}" + (" END" if cell.last else "")
        ax.text(3.1, y, text, ha="left", va="center", size=SMALL, color=INK)
    for n, id in enumerate(done):
        x, y = n // rows, n % rows
        box(ax, 9.6 + x, y - 0.36, 0.9, 0.72, LAST_COLOUR)
        centred(ax, 9.6 + x + 0.45, y, id)
    ax.set_xlim(-0.2, 9.8 + max(2, -(-len(lengths) // rows)))
    ax.set_ylim(rows - 0.45, -1.2)


# ---- ragged batches -----------------------------------------------------------------------------------------------


@styled
def ragged_batch(lengths: Mapping[str, int], *, title: str) -> Figure:
    """The tokens of a step twice: padded to a rectangle, and laid end to end.

    Args:
        lengths: tokens that each request brings to this step.
    """
    require_positive("the tokens of a request", lengths.values())
    longest, whole = max(lengths.values()), sum(lengths.values())
    fig, (top, bottom) = figure(
        title, height=0.3 * len(lengths) + 1.35, rows=2, height_ratios=[len(lengths), 1.1],
        grid="none",
    )  # fmt: skip
    padded = longest * len(lengths)
    for ax, width, name in (
        (
            top,
            whole,
            f"padded: {len(lengths)} x {longest} = {padded} rows for every operation, {padded - whole} wasted",
        ),
        (bottom, whole, f"laid end to end: {whole} rows"),
    ):
        bare(ax)
        ax.set_title(name, loc="left", size=TEXT, color=INK)
        ax.set_xlim(-0.08 * width, max(width, longest) + 0.1)
    at = 0
    for y, (id, count) in enumerate(lengths.items()):
        colour = mix(ARITHMETIC, 0.3 + 0.5 * (y % 2))
        for x in range(longest):
            look = {"facecolor": colour} if x < count else _IDLE
            box(top, x + 0.04, y - 0.42, 0.92, 0.84, linewidth=0.0, **look)
        for x in range(at, at + count):
            box(bottom, x + 0.04, -0.42, 0.92, 0.84, colour)
        top.text(-0.2, y, id, ha="right", va="center", size=SMALL, color=INK)
        centred(bottom, at + count / 2, 0, id, color=INK if not y % 2 else "white")
        at += count
    top.set_ylim(len(lengths) - 0.5, -0.5)
    bottom.set_ylim(0.5, -0.5)
    listed = ", ".join(f"{id} {count}" for id, count in lengths.items())
    fig.alt = f"{title.rstrip('.')}. Tokens in this step: {listed}. Padded {padded} rows, laid end to end {whole}."
    return fig


# ---- reservations -------------------------------------------------------------------------------------------------


@styled
def reservation_plot(
    panels: Mapping[str, Sequence[Mapping[str, tuple[int, int]]]], capacity: int, *, title: str, subtitle: str = ""
) -> Figure:
    """Slots of KV memory over iterations, each request's stacked: solid what holds tokens, pale what is reserved.

    Args:
        panels: by name, for each iteration request -> (slots with tokens, slots reserved for it, those included).
        capacity: slots in all, drawn as the limit.
    """
    fig, axes = figure(
        title, subtitle=subtitle, height=1.9 * len(panels) + 0.5, rows=len(panels), sharex=True, grid="y"
    )
    said = []
    for ax, (name, steps) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        order = list(dict.fromkeys(id for step in steps for id in step))
        x = np.arange(1, len(steps) + 1)
        base = np.zeros(len(steps))
        for n, id in enumerate(order):
            held = np.array([step.get(id, (0, 0))[0] for step in steps], float)
            kept = np.array([step.get(id, (0, 0))[1] for step in steps], float)
            colour = mix(ARITHMETIC, 0.45 + 0.4 * (n % 2))
            ax.bar(x, held, 0.94, base, color=colour, linewidth=0)
            ax.bar(x, kept - held, 0.94, base + held, color=mix(WASTE, 0.5), linewidth=0, hatch=WASTE_HATCH)
            here = np.flatnonzero(kept)
            if len(here):
                middle = here[len(here) // 2]
                ax.text(
                    x[middle], base[middle] + max(held[middle], 1) / 2, id, ha="center", va="center", size=SMALL,
                    color=INK if n % 2 == 0 else "white",
                )  # fmt: skip
            base += kept
        ax.axhline(capacity, color=LIMIT, linewidth=1.0)
        ax.set_title(name, loc="left", size=TEXT, color=INK)
        tokens = sum(held for held, _ in steps[-1].values())
        said.append(f"{name}: {len(steps)} iterations, at the end {tokens} of {capacity} slots hold tokens")
        ax.set_ylabel("slots of KV memory", size=SMALL)
    np.atleast_1d(axes)[-1].set_xlabel("iteration", size=SMALL)
    fig.alt = f"{title.rstrip('.')}. {'; '.join(said)}."
    return fig
