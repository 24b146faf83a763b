"""What a notebook shows of a place that is not written yet, and of a file that is not what is loaded."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from utils.checks.student_files import LoadedFiles

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
LAB = "lab3_flash_attention"
SOLVED = (ROOT / "solutions" / LAB / "merge.py").read_text()
END = SOLVED.count("\n") + 1


def shown(cell: nbformat.NotebookNode) -> str:
    """What the cell shows as its error, and what it prints beside its results."""
    errors = [line for output in cell.outputs for line in output.get("traceback", ())]
    return "\n".join([output.text for output in cell.outputs if output.get("name") == "stderr"] + errors)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A student's session in lab 3: the check of 3.1 on the released file, and after each of these was saved."""
    folder = shutil.copytree(ROOT / "labs" / LAB, tmp_path_factory.mktemp("labs") / LAB)
    notebook = nbformat.read(folder / f"{LAB}.ipynb", as_version=4)
    imports, check = (next(c.source for c in notebook.cells if c.id == name) for name in ("imports", "check-3-1"))
    nested = SOLVED.replace(
        "    return m, d1", "    x = [\n        0\n    ]\n    y = sum(a for a in x)\n    return m, (d1 + y)", 1
    )
    assert nested != SOLVED
    stub, wrong = (folder / "merge.py").read_text(), SOLVED.replace(" * ", " / ", 1)
    saved = [stub, SOLVED, SOLVED + "x = (\n", SOLVED + "x = nowhere\n", SOLVED + "\n", nested, wrong]
    checks = [nbformat.v4.new_code_cell(check, metadata={"saved": text}) for text in saved]
    off = nbformat.v4.new_code_cell("%autoreload 0")
    notebook.cells = [nbformat.v4.new_code_cell(imports), *checks[:-1], off, checks[-1]]

    def save(cell: nbformat.NotebookNode, cell_index: int) -> None:
        """What an editor does before the cell runs."""
        if text := cell.metadata.get("saved"):
            (folder / "merge.py").write_text(text)

    NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}, on_cell_start=save
    ).execute()
    return [shown(cell) for cell in notebook.cells if cell.source == check]


def test_a_place_that_is_not_written_is_one_line(session):
    assert session[0] == "3.1 is not written yet: merge.py, line 24"


def test_a_file_that_cannot_be_loaded_fails_in_one_line_although_the_old_code_would_pass(session):
    failed = "CheckFailed: exercise 3.1 (merge operator): merge.py"
    assert session[1:6] == [
        "",
        f"{failed}, line {END}: SyntaxError: '(' was never closed",
        f"{failed}, line {END}: the file cannot be imported: NameError: name 'nowhere' is not defined",
        "",
        "",
    ]


def test_a_file_that_was_not_loaded_again_is_not_passed(session):
    assert session[6].endswith(
        "merge.py has changed since it was loaded: restart the kernel and run the notebook's cells again"
    )


def test_an_older_object_gives_way_to_what_its_module_now_has(tmp_path, monkeypatch):
    folder = tmp_path / "reloaded_lab"
    folder.mkdir()
    for name, text in {"__init__": "", "part": "def f():\n    return 1\n", "user": "from .part import f\n"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    part, user = (importlib.import_module(f"reloaded_lab.{name}") for name in ("part", "user"))
    files, notebook, older = LoadedFiles("reloaded_lab"), {"f": part.f, "mine": lambda: 3}, part.f
    exec("def f():\n    return 2\n", vars(part))
    assert (user.f(), notebook["f"](), files.current(older)()) == (1, 1, 2)
    files.refresh(notebook)
    assert (user.f(), notebook["f"](), notebook["mine"]()) == (2, 2, 3)
