"""The course map: parts, lectures and labs as a graph, laid out from :mod:`website.course` and drawn as inline SVG.

Two drawings of the same graph are written to ``_generated/course_map.html``: one with a row for each part, and one in a
single column for narrow screens; the style sheet shows one of them. An edge says that a lesson builds on another. What
follows from other edges is not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from website import teaching
from website.course import Lesson, Part, ancestors, direct_needs, hours, lessons, parts

FILE = "_generated/course_map.html"
_RADIUS = 7  # of a bend
_TRACK = 9  # between two lines in one channel


@dataclass(frozen=True)
class Box:
    """Where a lesson is drawn: its left upper corner and its size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class Edge:
    """``target`` builds on ``source``."""

    source: str
    target: str


def edges() -> list[Edge]:
    """The lines of the map, in reading order of their targets."""
    return [Edge(source, lesson.key) for lesson in lessons() for source in direct_needs(lesson)]


class Tracks:
    """Places for parallel lines in a channel: lines whose extents overlap get places beside each other."""

    def __init__(self) -> None:
        self._taken: list[list[tuple[float, float]]] = []

    def place(self, start: float, end: float) -> int:
        """The first place where nothing lies between ``start`` and ``end``."""
        low, high = min(start, end) - 4, max(start, end) + 4
        for index, taken in enumerate(self._taken):
            if all(high < a or b < low for a, b in taken):
                taken.append((low, high))
                return index
        self._taken.append([(low, high)])
        return len(self._taken) - 1


