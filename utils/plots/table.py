"""A table for notebooks: the same text on every machine, readable on light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from utils.units import number, quantity


@dataclass(frozen=True)
class Table:
    """Rows of text that a notebook shows as HTML and a terminal as aligned columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]
    caption: str = ""

    def __repr__(self) -> str:
        grid = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        lines = [
            "  ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, self.right, strict=True)).rstrip()
            for row in grid
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join(([self.caption] if self.caption else []) + lines)

    def _repr_html_(self) -> str:
        def cell(tag: str, text: str, right: bool, rule: str) -> str:
            align = "text-align:right;white-space:nowrap" if right else "text-align:left"
            style = f"{align};padding:3px 12px 3px 0;border-bottom:{rule};font-variant-numeric:tabular-nums"
            scope = ' scope="col"' if tag == "th" else ""
            return f'<{tag}{scope} style="{style}">{html.escape(text)}</{tag}>'

        def row(tag: str, texts: Sequence[str], rule: str) -> str:
            return "<tr>" + "".join(cell(tag, t, r, rule) for t, r in zip(texts, self.right, strict=True)) + "</tr>"

        caption = ""
        if self.caption:
            style = "caption-side:top;text-align:left;font-weight:bold;padding:0 0 4px;color:inherit"
            caption = f'<caption style="{style}">{html.escape(self.caption)}</caption>'
        head = row("th", self.columns, "1px solid currentColor")
        body = "".join(row("td", texts, "1px solid rgba(128,128,128,.25)") for texts in self.rows)
        style = "border-collapse:collapse;color:inherit;background:transparent;margin:4px 0"
        return f'<table style="{style}">{caption}<thead>{head}</thead><tbody>{body}</tbody></table>'


def table(
    rows: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
    columns: Sequence[str] | None = None,
    *,
    units: Mapping[str, str] | None = None,
    formats: Mapping[str, Callable[[Any], str]] | None = None,
    digits: int = 4,
    caption: str = "",
) -> Table:
    """A tidy table from rows of values.

    Args:
        rows: mappings from column name to value, or sequences in the order of ``columns``.
        columns: names in order; by default the keys of the first mapping.
        units: SI unit by column; "s", "B", "B/s", "FLOP/s", "FLOP", "Hz" are printed with a prefix in each cell.
        formats: a function from value to text by column; it wins over ``units``.
        digits: significant digits of floats; integers are printed in full. None and missing keys give "–".

    Raises:
        ValueError: no rows, a row of another length, or a unit or format for a column that is not there.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("a table needs at least one row")
    if columns is None:
        if not isinstance(rows[0], Mapping):
            raise ValueError("rows that are not mappings need columns, the names in order")
        columns = list(rows[0])
    columns = tuple(columns)
    for option in (units or {}, formats or {}):
        if unknown := set(option) - set(columns):
            raise ValueError(f"no column named {sorted(unknown)[0]!r} (columns: {', '.join(columns)})")
    values = [_values(row, columns) for row in rows]
    show = {name: _formatter((units or {}).get(name, ""), (formats or {}).get(name), digits) for name in columns}
    texts = tuple(tuple(show[n](v) for n, v in zip(columns, row, strict=True)) for row in values)
    right = tuple(all(_is_number(row[i]) or row[i] is None for row in values) for i in range(len(columns)))
    return Table(columns, texts, right, caption)


def _values(row: Mapping[str, Any] | Sequence[Any], columns: tuple[str, ...]) -> list[Any]:
    if isinstance(row, Mapping):
        if unknown := set(row) - set(columns):
            raise ValueError(f"row has a value for {sorted(unknown)[0]!r}, which is no column ({', '.join(columns)})")
        return [row.get(name) for name in columns]
    if isinstance(row, str) or len(row) != len(columns):
        raise ValueError(f"a row needs {len(columns)} values ({', '.join(columns)}), got {row!r}")
    return list(row)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _formatter(unit: str, custom: Callable[[Any], str] | None, digits: int) -> Callable[[Any], str]:
    def text(value: Any) -> str:
        if value is None:
            return "–"
        if custom is not None:
            return str(custom(value))
        if isinstance(value, bool):
            return "✓" if value else "✗"
        if _is_number(value):
            return quantity(value, unit, digits) if unit else number(value, digits)
        return str(value)

    return text
