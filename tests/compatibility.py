"""Writes what a run of ``make test-compat`` found into ``tests/COMPATIBILITY.md``, one row for each set of versions.

python -m tests.compatibility "not thorough and not timed" tests.xml cells.xml
"""

from __future__ import annotations

import datetime
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "COMPATIBILITY.md"
#: A row of results, which begins with a version of Python.
ROW = re.compile(r"\| \d+\.\d+\.\d+ \|.*")


class Counts(NamedTuple):
    """Of a run of pytest; an error counts as a failure, an expected failure as a skip."""

    passed: int
    failed: int
    skipped: int
    files: int

    def __str__(self) -> str:
        return f"{self.passed:,} passed, {self.failed:,} failed, {self.skipped:,} skipped in {self.files} files"


def count(report: Path) -> Counts:
    """The counts of a report that ``pytest --junitxml`` wrote."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = [{child.tag for child in case} for case in cases]
    failed = sum(bool(tags & {"failure", "error"}) for tags in found)
    skipped = sum("skipped" in tags for tags in found)
    files = {case.get("classname") or case.get("name") for case in cases}
    return Counts(len(found) - failed - skipped, failed, skipped, len(files))


def row(selected: str, tests: Counts, cells: Counts, today: datetime.date) -> str:
    """The row of the environment that runs this.

    Args:
        selected: Pytest's expression for the tests that ran, ``"not thorough and not timed"``.
    """
    versions = [platform.python_version(), version("torch").split("+")[0], version("triton")]
    return f"| {' | '.join(map(str, [*versions, today, f'`{selected}`', tests, cells]))} |"


def renewed(text: str, new: str) -> str:
    """The table's text with a row added, in place of the one for the same versions and the same selection of tests."""
    rows = {_key(old): old for old in ROW.findall(text)} | {_key(new): new}
    return "\n".join([ROW.sub("", text).rstrip(), *(rows[key] for key in sorted(rows)), ""])


def _key(text: str) -> tuple[tuple[int, ...], str]:
    """Of a row: Python's major and minor version, those of the packages, and the tests that ran."""
    python, torch, triton, _, selected = text.split(" | ")[:5]
    numbers = ".".join([*python.removeprefix("| ").split(".")[:2], torch, triton])
    return tuple(int(part) for part in numbers.split(".")), selected


def main(selected: str, *reports: str) -> int:
    """Write the row of this environment and show it; returns the exit status, 1 where something failed."""
    if absent := [report for report in reports if not Path(report).exists()]:
        print(f"pytest wrote no {' and no '.join(absent)}; the table is left as it was.")
        return 1
    tests, cells = (count(Path(report)) for report in reports)
    new = row(selected, tests, cells, datetime.date.today())
    TABLE.write_text(renewed(TABLE.read_text(), new))
    print(new)
    return int(bool(tests.failed or cells.failed or not tests.passed or not cells.passed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
