"""The backward pass of attention in pictures: softmax's Jacobian, who writes what, the walk over tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between, require_known
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
    WRONG,
    WRONG_HATCH,
    bare,
    figure,
    mix,
    styled,
)

if TYPE_CHECKING:
    from utils.kernel_profile.lanes import Lanes


def _draw_matrix(ax: Axes, matrix: np.ndarray, largest: float, numbers: bool) -> None:
    """Cells shaded by size: blue above zero, grey below, and white for exactly zero."""
    bare(ax)
    rows, columns = matrix.shape
    for row in range(rows):
        for column in range(columns):
            value = matrix[row, column]
            share = min(1.0, abs(value) / largest) ** 0.7
            face = "#FFFFFF" if value == 0 else mix(ARITHMETIC if value > 0 else MUTED, 0.12 + 0.78 * share)
            edge = mix(INK, 0.12) if numbers else "none"
            box(ax, column, row, 1, 1, face, edgecolor=edge, linewidth=0.5)
            if numbers:
                dark = value != 0 and 0.12 + 0.78 * share > 0.55
                text = "0" if value == 0 else f"{value:.{2 if abs(value) >= 0.005 else 3}f}"
                text = text.replace("0.", ".").replace("-", "\N{MINUS SIGN}")  # short enough for its cell
                centred(ax, column + 0.5, row + 0.52, text, color="#FFFFFF" if dark else INK)
    box(ax, 0, 0, columns, rows, edgecolor=LIMIT, linewidth=0.9)
    ax.set_xlim(-0.05, columns + 0.05)
    ax.set_ylim(rows + 0.05, -0.05)
    ax.set_aspect("equal")


@styled
def softmax_jacobian(p: Sequence[float], *, title: str, subtitle: str = "") -> Figure:
    """Draw diag(p) minus p p^T equals J, for one row of probabilities.

    Args:
        p: the row, up to 8 probabilities that add up to 1.
    """
    p = np.asarray(p, np.float64)
    require_between("the number of probabilities", [p.size if p.ndim == 1 else 0], 1, 8)
    if (p < 0).any() or abs(p.sum() - 1) > 1e-9:
        raise ValueError(f"p must be probabilities that add up to 1, got {p.tolist()}")
    parts = {"diag(p)": np.diag(p), "p pᵀ": np.outer(p, p), "J = diag(p) − p pᵀ": np.diag(p) - np.outer(p, p)}
    fig, axes = figure(title, subtitle=subtitle, columns=3, height=2.75, grid="none")
    for ax, (name, matrix), sign in zip(axes, parts.items(), ("−", "=", ""), strict=True):
        _draw_matrix(ax, matrix, p.max(), True)
        ax.set_title(name, loc="left", size=TEXT, weight="bold", color=INK)
        centred(ax, 1.09, 0.5, sign, transform=ax.transAxes, size=15)
    listed = ", ".join(f"{value:.2f}" for value in p)
    fig.alt = (
        f"Three matrices of {p.size} by {p.size} for p = ({listed}): diag(p) holds p on its diagonal and zeros "
        "elsewhere, p p transposed holds all products, and their difference, the Jacobian, is positive on the diagonal "
        "and negative beside it; each of its rows adds up to zero."
    )
    return fig


@styled
def block_jacobian(jacobian: np.ndarray, columns: int, *, title: str, subtitle: str = "") -> Figure:
    """Draw the Jacobian of a whole matrix P with respect to a whole matrix S, flattened row by row.

    Args:
        jacobian: (R C, R C) for R rows of C scores: entry (i, j) is the derivative of P's i-th by S's j-th element.
        columns: C.
    """
    jacobian = np.asarray(jacobian, np.float64)
    if jacobian.ndim != 2 or len(jacobian) != jacobian.shape[1] or columns < 1 or len(jacobian) % columns:
        raise ValueError(f"jacobian must be square with a multiple of {columns} rows, got shape {jacobian.shape}")
    require_between("the number of rows of the jacobian", [len(jacobian)], 1, 96)
    size = len(jacobian)
    rows = size // columns
    fig, ax = figure(title, subtitle=subtitle, height=4.1, grid="none")
    _draw_matrix(ax, jacobian, np.abs(jacobian).max(), False)
    for row in range(rows):
        box(ax, row * columns, row * columns, columns, columns, edgecolor=INK, linewidth=1.2)
        middle = (row + 0.5) * columns
        ax.text(size + 0.6, middle, f"row {row} of P", va="center", size=SMALL, color=INK)
        ax.text(middle, -0.6, f"row {row} of S", ha="center", va="bottom", size=SMALL, color=INK)
    outside = sum(
        np.count_nonzero(jacobian[a * columns : (a + 1) * columns, b * columns : (b + 1) * columns])
        for a in range(rows)
        for b in range(rows)
        if a != b
    )
    fig.alt = (
        f"A matrix of {size} by {size}: derivatives of the {size} probabilities by the {size} scores. {rows} blocks of "
        f"{columns} by {columns} on the diagonal hold numbers, one block a row of P; outside of them {outside} of "
        f"{size**2 - rows * columns**2} entries differ from zero."
    )
    return fig


def touched_tiles(lanes: Sequence[Lanes], head_dim: int, tile: int) -> dict[tuple[int, int, int], set[int]]:
    """Program -> tiles of rows that it touches, from the lanes that took part."""
    found: dict[tuple[int, int, int], set[int]] = {}
    for one in lanes:
        rows = np.unique(one.elements[one.mask] // head_dim // tile)
        found.setdefault(one.program, set()).update(int(row) for row in rows)
    return found


@styled
def gradient_writers(
    designs: Mapping[str, Mapping[str, Sequence[Lanes]]],
    *,
    head_dim: int,
    tile: int,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw which program writes which tile of which gradient; a tile with several writers is hatched.

    Args:
        designs: design -> gradient -> its stores and atomics of :func:`utils.kernel_profile.lanes.trace_lanes`, one
            sequence of (N, head_dim). All programs of one gradient belong to one launch.
        tile: rows of a tile.
    """
    names = list(next(iter(designs.values())))
    if not names or any(list(design) != names for design in designs.values()):
        raise ValueError(f"every design must hold the same gradients, got {list(map(list, designs.values()))}")
    fig, axes = figure(
        title, subtitle=subtitle, rows=len(designs), columns=len(names), height=1.9 * len(designs) + 0.2, grid="none"
    )
    said = []
    for line, (design, gradients) in zip(np.atleast_2d(axes), designs.items(), strict=True):
        for ax, (name, lanes) in zip(line, gradients.items(), strict=True):
            shared, tiles = _draw_writers(ax, touched_tiles(lanes, head_dim, tile))
            ax.set_title(name, loc="left", size=TEXT, weight="bold", color=WRONG if shared else INK)
            said.append(f"{design}, {name}: {shared} of {tiles} tiles written by several programs")
        line[0].set_ylabel(f"{design}\nprogram", size=SMALL, color=INK)
    for ax in np.atleast_2d(axes)[-1]:
        ax.set_xlabel("tile of rows", size=SMALL)
    fig.alt = f"Grids of programs against tiles of rows, filled where a program writes. {'; '.join(said)}."
    return fig


