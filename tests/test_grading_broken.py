"""A module that cannot be imported costs what is written in it, and its student is told where it stops."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from grading.broken_modules import Broken, find_broken
from grading.lab import Lab
from grading.sandbox import Sandbox
from grading.watcher import Limits

RELEASED = {
    "__init__.py": "from .first import one\nfrom .second import two\n",
    "first.py": "def one():\n    raise NotImplementedError\n",
    "second.py": "from .first import one\n\n\ndef two():\n    return one()\n",
}
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.slow,
]


def broken(folder: Path, files: Mapping[str, str], seconds: float = 20.0) -> Broken | None:
    """What is found in a submission of these files, beside those of the release."""
    for home in ("released", "files/lab9_x"):
        (folder / home).mkdir(parents=True)
        for name, text in RELEASED.items():
            (folder / home / name).write_text(text)
    lab = Lab("lab9_x", "A lab", (), folder / "released", folder / "released")
    for name, text in files.items():
        (folder / "files" / "lab9_x" / name).write_text(text)

    def made(shown: Mapping[str, Path]) -> Sandbox:
        return Sandbox(folder / "files", shown=shown, limits=replace(Limits(), seconds=seconds))

    found = find_broken(lab, folder / "files" / "lab9_x", made, seconds)
    shutil.rmtree(folder / "files")
    return found


def test_a_module_that_raises_is_named_with_its_line_and_error(tmp_path):
    found = broken(tmp_path, {"first.py": "x = 1\ny = x / 0\n"})
    assert found == Broken(
        "first.py", "failed", "first.py cannot be imported (line 2): ZeroDivisionError: division by zero"
    )


def test_a_module_without_a_function_that_the_lab_imports_is_named(tmp_path):
    found = broken(tmp_path, {"second.py": "x = 1\n"})
    assert found.module == "second.py" and found.outcome == "failed"
    assert found.why.endswith("ImportError: cannot import name 'two' from 'lab9_x.second'")


def test_the_innermost_module_of_the_student_is_the_one(tmp_path):
    found = broken(tmp_path, {"second.py": "from .third import x\n", "third.py": "\n\nx = nothing\n"})
    assert found.why == "third.py cannot be imported (line 3): NameError: name 'nothing' is not defined"
    (tmp_path / "again").mkdir()
    found = broken(tmp_path / "again", {"second.py": "from .third import x\n"})
    assert found.why.startswith("second.py cannot be imported (line 1): ModuleNotFoundError: No module named")


def test_a_module_that_hangs_is_named_with_the_line_where_it_stood(tmp_path):
    found = broken(tmp_path, {"first.py": "\nwhile True:\n    pass\n"}, seconds=7)
    assert (found.module, found.outcome) == ("first.py", "timed out")
    assert found.why in (f"first.py cannot be imported (line {n}): it never finishes importing" for n in (2, 3))


def test_a_module_that_ends_python_is_named(tmp_path):
    found = broken(tmp_path, {"first.py": "import os\nos._exit(0)\n"})
    assert found == Broken("first.py", "crashed", "first.py cannot be imported: it ends Python itself")


def test_nobody_is_blamed_where_the_import_works(tmp_path):
    assert broken(tmp_path, {"first.py": "def one():\n    return 1\n"}) is None
