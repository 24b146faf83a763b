"""Chunks that travel between ranks, step by step, drawn from the states that a real run recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from utils.plots.animate import Animation, animate
from utils.plots.marks import box
from utils.plots.style import ARITHMETIC, HBM, INK, LINK, MUTED, ON_CHIP, SMALL, TEXT, bare, ink, mix

#: One colour a rank, for what that rank contributed.
RANK_COLOURS = (ARITHMETIC, HBM, ON_CHIP, "#8C6BB1", "#56B4E9", "#A6761D")
MOST_RANKS = len(RANK_COLOURS)

Held = frozenset[int]
#: ``states[step][rank][chunk]`` is the set of ranks whose data that chunk contains.
States = Sequence[Sequence[Sequence[Held]]]


@dataclass(frozen=True)
class Move:
    """A chunk that went from one rank to another in a step, and what it held when it left."""

    source: int
    target: int
    chunk: int
    carried: Held


def contributions(values: Sequence[Sequence[Sequence[float]]]) -> list[list[list[Held]]]:
    """Read off which ranks' data each chunk holds, from a run in which rank r contributed 2**r everywhere.

    Every sum of distinct powers of two says which of them it contains, so numbers recorded in a real run are enough;
    0 is a chunk that holds nothing.

    Args:
        values: values[step][rank][chunk], one number a chunk.

    Raises:
        ValueError: a number that is no sum of distinct contributions: one was counted twice, or is not from this run.
    """
    found = []
    for step, ranks in enumerate(values):
        found.append([])
        for rank, chunks in enumerate(ranks):
            for chunk, value in enumerate(chunks):
                if value != int(value) or not 0 <= value < 2 ** len(ranks):
                    raise ValueError(
                        f"step {step}, rank {rank}, chunk {chunk}: {value:g} is no sum of distinct contributions "
                        f"{', '.join(str(2**r) for r in range(len(ranks)))}"
                    )
            bits = [[r for r in range(len(ranks)) if int(value) >> r & 1] for value in chunks]
            found[-1].append([frozenset(held) for held in bits])
    return found


def moves_between(before: Sequence[Sequence[Held]], after: Sequence[Sequence[Held]]) -> list[Move]:
    """What must have been sent between two states, by the previous rank in the ring where several could have sent it.

    Raises:
        ValueError: a chunk that no other rank's copy explains, by replacing it or by adding to it.
    """
    moves, n = [], len(before)
    for rank in range(n):
        for chunk, (old, new) in enumerate(zip(before[rank], after[rank], strict=True)):
            if old == new:
                continue
            sources = [(rank - step) % n for step in range(1, n)]
            sent = {source: before[source][chunk] for source in sources}
            able = [s for s in sources if sent[s] and (sent[s] == new or (not sent[s] & old and sent[s] | old == new))]
            if not able:
                raise ValueError(
                    f"rank {rank}, chunk {chunk}: no rank could have turned {_said(old)} into {_said(new)} in one step"
                )
            moves.append(Move(able[0], rank, chunk, sent[able[0]]))
    return moves


def check_states(states: States) -> int:
    """The number of ranks of the states; ValueError when they are fewer than two, too many or of different shapes."""
    if len(states) < 2:
        raise ValueError(f"an animation needs the states before and after at least one step, got {len(states)}")
    n = len(states[0])
    if not 2 <= n <= MOST_RANKS:
        raise ValueError(f"there must be 2 to {MOST_RANKS} ranks, got {n}")
    chunks = len(states[0][0])
    for step, ranks in enumerate(states):
        if len(ranks) != n or any(len(row) != chunks for row in ranks):
            raise ValueError(f"step {step} must have {n} ranks of {chunks} chunks each, as step 0 has")
        for rank, row in enumerate(ranks):
            for chunk, held in enumerate(row):
                if not set(held) <= set(range(n)):
                    raise ValueError(f"step {step}, rank {rank}, chunk {chunk}: {_said(held)} are not all ranks")
    return n


def collective_animation(states: States, *, title: str) -> Animation:
    """Play a collective: ranks in a ring, each with its chunks; what is sent lies on the arrows.

    A chunk is striped in the colours of the ranks whose data it contains. What is being sent or has just arrived is
    framed in pink, a chunk that holds the data of all ranks in black.

    Args:
        states: states[step][rank][chunk] = set of contributing ranks, recorded before the first and after each step,
            for 2 to 6 ranks; :func:`contributions` makes them of recorded numbers.

    Raises:
        ValueError: states that do not have one shape or that sending chunks cannot explain.
    """
    states = [[[frozenset(held) for held in row] for row in ranks] for ranks in states]
    n = check_states(states)
    steps = [moves_between(a, b) for a, b in pairwise(states)]
    frames = [partial(_frame, state=states[0], moves=steps[0], sending=None)]
    texts = [f"Before: {_complete(states[0])}."]
    for k, moves in enumerate(steps):
        frames.append(partial(_frame, state=states[k], moves=moves, sending=True))
        texts.append(f"Step {k + 1} of {len(steps)}: {_sentence(moves)}")
        frames.append(partial(_frame, state=states[k + 1], moves=moves, sending=False))
        texts.append(f"After step {k + 1}: {_complete(states[k + 1])}.")
    end = _complete(states[-1])
    alt = f"{title.rstrip('.')}. {n} ranks in a ring exchange chunks in {len(steps)} steps; at the end {end}."
    return animate(
        frames, title=title, alt=alt, captions=texts, height=4.0, seconds_per_frame=1.1,
        poster=min(3, len(frames) - 1),
    )  # fmt: skip


def _said(ranks: Held) -> str:
    return "{" + ", ".join(map(str, sorted(ranks))) + "}"


def _complete(state: Sequence[Sequence[Held]]) -> str:
    n = len(state)
    whole = sum(len(held) == n for row in state for held in row)
    return f"{whole} of {sum(map(len, state))} chunks hold the data of all {n} ranks"


def _sentence(moves: Sequence[Move]) -> str:
    if not moves:
        return "nothing is sent."
    said = [f"rank {m.source} sends chunk {m.chunk} to rank {m.target}" for m in moves]
    if len(moves) <= 2:
        return "; ".join(said) + "."
    return f"{len(moves)} chunks are sent at once; {said[0]}, {said[1]}, and so on."


# ---- drawing -------------------------------------------------------------------------------------------------------


def _layout(n: int, chunks: int) -> tuple[list[tuple[float, float]], float, float]:
    """Centres of the ranks, clockwise around a ring, and width and height of a chunk's cell."""
    wide, high = (min(0.50, 2.2 / chunks), 0.56) if n <= 4 else (min(0.36, 1.7 / chunks), 0.40)
    if n == 2:
        return [(-2.5, 0.0), (2.5, 0.0)], wide, high
    if n == 4:
        return [(-2.45, 1.25), (2.45, 1.25), (2.45, -1.25), (-2.45, -1.25)], wide, high
    angles = [math.pi / 2 - 2 * math.pi * k / n for k in range(n)]
    return [(2.75 * math.cos(a), 1.48 * math.sin(a) - (n == 3) * 0.25) for a in angles], wide, high