def _draw_writers(ax: Axes, touched: Mapping[tuple[int, int, int], set[int]]) -> tuple[int, int]:
    """Draw one grid; return how many tiles have several writers, and how many tiles there are."""
    programs = sorted(touched)
    tiles = sorted(set().union(*touched.values()))
    writers = {tile: sum(tile in own for own in touched.values()) for tile in tiles}
    bare(ax)
    for y, program in enumerate(programs):
        for x, tile in enumerate(tiles):
            look = {"facecolor": IDLE, "edgecolor": "none"}
            if tile in touched[program]:
                look = {"facecolor": mix(HBM, 0.8), "edgecolor": "none"}
                if writers[tile] > 1:
                    look = {"facecolor": mix(WRONG, 0.45), "edgecolor": WRONG, "hatch": WRONG_HATCH, "linewidth": 0.5}
            box(ax, x + 0.05, y + 0.05, 0.9, 0.9, **look)
    ax.set_xlim(0, len(tiles))
    ax.set_ylim(len(programs), 0)
    ax.set_aspect("equal")
    ax.set_xticks([x + 0.5 for x in range(len(tiles))], [str(tile) for tile in tiles])
    ax.set_yticks([y + 0.5 for y in range(len(programs))], [str(program[0]) for program in programs])
    return sum(count > 1 for count in writers.values()), len(tiles)


