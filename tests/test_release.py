"""labs/ is generated from solutions/: the same bytes each time, nothing left over, no student's work overwritten."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from grading.handed_out import leave_the_rest, modules_of
from grading.lab import lab_names
from grading.release import ROOT, differences, generate, generate_lab, main
from grading.strip import BEGIN, END

MODULE = "def f():\n    ### BEGIN SOLUTION 9.1: f\n    return 1\n    ### END SOLUTION\n"
NOTEBOOK = json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course with one lab in it."""
    lab = tmp_path / "solutions" / "lab9_x"
    (lab / "inner").mkdir(parents=True)
    (lab / "__pycache__").mkdir()
    (lab / "__pycache__" / "f.pyc").write_bytes(b"\0")
    (lab / ".DS_Store").write_bytes(b"\0")
    (lab / "f.py").write_text(MODULE)
    (lab / "inner" / "g.py").write_text("y = 1\n")
    (lab / "lab9_x.ipynb").write_text(NOTEBOOK)
    (lab / "data.csv").write_bytes(b"1,2\r\n")
    return tmp_path


def test_labs_equal_what_is_generated_from_solutions():
    assert differences(ROOT / "labs", generate(ROOT / "solutions")) == {}, "run `make labs`"


def test_a_first_release_writes_every_file_and_a_second_changes_none(course, capsys):
    assert main([], root=course) == 0
    written = {p.relative_to(course / "labs").as_posix() for p in (course / "labs").rglob("*") if p.is_file()}
    assert written == {
        "manifest.json",
        *(f"lab9_x/{name}" for name in ("f.py", "inner/g.py", "lab9_x.ipynb", "data.csv")),
    }
    assert "return 1" not in (course / "labs/lab9_x/f.py").read_text()
    assert (course / "labs/lab9_x/data.csv").read_bytes() == b"1,2\r\n"
    assert main([], root=course) == 0
    assert "0 of 5 files changed" in capsys.readouterr().out


def test_a_lab_that_lists_what_it_hands_out_keeps_its_other_modules_and_their_imports(course):
    lab = course / "solutions" / "lab9_x"
    lines = ["from .f import f", "from .fast import (", "    f_fast,", "    g_fast,", ")", "from .g import g"]
    (lab / "__init__.py").write_text("\n".join([*lines, 'HANDED_OUT = ("f.py",)', ""]))
    (lab / "fast.py").write_text("f_fast = g_fast = 1\n")
    (lab / "g.py").write_text("g = 1\n")
    made = generate_lab(lab)
    assert set(made) == {"__init__.py", "f.py", "inner/g.py", "lab9_x.ipynb", "data.csv"}
    assert made["__init__.py"].decode() == 'from .f import f\nHANDED_OUT = ("f.py",)\n'
    leave_the_rest(lab)
    assert (
        [path.name for path in modules_of(lab)] == ["__init__.py", "f.py"] == sorted(p.name for p in lab.glob("*.py"))
    )
    assert generate_lab(lab) == made


def test_a_list_of_what_is_handed_out_names_modules_that_are_there(course):
    (course / "solutions" / "lab9_x" / "__init__.py").write_text('HANDED_OUT = ("f.py", "none.py")\n')
    with pytest.raises(ValueError, match=r"HANDED_OUT names none\.py, which"):
        generate_lab(course / "solutions" / "lab9_x")


def test_check_writes_nothing_and_lists_what_differs(course, capsys):
    assert main(["--check"], root=course) == 1
    assert not (course / "labs").exists()
    assert "labs/lab9_x/f.py: missing" in capsys.readouterr().out
    main([], root=course)
    assert main(["--check"], root=course) == 0
    (course / "solutions/lab9_x/inner/g.py").write_text("y = 2\n")
    assert main(["--check"], root=course) == 1
    assert "labs/lab9_x/inner/g.py: differs" in capsys.readouterr().out


def test_a_file_without_a_source_is_removed_and_its_empty_folder_too(course, capsys):
    main([], root=course)
    (course / "solutions/lab9_x/inner/g.py").unlink()
    assert main(["--check"], root=course) == 1
    assert "labs/lab9_x/inner/g.py: no source" in capsys.readouterr().out
    assert main([], root=course) == 0
    assert not (course / "labs/lab9_x/inner").exists()


def test_a_file_that_a_student_edited_is_not_overwritten_unless_told_to(course, capsys):
    main([], root=course)
    work = course / "labs/lab9_x/f.py"
    work.write_text("def f():\n    return 'my work'\n")
    (course / "labs/lab9_x/notes.txt").write_text("mine")
    (course / "solutions/lab9_x/f.py").write_text(MODULE + "# changed\n")
    assert main([], root=course) == 1
    told = capsys.readouterr().err
    assert "labs/lab9_x/f.py" in told and "labs/lab9_x/notes.txt" in told
    assert "my work" in work.read_text()
    assert main(["--overwrite"], root=course) == 0
    assert "# changed" in work.read_text() and not (course / "labs/lab9_x/notes.txt").exists()


