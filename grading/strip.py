"""Cuts the solutions out of a lab: one function for modules, one for notebooks, both over the same markers.

A solution stands between two comments::

    ### BEGIN SOLUTION 1.2: FLOPs of a matmul
    return 2 * m * k * n
    ### END SOLUTION

The released file has ``raise NotImplementedError("Lab 1, exercise 1.2: FLOPs of a matmul")`` in its place, at the same
indentation. Everything outside the markers (signature, docstring, hints) stays as it is written.
"""

from __future__ import annotations

import json
import re

BEGIN = re.compile(r"^(?P<indent>\s*)### BEGIN SOLUTION(?P<label>.*)$")
END = re.compile(r"^\s*### END SOLUTION\s*$")
LABEL = re.compile(r"\s+(?P<number>(?P<lab>\d+)\.\d+): (?P<title>\S.*?)\s*$")
EXECUTION = {"execution", "making-llms-fast"}  # what an execution leaves in a cell's metadata (`utils.notebooks`)
MARKER = re.compile(r"#\s*(BEGIN|END)\s+SOLUTION", re.IGNORECASE)


class StripError(ValueError):
    """Markers that do not pair up, or that name no exercise; the text names the file and the line."""


def strip_source(text: str, name: str) -> str:
    """Return the Python source ``text`` with each solution replaced by an error that names its exercise.

    Args:
        text: source of a module, or of one code cell.
        name: the file (and cell) to name in an error.

    Raises:
        StripError: nested or unpaired markers, a marker that is misspelt, or one without ``<lab>.<number>: <title>``.
    """
    kept: list[str] = []
    opened = 0  # the line of the open BEGIN marker, 0 when there is none
    for number, line in enumerate(text.split("\n"), start=1):
        begin, end = BEGIN.match(line), END.match(line)
        if begin:
            if opened:
                raise StripError(f"{name}:{number}: BEGIN SOLUTION inside the solution that begins on line {opened}")
            label = LABEL.fullmatch(begin["label"])
            if label is None:
                raise StripError(f"{name}:{number}: write '### BEGIN SOLUTION 1.2: title', got {line.strip()!r}")
            task = json.dumps(f"Lab {label['lab']}, exercise {label['number']}: {label['title']}", ensure_ascii=False)
            kept.append(f"{begin['indent']}raise NotImplementedError({task})")
            opened = number
        elif end:
            if not opened:
                raise StripError(f"{name}:{number}: END SOLUTION without a BEGIN SOLUTION above it")
            opened = 0
        elif MARKER.search(line):
            raise StripError(f"{name}:{number}: a marker stands alone on its line as '### ...', got {line.strip()!r}")
        elif not opened:
            kept.append(line)
    if opened:
        raise StripError(f"{name}:{opened}: BEGIN SOLUTION without an END SOLUTION below it")
    return "\n".join(kept)


def strip_notebook(text: str, name: str) -> str:
    """Return the notebook ``text`` (JSON, nbformat 4) as a student receives it.

    Solutions are cut out of code cells; outputs, execution counts and what an execution leaves in the metadata are
    removed. The same notebook gives the same bytes, however often and by whichever Python it was executed.

    Raises:
        StripError: as :func:`strip_source` (the name of a cell is ``file[cell 3]``), or the text is no notebook.
    """
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise StripError(f"{name}: not a notebook of nbformat 4 ({type(error).__name__}: {error})") from error
    for index, cell in enumerate(cells):
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key not in EXECUTION}
        if cell["cell_type"] == "code":
            source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
            cell["source"] = strip_source(source, f"{name}[cell {index}]").splitlines(keepends=True)
            cell["outputs"], cell["execution_count"] = [], None
    notebook["metadata"] = {key: notebook["metadata"][key] for key in ("kernelspec",) if key in notebook["metadata"]}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
