"""Programs of a launch over the tensor that they work on: drawn from what a kernel's lanes really pointed to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.plots.animate import Animation, animate
from utils.plots.check import require_between, require_data, require_positive
from utils.plots.marks import box, centred
from utils.plots.sm import WAVE_COLOURS
from utils.plots.style import (
    HBM,
    IDLE,
    INK,
    LIMIT,
    MUTED,
    SMALL,
    TEXT,
    WASTE_HATCH,
    WIDTH,
    WRONG,
    WRONG_HATCH,
    bare,
    figure,
    mix,
    styled,
)
from utils.units import number

if TYPE_CHECKING:
    from utils.kernel_profile.lanes import Lanes

#: Elements beyond which a drawing of single elements is too fine to read.
MOST_ELEMENTS = 2048


def programs_animation(
    lanes: Sequence[Lanes],
    shape: tuple[int, int],
    strides: tuple[int, int] | None = None,
    *,
    title: str,
    alt: str,
    subtitle: str = "",
) -> Animation:
    """Show programs one after the other over the elements of a matrix: what each touches, and what it masks off.

    Args:
        lanes: one access a program, of :func:`utils.kernel_profile.lanes.trace_lanes`, in the order of the frames.
        shape: rows and columns of the tensor; a vector is one row.
        strides: of the tensor in elements; by default those of a contiguous one.
    """
    lanes = list(lanes)
    rows, columns = shape
    require_data("programs_animation", lanes)
    require_between("the number of elements", [rows * columns], 1, MOST_ELEMENTS)
    strides = (columns, 1) if strides is None else strides
    boxes = [one.corner(strides) for one in lanes]
    reach = (max(b[0] + b[2] for b in boxes), max(b[1] + b[3] for b in boxes))
    frames = [
        partial(_draw_programs, step=k, lanes=lanes, boxes=boxes, shape=shape, reach=reach)
        for k in range(-1, len(lanes))
    ]
    captions = [f"{len(lanes)} programs are launched; each computes from its program_id which elements are its own."]
    captions += [_caption(one, _flat(lanes)) for one in lanes]
    inches = min(4.6, (WIDTH - 0.2) * max(reach[0], rows) / max(reach[1], columns) + 0.35)
    return animate(
        frames, title=title, alt=alt, captions=captions, subtitle=subtitle, height=inches,
        seconds_per_frame=0.9, poster=-1,
    )  # fmt: skip


def _caption(lanes: Lanes, flat: bool) -> str:
    verb = {"read": "read", "write": "write", "atomic": "update"}[lanes.access]
    off = f"; {lanes.masked} are masked off and touch nothing" if lanes.masked else ""
    plural = "s" if lanes.active != 1 else ""
    return f"{'' if flat else 'program '}{_name(lanes, flat)}: {lanes.active} lane{plural} {verb} an element each{off}."


def _flat(lanes: Sequence[Lanes]) -> bool:
    """Whether the launch grid has one axis only, as far as these programs tell."""
    return not any(one.program[1] or one.program[2] for one in lanes)


def _name(lanes: Lanes, flat: bool) -> str:
    program = lanes.program if lanes.program[2] else lanes.program[:2]
    return f"program {program[0]}" if flat else f"({', '.join(map(str, program))})"


def _draw_programs(
    ax: Axes,
    *,
    step: int,
    lanes: Sequence[Lanes],
    boxes: Sequence[tuple[int, int, int, int]],
    shape: tuple[int, int],
    reach: tuple[int, int],
) -> None:
    bare(ax)
    rows, columns = shape
    owner: dict[tuple[int, int], int] = {}
    for k in range(step + 1):
        for cell in _cells(lanes[k], boxes[k], True):
            owner[cell] = k
    for row in range(rows):
        for column in range(columns):
            k = owner.get((row, column))
            face = IDLE if k is None else HBM if k == step else mix(HBM, 0.30 + 0.12 * (k % 2))
            box(ax, column + 0.06, row + 0.06, 0.88, 0.88, face)
    if step >= 0:
        row, column, height, width = boxes[step]
        hatch = {"facecolor": "white", "edgecolor": "#8A8A8A", "hatch": WASTE_HATCH, "linewidth": 0.4}
        for r, c in _cells(lanes[step], boxes[step], False):
            box(ax, c + 0.06, r + 0.06, 0.88, 0.88, **hatch)
        box(ax, column, row, width, height, edgecolor=INK, linewidth=1.6)
    for k in range(step + 1):
        row, column, height, width = boxes[k]
        middle = (column + min(width, columns - column) / 2, row + min(height, rows - row) / 2)
        colours = ("#FFFFFF", HBM) if k == step else (INK, mix(HBM, 0.30 + 0.12 * (k % 2)))
        _label(ax, middle, _name(lanes[k], _flat(lanes)), *colours)
    box(ax, 0, 0, columns, rows, edgecolor=LIMIT, linewidth=1.0)
    ax.set_xlim(-0.15, max(reach[1], columns) + 0.15)
    ax.set_ylim(max(reach[0], rows) + 0.15, -0.15)
    ax.set_aspect("equal")
    ax.set_anchor("NW")


def _label(ax: Axes, place: Sequence[float], text: str, colour: str, ground: str) -> None:
    """Small centred text on a ground of its own, so that the gaps between elements do not cut it."""
    box = {"facecolor": ground, "edgecolor": "none", "pad": 1.5}
    centred(ax, *place, text, color=colour, bbox=box)


def _cells(lanes: Lanes, box: tuple[int, int, int, int], active: bool) -> list[tuple[int, int]]:
    """Row and column of each lane that is active (or masked), as the block lies over the matrix."""
    row, column, rows, columns = box
    mask = lanes.mask.reshape(1, -1) if lanes.mask.ndim == 1 else lanes.mask
    if mask.shape != (rows, columns):
        mask = mask.T
    return [(row + r, column + c) for r in range(rows) for c in range(columns) if bool(mask[r, c]) is active]


@styled
def tile_orders(
    orders: dict[str, Sequence[tuple[int, int]]],
    wave: int,
    *,
    title: str,
    subtitle: str = "",
    note: Callable[[str], str] | None = None,
    tile: tuple[int, int] = (1, 1),
) -> Figure:
    """Draw orders in which programs take the tiles of an output, side by side, with the first wave of each marked.

    Args:
        orders: name -> (tile row, tile column) of each program, in order of its program_id.
        wave: programs that run at the same time.
        note: text below a panel, from its name.
        tile: rows and columns of a tile: the panel's proportions.

    Raises:
        ValueError: no orders or more than three, an order that skips a tile or takes one twice, or an empty wave.
    """
    require_between("the number of orders", [len(orders)], 1, 3)
    require_positive("wave", [wave])
    require_data("tile_orders", next(iter(orders.values())))
    first = next(iter(orders.values()))
    tiles_m, tiles_n = (max(place[axis] for place in first) + 1 for axis in (0, 1))
    for name, order in orders.items():
        if len(order) != tiles_m * tiles_n or len(set(order)) != len(order):
            raise ValueError(f"order {name!r} must visit each of the {tiles_m} x {tiles_n} tiles once")
    panel = WIDTH / max(2, len(orders))
    height = min(5.0, panel * 0.92 * tiles_m * tile[0] / (tiles_n * tile[1])) + 0.85
    fig, axes = figure(title, subtitle=subtitle, columns=len(orders), height=height, grid="none")
    axes = [axes] if len(orders) == 1 else list(axes)
    said = []
    for ax, (name, order) in zip(axes, orders.items(), strict=True):
        bare(ax)
        for pid, (m, n) in enumerate(order):
            face = HBM if pid < wave else WAVE_COLOURS[3] if (pid // wave) % 2 else IDLE
            corner = (n * tile[1], m * tile[0])
            box(ax, *corner, tile[1], tile[0], face, edgecolor="white", linewidth=0.5)
        middle = [((n + 0.5) * tile[1], (m + 0.5) * tile[0]) for m, n in order[:wave]]
        ax.plot(*zip(*middle), color=INK, linewidth=0.8)
        ax.plot(*middle[0], "o", color=INK, markersize=3)
        ax.set_xlim(0, tiles_n * tile[1])
        ax.set_ylim(tiles_m * tile[0], 0)
        ax.set_aspect("equal")
        ax.set_anchor("NW")
        ax.set_title(name, loc="left", size=TEXT, weight="bold", color=INK)
        if note is not None:
            ax.text(0, -0.02, note(name), transform=ax.transAxes, va="top", size=SMALL, color=MUTED, linespacing=1.3)
        touched = [len({place[axis] for place in order[:wave]}) for axis in (0, 1)]
        said.append(f"{name}: the first {number(wave)} programs touch {touched[0]} tile rows and {touched[1]} columns")
    fig.alt = f"{tiles_m} by {tiles_n} tiles in the order in which programs take them. {'; '.join(said)}."
    return fig


@styled
def program_owners(
    panels: Mapping[str, tuple[Sequence[Lanes], tuple[int, int]]], *, title: str, subtitle: str = ""
) -> Figure:
    """Draw which program touches which element of a matrix, panel below panel; where programs meet is hatched.

    Args:
        panels: name -> accesses of :func:`utils.kernel_profile.lanes.trace_lanes`, and rows and columns of the
            contiguous matrix that they go to; a vector is one row.

    Raises:
        ValueError: a lane outside of the matrix.
    """
    widest = max(shape[1] for _, shape in panels.values())
    heights = [(WIDTH - 0.2) * shape[0] / widest + 0.42 for _, shape in panels.values()]
    fig, axes = figure(
        title,
        subtitle=subtitle,
        rows=len(panels),
        height=sum(heights),
        grid="none",
        height_ratios=[shape[0] + 0.2 for _, shape in panels.values()],
    )
    axes = [axes] if len(panels) == 1 else list(axes)
    said = []
    for ax, (name, (lanes, shape)) in zip(axes, panels.items(), strict=True):
        owners = _owners(name, lanes, shape)
        _draw_owners(ax, owners, shape, widest)
        ax.set_title(name, loc="left", size=TEXT, weight="bold", color=INK)
        shared = sum(len(programs) > 1 for programs in owners.values())
        programs = len({program for owner in owners.values() for program in owner})
        said.append(f"{name}: {programs} programs, {shared} of {len(owners)} elements touched by several")
    fig.alt = f"Matrices whose elements are shaded by the program that touches them. {'; '.join(said)}."
    return fig


def _owners(name: str, lanes: Sequence[Lanes], shape: tuple[int, int]) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Element -> programs that touch it, in order of their first touch."""
    rows, columns = shape
    require_data(f"panel {name!r}", lanes)
    require_between("the number of elements", [rows * columns], 1, MOST_ELEMENTS)
    owners: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for one in lanes:
        for element in one.elements[one.mask].tolist():
            if not 0 <= element < rows * columns:
                raise ValueError(f"panel {name!r}: element {element} is outside of {rows} x {columns}")
            found = owners.setdefault(divmod(element, columns), [])
            if one.program not in found:
                found.append(one.program)
    return owners


