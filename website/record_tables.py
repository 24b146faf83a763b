"""Recorded results as tables: nested lists and objects of figures, with units in the headers where the names say them.

A list of measured points becomes a table with a row per point: first what tells the points apart, then what was
measured, then the rest. What a point holds by name (the times of several functions, say) becomes a row each, below a
line with what these rows share. So a name and its figures stand side by side on a phone too. What nests deeper gets a
heading and tables of its own. Figures are printed by :mod:`utils.units`, one unit per column where a column's figures
are near each other. Tables are kept narrow: how far a figure spread stands small beside it, and what is the same in all
rows stands above.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from typing import Any

from utils.units import number
from website.record_figures import Column, Path, column, is_figure, label, path_label, spread_of, text, unit_of

#: A list of more figures than this in a cell gets a block of its own; a table inside a row of more rows does too.
LONGEST_CELL = 12
LONGEST_INNER = 8
#: A cell of more characters than this is given room, or its row would become tall.
LONG_TEXT = 40
#: A table of more columns than this is set smaller; where it has only a few rows, these become its columns.
MOST_COLUMNS, FEW_ROWS = 6, 8
#: Of the columns that tell rows apart, so many stay columns, if at least so many rows on average share the others.
MOST_KEYS, FEWEST_SHARING = 2, 2


@dataclass
class Block:
    """A piece of a page: a table in HTML (or none), under a heading of some depth (or none)."""

    depth: int
    heading: str = ""
    html: str = ""


@dataclass
class _Item:
    """One point: its own figures by path, those that it holds by name, and what does not fit into a row."""

    own: dict[Path, Any] = field(default_factory=dict)
    named: dict[str, dict[Path, Any]] = field(default_factory=dict)
    by: tuple[str, ...] = ()  # what the names in ``named`` are names of
    deeper: dict[Path, Any] = field(default_factory=dict)


def blocks(value: Any, heading: str, rows: int, depth: int = 0) -> Iterator[Block]:
    """Tables of a recorded value, in its order.

    Args:
        value: Parsed JSON: an object, or a list with something in it.
        heading: Its name in words, "" for the whole.
        rows: A table ends after so many points, and says how many are left out.
        depth: How deep ``value`` lies; a heading's level.
    """
    if isinstance(value, Mapping) and value and _named(value) and _collect(value).deeper:
        value = [{"name": name, **item} for name, item in value.items()]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield from _of_points(value, heading, rows, depth)
    elif isinstance(value, list):
        yield Block(depth, heading, _grid(value, heading))
    else:
        yield from _of_object(value, heading, rows, depth)


# ---- taking a value apart ------------------------------------------------------------------------------------------


def _of_points(points: Sequence[Mapping], heading: str, rows: int, depth: int) -> Iterator[Block]:
    items = [_collect(point, lists=True) for point in points]
    if not any(item.deeper for item in items):
        yield Block(depth, heading, _table(items, heading, rows))
        return
    yield Block(depth, heading)
    for point, name in zip(points, _names_of(items)):
        yield from _of_object(point, name, rows, depth + 1)


def _of_object(value: Mapping, heading: str, rows: int, depth: int) -> Iterator[Block]:
    item = _collect(value)
    own = {path: v for path, v in item.own.items() if v != heading}  # a name that the heading says already
    if item.named:
        yield Block(depth, heading, _table([item], heading or "results", rows))
    else:
        yield Block(depth, heading, _facts(own, heading or "settings") if own else "")
    for path, inner in item.deeper.items():
        yield from blocks(inner, ", ".join(map(label, path)), rows, depth + 1)


def _collect(value: Mapping, path: Path = (), lists: bool = False) -> _Item:
    """Take an object apart; with ``lists`` a short list of plain points counts as points that it holds by name."""
    item = _Item()
    for key, inner in value.items():
        place = (*path, str(key))
        if isinstance(inner, Mapping):
            _collect_object(item, inner, place)
        elif lists and _is_short_table(inner) and not item.by:
            first = next(iter(inner[0]))
            item.by = (first,)
            for point in inner:
                rest = {key: v for key, v in point.items() if key != first}
                item.named[text(point[first])] = {(*place, *p): v for p, v in _collect(rest).own.items()}
        elif isinstance(inner, list) and (len(inner) > LONGEST_CELL or any(isinstance(i, dict | list) for i in inner)):
            item.deeper[place] = inner
        else:
            item.own[place] = inner
    return item


def _collect_object(item: _Item, inner: Mapping, place: Path) -> None:
    collected = _collect(inner, place)
    if collected.deeper or collected.named or len(inner) > LONGEST_CELL:
        item.deeper[place] = inner
    elif inner and _named(inner) and len(inner) <= LONGEST_INNER:
        item.by += (place[-1],)
        for name, own in inner.items():
            entry = item.named.setdefault(str(name), {})
            entry.update({(*place, *path): v for path, v in _collect(own).own.items()})
    elif inner and all(isinstance(v, Mapping) for v in inner.values()):
        item.deeper[place] = inner
    else:
        item.own.update(collected.own)


def _named(value: Mapping) -> bool:
    """Whether an object's keys are names of things that all look alike, rather than different properties of one."""
    inner = list(value.values())
    return all(isinstance(v, Mapping) and v for v in inner) and len({frozenset(v) for v in inner}) == 1