@dataclass
class Step:
    """One tile of scores in a program's walk.

    Attributes:
        kernel, program: whose walk it is.
        tile: row and column of the tile of scores.
        read: (argument, tile of its rows) that are fetched in this step.
        written: the same for what is written once this step is done.
    """

    kernel: str
    program: int
    tile: tuple[int, int]
    read: list[tuple[str, int]] = field(default_factory=list)
    written: list[tuple[str, int]] = field(default_factory=list)


#: Arguments of a backward kernel that lie along the queries and along the keys, with the names of what they hold.
QUERY_SIDE = {"q_ptr": "Q", "do_ptr": "dO", "dq_ptr": "dQ"}
KEY_SIDE = {"k_ptr": "K", "v_ptr": "V", "dk_ptr": "dK", "dv_ptr": "dV"}


def walk(lanes: Sequence[Lanes], head_dim: int, tile: int, own: str) -> list[Step]:
    """The steps of a backward kernel's programs, read off their accesses.

    Args:
        lanes: all accesses of one kernel over one sequence, in order; vectors such as L and delta are left out.
        tile: rows of a tile, of queries and of keys.
        own: argument of which a program holds one tile for all of its steps: ``"k_ptr"`` or ``"q_ptr"``.

    Raises:
        ValueError: another ``own``, or a program without steps.
    """
    require_known("own", [own], ("k_ptr", "q_ptr"))
    moving = {"k_ptr": "q_ptr", "q_ptr": "k_ptr"}[own]
    steps: list[Step] = []
    held: list[tuple[str, int]] = []
    for one in lanes:
        if one.argument not in QUERY_SIDE | KEY_SIDE or one.elements.ndim != 2 or not one.mask.any():
            continue
        where = int(one.elements[one.mask].min()) // head_dim // tile
        if one.access != "read":
            if not steps or steps[-1].program != one.program[0]:
                raise ValueError(f"program {one.program} writes {one.argument} before its first tile of scores")
            steps[-1].written.append((one.argument, where))
            continue
        new = not steps or steps[-1].program != one.program[0]
        if one.argument == moving:
            mine = held[0][1] if held else (steps[-1].tile[1 if own == "k_ptr" else 0])
            place = (where, mine) if own == "k_ptr" else (mine, where)
            steps.append(Step(one.kernel, one.program[0], place, [*held, (one.argument, where)]))
            held = []
        elif new or one.argument == own or held:
            held.append((one.argument, where))
        else:
            steps[-1].read.append((one.argument, where))
    return steps


def tile_walk(
    walks: Mapping[str, Sequence[Step]], tiles: tuple[int, int], *, title: str, alt: str, subtitle: str = ""
) -> Animation:
    """Animate walks over the tiles of the scores, one after the other.

    The square is S (and P, dP, dS) in tiles, which exist on chip only, one at a time; beside it lie Q, dO and dQ, above
    it K, V, dK and dV. What a step reads or writes in HBM is vermilion, what a program holds on chip green.

    Args:
        walks: name -> steps of :func:`walk`.
        tiles: tiles of queries and of keys.
    """
    frames, captions = [], []
    for name, steps in walks.items():
        for index, step in enumerate(steps):
            frames.append(partial(_draw_step, name=name, steps=steps, index=index, tiles=tiles))
            captions.append(_caption(name, step))
    return animate(
        frames, title=title, alt=alt, captions=captions, subtitle=subtitle, height=3.3, seconds_per_frame=1.1, dpi=115
    )


