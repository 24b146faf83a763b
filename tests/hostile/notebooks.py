"""Tricks on the notebook, which is never executed: the course's own cells are."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from grading.lab import Lab
from hostile import hostile

NOT_WRITTEN = ("not attempted",)


def _cells(folder: Path, lab: Lab) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    path = folder / lab.notebook.name
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return path, notebook, [cell for cell in notebook["cells"] if "nbgrader" in cell["metadata"]]


def _edit(change: Any) -> Any:
    def build(folder: Path, lab: Lab) -> None:
        path, notebook, checks = _cells(folder, lab)
        change(notebook, checks)
        path.write_text(json.dumps(notebook), encoding="utf-8")

    return build


def _emptied(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    for cell in checks:
        cell["source"] = "print('✓ passed')"


def _deleted(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    notebook["cells"] = [cell for cell in notebook["cells"] if cell not in checks]


def _duplicated(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    twins = copy.deepcopy(checks)
    for cell in twins:
        cell["source"] = "pass"
    notebook["cells"] += twins


def _renamed(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    for cell in checks:
        cell["metadata"]["nbgrader"]["grade_id"] += "-x"


def _reordered(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    notebook["cells"].reverse()


def _exchanged(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    first, last = checks[0]["metadata"]["nbgrader"], checks[-1]["metadata"]["nbgrader"]
    first["grade_id"], last["grade_id"] = last["grade_id"], first["grade_id"]


def _points(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    for cell in checks:
        cell["metadata"]["nbgrader"]["points"] = 1000


def _extra(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    cell = copy.deepcopy(checks[0])
    cell["metadata"]["nbgrader"] |= {"grade_id": "check-9-9", "points": 50}
    cell["source"], cell["id"] = "pass", "check-9-9"
    notebook["cells"].append(cell)


def _shadowed(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    names = {"".join(cell["source"]).split("(")[0] for cell in checks}
    source = "\n".join(f"def {name}(*_, **__):\n    print('passed')" for name in sorted(names))
    place = notebook["cells"].index(checks[0])
    cell = {"cell_type": "code", "id": "mine", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
    notebook["cells"].insert(place, cell)


def _outputs(notebook: dict[str, Any], checks: list[dict[str, Any]]) -> None:
    for count, cell in enumerate(checks, start=1):
        text = "✓ exercise: 40 cases agree"
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]
        cell["execution_count"] = count


for name, tries, change, reason in (
    ("checks-emptied", "checks nothing in the check cells", _emptied, r"edited|written"),
    ("checks-deleted", "hands in no check cell", _deleted, r"missing|written"),
    ("checks-twice", "hands in each check cell once more, empty", _duplicated, r"more than once|written"),
    ("checks-renamed", "gives the check cells other ids", _renamed, r"missing|written"),
    ("cells-reversed", "hands in the cells in another order", _reordered, r"written"),
    ("checks-exchanged", "gives the cell of one exercise the id of another", _exchanged, r"edited|written"),
    ("points-raised", "writes more points into the metadata", _points, r"written"),
    ("check-of-its-own", "adds a check cell with points", _extra, r"written"),
    ("checks-shadowed", "defines functions under the names of the checks", _shadowed, r"written"),
    ("outputs-painted", "stores the outputs of passed checks", _outputs, r"written"),
):
    hostile(name, tries, *NOT_WRITTEN, reason=reason)(_edit(change))


@hostile("notebook-broken", "hands in a notebook that is no JSON", *NOT_WRITTEN, reason=r"not a notebook")
def _broken(folder: Path, lab: Lab) -> None:
    (folder / lab.notebook.name).write_text('{"cells": [', encoding="utf-8")


@hostile("notebook-of-nothing", "hands in JSON that is no notebook", *NOT_WRITTEN, reason=r"not a notebook|missing")
def _nothing(folder: Path, lab: Lab) -> None:
    (folder / lab.notebook.name).write_text('{"cells": {"a": [[]]}}', encoding="utf-8")


@hostile("notebook-nested", "hands in JSON nested too deeply to read", *NOT_WRITTEN, reason=r"not a notebook")
def _nested(folder: Path, lab: Lab) -> None:
    (folder / lab.notebook.name).write_text("[" * 100_000, encoding="utf-8")


@hostile("notebook-missing", "hands in no notebook", *NOT_WRITTEN, reason=r"missing")
def _missing(folder: Path, lab: Lab) -> None:
    (folder / lab.notebook.name).unlink()


@hostile("notebook-renamed", "hands in a notebook of another name", *NOT_WRITTEN, reason=r"missing")
def _other_name(folder: Path, lab: Lab) -> None:
    (folder / lab.notebook.name).rename(folder / "final_version (2).ipynb")


@hostile("notebook-huge", "hands in a notebook of 100 MB", *NOT_WRITTEN, reason=r"large|big|most|MiB|missing")
def _huge(folder: Path, lab: Lab) -> None:
    with (folder / lab.notebook.name).open("ab") as file:
        file.truncate(100 * 2**20)  # a sparse file: it takes no room on the disk