def _is_short_table(value: Any) -> bool:
    """Whether a value is a list of a few plain points that differ in their first figure."""
    if not isinstance(value, list) or not 0 < len(value) <= LONGEST_INNER:
        return False
    if not all(isinstance(v, Mapping) and v and not any(isinstance(i, Mapping) for i in v.values()) for v in value):
        return False
    if any(_collect(v).deeper for v in value):
        return False
    first = next(iter(value[0]))
    return all(first in v for v in value) and len({str(v[first]) for v in value}) == len(value)


def _names_of(items: Sequence[_Item]) -> list[str]:
    """A heading for each point: its texts; where these do not tell points apart, its sizes too, or its place."""
    texts = [", ".join(str(v) for v in item.own.values() if isinstance(v, str)) for item in items]
    if all(texts) and len(set(texts)) == len(texts):
        return texts
    sizes = [
        ", ".join(f"{label(p[0])} {text(v)}" for p, v in item.own.items() if len(p) == 1 and _is_size(p, v))
        for item in items
    ]
    both = [", ".join(filter(None, pair)) for pair in zip(texts, sizes)]
    return both if len(set(both)) == len(both) else [f"{place}" for place in range(1, len(items) + 1)]


def _is_size(path: Path, value: Any) -> bool:
    return isinstance(value, int | list) and not isinstance(value, bool) and not unit_of(path)


# ---- HTML ----------------------------------------------------------------------------------------------------------


def _box(table: str, caption: str) -> str:
    """A table that scrolls in a box of its own, also by keyboard; one line, as raw HTML in Markdown wants it."""
    return f'<div class="table-box" role="region" tabindex="0" aria-label="{escape(caption, quote=True)}">{table}</div>'


def _facts(own: Mapping[Path, Any], caption: str) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(", ".join(map(label, path)))}</th>'
        f"<td{_class(value)}>{escape(text(value, unit_of(path)))}</td></tr>"
        for path, value in own.items()
    )
    return _box(f'<table class="record facts"><tbody>{lines}</tbody></table>', caption)


def _grid(values: Sequence[Any], caption: str) -> str:
    """A long list of figures, ten a line, with the place of each line's first."""
    lines = "".join(
        f'<tr><th scope="row">{number(start)}</th>'
        + "".join(f"<td{_class(v)}>{escape(text(v))}</td>" for v in values[start : start + 10])
        + "</tr>"
        for start in range(0, len(values), 10)
    )
    return _box(f'<table class="record"><tbody>{lines}</tbody></table>', caption)


def _table(items: Sequence[_Item], caption: str, rows: int) -> str:
    _join_where_keys_differ(items)
    by = next((item.by for item in items if item.by), ())
    own_same, own = _apart([item.own for item in items])
    named_same, named = _apart([entry for item in items for entry in item.named.values()], by[:1])
    over, shown = (own, named) if by else _shared(items, own)
    wide = " wide" if len(shown) + bool(by) > MOST_COLUMNS else ""
    if wide and len(items) <= FEW_ROWS and not by:
        table = f'<table class="record wide"><tbody>{_turned(items, shown)}</tbody></table>'
    else:
        body = _body(items[:rows], over, shown, by)
        table = f'<table class="record{wide}"><thead>{_head(shown, by)}</thead>{body}</table>'
    left = len(items) - rows
    more = f'<p class="left-out">The first {number(rows)} of {number(len(items))} points.</p>' if left > 0 else ""
    return own_same + named_same + _box(table, caption) + more


# ---- what stands where: on a phone a row's first columns are what a reader sees


def _shared(items: Sequence[_Item], own: Sequence[Column]) -> tuple[list[Column], list[Column]]:
    """What a line over several rows says, and the columns: what tells rows apart, what was measured, the rest."""
    sizes = [c for c in own if not _is_measured(c)]
    keys = next((sizes[:n] for n in range(1, len(sizes) + 1) if _are_apart(items, sizes[:n])), [])
    if not keys:
        return [], list(own)
    rest = sorted((c for c in own if c not in keys), key=lambda c: not _is_measured(c))
    wanted = [keys[:n] for n in range(len(keys) - MOST_KEYS, 0, -1)]
    over = next((columns for columns in wanted if _runs(items, columns) * FEWEST_SHARING <= len(items)), [])
    return over, [c for c in keys if c not in over] + rest


def _is_measured(column: Column) -> bool:
    return bool(column.spread) or unit_of(column.path) in ("s", "cycles") or unit_of(column.path).endswith("/s")


def _values(item: _Item, columns: Sequence[Column]) -> list[str]:
    return [repr(item.own.get(c.path)) for c in columns]


def _runs(items: Sequence[_Item], columns: Sequence[Column]) -> int:
    return len(list(groupby(items, lambda item: _values(item, columns))))


def _are_apart(items: Sequence[_Item], columns: Sequence[Column]) -> bool:
    return len({tuple(_values(item, columns)) for item in items}) == len(items)