def bends(points: Sequence[tuple[float, float]]) -> str:
    """A path along horizontal and vertical lines, with round corners."""
    path = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (ax, ay), (bx, by), (cx, cy) in zip(points, points[1:], points[2:]):
        before, after = abs(bx - ax) + abs(by - ay), abs(cx - bx) + abs(cy - by)
        radius = min(_RADIUS, before / 2, after / 2)
        sx, sy = bx - radius * _sign(bx - ax), by - radius * _sign(by - ay)
        ex, ey = bx + radius * _sign(cx - bx), by + radius * _sign(cy - by)
        path.append(f"L{_n(sx)} {_n(sy)}Q{_n(bx)} {_n(by)} {_n(ex)} {_n(ey)}")
    return "".join([*path, f"L{_n(points[-1][0])} {_n(points[-1][1])}"])


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def wrap(text: str, most: int) -> list[str]:
    """Lines of at most ``most`` characters where words allow."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


# ---- a row for each part ---------------------------------------------------------------------------------------------

_WIDTH, _LABEL, _COLUMNS, _GAP = 1064, 140, 6, 24
_NODE = (_WIDTH - _LABEL - _GAP * _COLUMNS - 12) / _COLUMNS
_LANE, _NODE_HEIGHT, _CHANNEL = 98, 75, 40


def rows() -> dict[str, Box]:
    """Place of each lesson: a row for a part, its lectures from the left, its lab in the last column."""
    placed = {}
    for row, part in enumerate(parts()):
        y = row * (_LANE + _CHANNEL) + (_LANE - _NODE_HEIGHT) / 2
        for index, lesson in enumerate(part.lessons):
            column = _COLUMNS - 1 if lesson.is_lab else index
            placed[lesson.key] = Box(_LABEL + _GAP + column * (_NODE + _GAP), y, _NODE, _NODE_HEIGHT)
    return placed


class _Router:
    """Leads lines through the channels below the rows, and down between label and first or between last two columns."""

    def __init__(self, placed: dict[str, Box]) -> None:
        self.placed = placed
        self.across: dict[int, Tracks] = {}
        self.down: dict[float, Tracks] = {}
        self.left: dict[str, int] = {}  # lines that left a lesson downwards already
        self.entered: dict[str, int] = {}  # lines of the same row that entered it from below
        self.sideways: dict[str, int] = {}  # lines that entered it from its left

    def route(self, edge: Edge) -> list[tuple[float, float]]:
        a, b = self.placed[edge.source], self.placed[edge.target]
        row, target_row = self._row(a), self._row(b)
        boxes = self.placed.values()
        if row == target_row:
            if not any(self._row(o) == row and a.x < o.x < b.x for o in boxes):
                return [(a.right, a.middle), (b.x, b.middle)]
            entered = self.entered.get(edge.target, 0)
            self.entered[edge.target] = entered + 1
            start, end = a.x + 0.6 * a.width, b.x + 0.3 * b.width + _TRACK * entered
            y = self._channel(row, start, end)
            return [(start, a.bottom), (start, y), (end, y), (end, b.bottom)]
        between = [o for o in boxes if row < self._row(o) < target_row and o.x == b.x]
        if a.x == b.x and not between:
            x = a.x + a.width / 2
            return [(x, a.bottom), (x, b.y)]
        before = self.left.get(edge.source, 0)
        self.left[edge.source] = before + 1
        start = a.x + 0.3 * a.width + _TRACK * before
        if not between:
            end = b.x + 0.7 * b.width
            y = self._channel(row, start, end)
            return [(start, a.bottom), (start, y), (end, y), (end, b.y)]
        gutter = b.x - _GAP + 6
        gutter += 5 * self.down.setdefault(gutter, Tracks()).place(a.bottom, b.y)
        y = self._channel(row, start, gutter)
        sideways = self.sideways.get(edge.target, 0)
        self.sideways[edge.target] = sideways + 1
        enter = b.y + 0.24 * b.height - _TRACK * sideways  # the line beside it is nearer, and enters above
        return [(start, a.bottom), (start, y), (gutter, y), (gutter, enter), (b.x, enter)]

    @staticmethod
    def _row(box: Box) -> int:
        return int(box.y // (_LANE + _CHANNEL))

    def _channel(self, row: int, start: float, end: float) -> float:
        top = row * (_LANE + _CHANNEL) + _LANE
        return top + 13 + _TRACK * self.across.setdefault(row, Tracks()).place(start, end)


def draw_rows() -> str:
    """The map with a row for each part, as an SVG element."""
    placed, router = rows(), _Router(rows())
    lines = "".join(_line(edge, router.route(edge)) for edge in edges())
    height = len(parts()) * (_LANE + _CHANNEL) - _CHANNEL
    body = []
    for row in range(len(parts())):
        y = row * (_LANE + _CHANNEL)
        body.append(f'<rect class="lane" x="0" y="{y}" width="{_WIDTH}" height="{_LANE}" rx="10"/>')
    body.append(f'<g class="edges" aria-hidden="true">{lines}</g>')
    for row, part in enumerate(parts()):
        body.append(_label(part, 14, row * (_LANE + _CHANNEL), 21))
        body += [_node(lesson, placed[lesson.key], 16) for lesson in part.lessons]
    return _svg("rows", _WIDTH, height, "".join(body))


def _label(part: Part, x: float, y: float, most: int) -> str:
    lines = wrap(part.able, most)[:4]
    text = "".join(f'<tspan x="{x}" dy="15">{escape(line)}</tspan>' for line in lines)
    return f'<text class="part" x="{x}" y="{y + 22}">{escape(part.label)}<tspan class="able">{text}</tspan></text>'


# ---- one column ------------------------------------------------------------------------------------------------------

_NARROW, _RAIL, _ROW, _HEAD, _SPACE = 358, 62, 46, 33, 12


def column() -> tuple[dict[str, Box], list[tuple[Part, float]], float]:
    """Place of each lesson in one column, of each part's heading, and the height of all."""
    placed, heads, y = {}, [], 0.0
    for part in parts():
        heads.append((part, y))
        y += _HEAD + 15 * len(wrap(part.able, 44))
        for lesson in part.lessons:
            placed[lesson.key] = Box(_RAIL, y, _NARROW - _RAIL - 1, _ROW)
            y += _ROW + _SPACE
        y += 8
    return placed, heads, y - 8


