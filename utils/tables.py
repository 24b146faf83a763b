"""Tables in notebooks: aligned text for a terminal, HTML for a page, the same characters on every machine."""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from numbers import Real

from utils.units import number


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = "", digits: int = 4) -> None:
    """Show rows of cells under the names of their columns; outside a notebook, print them.

    Numbers are set to the right with ``digits`` significant digits (whole numbers in full), the rest to the left.
    Pass ``utils.units.quantity(...)`` as a cell for a number with a unit.

    Args:
        columns: Name of each column, with the unit where its cells carry none.
        rows: Cells, row by row, as many as there are columns.
        caption: A line above the table.
        digits: Significant digits of numbers.

    Raises:
        ValueError: there are no rows, or a row has more or fewer cells than there are columns.
    """
    if not rows:
        raise ValueError("rows must hold at least one row, got none")
    for i, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {i} has {len(row)} cells for {len(columns)} columns: {tuple(row)!r}")
    right = [all(_is_number(row[c]) or row[c] is None for row in rows) for c in range(len(columns))]
    cells = [[_text(cell, digits) for cell in row] for row in rows]
    text, page = _plain(columns, cells, right, caption), _html(columns, cells, right, caption)
    if "IPython" in sys.modules:
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is not None:
            display({"text/plain": text, "text/html": page}, raw=True)
            return
    print(text)


def _is_number(cell: object) -> bool:
    return isinstance(cell, Real) and not isinstance(cell, bool)


def _text(cell: object, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return number(cell, digits) if _is_number(cell) else str(cell)


def _plain(columns: Sequence[str], cells: list[list[str]], right: list[bool], caption: str) -> str:
    widths = [max(len(row[c]) for row in [list(columns), *cells]) for c in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        aligned = (text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True))
        return "  ".join(aligned).rstrip()

    lines = [line(columns), "  ".join("-" * w for w in widths), *map(line, cells)]
    return "\n".join([caption, *lines] if caption else lines)


def _html(columns: Sequence[str], cells: list[list[str]], right: list[bool], caption: str) -> str:
    def row(tag: str, texts: Sequence[str]) -> str:
        sides = ("right" if r else "left" for r in right)
        return "".join(
            f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>'
            for text, side in zip(texts, sides, strict=True)
        )

    head = f'<caption style="caption-side:top;text-align:left">{html.escape(caption)}</caption>' if caption else ""
    body = "".join(f"<tr>{row('td', texts)}</tr>" for texts in cells)
    return f"<table>{head}<thead><tr>{row('th', columns)}</tr></thead><tbody>{body}</tbody></table>"