def _frame(ax: Axes, state: Sequence[Sequence[Held]], moves: Sequence[Move], sending: bool | None) -> None:
    """One state and the messages of a step: on their way (``sending``), just arrived (False), or yet to come (None)."""
    bare(ax)
    n, chunks = len(state), len(state[0])
    places, wide, high = _layout(n, chunks)
    ax.set_aspect("equal")
    ax.set_xlim(-4.1, 4.1)
    ax.set_ylim(-2.42, 2.3)
    half = (chunks * wide / 2 + 0.12, high / 2 + 0.20)
    for source, target in sorted({(m.source, m.target) for m in moves}):
        sent = [m for m in moves if (m.source, m.target) == (source, target)]
        _arrow(ax, places[source], places[target], half, sent if sending else (), (wide, high), n)
    new = {(m.source if sending else m.target, m.chunk) for m in moves} if sending is not None else set()
    for rank, row in enumerate(state):
        x, y = places[rank]
        ax.add_patch(
            FancyBboxPatch(
                (x - half[0], y - half[1]), 2 * half[0], 2 * half[1], boxstyle="round,pad=0.02,rounding_size=0.08",
                facecolor="#F4F4F4", edgecolor="#C4C4C4", linewidth=0.8, zorder=3,
            )
        )  # fmt: skip
        above = y >= -1e-9
        ax.text(
            x, y + (half[1] + 0.07 if above else -half[1] - 0.07), f"rank {rank}", ha="center",
            va="bottom" if above else "top", size=TEXT, weight="bold",
            color=ink(RANK_COLOURS[rank]), zorder=6,
        )  # fmt: skip
        for chunk, held in enumerate(row):
            left, bottom = x - chunks * wide / 2 + chunk * wide, y - high / 2 + 0.08
            _cell(ax, (left, bottom), (wide, high), held, n, new=(rank, chunk) in new)
            ax.text(
                left + wide / 2, bottom - 0.02, str(chunk), ha="center", va="top", size=SMALL, color=MUTED,
                zorder=6,
            )  # fmt: skip
    note = "stripes: the ranks whose data a chunk holds; black frame: all of them"
    ax.text(-4.05, -2.40, note, size=SMALL, color=MUTED, va="bottom")