def _caption(name: str, step: Step) -> str:
    def listed(items: Sequence[tuple[str, int]]) -> str:
        sides = QUERY_SIDE | KEY_SIDE
        return ", ".join(f"{sides[argument]}{where}" for argument, where in items)

    wrote = f", then writes {listed(step.written)}" if step.written else ""
    where = f"tile ({step.tile[0]}, {step.tile[1]}) of the scores"
    return f"{name}, program {step.program}: {where}, reads {listed(step.read)}{wrote}."


def _draw_step(ax: Axes, *, name: str, steps: Sequence[Step], index: int, tiles: tuple[int, int]) -> None:
    bare(ax)
    rows, columns = tiles
    step = steps[index]
    seen = {one.tile for one in steps[: index + 1]}
    ever = {one.tile for one in steps}
    for row in range(rows):
        for column in range(columns):
            place = (row, column)
            face = ARITHMETIC if place == step.tile else mix(ARITHMETIC, 0.35) if place in seen else IDLE
            look = {"facecolor": face, "edgecolor": "none"}
            if place not in ever:
                look = {"facecolor": "#FFFFFF", "edgecolor": "#B5B5B5", "hatch": "////", "linewidth": 0.4}
            box(ax, column + 0.04, row + 0.04, 0.92, 0.92, **look)
    own = [one for one in steps[: index + 1] if one.program == step.program]
    held = _held(own)
    done = {item for one in steps[: index + 1] for item in one.written}
    for k, (argument, label) in enumerate(QUERY_SIDE.items()):
        for row in range(rows):
            _draw_strip(ax, (-2.4 + 0.75 * k, row + 0.04), (0.6, 0.92), (argument, row), step, held, done, label)
    for k, (argument, label) in enumerate(KEY_SIDE.items()):
        for column in range(columns):
            _draw_strip(ax, (column + 0.04, -2.6 + 0.62 * k), (0.92, 0.5), (argument, column), step, held, done, label)
    ax.text(columns + 0.25, 0.0, name, va="top", size=TEXT, weight="bold", color=INK)
    legend = ((ARITHMETIC, "tile of S, P, dP, dS now"), (ON_CHIP, "held on chip"), (HBM, "read or written now"),
              (mix(HBM, 0.3), "written before"))  # fmt: skip
    for k, (colour, text) in enumerate(legend):
        y = 0.75 + 0.5 * k
        box(ax, columns + 0.25, y - 0.14, 0.28, 0.28, colour)
        ax.text(columns + 0.65, y, text, va="center", size=SMALL, color=INK)
    ax.set_xlim(-2.5, columns + 4.6)
    ax.set_ylim(rows + 0.1, -2.7)
    ax.set_aspect("equal")
    ax.set_anchor("NW")


def _held(own: Sequence[Step]) -> set[tuple[str, int]]:
    """What a program keeps on chip for all of its steps: its tiles of the inputs, and the sums that it will write."""
    first, column = own[0], own[0].tile[1]
    if first.read[0][0] in KEY_SIDE:
        return {(argument, column) for argument in KEY_SIDE}
    return {(argument, first.tile[0]) for argument in QUERY_SIDE}


def _draw_strip(
    ax: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    item: tuple[str, int],
    step: Step,
    held: set[tuple[str, int]],
    done: set[tuple[str, int]],
    label: str,
) -> None:
    """One tile of one tensor beside the scores."""
    moving = item in step.read or item in step.written
    face = HBM if moving else ON_CHIP if item in held else mix(HBM, 0.3) if item in done else IDLE
    box(ax, *corner, *size, face)
    if moving and item in held:
        box(ax, *corner, *size, edgecolor=ON_CHIP, linewidth=1.8)
    ax.text(
        corner[0] + size[0] / 2, corner[1] + size[1] / 2, f"{label}{item[1]}", ha="center", va="center", size=SMALL,
        color="#FFFFFF" if moving or item in held else INK,
    )  # fmt: skip
