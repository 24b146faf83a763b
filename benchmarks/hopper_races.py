"""Which of racecheck's reports are about a kernel of the capstone, and which about how Triton starts its partitions.

Triton tells a waiting warp which partition to run by a byte of shared memory, which the first warps write and all warps
meet over at barrier 1 of the block (``barrier.sync 1``). racecheck knows that barrier, and reports the byte as a race
all the same, in some blocks of a launch: its own trace of synchronisation (``--racecheck-trace-sync yes``, version
2025.3) lists a warp's arrival there after the reads by warps that can only have passed once it had arrived. Delays in
the kernel, the barrier's other spellings and the tool's options change how many blocks it reports, no more. It names as
places the kernel's first line and the statement with ``warp_specialize``, neither of which has an access of its own. A
report on these places alone is Triton's; any other is the kernel's.

Controls say what racecheck is worth here: kernels of which one is right and two have a race. They are written down
beside the kernels' reports, not asked for, for on an H100 racecheck is wrong about all three: it reports the tile that
is handed over with an ``mbarrier``, and not the ones that are read without a wait. What it says of kernels with
partitions is therefore no proof in either direction. The emulator in the course's tests is there for that: it plays
the kernels in random orders, with tiles that are poison until their copy has come, and finds planted mistakes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.fingerprint import ROOT

#: (file, line) as racecheck names it.
Place = tuple[str, int]

#: Files with kernels that have partitions: the capstone's, and that of the controls.
FILES = (*sorted((ROOT / "solutions" / "capstone_hopper").glob("*.py")), Path(__file__).with_name("hopper_control.py"))
#: The controls' names -> whether the reader waits, and whether the tile moves by instructions for matrices.
CONTROLS = {"waits": (True, False), "does not wait": (False, False), "does not wait, matrices": (False, True)}


def start_places(path: Path) -> set[Place]:
    """Where racecheck sees Triton start partitions of a file's kernels: the ``def`` of each kernel that has any, and
    the statements with ``warp_specialize``."""
    places = set()
    for function in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(function, ast.FunctionDef):
            calls = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize"
            ]
            around = [statement for statement in function.body if any(call in ast.walk(statement) for call in calls)]
            places |= {(path.name, node.lineno) for node in (*calls, *around, *([function] if calls else []))}
    return places


class Reports(NamedTuple):
    """What racecheck reported: ``own`` about the kernels, as places; ``triton`` about how partitions start, counted."""

    own: list[tuple[Place, ...]]
    triton: int


def reports(said: Sequence[str], starts: Iterable[Place] | None = None) -> Reports:
    """Sort racecheck's reports.

    Args:
        said: Its lines.
        starts: Places where partitions start; those of the capstone's kernels by default.

    Raises:
        ValueError: a report has a place that cannot be read.
    """
    known = set().union(*map(start_places, FILES)) if starts is None else set(starts)
    found: list[list[Place]] = []
    for line in said:
        begins = "Race reported between" in line
        if begins:
            found.append([])
        if begins or (found and re.match(r"=+\s+and (Read|Write) access", line)):
            place = re.search(r" in (?:.*/)?([^/\s]+):(\d+)", line)
            if place is None:
                raise ValueError(f"no place in racecheck's line {line!r}")
            found[-1].append((place[1], int(place[2])))
    own = [tuple(places) for places in found if not known.issuperset(places)]
    return Reports(own, len(found) - len(own))
