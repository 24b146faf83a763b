"""Cuts solutions and hidden tests out of a lab: one function for modules, one for notebooks, with the same markers.

A solution stands between two comments::

    ### BEGIN SOLUTION 1.2: FLOPs of a matmul
    return 2 * m * k * n
    ### END SOLUTION

The released file has ``raise NotImplementedError("Lab 1, exercise 1.2: FLOPs of a matmul")`` in its place, at the same
indentation. Where a module's solution is not indented, students write functions of their own: a comment with that text
stands there, since an error would end the import. Everything outside the markers (signature, docstring, hints) stays as
it is written. What stands between ``### BEGIN HIDDEN TESTS`` and ``### END HIDDEN TESTS`` is left out: the grader runs
it, students do not get it.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from utils.stubs import stub_line

BEGIN = re.compile(r"^(?P<indent>\s*)### BEGIN SOLUTION(?P<label>.*)$")
END = re.compile(r"^\s*### END SOLUTION\s*$")
HIDDEN = re.compile(r"^\s*### (?P<which>BEGIN|END) HIDDEN TESTS\s*$")
LABEL = re.compile(r"\s+(?P<number>(?P<lab>\d+)\.\d+): (?P<title>\S.*?)\s*$")
EXECUTION = {"execution", "making-llms-fast"}  # what an execution leaves in a cell's metadata (`utils.notebooks`)
MARKER = re.compile(r"#\s*(BEGIN|END)\s+(SOLUTION|HIDDEN\s+TEST)", re.IGNORECASE)


class StripError(ValueError):
    """Markers that do not pair up, or that name no exercise; the text names the file and the line."""


@dataclass(frozen=True)
class Place:
    """What a student writes in one place: the module of the lab, the label (``"3.1: merge"``) and the lines of it."""

    module: str
    label: str
    first: int
    last: int
    indent: str
    text: str

    @property
    def number(self) -> str:
        """The exercise that it belongs to."""
        return self.label.split(":")[0]


def places(folder: Path) -> list[Place]:
    """The places of a lab's solutions, file by file; ``text`` is what stands between the markers, dedented."""
    found = []
    for path in sorted(folder.glob("*.py")):
        lines, begin = path.read_text(encoding="utf-8").splitlines(), None
        for number, line in enumerate(lines):
            if mark := BEGIN.match(line):
                begin = number + 1, mark
            elif END.match(line):
                first, mark = begin
                text = textwrap.dedent("\n".join(lines[first:number]))
                found.append(Place(path.stem, mark["label"].strip(), first, number, mark["indent"], text))
    return found


def strip_source(text: str, name: str, cell: bool = False) -> str:
    """Return the Python source ``text`` without hidden tests, each solution replaced by an error naming its exercise.

    Args:
        text: source of a module, or of one code cell.
        name: the file (and cell) to name in an error.
        cell: whether it is a cell, in which an error stands for a solution that is not indented, too.

    Raises:
        StripError: nested or unpaired markers, a marker that is misspelt, or a solution's without
            ``<lab>.<number>: <title>``.
    """
    kept: list[str] = []
    opened, kind = 0, ""  # the line of the open BEGIN marker, 0 when there is none, and what it opens
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{name}:{number}"
        begin, end, hidden = BEGIN.match(line), END.match(line), HIDDEN.match(line)
        if begin or (hidden and hidden["which"] == "BEGIN"):
            what = "SOLUTION" if begin else "HIDDEN TESTS"
            if opened:
                raise StripError(f"{place}: BEGIN {what} inside the {_region(kind)} on line {opened}")
            if begin:
                kept.append(_stub(begin, place, cell))
            opened, kind = number, what
        elif end or hidden:
            what = "SOLUTION" if end else "HIDDEN TESTS"
            if not opened:
                raise StripError(f"{place}: END {what} without a BEGIN {what} above it")
            if what != kind:
                raise StripError(f"{place}: END {what} inside the {_region(kind)} on line {opened}")
            opened = 0
        elif MARKER.search(line):
            raise StripError(f"{place}: a marker stands alone on its line as '### ...', got {line.strip()!r}")
        elif not opened:
            kept.append(line)
    if opened:
        raise StripError(f"{name}:{opened}: BEGIN {kind} without an END {kind} below it")
    return "\n".join(kept)


def _stub(begin: re.Match[str], place: str, cell: bool) -> str:
    """The line that stands in for a solution."""
    label = LABEL.fullmatch(begin["label"])
    if label is None:
        raise StripError(f"{place}: write '### BEGIN SOLUTION 1.2: title', got {begin.string.strip()!r}")
    message = f"Lab {label['lab']}, exercise {label['number']}: {label['title']}"
    return begin["indent"] + stub_line(message) if cell or begin["indent"] else f"# {message}"


def _region(kind: str) -> str:
    return "solution that begins" if kind == "SOLUTION" else "hidden tests that begin"


def strip_notebook(text: str, name: str) -> str:
    """Return the notebook ``text`` (JSON, nbformat 4) as a student receives it.

    Solutions and hidden tests are cut out of code cells; outputs, execution counts and what an execution leaves in the
    metadata are removed. The same notebook gives the same bytes, however often and by whichever Python it was executed.

    Raises:
        StripError: as :func:`strip_source` (the name of a cell is ``file[cell 3]``), a marker in a cell that is not
            code, or the text is no notebook.
    """
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise StripError(f"{name}: not a notebook of nbformat 4 ({type(error).__name__}: {error})") from error
    for index, cell in enumerate(cells):
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key not in EXECUTION}
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell["source"] = strip_source(source, f"{name}[cell {index}]", cell=True).splitlines(keepends=True)
            cell["outputs"], cell["execution_count"] = [], None
        elif marker := MARKER.search(source):
            raise StripError(f"{name}[cell {index}]: only code cells are stripped, and this one has {marker[0]!r}")
    notebook["metadata"] = {key: notebook["metadata"][key] for key in ("kernelspec",) if key in notebook["metadata"]}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
