"""FlashAttention's forward pass in pictures: the walk over tiles, the tiles that causality skips, and HBM traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between, require_data, require_known, require_positive, require_same_length
from utils.plots.marks import box, centred
from utils.plots.style import (
    ARITHMETIC,
    HBM,
    IDLE,
    INK,
    LIMIT,
    MUTED,
    ON_CHIP,
    SMALL,
    TEXT,
    WASTE_HATCH,
    WIDTH,
    bare,
    figure,
    mix,
    styled,
)
from utils.units import quantity

if TYPE_CHECKING:
    from utils.kernel_profile.lanes import Lanes

_NAMES = {"q_ptr": "Q", "k_ptr": "K", "v_ptr": "V", "o_ptr": "O", "lse_ptr": "L"}


@dataclass(frozen=True)
class TileAccess:
    """One tile that a program of the forward kernel read or wrote: rows ``first`` to ``last - 1`` of ``tensor``.

    ``tensor`` is Q, K, V, O or L, ``bytes`` what the unmasked lanes moved.
    """

    program: int
    tensor: str
    access: str
    first: int
    last: int
    bytes: int


def tile_accesses(lanes: Sequence[Lanes], head_dim: int, element_size: int) -> list[TileAccess]:
    """What a forward kernel of one head touched, tile by tile, in order.

    Args:
        lanes: ``trace_lanes().lanes`` of one launch whose arguments are q_ptr, k_ptr, v_ptr, o_ptr and lse_ptr, each
            contiguous with rows of ``head_dim`` elements; lse_ptr has one element a row.
        element_size: bytes of an element of q, k, v and o; one of the logsumexp has 4.
    """
    require_data("tile_accesses", lanes)
    require_known("the argument of an access", (one.argument for one in lanes), _NAMES)
    found = []
    for one in lanes:
        tensor = _NAMES[one.argument]
        elements = one.elements[one.mask]
        require_data(f"program {one.program[0]} and its access to {tensor}", elements)
        rows = elements if tensor == "L" else elements // head_dim
        size = 4 if tensor == "L" else element_size
        found.append(
            TileAccess(one.program[0], tensor, one.access, int(rows.min()), int(rows.max()) + 1, elements.size * size)
        )
    return found


@dataclass(frozen=True)
class _Frame:
    """One frame of the walk: what moves in it, and what the chip holds."""

    program: int
    moves: tuple[TileAccess, ...]
    queries: tuple[int, int]
    keys: tuple[int, int] | None
    moved: int  # bytes since the start
    done: frozenset[tuple[int, int, int, int]]  # finished tiles of scores: first and last query, first and last key


def _frames(accesses: Sequence[TileAccess]) -> list[_Frame]:
    """Group accesses: the load of Q, then K with V for each tile of keys, then the stores."""
    frames: list[_Frame] = []
    done: set[tuple[int, int, int, int]] = set()
    moved, queries, keys = 0, (0, 0), None
    pending: list[TileAccess] = []

    def close() -> None:
        nonlocal pending
        if pending:
            frames.append(_Frame(pending[0].program, tuple(pending), queries, keys, moved, frozenset(done)))
        pending = []

    for one in accesses:
        opens = one.tensor in ("Q", "K") or (one.tensor == "O" and one.access == "write")
        if opens:
            close()
        if one.tensor == "Q":
            queries, keys = (one.first, one.last), None
        elif one.tensor == "K":
            keys = (one.first, one.last)
            done.add((*queries, *keys))
        elif one.tensor in ("O", "L"):
            keys = None
        pending.append(one)
        moved += one.bytes
    close()
    return frames


def tile_walk_animation(
    accesses: Sequence[TileAccess],
    *,
    num_queries: int,
    num_keys: int,
    on_chip: Mapping[str, int],
    title: str,
    alt: str,
    subtitle: str = "",
) -> Animation:
    """Show FlashAttention's walk: which tiles of Q, K and V come from HBM, what the chip holds, what is written.

    Args:
        accesses: of :func:`tile_accesses`, what a kernel really touched.
        num_queries, num_keys: rows of Q and O, and of K and V.
        on_chip: bytes that a program holds while it works on a tile of scores, by tensor, such as ``{"Q": 4096}``.

    Raises:
        ValueError: accesses outside of the matrices.
    """
    require_data("tile_walk_animation", accesses)
    frames = _frames(accesses)
    for one in accesses:
        limit = num_keys if one.tensor in ("K", "V") else num_queries
        if not 0 <= one.first < one.last <= limit:
            raise ValueError(f"rows {one.first} to {one.last - 1} of {one.tensor} are outside of its {limit}")
    draw = partial(_draw_walk, frames=frames, num_queries=num_queries, num_keys=num_keys, on_chip=on_chip)
    captions = ["Q, K and V lie in HBM. The scores are a grid that nobody stores."]
    captions += [_walk_caption(frame) for frame in frames]
    steps = [partial(draw, step=k) for k in range(-1, len(frames))]
    poster = next(k for k in range(len(frames) - 1, -1, -1) if frames[k].keys) + 1
    return animate(
        steps, title=title, alt=alt, captions=captions, subtitle=subtitle, height=3.35,
        seconds_per_frame=0.9, poster=poster,
    )  # fmt: skip


def _walk_caption(frame: _Frame) -> str:
    names = " and ".join(dict.fromkeys(one.tensor for one in frame.moves))
    rows = f"{frame.moves[0].first} to {frame.moves[0].last - 1}"
    size = quantity(sum(one.bytes for one in frame.moves), "B", 4)
    if frame.moves[0].access == "write":
        return (
            f"program {frame.program} divides by d and writes {names}, rows {rows}: {size}. Then it forgets everything."
        )
    if frame.keys is None:
        return f"program {frame.program} reads its rows {rows} of {names}, {size}: they stay until it ends."
    return (
        f"program {frame.program} reads {names}, rows {rows}, {size}: scores, weights, and a better O, all on the chip."
    )


def _draw_walk(
    ax: Axes,
    *,
    step: int,
    frames: Sequence[_Frame],
    num_queries: int,
    num_keys: int,
    on_chip: Mapping[str, int],
) -> None:
    bare(ax)
    frame = frames[step] if step >= 0 else None
    unit = 5.2 / max(num_queries, num_keys)  # drawing units a row
    height, width, thick, gap = num_queries * unit, num_keys * unit, 0.75, 0.45
    pale = mix(HBM, 0.28)
    left, right = -gap - thick, width + gap

    places = {  # tensor -> its rectangle; rows run down for Q and O, to the right for K and V
        "Q": (left, 0.0, thick, height), "O": (right, 0.0, thick, height),
        "L": (right + thick + 0.12, 0.0, 0.16, height),
        "K": (0.0, -gap - thick, width, thick), "V": (0.0, -2 * gap - 2 * thick + 0.15, width, thick),
    }  # fmt: skip
    written = {
        t: [f for f in frames[: step + 1] for f in f.moves if f.access == "write" and f.tensor == t] for t in "OL"
    }
    for tensor, (x, y, w, h) in places.items():
        box(ax, x, y, w, h, IDLE if tensor in "OL" else pale)
        parts = [(one, pale) for one in written.get(tensor, [])]
        if frame:
            parts += [(one, HBM) for one in frame.moves if one.tensor == tensor]
            if tensor == "Q" and frame.moves[0].access != "write" and frame.keys:
                parts.append((TileAccess(0, "Q", "read", *frame.queries, 0), ON_CHIP))
        for one, colour in parts:
            start, length = one.first * unit, (one.last - one.first) * unit
            if tensor in "KV":
                box(ax, x + start, y, length, h, colour)
            else:
                box(ax, x, y + start, w, length, colour)
        box(ax, x, y, w, h, edgecolor=LIMIT, linewidth=0.8)
    centred(ax, left + thick / 2, height + 0.3, "Q", size=TEXT, weight="bold")
    centred(ax, right + thick / 2, height + 0.3, "O", size=TEXT, weight="bold")
    centred(ax, right + thick + 0.2, height + 0.3, "L", size=TEXT, weight="bold")
    centred(ax, -0.3, places["K"][1] + thick / 2, "Kᵀ", size=TEXT, weight="bold")
    centred(ax, -0.3, places["V"][1] + thick / 2, "Vᵀ", size=TEXT, weight="bold")

    tiles = sorted({(*f.queries, *f.keys) for f in frames if f.keys})
    for q0, q1, k0, k1 in tiles:
        active = frame is not None and frame.keys == (k0, k1) and frame.queries == (q0, q1)
        past = frame is not None and (q0, q1, k0, k1) in frame.done
        face = ON_CHIP if active else mix(ON_CHIP, 0.14) if past else "#FFFFFF"
        size = {"linewidth": 0.7, "linestyle": (0, (3, 2)), "edgecolor": "#8A8A8A"}
        box(ax, k0 * unit, q0 * unit, (k1 - k0) * unit, (q1 - q0) * unit, face, **size)
        if active:
            centred(ax, (k0 + k1) / 2 * unit, (q0 + q1) / 2 * unit, "S, P", color="white", weight="bold")
    centred(ax, width / 2, height + 0.3, "S and P: never in HBM", color=MUTED)
    _draw_chip(ax, right + 2.0, places["V"][1], height - places["V"][1], frame, on_chip)
    ax.set_xlim(left - 0.1, right + 6.9)
    ax.set_ylim(height + 0.55, places["V"][1] - 0.1)


def _draw_chip(ax: Axes, x: float, y: float, height: float, frame: _Frame | None, on_chip: Mapping[str, int]) -> None:
    """The box on the right: what the SM of this program holds, and the bytes read and written so far."""
    width = 4.8
    box(ax, x, y, width, 0.66 * height, mix(ON_CHIP, 0.10), edgecolor=ON_CHIP, linewidth=1.2)
    writing = frame is not None and frame.moves[0].access == "write"
    head = "on chip" if frame is None else f"on chip, program {frame.program}"
    ax.text(x + 0.2, y + 0.35, head, size=TEXT, weight="bold", color=INK, va="center")
    held = set()
    if frame is not None:
        held = set(on_chip) if frame.keys else {n for n in on_chip if n in (("O", "m, d") if writing else ("Q",))}
    for k, (name, size) in enumerate(on_chip.items()):
        line = y + 0.95 + 0.58 * k
        here = name in held
        box(ax, x + 0.2, line - 0.2, 0.4, 0.4, ON_CHIP if here else IDLE)
        ax.text(x + 0.8, line, name, size=TEXT, color=INK if here else "#B0B0B0", va="center")
        text = quantity(size, "B", 4) if here else "–"
        ax.text(x + width - 0.2, line, text, size=TEXT, color=INK if here else "#B0B0B0", va="center", ha="right")
    moved = 0 if frame is None else frame.moved
    below = y + 0.66 * height + 0.45
    ax.text(x, below, "bytes moved so far", size=SMALL, color=MUTED, va="center")
    ax.text(x, below + 0.6, quantity(moved, "B", 5), size=13, weight="bold", color=HBM, va="center")


_TILE_KINDS = ("skip", "diagonal", "full")


@styled
def causal_tile_map(panels: Mapping[str, Sequence[Sequence[str]]], *, title: str) -> Figure:
    """Draw what a causal kernel does with each tile of the scores, panels side by side: skip, mask, or just compute.

    Args:
        panels: name -> rows of ``skip``, ``diagonal`` or ``full``, as :func:`utils.attention_math.causal_tiles` says.
    """
    require_between("the number of panels", [len(panels)], 1, 3)
    for name, rows in panels.items():
        require_same_length(f"the rows of panel {name!r}", *rows)
        require_between(f"the tiles on a side of panel {name!r}", [len(rows), len(rows[0])], 1, 40)
        require_known(f"a tile of panel {name!r}", (kind for row in rows for kind in row), _TILE_KINDS)
    counts = {
        n: {k: sum(row.count(k) for row in rows) for k in ("full", "diagonal", "skip")} for n, rows in panels.items()
    }
    subtitle = "rows: tiles of queries; columns: tiles of keys. Blue: computed; pale: with a mask; hatched: skipped"
    columns = sum(len(rows[0]) for rows in panels.values())
    tallest = max(len(rows) for rows in panels.values())
    height = min(5.0, (WIDTH - 0.7) * tallest / columns) + 1.0
    fig, axes = figure(
        title, subtitle=subtitle, columns=len(panels), height=height, grid="none",
        width_ratios=[len(rows[0]) for rows in panels.values()],
    )  # fmt: skip
    looks = {
        "full": {"facecolor": ARITHMETIC, "edgecolor": "white"},
        "diagonal": {"facecolor": mix(ARITHMETIC, 0.42), "edgecolor": "white"},
        "skip": {"facecolor": "#FFFFFF", "edgecolor": "#B5B5B5", "hatch": WASTE_HATCH},
    }
    said = []
    for ax, (name, rows) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        bare(ax)
        for i, row in enumerate(rows):
            for j, kind in enumerate(row):
                box(ax, j, i, 1, 1, linewidth=0.8, **looks[kind])
        ax.set_xlim(-0.05, len(rows[0]) + 0.05)
        ax.set_ylim(len(rows) + 0.05, -0.05)
        ax.set_aspect("equal")
        ax.set_anchor("NW")
        ax.set_title(name, loc="left", size=TEXT, weight="bold", color=INK, pad=5)
        c = counts[name]
        foot = f"{c['full']} full, {c['diagonal']} on the diagonal, {c['skip']} skipped"
        lines = foot.replace(", ", "\n")
        ax.text(0, -0.03, lines, transform=ax.transAxes, va="top", size=SMALL, color=MUTED, linespacing=1.3)
        said.append(f"{name}: {foot}")
    fig.alt = f"Tiles of the scores, by what a causal kernel does with them. {'; '.join(said)}."
    return fig


@styled
def tile_rates(rates: Mapping[tuple[int, int], tuple[float, bool]], *, title: str, subtitle: str = "") -> Figure:
    """Draw the rate of a kernel by its tile as a map: queries down, keys to the right, the best in bold.

    Args:
        rates: (BLOCK_M, BLOCK_N) -> FLOP/s, and whether registers spill; a tile that is missing was refused.
    """
    require_positive("the rate of a tile", (rate for rate, _ in rates.values()))
    down, right = (sorted({tile[axis] for tile in rates}) for axis in (0, 1))
    top = max(rate for rate, _ in rates.values())
    fig, ax = figure(title, subtitle=subtitle, height=0.5 * len(down) + 0.75, grid="none")
    for i, block_m in enumerate(down):
        for j, block_n in enumerate(right):
            rate, spills = rates.get((block_m, block_n), (0.0, False))
            share = rate / top
            face = mix(ARITHMETIC, 0.06 + 0.9 * share) if rate else IDLE
            box(ax, j + 0.02, i + 0.03, 0.96, 0.94, face)
            text = f"{rate / 1e12:.0f}" + (", spills" if spills else "") if rate else "refused"
            ax.text(
                j + 0.5, i + 0.5, text, ha="center", va="center", size=TEXT, color="white" if share > 0.55 else INK,
                weight="bold" if share == 1 else "normal",
            )  # fmt: skip
    ax.set_xlim(0, len(right))
    ax.set_ylim(len(down), 0)
    ax.set_xticks([j + 0.5 for j in range(len(right))], right)
    ax.set_yticks([i + 0.5 for i in range(len(down))], down)
    ax.set_xlabel("keys per tile")
    ax.set_ylabel("queries per tile")
    ax.spines["bottom"].set_visible(False)
    said = (f"{m} x {n}: {rate / 1e12:.0f}{', spills' if spills else ''}" for (m, n), (rate, spills) in rates.items())
    fig.alt = f"Rates in TFLOP/s by queries and keys per tile. {'; '.join(said)}."
    return fig
