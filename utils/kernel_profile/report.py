"""A profile as a table for people, in text and in HTML."""

from __future__ import annotations

from html import escape
from math import prod
from typing import TYPE_CHECKING

from utils.kernel_profile.counters import Counters

if TYPE_CHECKING:
    from utils.kernel_profile.launches import LaunchProfile
    from utils.kernel_profile.profile import Profile

_HEAD = ("argument", "loaded B", "stored B", "reads/elem", "sectors in", "sectors out", "coalescing")
_SHOWN = 5  # findings of a kind
_ADVICE = {
    "out of bounds": "mask the lanes past the end (offsets < n), or check the strides that were passed",
    "uninitialised reads": "allocate with torch.zeros, or let a program write the element before another reads it",
    "races": "give each element to one program, add with tl.atomic_add, or split the kernel into two launches",
}


def as_text(profile: Profile) -> str:
    """The whole report, plain text."""
    if not profile.launches:
        return "no kernel was launched inside the block"
    blocks = [_launch_text(title, rows) for title, rows in _tables(profile)]
    for kind, findings in _kinds(profile):
        lines = [f"{kind}: {len(findings)}"]
        lines += [f"  {finding}" for finding in findings[:_SHOWN]]
        if len(findings) > _SHOWN:
            lines.append(f"  ... and {len(findings) - _SHOWN} more")
        lines.append(f"  -> {_ADVICE[kind]}")
        blocks.append("\n".join(lines))
    if profile.findings_left_out:
        blocks.append(_left_out(profile))
    if not profile.findings:
        blocks.append("no access out of bounds, no uninitialised read, no race")
    return "\n\n".join(blocks)


def as_html(profile: Profile) -> str:
    """The whole report as HTML without styles of its own beyond alignment."""
    if not profile.launches:
        return "<p>no kernel was launched inside the block</p>"
    parts = []
    for title, rows in _tables(profile):
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
    for kind, findings in _kinds(profile):
        items = "".join(f"<li>{escape(str(finding))}</li>" for finding in findings[:_SHOWN])
        if len(findings) > _SHOWN:
            items += f"<li>... and {len(findings) - _SHOWN} more</li>"
        parts.append(f"<p><b>{escape(kind)}: {len(findings)}</b></p><ul>{items}</ul><p>{escape(_ADVICE[kind])}</p>")
    if profile.findings_left_out:
        parts.append(f"<p>{escape(_left_out(profile))}</p>")
    if not profile.findings:
        parts.append("<p>no access out of bounds, no uninitialised read, no race</p>")
    return "".join(parts)


def _left_out(profile: Profile) -> str:
    kept = len(profile.findings)
    return f"these are the first {kept:,} findings; {profile.findings_left_out:,} later occurrences are not listed"


def _side(column: int) -> str:
    return "left" if column == 0 else "right"


def _kinds(profile: Profile) -> list[tuple[str, list]]:
    kinds = (
        ("out of bounds", profile.out_of_bounds),
        ("uninitialised reads", profile.uninitialized_reads),
        ("races", profile.races),
    )
    return [(kind, findings) for kind, findings in kinds if findings]


def _tables(profile: Profile) -> list[tuple[str, list[tuple[str, ...]]]]:
    """One table per kernel and grid: a title and rows of cells. Launches on tensors of equal shapes are added up."""
    groups: dict[tuple, list[LaunchProfile]] = {}
    for launch in profile.launches:
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
