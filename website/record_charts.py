"""A record's first chart, drawn from its figures: what was measured over a size that was varied, or a bar for each way.

``record_charts.toml`` says which figures. A chart is SVG in the page's own colours, drawn twice: for a column of text,
and for a phone, where letters keep their size.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from utils.units import number
from website.record_figures import column, is_figure, label, path_label, spread_of, text, unit_of

#: What is drawn of each record.
CHARTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: So many bars are drawn, the highest.
MOST_BARS = 18
#: Widths of the two drawings, in px, and the height of one with lines.
WIDE, NARROW, HIGH = 640, 350, 280

#: A row of a table: a key, or keys joined by points, -> a figure or text.
Row = dict[str, Any]
#: A place on the x axis (None for a bar), a figure, and the low and high end that stand beside it.
Point = tuple[float | None, float, tuple[float, float] | None]


@dataclass(frozen=True)
class Chart:
    """What a chart shows: a measure over ``x`` in lines (or dots), or in bars if there is no ``x``."""

    measure: str
    x: str | None
    notes: str
    dots: bool
    lines: dict[str, list[Point]]


def chart(benchmark: str, results: Mapping[str, Any]) -> str:
    """A record's chart as one line of HTML; KeyError if record_charts.toml has none for this benchmark."""
    chosen = choose(results, **CHARTS[benchmark])
    draw = _lines if chosen.x else _bars
    drawings = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        high, body = draw(chosen, width)
        drawings.append(
            f'<svg class="chart-{name}" viewBox="0 0 {width} {high}" width="{width}" role="img" '
            f'aria-label="{escape(_said(chosen))}">{body}</svg>'
        )
    notes = f" <small>({escape(chosen.notes)})</small>" if chosen.notes else ""
    caption = f"<figcaption>{escape(_title(chosen))}{notes}</figcaption>"
    return f'<figure class="record-chart">{caption}{"".join(drawings)}</figure>'


def choose(
    results: Mapping[str, Any],
    table: str | Sequence[str],
    measure: str | Sequence[str],
    x: str | None = None,
    by: Sequence[str] = (),
    where: Mapping[str, Any] | None = None,
    each: str = "",
    dots: bool = False,
    least: bool = False,
) -> Chart:
    """The figures that a chart shows, by the keys of ``record_charts.toml``; ValueError if no row has them."""
    where = where or {}
    measures = [measure] if isinstance(measure, str) else measure
    own = next((i for i, parts in enumerate(zip(*map(_path, measures))) if len(set(parts)) > 1), 0)  # names a line
    places: dict[str, dict[Any, Point]] = {}
    several = False
    for row in _rows(results, [table] if isinstance(table, str) else table, each):
        if any(row.get(key) not in (value if isinstance(value, list) else [value]) for key, value in where.items()):
            continue
        for key in measures:
            if not is_figure(row.get(key)) or (x and not is_figure(row.get(x))) or (dots and not row[x] * row[key]):
                continue  # (a zero has no place among decades)
            ends = [row.get(".".join(end)) for end in spread_of(tuple(key.split(".")))]
            name = _name(row, by) if len(measures) == 1 else label(_path(key)[own])
            point = (row[x] if x else None, float(row[key]), tuple(ends) if all(map(is_figure, ends)) else None)
            line = places.setdefault(name, {})
            place = len(line) if dots else point[0]
            several = several or place in line
            line[place] = (min if least else max)(line.get(place, point), point, key=lambda p: p[1])
    if not places:
        raise ValueError(f"no row of {table} has {measures} where {where}")
    lines = {name: sorted(line.values(), key=lambda p: p[0] or 0) for name, line in places.items()}
    notes = [f"{label(key)} {text(value)}" for key, value in where.items() if not isinstance(value, list)]
    notes += [f"the {'smallest' if least else 'largest'} of each"] if several else []
    if not x and len(lines) > MOST_BARS:
        notes.append(f"the highest {MOST_BARS} of {len(lines)}")
        lines = {name: lines[name] for name in sorted(lines, key=lambda name: -lines[name][0][1])[:MOST_BARS]}
    return Chart(measures[0], x, "; ".join(notes), dots, lines)


def _rows(results: Mapping[str, Any], tables: Sequence[str], each: str) -> Iterator[Row]:
    for table in tables:
        value = results[table]
        if isinstance(value, Mapping):  # by name: a point, or a list of them
            named = (
                (name, p) for name, inner in value.items() for p in (inner if isinstance(inner, list) else [inner])
            )
            points = [{"name": name, **point} for name, point in named]
        else:
            points = value
        for point in points:
            row = {"table": label(table), **_flat({k: v for k, v in point.items() if k != each or not each})}
            inner = point.get(each, {}) if each else {}
            parts = [{each: name, **part} for name, part in inner.items()] if isinstance(inner, Mapping) else inner
            yield from ({**row, **_flat(part)} for part in parts or [{}])


def _flat(point: Mapping[str, Any], before: str = "") -> Row:
    found: Row = {}
    for key, value in point.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return found


def _name(row: Row, by: Sequence[str]) -> str:
    """What tells a line or bar from others: its texts, and its numbers with what they are."""
    parts = []
    for key in by:
        value = row.get(key)
        if isinstance(value, bool):
            parts.append(label(key) if value else f"not {label(key)}")
        elif value not in (None, 0):
            parts.append(value if isinstance(value, str) else f"{label(key)} {text(value, unit_of((key,)))}")
    return ", ".join(parts)


# ---- drawing -------------------------------------------------------------------------------------------------------


