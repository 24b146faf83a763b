"""A profile as a table for people, in text and in HTML."""

from __future__ import annotations

from html import escape
from math import prod

from utils.kernel_profile.counters import Counters
from utils.kernel_profile.findings import Finding, OutOfBounds, Race, UninitializedRead
from utils.kernel_profile.launches import LaunchProfile
from utils.kernel_profile.recorder import Recorder

_HEAD = ("argument", "loaded B", "stored B", "reads/elem", "sectors in", "sectors out", "coalescing")
_SHOWN = 5  # findings of a kind
_ADVICE = {
    "out of bounds": "mask the lanes past the end (offsets < n), or check the strides that were passed",
    "uninitialised reads": "allocate with torch.zeros, or let a program write the element before another reads it",
    "races": "give each element to one program, add with tl.atomic_add, or split the kernel into two launches",
}


def as_text(recorder: Recorder) -> str:
    """The whole report, plain text."""
    if not recorder.launches:
        return "no kernel was launched inside the block"
    blocks = [_launch_text(title, rows) for title, rows in _tables(recorder)]
    for kind, findings in _kinds(recorder):
        lines = [f"{kind}: {len(findings)}"]
        lines += [f"  {finding}" for finding in findings[:_SHOWN]]
        if len(findings) > _SHOWN:
            lines.append(f"  ... and {len(findings) - _SHOWN} more")
        lines.append(f"  -> {_ADVICE[kind]}")
        blocks.append("\n".join(lines))
    if recorder.findings_left_out:
        blocks.append(_left_out(recorder))
    if not recorder.findings:
        blocks.append("no access out of bounds, no uninitialised read, no race")
    return "\n\n".join(blocks)


def as_html(recorder: Recorder) -> str:
    """The whole report as HTML without styles of its own beyond alignment."""
    if not recorder.launches:
        return "<p>no kernel was launched inside the block</p>"
    parts = []
    for title, rows in _tables(recorder):
        head = "".join(f'<th style="text-align:{_side(i)}">{escape(text)}</th>' for i, text in enumerate(_HEAD))
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align:{_side(i)}">{escape(cell)}</td>' for i, cell in enumerate(row))
            + "</tr>"
            for row in rows
        )
        parts.append(
            f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    for kind, findings in _kinds(recorder):
        items = "".join(f"<li>{escape(str(finding))}</li>" for finding in findings[:_SHOWN])
        if len(findings) > _SHOWN:
            items += f"<li>... and {len(findings) - _SHOWN} more</li>"
        parts.append(f"<p><b>{escape(kind)}: {len(findings)}</b></p><ul>{items}</ul><p>{escape(_ADVICE[kind])}</p>")
    if recorder.findings_left_out:
        parts.append(f"<p>{escape(_left_out(recorder))}</p>")
    if not recorder.findings:
        parts.append("<p>no access out of bounds, no uninitialised read, no race</p>")
    return "".join(parts)


def _left_out(recorder: Recorder) -> str:
    kept = len(recorder.findings)
    return f"these are the first {kept:,} findings; {recorder.findings_left_out:,} later occurrences are not listed"


def _side(column: int) -> str:
    return "left" if column == 0 else "right"


def _kinds(recorder: Recorder) -> list[tuple[str, list[Finding]]]:
    kinds = (("out of bounds", OutOfBounds), ("uninitialised reads", UninitializedRead), ("races", Race))
    found = [(name, [f for f in recorder.findings.values() if isinstance(f, kind)]) for name, kind in kinds]
    return [(name, findings) for name, findings in found if findings]


def _tables(recorder: Recorder) -> list[tuple[str, list[tuple[str, ...]]]]:
    """One table per kernel and grid: a title and rows of cells. Launches on tensors of equal shapes are added up."""
    groups: dict[tuple, list[LaunchProfile]] = {}
    for launch in recorder.launches:
        groups.setdefault((launch.kernel, launch.grid, launch.tensors), []).append(launch)
    tables = []
    for (kernel, grid, tensors), launches in groups.items():
        counters = Counters()
        arguments: dict[str, Counters] = {}
        for launch in launches:
            counters.add(launch.counters)
            for name, part in launch.by_argument.items():
                arguments.setdefault(name, Counters()).add(part)
        numel = {name: prod(shape) * len(launches) * dtype.itemsize for name, shape, dtype in tensors}
        rows = [_row(name, part, numel.get(name, 0)) for name, part in arguments.items()]
        rows.append(_row("all", counters, 0))
        times = f", {len(launches)} launches" if len(launches) > 1 else ""
        title = f"{kernel}, {prod(grid):,} program{'s' * (prod(grid) != 1)} (grid {'x'.join(map(str, grid))}){times}"
        if counters.flops:
            title += f"; {counters.flops:,} FLOPs in dots, {counters.arithmetic_intensity:.2f} FLOP/B"
        if any(launch.error for launch in launches):
            title += "; raised an error, counts are partial"
        tables.append((title, rows))
    return tables


def _row(name: str, counters: Counters, nbytes: int) -> tuple[str, ...]:
    reads = f"{counters.bytes_loaded / nbytes:.2f}" if nbytes and counters.bytes_loaded else ""
    return (
        name,
        f"{counters.bytes_loaded:,}",
        f"{counters.bytes_stored:,}",
        reads,
        f"{counters.sectors_loaded:,}",
        f"{counters.sectors_stored:,}",
        f"{100 * counters.coalescing:.0f}%" if counters.sectors_moved else "",
    )


def _launch_text(title: str, rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    lines = [title]
    for row in (_HEAD, *rows):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