def _join_where_keys_differ(items: Sequence[_Item]) -> None:
    """Make one column of an object whose keys are not the same in all points, as the parameters of operators are."""
    for key in {path[0] for item in items for path in item.own if len(path) == 2}:
        keys = {frozenset(path[1] for path in item.own if path[0] == key) for item in items}
        if len(keys) > 1 and len(frozenset.union(*keys)) > 2:
            for item in items:
                joined = {path[1]: item.own.pop(path) for path in list(item.own) if path[0] == key}
                item.own[key,] = ", ".join(f"{label(name)}: {text(v, unit_of((name,)))}" for name, v in joined.items())


def _turned(items: Sequence[_Item], columns: Sequence[Column]) -> str:
    """The rows of a table whose columns are the points: a few points of many figures."""
    lines = []
    for c in columns:
        cells = "".join(_cell(replace(c, in_cells=True), item.own) for item in items)
        lines.append(f'<tr><th scope="row">{escape(path_label(c.path))}</th>{cells}</tr>')
    return "".join(lines)


def _apart(entries: Sequence[Mapping[Path, Any]], said: Collection[str] = ()) -> tuple[str, list[Column]]:
    """What the rows have in common, as a line of text, and the columns in which they differ."""
    columns = _columns(entries)
    same = [c for c in columns if len(entries) > 1 and not c.spread and _in_common(c.path, entries)]
    if not same or len(same) == len(columns):
        return "", columns
    listed = "; ".join(_words(c, entries[0], said) for c in same)
    line = f'<p class="in-common">In all {number(len(entries))} rows: {listed}.</p>'
    return line, [c for c in columns if c not in same]


def _in_common(path: Path, entries: Sequence[Mapping[Path, Any]]) -> bool:
    first = entries[0].get(path)
    return first not in (None, []) and all(path in entry and entry[path] == first for entry in entries)


def _columns(entries: Sequence[Mapping[Path, Any]]) -> list[Column]:
    paths = list(dict.fromkeys(path for entry in entries for path in entry))
    made = [column(path, [entry[path] for entry in entries if path in entry]) for path in paths]
    ends = {path: spread_of(path) for path in paths if set(spread_of(path)) <= set(paths)}
    small = {end for both in ends.values() for end in both}
    return [replace(c, spread=ends.get(c.path, ())) for c in made if c.path not in small]


def _head(columns: Sequence[Column], by: tuple[str, ...]) -> str:
    outer = {c.path[0] for c in columns}
    said = outer if by and len(outer) == 1 else by[:1]
    cells = [(label(by[0]), "")] if by else []
    cells += [(_name(c, said), c.unit) for c in columns]
    return "<tr>" + "".join(f'<th scope="col">{_header(name, unit)}</th>' for name, unit in cells) + "</tr>"


def _name(column: Column, said: Collection[str]) -> str:
    """A column's name without an outermost part that is among ``said``, as the head of the first column is."""
    return path_label(column.path[1:] if column.path[0] in said else column.path)


def _header(name: str, unit: str) -> str:
    return escape(name) + (f' <span class="unit">({escape(unit)})</span>' if unit and unit != name else "")


def _body(items: Sequence[_Item], over: Sequence[Column], columns: Sequence[Column], by: tuple[str, ...]) -> str:
    """Rows, below a line for what several of them share."""
    bodies = []
    for _, group in groupby(items, lambda item: _values(item, over)):
        together = list(group)
        shared = "; ".join(_words(c, together[0].own) for c in over if c.path in together[0].own)
        wide = len(columns) + bool(by)
        lines = [f'<tr><th class="shared" colspan="{wide}"><div>{shared}</div></th></tr>'] if shared else []
        for item in together:
            named = [(f'<th scope="row">{escape(name)}</th>', entry) for name, entry in item.named.items()]
            for name, entry in named if by else [("", item.own)]:
                lines.append(f"<tr>{name}{''.join(_cell(c, entry) for c in columns)}</tr>")
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return "".join(bodies)


def _words(column: Column, entry: Mapping[Path, Any], said: Collection[str] = ()) -> str:
    """A figure with its name and its unit, as it stands in a line of text."""
    unit = f" {column.unit}" if column.unit else ""
    ends = [column.cell(entry[end]) for end in column.spread if end in entry]
    small = f" <small>{escape(' to '.join(ends))}</small>" if ends else ""
    return f"{escape(_name(column, said))} <b>{escape(column.cell(entry[column.path]) + unit)}</b>{small}"


def _cell(column: Column, entry: Mapping[Path, Any]) -> str:
    if column.path not in entry:
        return "<td></td>"
    value = entry[column.path]
    ends = [column.cell(entry[end]) for end in column.spread if end in entry]
    small = f" <small>{escape(' to '.join(ends))}</small>" if ends else ""
    return f"<td{_class(value)}>{escape(column.cell(value))}{small}</td>"


def _class(value: Any) -> str:
    if is_figure(value):
        return ' class="n"'
    return ' class="long"' if len(text(value)) > LONG_TEXT else ""