def test_hidden_tests_of_a_module_and_of_a_notebook_are_not_released(course):
    hidden = "y = 1\n### BEGIN HIDDEN TESTS\nassert y == 41\n### END HIDDEN TESTS\n"
    cell = {"cell_type": "code", "execution_count": 1, "id": "a", "metadata": {}, "outputs": [], "source": hidden}
    (course / "solutions/lab9_x/inner/g.py").write_text(hidden)
    (course / "solutions/lab9_x/lab9_x.ipynb").write_text(NOTEBOOK.replace("[]", json.dumps([cell])))
    assert main([], root=course) == 0
    assert (course / "labs/lab9_x/inner/g.py").read_text() == "y = 1\n"
    assert json.loads((course / "labs/lab9_x/lab9_x.ipynb").read_text())["cells"][0]["source"] == ["y = 1\n"]


@pytest.mark.parametrize("what", ["SOLUTION 9.1: f", "HIDDEN TESTS"])
def test_a_marker_in_a_file_that_is_not_stripped_is_refused(course, what):
    (course / "solutions/lab9_x/notes.md").write_text(f"### BEGIN {what}\n### END {what.split(' 9')[0]}\n")
    with pytest.raises(ValueError, match=r"lab9_x/notes\.md: solutions are cut out of \.py and \.ipynb"):
        main([], root=course)


def test_a_package_without_a_notebook_is_no_lab(course):
    (course / "solutions" / "lab8_y").mkdir()
    (course / "solutions" / "lab8_y" / "f.py").write_text("y = 1\n")
    assert {name.split("/")[0] for name in generate(course / "solutions")} == {"lab9_x", "manifest.json"}
    assert lab_names(course) == ["lab9_x"]


@pytest.mark.thorough
def test_the_command_line_reports_the_state_of_the_real_labs():
    ran = subprocess.run(
        [sys.executable, "-m", "grading.release", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, "labs/ equals what solutions/ generates\n"), ran.stdout + ran.stderr


# ---- no solution in what is released ----
def solution_lines() -> dict[str, list[str]]:
    """The telling lines in the solutions of each module: more than a bracket, and not also given, in whatever lab."""
    found: dict[str, list[str]] = {}
    given: set[str] = set()
    for lab in sorted(notebook.parent for notebook in (ROOT / "solutions").glob("lab*/lab*.ipynb")):
        checks = sorted(path for path in lab.rglob("*.py") if path.parent not in (lab, lab / "answers"))
        for path in [*modules_of(lab), *checks]:
            inside, lines = False, []
            for line in path.read_text().splitlines():
                if BEGIN.match(line) or END.match(line):
                    inside = BEGIN.match(line) is not None
                elif not inside:
                    given.add(line.strip())
                elif len(line.strip()) > 12:
                    lines.append(line.strip())
            found[path.relative_to(lab.parent).as_posix()] = lines
    text = "\n".join(given)  # a line of it may begin like a solution's: lab 2 gives a kernel
    return {name: [line for line in lines if line not in text] for name, lines in found.items()}


def test_no_line_of_any_solution_appears_in_labs():
    lines = {line for found in solution_lines().values() for line in found}
    assert len(lines) > 30
    for path in sorted((ROOT / "labs").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            text = path.read_text()
            source = json.dumps(text) if path.suffix == ".ipynb" else text
            held = [line for line in lines if line in source and re.search(r"(?<!\w)" + re.escape(line), source)]
            assert not held, f"{path.name} holds a line of a solution"
            assert "BEGIN SOLUTION" not in text and "END SOLUTION" not in text and "HIDDEN TESTS" not in text


def statements(function: ast.FunctionDef) -> Counter[str]:
    """What the simple statements of a function say, at whatever depth."""
    return Counter(
        ast.dump(node) for node in ast.walk(function) if isinstance(node, ast.stmt) and not hasattr(node, "body")
    )


def functions(tree: ast.AST, within: str = "") -> dict[str, ast.FunctionDef]:
    """Every function of a module by its qualified name."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        name = f"{within}.{node.name}" if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else within
        if isinstance(node, ast.FunctionDef):
            found[name] = node
        found |= functions(node, name)
    return found


@pytest.mark.slow
def test_every_function_with_a_solution_is_a_stub_that_raises_and_keeps_only_what_surrounds_the_solution():
    stubs = 0
    for name in solution_lines():
        solved = ast.parse((ROOT / "solutions" / name).read_text())
        stub = ast.parse((ROOT / "labs" / name).read_text())
        originals = functions(solved)
        for qualified, node in functions(stub).items():
            original = originals[qualified]
            assert ast.dump(node.args) == ast.dump(original.args)
            assert ast.get_docstring(node) == ast.get_docstring(original)
            if ast.dump(node) != ast.dump(original):
                stubs += 1
                added = statements(node) - statements(original)
                assert added and all("NotImplementedError" in statement for statement in added), node.name
                assert statements(original) - statements(node), node.name
                early = [n for n in ast.walk(node) if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Return)]
                branches = [n for n in ast.walk(node) if isinstance(n, ast.If)]
                given = [r for n in branches for r in n.orelse if isinstance(r, ast.Return)]  # the other case
                returns = [n for n in ast.walk(node) if isinstance(n, ast.Return)]
                stop = next((n.lineno for n in node.body if isinstance(n, ast.Raise)), 0)
                if stop:  # else it stops inside a loop or a branch
                    reached = [n for n in returns if n.lineno < stop]
                    allowed = [n for n in early + given if n.lineno < stop]
                    assert len(reached) == len(allowed), f"{qualified} returns something of its own"
    assert stubs > 15


def test_a_released_notebook_has_no_outputs_and_no_execution_counts():
    for path in (ROOT / "labs").glob("lab*/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None