def _cell(
    ax: Axes, corner: tuple[float, float], size: tuple[float, float], held: Held, n: int, *,
    new: bool = False, zorder: float = 4,
) -> None:  # fmt: skip
    """A chunk: n slots from the top down, those of the ranks whose data it holds filled."""
    (left, bottom), (wide, high) = corner, size
    left, inner, slot = left + 0.03, wide - 0.06, high / n
    box(ax, left, bottom, inner, high, "white", zorder=zorder)
    for rank in sorted(held):
        low = bottom + (n - 1 - rank) * slot
        colour = RANK_COLOURS[rank]
        box(ax, left, low, inner, slot, colour, zorder=zorder)
    edge, width = (INK, 1.5) if len(held) == n else ("#B8B8B8", 0.6)
    if new:
        edge, width = LINK, 2.6
    box(ax, left, bottom, inner, high, edgecolor=edge, linewidth=width, zorder=zorder + 1)


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], half: tuple[float, float], sent: Sequence[Move],
    size: tuple[float, float], n: int,
) -> None:  # fmt: skip
    """An arrow between two boxes, pale when nothing is on its way; the chunks that it carries lie on its middle."""
    a, b = _edge(start, end, half), _edge(end, start, half)
    bend = -0.35 if n == 2 else 0.0  # both ways between two ranks: apart
    ax.add_patch(
        FancyArrowPatch(
            a, b, arrowstyle="-|>,head_length=5,head_width=3", connectionstyle=f"arc3,rad={bend}",
            color=LINK if sent else mix(LINK, 0.35), linewidth=1.8, shrinkA=3, shrinkB=3, zorder=2,
        )
    )  # fmt: skip
    # the middle of arc3's curve lies half its bend off the straight line
    x = (a[0] + b[0]) / 2 + 0.5 * bend * (b[1] - a[1])
    y = (a[1] + b[1]) / 2 - 0.5 * bend * (b[0] - a[0])
    w, h = 0.85 * size[0], 0.85 * size[1]
    left, flat = x - len(sent) * w / 2, abs(b[0] - a[0]) > abs(b[1] - a[1])
    for k, move in enumerate(sent):
        _cell(ax, (left + k * w, y - h / 2), (w, h), move.carried, n, new=True, zorder=6)
        place = (left + (k + 0.5) * w, y + h / 2 + 0.05) if flat else (left + (k + 1) * w + 0.05, y)
        across, up = ("center", "bottom") if flat else ("left", "center")
        ax.text(*place, str(move.chunk), ha=across, va=up, size=SMALL, color=MUTED, zorder=8)


def _edge(start: tuple[float, float], end: tuple[float, float], half: tuple[float, float]) -> tuple[float, float]:
    """Where the line from ``start`` to ``end`` leaves the box around ``start``."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    reach = min(half[0] / abs(dx) if dx else math.inf, half[1] / abs(dy) if dy else math.inf)
    return start[0] + dx * reach, start[1] + dy * reach