def _path(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def _title(chosen: Chart) -> str:
    *outer, last = _path(chosen.measure)
    name = path_label((*outer, last) if last.startswith("ratio") else (last,))
    unit = column(_path(chosen.measure), [v for points in chosen.lines.values() for _, v, _ in points]).unit
    over = f" by {path_label(_path(chosen.x))}" if chosen.x else ""
    return f"{name[0].upper()}{name[1:]}{f' ({unit})' if unit and unit != name else ''}{over}"


def _said(chosen: Chart) -> str:
    """The chart in words, for those who do not see it: the ends of each line, or each bar."""
    unit, over = unit_of(_path(chosen.measure)), unit_of(_path(chosen.x or ""))
    parts = []
    for name, points in chosen.lines.items():
        ends = [points[0], points[-1]] if chosen.x else [points[0]]
        shown = ", ".join(text(v, unit) + (f" at {text(x, over)}" if chosen.x else "") for x, v, _ in ends)
        parts.append(f"{name}: {shown}" if name else shown)
    return f"{_title(chosen)}. " + "; ".join(parts)


def _bars(chosen: Chart, width: int) -> tuple[int, str]:
    """How high the drawing is, and its body: a bar for each way, its name above it and its figure behind it."""
    unit, top = unit_of(_path(chosen.measure)), max(points[0][1] for points in chosen.lines.values())
    room, parts = width - 110, []
    for i, (name, ((_, value, ends), *_)) in enumerate(chosen.lines.items()):
        y, long = 40 * i, room * value / top
        parts.append(f'<text x="0" y="{y + 13}">{escape(name)}</text>')
        parts.append(f'<rect class="bar" x="0" y="{y + 18}" width="{long:.1f}" height="14"/>')
        if ends:
            parts.append(f'<path class="spread" d="M{room * ends[0] / top:.1f} {y + 25}H{room * ends[1] / top:.1f}"/>')
        behind = room * max([value, *(ends or ())]) / top + 6
        shown = text(float(f"{value:.3g}"), unit)
        parts.append(f'<text x="{behind:.1f}" y="{y + 30}">{escape(shown)}</text>')
    return 40 * len(chosen.lines), "".join(parts)


def _lines(chosen: Chart, width: int) -> tuple[int, str]:
    """How high the drawing is, and its body: a key, axes (logarithmic where figures span decades), and the lines."""
    values = [v for points in chosen.lines.values() for _, v, _ in points]
    sizes = sorted({x for points in chosen.lines.values() for x, _, _ in points})
    key, top = _key(list(chosen.lines), width)
    left, right, bottom = 56, width - 16, top + HIGH - 38
    across = _Axis(sizes, left, right, sizes[0] > 0 and sizes[-1] > 12 * sizes[0], 50)
    decades = 0 < min(values) * 20 <= max(values)
    up = _Axis(values if decades else [*values, 0], bottom, top + 8, decades, 20)
    unit, over = column(_path(chosen.measure), values), unit_of(_path(chosen.x))
    parts = [key]
    for at, y in up.ticks:
        shown = text(at, unit_of(_path(chosen.measure))) if unit.in_cells else number(float(f"{at / unit.factor:.6g}"))
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(shown)}</text>')
    for at, x in across.ticks:
        shown = escape(text(at if isinstance(at, int) and not over else float(f"{at:.3g}"), over))
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{shown}</text>')
    name = escape(path_label(_path(chosen.x)))
    parts.append(f'<text class="tick" x="{right}" y="{bottom + 36}" text-anchor="end">{name}</text>')
    for i, points in enumerate(chosen.lines.values()):
        places = [(across(x), up(v)) for x, v, _ in points]
        if not chosen.dots:
            parts.append(f'<path class="line c{i}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>')
        if chosen.dots or len(places) <= 24:
            parts += [f'<circle class="dot c{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    return top + HIGH, "".join(parts)


def _key(names: Sequence[str], width: int) -> tuple[str, int]:
    """The names of the lines beside their colours, in as many rows as the width asks for, and how high they are."""
    if len(names) == 1:
        return "", 0
    parts, x, y = [], 0, 13
    for i, name in enumerate(names):
        wide = 36 + 7 * len(name)
        if x and x + wide > width:
            x, y = 0, y + 19
        parts.append(f'<path class="line c{i}" d="M{x} {y - 4}h16"/><text x="{x + 21}" y="{y}">{escape(name)}</text>')
        x += wide
    return "".join(parts), y + 11


class _Axis:
    """From a figure to its place between two ends of an axis; ``ticks`` are (figure, place), so many px apart."""

    def __init__(self, values: Sequence[float], start: float, end: float, by_decades: bool, apart: float) -> None:
        low, high = min(values), max(values)
        self.map = math.log10 if by_decades else float
        if len(set(values)) <= 10 and apart > 40:
            ticks = sorted(set(values))
        elif by_decades:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            few = math.log10(high / low) < 2.5
            ticks = [m * 10.0**k for k in decades for m in ((1, 2, 5) if few else (1,))]
            if apart <= 40:
                low = max((t for t in ticks if t <= low), default=low)
        else:
            step = 10 ** math.floor(math.log10((high - low) / 3 or 1))
            step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (m * step) <= 5)
            ticks = [k * step for k in range(math.ceil(low / step - 1e-9), math.ceil(high / step) + 1)]
            high = max(high, ticks[-1]) if apart <= 40 else high
        self.low, self.high, self.start, self.end = low, high, start, end
        self.ticks: list[tuple[float, float]] = []
        for tick in ticks:
            far = not self.ticks or abs(self(tick) - self.ticks[-1][1]) >= apart if low <= tick <= high else False
            if far:
                self.ticks.append((tick, self(tick)))

    def __call__(self, value: float) -> float:
        low, high = self.map(self.low), self.map(self.high)
        return self.start + (self.end - self.start) * (self.map(value) - low) / ((high - low) or 1)
