"""An online softmax played tile by tile, drawn from the states that the algorithm went through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from utils.plots.animate import Animation, animate
from utils.plots.marks import box, centred
from utils.plots.style import ARITHMETIC, HBM, IDLE, INK, MUTED, ON_CHIP, SMALL, TEXT, bare, mix
from utils.units import number

#: More scores than these do not fit side by side.
MOST_SCORES = 5
#: Relative error up to which a drawn state may differ from the recurrence: float64 with room for any order.
SLACK = 1e-9
#: An accumulator is drawn with at most so many numbers.
MOST_WIDE = 3


@dataclass(frozen=True)
class TileStep:
    """What one tile of scores did to the running state of an online softmax.

    Args:
        scores: the tile.
        maximum: the largest score so far, this tile included.
        factor: exp(old maximum - maximum), by which the past was multiplied; 0 for the first tile.
        exponentials: exp(score - maximum) of each score of the tile.
        total: the running sum after the tile.
        output: the accumulator after the tile, relative to ``maximum`` and not yet divided; empty for a softmax alone.
    """

    scores: tuple[float, ...]
    maximum: float
    factor: float
    exponentials: tuple[float, ...]
    total: float
    output: tuple[float, ...] = ()


def near(a: float, b: float) -> bool:
    """Whether two numbers agree to :data:`SLACK`, relative to the larger."""
    return abs(a - b) <= SLACK * max(abs(a), abs(b), 1e-300)


def check_steps(steps: Sequence[TileStep], values: Sequence[Sequence[float]] = ()) -> list[TileStep]:
    """``steps`` as a list, after following the recurrence through them.

    Raises:
        ValueError: no steps, too many scores, values that do not fit, or a state that does not follow from the one
            before it; names the tile and what it should hold.
    """
    steps, seen = list(steps), 0
    count = sum(len(step.scores) for step in steps)
    if not steps or not all(step.scores for step in steps) or count > MOST_SCORES:
        raise ValueError(f"draw one to {MOST_SCORES} scores in tiles that are not empty, got {count}")
    if values and len(values) != count:
        raise ValueError(f"give one row of values for each of the {count} scores, got {len(values)}")
    maximum, total = -math.inf, 0.0
    wide = len(values[0]) if values else 0
    if wide > MOST_WIDE:
        raise ValueError(f"a row of values holds at most {MOST_WIDE} numbers, got {wide}")
    output = [0.0] * wide
    for tile, step in enumerate(steps, 1):
        new = max(maximum, *step.scores)
        factor = math.exp(maximum - new)
        weights = [math.exp(score - new) for score in step.scores]
        maximum, total = new, total * factor + sum(weights)
        rows = values[seen : seen + len(step.scores)]
        output = [o * factor + sum(w * row[c] for w, row in zip(weights, rows)) for c, o in enumerate(output)]
        seen += len(step.scores)
        wanted = {"maximum": maximum, "factor": factor, "total": total}
        for name, value in wanted.items():
            if not near(getattr(step, name), value):
                got = number(getattr(step, name))
                raise ValueError(f"tile {tile}: {name} must be {number(value)} by the recurrence, got {got}")
        for name, numbers in (("exponentials", weights), ("output", output)):
            held = getattr(step, name)
            if len(held) != len(numbers) or not all(map(near, held, numbers)):
                got, wanted_text = ([number(float(v)) for v in w] for w in (held, numbers))
                raise ValueError(f"tile {tile}: {name} must be {wanted_text} by the recurrence, got {got}")
    return steps


# ---- the animation -------------------------------------------------------------------------------------------------

_LEFT, _CELL, _GAP = 2.35, 1.62, 0.38


def online_animation(
    steps: Sequence[TileStep],
    values: Sequence[Sequence[float]] = (),
    *,
    title: str,
    alt: str,
    subtitle: str = "",
) -> Animation:
    """Play an online softmax tile by tile: read, new maximum, rescale the past, add the tile; then the results.

    Without ``values`` the row is read a second time, tile by tile, and the softmax is written. With one row of values
    for each score, the accumulator is carried along and divided once: attention of one query, in one pass.

    Raises:
        ValueError: as :func:`check_steps`; a result above 300 kB.
    """
    values = [tuple(float(v) for v in row) for row in values]
    steps = check_steps(steps, values)
    frames: list[tuple[int, str]] = [(0, "start")]
    for tile in range(len(steps)):
        frames += [(tile, phase) for phase in ("read", "maximum", "rescale", "add")]
    frames += [(len(steps) - 1, "divide")] if values else [(tile, "write") for tile in range(len(steps))]
    captions = [_caption(steps, values, tile, phase) for tile, phase in frames]
    draw = [partial(_draw_row, steps=steps, values=values, tile=tile, phase=phase) for tile, phase in frames]
    poster = frames.index((len(steps) - 1, "rescale"))  # the step that the row is about
    return animate(
        draw, title=title, alt=alt, captions=captions, subtitle=subtitle, poster=poster,
        height=2.62 if values else 2.3, seconds_per_frame=1.6,
    )  # fmt: skip


def _vector(numbers: Sequence[float]) -> str:
    return "(" + ", ".join(number(v, 5) for v in numbers) + ")"


def _before(steps: Sequence[TileStep], tile: int) -> tuple[float, float, tuple[float, ...]]:
    if tile:
        return steps[tile - 1].maximum, steps[tile - 1].total, steps[tile - 1].output
    return -math.inf, 0.0, (0.0,) * len(steps[0].output)


def _caption(steps: Sequence[TileStep], values: Sequence[Sequence[float]], tile: int, phase: str) -> str:
    step = steps[tile]
    m, d, o = _before(steps, tile)
    state = "sum and accumulator" if values else "sum"
    if phase == "start":
        return f"Nothing seen yet: the maximum is −∞, the {state} 0. That is the identity of the merge."
    if phase == "read":
        return f"Tile {tile + 1} is read" + (", its scores and its values." if values else ".")
    if phase == "maximum":
        news = "a new maximum" if step.maximum > m else "no new maximum"
        largest = number(max(step.scores))
        return f"The tile's largest score is {largest}: {news}. Factor on the past: {_power(steps, tile)}."
    if phase == "rescale":
        what = f"d becomes {number(d, 4)} × {number(step.factor, 4)} = {number(d * step.factor, 4)}"
        scaled = _vector([v * step.factor for v in o])
        return what + (f", and the accumulator {scaled}." if values else ".")
    if phase == "add":
        total = f"The tile adds {number(sum(step.exponentials), 5)} to the sum: d = {number(step.total, 7)}"
        return total + (f", and its weighted values: {_vector(step.output)}." if values else ".")
    if phase == "write":
        return f"Second read of tile {tile + 1}: with the final m and d each score becomes its softmax, and is written."
    return f"One division ends it: {_vector(step.output)} / {number(step.total, 5)}. Nothing is read twice."


def _power(steps: Sequence[TileStep], tile: int) -> str:
    m = _before(steps, tile)[0]
    new = number(steps[tile].maximum)
    shown = f"e^(−∞ − ({new}))" if m == -math.inf else f"e^({number(m)} − ({new}))"
    return f"{shown} = {number(steps[tile].factor, 5)}"


def _places(steps: Sequence[TileStep]) -> list[list[float]]:
    places, x = [], _LEFT
    for step in steps:
        places.append([x + k * _CELL for k in range(len(step.scores))])
        x += len(step.scores) * _CELL + _GAP
    return places


def _cell(ax: Axes, x: float, y: float, text: str, face: str, ink: str = INK, width: float = _CELL) -> None:
    box(ax, x + 0.04, y, width - 0.08, 0.62, face)
    centred(ax, x + width / 2, y + 0.31, text, size=TEXT, color=ink)


def _draw_row(ax: Axes, *, steps: Sequence[TileStep], values: Sequence[Sequence[float]], tile: int, phase: str) -> None:
    bare(ax)
    places, rows = _places(steps), iter(values)
    done = phase in ("write", "divide")
    current = {"start": -1, "divide": -1}.get(phase, tile)
    read = len(steps) if done else tile + (phase != "start")
    lines = {"x": 0.0, "v": 0.75, "e": 1.65 if values else 0.9}
    lines["state"] = lines["e"] + 1.15
    lines["y"] = lines["state"] + 0.95
    labels = [(lines["x"], "scores x"), (lines["state"], "on chip")]
    labels += [(lines["v"], "values v")] if values else []
    labels += [(lines["y"], "o = õ / d" if values else "softmax")]
    for k, step in enumerate(steps):
        face = HBM if k == current and phase in ("read", "write") else mix(HBM, 0.22) if k < read else IDLE
        ink = "white" if face == HBM else INK if k < read else MUTED
        for x, score in zip(places[k], step.scores):
            _cell(ax, x, lines["x"], number(score), face, ink)
            if values:
                _cell(ax, x, lines["v"], _vector(next(rows)), face, ink)
        width = len(step.scores) * _CELL
        ax.text(places[k][0] + width / 2, -0.14, f"tile {k + 1}", ha="center", va="bottom", size=SMALL, color=MUTED)
    if phase == "add":
        labels.append((lines["e"], "exp(x − m)"))
        for x, weight in zip(places[tile], steps[tile].exponentials):
            _cell(ax, x, lines["e"], number(weight, 4), mix(ARITHMETIC, 0.85), "white")
    if phase in ("maximum", "rescale"):
        labels.append((lines["e"], "factor"))
        _cell(ax, _LEFT, lines["e"], _power(steps, tile), mix(ARITHMETIC, 0.85), "white", 5.0)
    _draw_state(ax, steps, tile, phase, lines["state"])
    if phase == "write":
        total, maximum = steps[-1].total, steps[-1].maximum
        for k in range(tile + 1):
            for x, score in zip(places[k], steps[k].scores):
                bright = k == tile
                y = number(math.exp(score - maximum) / total, 5)
                _cell(ax, x, lines["y"], y, HBM if bright else mix(HBM, 0.22), "white" if bright else INK)
    elif phase == "divide":
        o = _vector([v / steps[-1].total for v in steps[-1].output])
        _cell(ax, _LEFT, lines["y"], o, HBM, "white", 3.2)
    else:
        for group in places:
            for x in group if not values else []:
                _cell(ax, x, lines["y"], "", IDLE)
        if values:
            _cell(ax, _LEFT, lines["y"], "", IDLE, width=3.2)
    for y, text in labels:
        ax.text(0, y + 0.31, text, va="center", size=TEXT, color=MUTED)
    ax.set_xlim(0, max(places[-1][-1] + _CELL, _LEFT + 8.4) + 0.1)
    ax.set_ylim(lines["y"] + 0.75, -0.5)


def _draw_state(ax: Axes, steps: Sequence[TileStep], tile: int, phase: str, y: float) -> None:
    """The running state as it is during ``phase``; what the phase has just changed is dark."""
    m, d, o = _before(steps, tile)
    step, changed = steps[tile], ""
    if phase in ("maximum", "rescale", "add"):
        m, changed = step.maximum, "m"
    if phase == "rescale":
        d, o, changed = d * step.factor, tuple(v * step.factor for v in o), "do"
    if phase == "add" or phase in ("write", "divide"):
        m, d, o, changed = step.maximum, step.total, step.output, "do" if phase == "add" else ""
    if phase in ("write", "divide"):
        m, d, o = steps[-1].maximum, steps[-1].total, steps[-1].output
    shown = [("m", f"m = {number(m)}", 1.4), ("d", f"d = {number(d, 7)}", 2.6)]
    if o:
        shown.append(("o", f"õ = {_vector(o)}", 4.3))
    x = _LEFT
    for name, text, width in shown:
        dark = name in changed
        box = FancyBboxPatch(
            (x + 0.08, y + 0.04), width - 0.16, 0.54, boxstyle="round,pad=0.04,rounding_size=0.12",
            facecolor=ON_CHIP if dark else mix(ON_CHIP, 0.25), edgecolor="none",
        )  # fmt: skip
        ax.add_patch(box)
        ink = "white" if dark else INK
        centred(ax, x + width / 2, y + 0.31, text, color=ink)
        x += width
