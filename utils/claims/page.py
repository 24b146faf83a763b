"""The ledger as a page: ``notebooks/CLAIMS.md``, one table for each notebook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.claims.claim import KINDS, Claim
from utils.claims.ledger import NOTEBOOKS, ledger, notebook_paths
from utils.units import number, scale

PAGE = NOTEBOOKS / "CLAIMS.md"

_HEAD = """\
# Claims ledger

Every figure that the course states, held against what it should be by the cell that computes it. This page is built
from the notebooks' stored outputs by `python -m utils.claims`; do not edit it.

**derive**: computed or counted, the same on every machine. **measure**: read from a recorded measurement on a GPU, or
from a recorded calculation, held against a prediction or a published figure. **state**: published by others, quoted
with its source. A tolerance is relative to the expected value.
"""


def page(notebooks: Iterable[Path | str] | None = None) -> str:
    """The ledger as Markdown, the same text on every machine; LedgerError when the stored outputs cannot be read."""
    paths = notebook_paths() if notebooks is None else [Path(p) for p in notebooks]
    made = ledger(paths)
    counts = ", ".join(f"{sum(c.kind == kind for c in made)} {kind}" for kind in KINDS)
    parts = [_HEAD, f"{len(made)} claims: {counts}.\n"]
    for path in paths:
        claims = [c for c in made if c.notebook == path.stem]
        if claims:
            parts += [f"## [{title(path)}]({path.name})\n", _table(claims)]
    return "\n".join(parts)


def title(path: Path) -> str:
    """The first heading of a notebook, or its file name."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell.get("cell_type") == "markdown":
            for line in "".join(cell["source"]).splitlines():
                if line.startswith("# "):
                    return line[2:].strip()
    return path.stem


def _table(claims: Sequence[Claim]) -> str:
    lines = [
        "| claim | computed | expected | tolerance | unit | kind | source |",
        "|:---|---:|---:|---:|:---|:---|:---|",
    ]
    for c in claims:
        name = f"{_cell(c.statement)}<br>`{c.id}`" if c.statement else f"`{c.id}`"
        computed, expected, unit = in_one_unit(c)
        cells = (computed, expected, c.tolerance_text, unit or "–", c.kind, c.source or "derivation")
        lines.append(f"| {name} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def in_one_unit(c: Claim) -> tuple[str, str, str]:
    """Computed and expected as plain numbers, and the unit (with its SI prefix) that both are in."""
    bounds = c.expected if isinstance(c.expected, tuple) else (c.expected,)
    if isinstance(c.computed, bool | str):
        return c.computed_text, c.expected_text, c.unit
    whole = all(isinstance(v, int) for v in (c.computed, *bounds))
    factor, unit = (1, c.unit) if whole else scale(max(abs(v) for v in (c.computed, *bounds)), c.unit)
    texts = [number(v if factor == 1 else v / factor) for v in (c.computed, *bounds)]
    return texts[0], " to ".join(texts[1:]), unit


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