def _draw_owners(
    ax: Axes, owners: dict[tuple[int, int], list[tuple[int, ...]]], shape: tuple[int, int], widest: int
) -> None:
    bare(ax)
    rows, columns = shape
    order = list(dict.fromkeys(program for owner in owners.values() for program in sorted(owner)))
    alone = sorted({owner[0] for owner in owners.values() if len(owner) == 1})
    for row in range(rows):
        for column in range(columns):
            owner = owners.get((row, column), [])
            if len(owner) > 1:
                look = {"facecolor": mix(WRONG, 0.45), "edgecolor": WRONG, "hatch": WRONG_HATCH, "linewidth": 0.6}
            else:
                shade = (0.85, 0.4, 0.62, 0.25)[alone.index(owner[0]) % 4] if owner else 0
                look = {"facecolor": mix(HBM, shade) if owner else IDLE, "edgecolor": "none"}
            box(ax, column + 0.06, row + 0.06, 0.88, 0.88, **look)
    for program in alone:
        cells = [cell for cell, owner in owners.items() if owner == [program]]
        middle = [sum(cell[axis] for cell in cells) / len(cells) + 0.5 for axis in (1, 0)]
        shade = mix(HBM, (0.85, 0.4, 0.62, 0.25)[alone.index(program) % 4])
        _label(ax, middle, f"program {program[0]}", INK, shade)
    if any(len(owner) > 1 for owner in owners.values()):
        text = f"programs {', '.join(str(program[0]) for program in sorted(order))}: all of them, in any order"
        _label(ax, (columns / 2, rows / 2), text, INK, "#FFFFFF")
    ax.set_xlim(-0.1, widest + 0.1)
    ax.set_ylim(rows + 0.1, -0.1)
    ax.set_aspect("equal")
    ax.set_anchor("NW")
