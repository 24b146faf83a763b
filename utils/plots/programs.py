"""Programs of a launch over the tensor that they work on: drawn from what a kernel's lanes really pointed to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.plots.animate import Animation, animate
from utils.plots.sm import IDLE, WAVE_COLOURS
from utils.plots.style import HBM, INK, LIMIT, MUTED, SMALL, TEXT, WASTE_HATCH, bare, figure, mix, styled
from utils.units import number

if TYPE_CHECKING:
    from utils.kernel_profile.lanes import Lanes

#: A drawing of single elements gets too fine beyond this many.
MOST_CELLS = 2048


def programs_animation(
    lanes: Sequence[Lanes],
    shape: tuple[int, int],
    strides: tuple[int, int] | None = None,
    *,
    title: str,
    alt: str,
    subtitle: str = "",
    seconds_per_frame: float = 0.9,
    height: float | None = None,
) -> Animation:
    """Show programs one after the other over the elements of a matrix: what each touches, and what it masks off.

    Args:
        lanes: one access a program, of :func:`utils.kernel_profile.lanes.trace_lanes`, in the order of the frames.
        shape: rows and columns of the tensor; a vector is one row.
        strides: of the tensor in elements; by default those of a contiguous one.
        height: inches; by default what square elements need.

    Raises:
        ValueError: no lanes, more than 2,048 elements, or lanes that are no rectangle of this matrix.
    """
    lanes = list(lanes)
    if not lanes:
        raise ValueError("programs_animation needs at least one access")
    rows, columns = shape
    strides = (columns, 1) if strides is None else strides
    if rows * columns > MOST_CELLS:
        raise ValueError(f"at most {MOST_CELLS} elements can be told apart, got {rows} x {columns}")
    boxes = [one.corner(strides) for one in lanes]
    reach = (max(b[0] + b[2] for b in boxes), max(b[1] + b[3] for b in boxes))
    frames = [
        partial(_draw_programs, step=k, lanes=lanes, boxes=boxes, shape=shape, reach=reach)
        for k in range(-1, len(lanes))
    ]
    captions = [f"{len(lanes)} programs are launched; each computes from its program_id which elements are its own."]
    captions += [_caption(one) for one in lanes]
    inches = height or min(4.6, 7.0 * max(reach[0], rows) / max(reach[1], columns) + 0.35)
    return animate(
        frames, title=title, alt=alt, captions=captions, subtitle=subtitle, height=inches,
        seconds_per_frame=seconds_per_frame, poster=-1,
    )  # fmt: skip


def _caption(lanes: Lanes) -> str:
    index = ", ".join(map(str, _trimmed(lanes.program)))
    verb = {"read": "read", "write": "write", "atomic": "update"}[lanes.access]
    off = f"; {lanes.masked} are masked off and touch nothing" if lanes.masked else ""
    plural = "s" if lanes.active != 1 else ""
    return f"program ({index}): {lanes.active} lane{plural} {verb} an element each{off}."


def _trimmed(program: tuple[int, int, int]) -> tuple[int, ...]:
    return program if program[2] else program[:2]


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
            ax.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, facecolor=face, edgecolor="none"))
    if step >= 0:
        row, column, height, width = boxes[step]
        hatch = {"facecolor": "white", "edgecolor": "#8A8A8A", "hatch": WASTE_HATCH, "linewidth": 0.4}
        for r, c in _cells(lanes[step], boxes[step], False):
            ax.add_patch(Rectangle((c + 0.06, r + 0.06), 0.88, 0.88, **hatch))
        ax.add_patch(Rectangle((column, row), width, height, fill=False, edgecolor=INK, linewidth=1.6))
    for k in range(step + 1):
        row, column, height, width = boxes[k]
        middle = (column + min(width, columns - column) / 2, row + min(height, rows - row) / 2)
        name = f"({', '.join(map(str, _trimmed(lanes[k].program)))})"
        colour = "#FFFFFF" if k == step else INK
        ax.text(*middle, name, ha="center", va="center", size=SMALL, color=colour, weight="bold" if k == step else None)
    ax.add_patch(Rectangle((0, 0), columns, rows, fill=False, edgecolor=LIMIT, linewidth=1.0))
    ax.set_xlim(-0.15, max(reach[1], columns) + 0.15)
    ax.set_ylim(max(reach[0], rows) + 0.15, -0.15)
    ax.set_aspect("equal")
    ax.set_anchor("NW")


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
    if not 1 <= len(orders) <= 3:
        raise ValueError(f"tile_orders draws one to three orders, got {len(orders)}")
    if wave < 1:
        raise ValueError(f"wave must be at least 1, got {wave}")
    first = next(iter(orders.values()))
    tiles_m, tiles_n = (max(place[axis] for place in first) + 1 for axis in (0, 1))
    for name, order in orders.items():
        if len(order) != tiles_m * tiles_n or len(set(order)) != len(order):
            raise ValueError(f"order {name!r} must visit each of the {tiles_m} x {tiles_n} tiles once")
    panel = 7.2 / max(2, len(orders))
    height = min(5.0, panel * 0.92 * tiles_m * tile[0] / (tiles_n * tile[1])) + 0.85
    fig, axes = figure(title, subtitle=subtitle, columns=len(orders), height=height, grid="none")
    axes = [axes] if len(orders) == 1 else list(axes)
    said = []
    for ax, (name, order) in zip(axes, orders.items(), strict=True):
        bare(ax)
        for pid, (m, n) in enumerate(order):
            face = HBM if pid < wave else WAVE_COLOURS[3] if (pid // wave) % 2 else IDLE
            corner = (n * tile[1], m * tile[0])
            ax.add_patch(Rectangle(corner, tile[1], tile[0], facecolor=face, edgecolor="white", linewidth=0.5))
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
