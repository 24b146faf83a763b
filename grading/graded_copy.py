"""The notebook that is executed for a grade: the course's own cells with hidden seeds, never the student's.

A student's work is in the modules; the notebook only imports and checks them. So the graded copy is made from the
release: setup, the course's imports, the seal, the imports of the student's package, and each check with a hidden seed.
What a student did to the notebook's check cells changes nothing, and is only told.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Mapping

import nbformat
from nbformat import NotebookNode

from grading.lab import Exercise, Lab
from grading.look import CHECKS, Note
from grading.strip import strip_source

PRELUDE, STUDENT, CHECK = "prelude", "student", "check"
SEED = re.compile(r"\bseed=\d+")
SEAL = "from grading.seal import snapshot\n__seal__ = snapshot()"
VERIFY = "__seal__.verify()"
MAX_CELLS = 5000


def graded_copy(lab: Lab, seeds: Mapping[str, int] | None, numbers: list[str] | None = None) -> NotebookNode:
    """The notebook to execute: the prelude's cells and a check cell for each exercise.

    Args:
        lab: whose release the cells come from.
        seeds: the seed of each exercise's check; None makes the check that students see, without hidden tests.
        numbers: the exercises to check; all by default.

    Raises:
        ValueError: a released notebook without setup or imports, or a check cell without exactly one ``seed=``.
    """
    cells = {cell.id: cell for cell in nbformat.read(lab.notebook, as_version=4).cells}
    for needed in ("setup", "imports"):
        if needed not in cells:
            raise ValueError(f"{lab.notebook.name} has no cell {needed!r}")
    imports = undrawn("\n".join(line for line in cells["imports"].source.split("\n") if not line.startswith("%")))
    # the course's own copy of the checks: it imports nothing of the student's
    imports = imports.replace(f"from {lab.name}.exercises.", f"from labs.{lab.name}.exercises.")
    prelude = [cells["setup"].source, f"import utils.runtime\n{course_imports(imports)}", SEAL]
    made = [_cell(source, PRELUDE, f"prelude-{index}") for index, source in enumerate(prelude)]
    made.append(_cell(imports, STUDENT, "imports"))
    for exercise in lab.exercises:
        if numbers is not None and exercise.number not in numbers:
            continue
        source = exercise.source if seeds is not None else shown(exercise)
        if len(SEED.findall(source)) != 1:
            raise ValueError(f"{lab.name}: the check of exercise {exercise.number} needs one seed=, got {source!r}")
        if seeds is not None:
            source = SEED.sub(f"seed={seeds[exercise.number]}", source)
        made.append(_cell(source, CHECK, exercise.grade_id))
    return nbformat.v4.new_notebook(cells=made)


def shown(exercise: Exercise) -> str:
    """The source of an exercise's check cell as students have it."""
    return strip_source(exercise.source, exercise.grade_id)


def undrawn(imports: str) -> str:
    """The statements of the imports cell without those of ``utils.plots``: no check draws, and it takes its time."""
    kept = []
    for node in ast.parse(imports).body:
        if isinstance(node, ast.ImportFrom) and node.module == "utils":
            node.names = [alias for alias in node.names if alias.name != "plots"]
        draws = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("utils.plots")
        if not draws and getattr(node, "names", True):
            kept.append(ast.unparse(node))
    return "\n".join(kept)


def course_imports(imports: str) -> str:
    """The statements of the imports cell that import the course's own modules, so that the seal sees them first."""
    kept = []
    for node in ast.parse(imports).body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if names and all(name.split(".")[0] in ("utils", "torch", "labs") for name in names):
            kept.append(ast.unparse(node))
    return "\n".join(kept)


def notebook_notes(content: bytes | None, lab: Lab) -> list[str]:
    """What is odd about a student's notebook, in words for the student; it is never executed."""
    without = "the course's own checks were run"
    if content is None:
        return [f"{lab.notebook.name} is missing: {without}"]
    try:
        cells = json.loads(content)["cells"]
        found: dict[str, list[str]] = {}
        for cell in cells[:MAX_CELLS]:
            grade_id = cell.get("metadata", {}).get("nbgrader", {}).get("grade_id")
            source = cell.get("source", "")
            if isinstance(grade_id, str):
                found.setdefault(grade_id, []).append(source if isinstance(source, str) else "".join(source))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{lab.notebook.name} is not a notebook that can be read: {without}"]
    ours = {exercise.grade_id for exercise in lab.exercises} | _grade_ids(lab)
    foreign = sorted(shown_id[:40] for shown_id in found.keys() - ours)
    notes = []
    if foreign:
        listed = ", ".join(ascii(name) for name in foreign[:8]) + (f" and {len(foreign) - 8} more" * (len(foreign) > 8))
        text = f"cells of your notebook have ids that are not the lab's, and were ignored: {listed}"
        notes.append(Note(text, CHECKS))
    for what, is_so in (
        ("missing", lambda e: e.grade_id not in found),
        ("there more than once", lambda e: len(found.get(e.grade_id, ())) > 1),
        ("edited", lambda e: found.get(e.grade_id) and any(s.strip() != shown(e).strip() for s in found[e.grade_id])),
    ):
        if numbers := [exercise.number for exercise in lab.exercises if is_so(exercise)]:
            text = f"the check cell of exercise {', '.join(numbers)} is {what} in your notebook: {without}"
            notes.append(Note(text, CHECKS))
    return notes


@functools.cache
def _grade_ids(lab: Lab) -> frozenset[str]:
    """The nbgrader ids of all cells that are handed out."""
    cells = nbformat.read(lab.notebook, as_version=4).cells
    return frozenset(cell.metadata.nbgrader.grade_id for cell in cells if "nbgrader" in cell.metadata)


def _cell(source: str, role: str, name: str) -> NotebookNode:
    return nbformat.v4.new_code_cell(source, id=name, metadata={"grading": {"role": role}})