def draw_column() -> str:
    """The map in one column, as an SVG element."""
    placed, heads, height = column()
    order, tracks, lines = list(placed), Tracks(), []
    for edge in sorted(edges(), key=lambda e: order.index(e.target) - order.index(e.source)):
        a, b = placed[edge.source], placed[edge.target]
        if order.index(edge.target) == order.index(edge.source) + 1 and b.y - a.bottom <= _SPACE:
            x = a.x + 22
            points = [(x, a.bottom), (x, b.y)]
        else:
            x = _RAIL - 13 - 11 * tracks.place(a.middle + 9, b.middle - 9)
            points = [(a.x, a.middle + 8), (x, a.middle + 8), (x, b.middle - 8), (b.x, b.middle - 8)]
        lines.append(_line(edge, points))
    body = [f'<g class="edges" aria-hidden="true">{"".join(lines)}</g>']
    for part, y in heads:
        body.append(_label(part, _RAIL, y - 4, 44))
        body += [_node(lesson, placed[lesson.key], 34) for lesson in part.lessons]
    return _svg("column", _NARROW, height, "".join(body))


# ---- what both have --------------------------------------------------------------------------------------------------


def _line(edge: Edge, points: Sequence[tuple[float, float]]) -> str:
    path = bends(points) + _arrow(*points[-2], *points[-1])
    return f'<path class="edge" data-from="{edge.source}" data-to="{edge.target}" d="{path}"/>'


def _arrow(ax: float, ay: float, bx: float, by: float) -> str:
    """An open arrow at the end of a line from a to b."""
    x, y = 4.5 * _sign(bx - ax), 4.5 * _sign(by - ay)
    return f"M{_n(bx - x - y)} {_n(by - y - x)}L{_n(bx)} {_n(by)}L{_n(bx - x + y)} {_n(by - y + x)}"


def _node(lesson: Lesson, box: Box, most: int) -> str:
    kind = "lab" if lesson.is_lab else "lecture"
    number = lesson.key.replace("lab", "Lab ")
    title = wrap(lesson.title, most)
    x = box.x + 11
    first = box.y + (39 if box.height > _ROW else 34)
    text = "".join(
        f'<tspan x="{_n(x)}" y="{_n(first + 15.5 * i)}">{escape(line)}</tspan>' for i, line in enumerate(title)
    )
    y = box.y + 18
    drawn = (
        f'<rect x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}" rx="7"/>'
        f'<text class="number" x="{_n(x)}" y="{_n(y)}">{number}</text>'
        f'<text class="time" x="{_n(box.right - 10)}" y="{_n(y)}" text-anchor="end">{hours(lesson.minutes)}</text>'
        f'<text class="title">{text}</text>'
    )
    needs = " ".join(sorted(ancestors(lesson.key)))
    said = said_of(lesson)
    return (
        f'<a class="node {kind}" href="{lesson.page}.html" aria-label="{escape(said)}" data-key="{lesson.key}" '
        f'data-needs="{needs}"><title>{escape(said)}</title>{drawn}</a>'
    )


def said_of(lesson: Lesson) -> str:
    """What a screen reader says of a lesson: name, time, and all that it names as known."""
    builds = ", ".join(key.replace("lab", "lab ") for key in lesson.needs)
    exercises = f" and {lesson.exercise_minutes} for its exercises" if lesson.exercise_minutes else ""
    time = hours(lesson.minutes) if lesson.is_lab else f"{lesson.minutes} minutes"
    return f"{lesson.name}, {time}{exercises}" + (f"; builds on {builds}" if builds else "")


def _svg(name: str, width: float, height: float, body: str) -> str:
    labs = sum(lesson.is_lab for lesson in lessons())
    desc = (
        f"{len(lessons()) - labs} lectures and {labs} labs in {sum(bool(p.numeral) for p in parts())} parts. "
        "Each is a link; lines lead from a lesson to those that build on it."
    )
    return (
        f'<svg class="map-{name}" viewBox="-1 -1 {_n(width + 2)} {_n(height + 2)}" role="group" '
        f'aria-labelledby="map-{name}-title map-{name}-desc"><title id="map-{name}-title">Course map</title>'
        f'<desc id="map-{name}-desc">{desc}</desc>{body}</svg>'
    )


def write(source: Path) -> None:
    """Write the map, and the pieces of the pages on teaching, into the staged sources."""
    file = source / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'<div class="course-map">\n{draw_rows()}\n{draw_column()}\n</div>\n', encoding="utf-8")
    teaching.write(source)
