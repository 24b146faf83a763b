"""A student's view of a lab: points exercise by exercise, whatever one of the answers does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from parameters import thorough_but

from grading import check_lab
from grading.release import main as release

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

#: A check that does what an answer asks of it: a stand-in for what a kernel's wrong address would do.
OBEY = """
import os, pathlib, subprocess, time

def obey(f):
    asked = f()
    if asked == "end":
        os._exit(3)
    if asked == "abort":
        os.abort()
    if asked == "leave":
        raise SystemExit("left")
    if asked.startswith("orphan"):
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path(asked.split(maxsplit=1)[1]).write_text(str(child.pid))
        time.sleep(600)
    assert asked == "right", "exercise 9.9 (tiny): it is wrong\\n  here\\n  and there"
    print("✓ passed, and this line is not for the table")
"""


def cell(kind: str, name: str, source: str, points: int | None = None) -> dict:
    graded = {"grade": True, "grade_id": name, "locked": True, "points": points, "schema_version": 3}
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    metadata = {"nbgrader": graded | {"solution": False, "task": False}} if points is not None else {}
    return {"cell_type": kind, "id": name, "metadata": metadata, "source": source} | more


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course with one lab of three exercises, two of them in one module, released."""
    lab = tmp_path / "solutions" / "lab9_tiny"
    lab.mkdir(parents=True)
    cells = [
        cell("markdown", "title", "# Lab 9. Tiny"),
        cell("code", "setup", "raise RuntimeError('the setup cell is for notebooks that are opened on their own')"),
        cell("code", "imports", 'import sys\n\nsys.path.insert(0, "..")\n%load_ext autoreload\n'
             "%autoreload 2\n\nfrom lab9_tiny import one, two, three\n" + OBEY),
    ]  # fmt: skip
    for index, name in enumerate(("one", "two", "three"), start=1):
        cells += [
            cell("markdown", f"text-9-{index}", f"## Exercise 9.{index}: the {name}\n\ntext"),
            cell("code", f"check-9-{index}", f"obey({name})", points=10 * index),
            cell("code", f"look-9-{index}", "raise RuntimeError('only checks are run')"),
        ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (lab / "lab9_tiny.ipynb").write_text(json.dumps(notebook))
    (lab / "__init__.py").write_text("from .first import one, two\nfrom .second import three\n")
    (lab / "first.py").write_text(function("one", 1) + "\n\n" + function("two", 2))
    (lab / "second.py").write_text(function("three", 3))
    release([], root=tmp_path)
    return tmp_path


def function(name: str, index: int) -> str:
    marked = f'    ### BEGIN SOLUTION 9.{index}: the {name}\n    return "right"\n    ### END SOLUTION\n'
    return f"def {name}() -> str:\n{marked}"


Answer = Callable[..., None]


@pytest.fixture
def answer(course: Path) -> Answer:
    """Writes a student's module: what each of its functions says."""

    def write(module: str, above: str = "", **says: str) -> None:
        body = "\n\n".join(f"def {name}() -> str:\n    {text}\n" for name, text in says.items())
        (course / "labs" / "lab9_tiny" / f"{module}.py").write_text(above + body)

    return write


def run(course: Path, *arguments: str) -> int:
    return check_lab.main(["lab9", *arguments], root=course)


def rows(printed: str) -> list[str]:
    """The table's lines, their spaces evened out."""
    return [" ".join(text.split()) for text in printed.split("\n\n")[0].splitlines() if text.startswith("9.")]


def test_what_nobody_has_touched_says_that_it_is_not_attempted(course, capsys):
    assert run(course) == 1
    printed = capsys.readouterr().out
    assert rows(printed) == [
        "9.1 the one 0 / 10 ○ not attempted",
        "9.2 the two 0 / 20 ○ not attempted",
        "9.3 the three 0 / 30 ○ not attempted",
    ]
    assert "0 of 60 points, in " in printed


def test_right_answers_have_full_marks_and_a_zero_exit_status(course, capsys):
    assert run(course, "--folder", str(course / "solutions/lab9_tiny")) == 0
    printed = capsys.readouterr().out
    assert rows(printed) == ["9.1 the one 10 / 10 ✓", "9.2 the two 20 / 20 ✓", "9.3 the three 30 / 30 ✓"]
    assert "60 of 60 points" in printed and "draws other cases" in printed and "not for the table" not in printed


def test_what_a_lab_does_not_hand_out_is_no_part_of_its_finished_answers(course, capsys):
    lab = course / "solutions" / "lab9_tiny"
    imports = (lab / "__init__.py").read_text() + "from .fast import fast\n"
    (lab / "__init__.py").write_text(imports + 'HANDED_OUT = ("first.py", "second.py")\n')
    (lab / "fast.py").write_text("from solutions.elsewhere import fast\n")
    release([], root=course)
    assert run(course, "--folder", str(lab)) == 0
    printed = capsys.readouterr().out
    assert "60 of 60 points" in printed and "fast" not in printed


def test_a_wrong_answer_shows_the_first_line_and_names_the_command_for_the_rest(course, answer, capsys):
    answer("first", one="return 'right'", two="return 'wrong'")
    assert run(course) == 1
    printed = capsys.readouterr().out
    assert rows(printed)[:2] == ["9.1 the one 10 / 10 ✓", "9.2 the two 0 / 20 ✗ it is wrong"]
    assert "and there" not in printed and "-m grading.check_lab lab9 --exercise 9.2" in printed


@pytest.mark.parametrize("arguments", thorough_but([("--verbose",), ("--exercise", "9.2")], ("--exercise", "9.2")))
def test_the_whole_message_is_shown_when_asked_for(course, answer, capsys, arguments):
    answer("first", one="return 'right'", two="return 'wrong'")
    assert run(course, *arguments) == 1
    printed = capsys.readouterr().out
    assert "    exercise 9.9 (tiny): it is wrong\n      here\n      and there\n" in printed
    assert ("9.1" in printed) == (arguments == ("--verbose",))


def test_a_voluntary_exercise_that_is_not_attempted_does_not_decide_on_the_exit_status(course, answer, capsys):
    path = course / "solutions" / "lab9_tiny" / "lab9_tiny.ipynb"
    path.write_text(path.read_text().replace('"points": 30', '"points": 0'))
    release([], root=course)
    answer("first", one="return 'right'", two="return 'right'")
    assert run(course) == 0
    printed = capsys.readouterr().out
    assert rows(printed)[-1] == "9.3 the three voluntary ○ not attempted" and "30 of 30 points" in printed
    answer("second", three="return 'wrong'")
    assert run(course) == 1
    assert rows(capsys.readouterr().out)[-1] == "9.3 the three voluntary ✗ it is wrong"


def test_exercises_that_are_asked_for_decide_on_the_exit_status(course, answer, capsys):
    answer("first", one="return 'right'", two="return 'wrong'")
    assert run(course, "--exercise", "9.1") == 0
    assert "10 of 10 points" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("says", "verdict"),
    [
        ("return 'end'", "⚡ crashed: it ended Python itself, with exit status 3"),
        pytest.param("return 'abort'", "⚡ crashed: it ended Python itself, by SIGABRT", marks=pytest.mark.thorough),
        ("return 'leave'", "✗ SystemExit: left"),
        pytest.param(
            "return 1 // 0", "✗ ZeroDivisionError: integer division or modulo by zero", marks=pytest.mark.thorough
        ),
        pytest.param(
            "return None.x", "✗ AttributeError: 'NoneType' object has no attribute 'x'", marks=pytest.mark.thorough
        ),
    ],
)
def test_an_answer_that_ends_python_costs_its_own_points_only(course, answer, capsys, says, verdict):
    answer("first", one=says, two="return 'right'")
    answer("second", three="return 'right'")
    assert run(course) == 1
    assert rows(capsys.readouterr().out) == [
        f"9.1 the one 0 / 10 {verdict}",
        "9.2 the two 20 / 20 ✓",
        "9.3 the three 30 / 30 ✓",
    ]


def test_an_answer_that_does_not_end_is_stopped_with_all_that_it_started(course, answer, capsys, tmp_path):
    answer("first", one=f"return 'orphan {tmp_path}/pid'", two="return 'right'")
    assert run(course, "--timeout", "2") == 1
    assert rows(capsys.readouterr().out) == [
        "9.1 the one 0 / 10 ◷ timed out: it did not end within 2 seconds",
        "9.2 the two 20 / 20 ✓",
        "9.3 the three 0 / 30 ○ not attempted",
    ]
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_hidden_tests_are_not_run(course, capsys):
    notebook = course / "solutions/lab9_tiny/lab9_tiny.ipynb"
    hidden = "obey(one)\\n### BEGIN HIDDEN TESTS\\nassert False\\n### END HIDDEN TESTS"
    notebook.write_text(notebook.read_text().replace("obey(one)", hidden))
    assert "HIDDEN" in check_lab.find_lab("lab9", course).exercise("9.1").source
    assert run(course, "--folder", str(course / "solutions/lab9_tiny"), "--exercise", "9.1") == 0


def test_an_error_names_the_students_own_lines(course, answer, capsys):
    answer("first", above="def deeper(x):\n    return x[3]\n\n\n", one="return deeper('ab')", two="return 'right'")
    run(course, "--exercise", "9.1")
    printed = capsys.readouterr().out
    assert "IndexError: string index out of range" in printed
    assert "first.py, line 6, in one: return deeper('ab')\n      first.py, line 2, in deeper: return x[3]" in printed


@pytest.mark.parametrize("above", ["import subprocess\n\n\n", "def broken(:\n\n\n"])
def test_a_file_that_the_grader_would_refuse_costs_its_exercises_and_no_others(course, answer, capsys, above):
    answer("first", above=above, one="return 'right'", two="return 'right'")
    answer("second", three="return 'right'")
    assert run(course) == 1
    found = rows(capsys.readouterr().out)
    assert [row.split(":")[0] for row in found] == [
        "9.1 the one 0 / 10 ⊘ refused",
        "9.2 the two 0 / 20 ⊘ refused",
        "9.3 the three 30 / 30 ✓",
    ]
    assert "first.py, line 1" in found[0]


def test_a_file_that_breaks_on_import_says_where(course, answer, capsys):
    answer("second", above="TABLE = {}['missing']\n\n\n", three="return 'right'")
    assert run(course, "--verbose") == 1
    printed = capsys.readouterr().out
    assert printed.count("your files cannot be imported: KeyError: 'missing'") == 6  # in the table and below each
    assert "second.py, line 1, in <module>: TABLE = {}['missing']" in printed


def test_a_missing_file_is_taken_as_handed_out_and_the_student_is_told(course, answer, capsys):
    answer("second", three="return 'right'")
    (course / "labs/lab9_tiny/first.py").unlink()
    assert run(course) == 1
    printed = capsys.readouterr().out
    assert "note: missing, so taken as handed out: first.py" in printed
    assert rows(printed)[2] == "9.3 the three 30 / 30 ✓" and rows(printed)[0].endswith("○ not attempted")


def test_nothing_in_labs_changes(course, answer):
    answer("first", one="return 'right'", two="return 'end'")
    before = {path: path.read_bytes() for path in sorted(course.rglob("*")) if path.is_file()}
    run(course)
    assert {path: path.read_bytes() for path in sorted(course.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lab7"], "no lab 'lab7'; there are lab9_tiny"),
        (["lab9", "--exercise", "9.4"], "lab9_tiny has no exercise 9.4, but 9.1, 9.2, 9.3"),
        (["lab9", "--folder", "nowhere"], "no folder nowhere"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(course, capsys, arguments, complaint):
    with pytest.raises(SystemExit) as ended:
        check_lab.main(arguments, root=course)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_a_line_is_as_wide_as_the_terminal_at_most(course):
    lab = check_lab.find_lab("lab9", course)
    found = check_lab.Checked(lab.exercises[0], "failed", "x" * 500, 1.0)
    assert len(check_lab.line(found, lab, 80)) == 80 and check_lab.line(found, lab, 80).endswith(" …")


def test_it_needs_no_nbgrader_and_leaves_pytorch_to_the_process_that_checks():
    unneeded = {"nbgrader", "jupyter_client", "torch"}
    code = f"import sys; import grading.check_lab; sys.exit(not {unneeded!r}.isdisjoint(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("lab", "exercises"),
    [
        ("lab7", ()),
        pytest.param("lab1", (), marks=pytest.mark.thorough),
        pytest.param("lab2", ("2.1",), marks=pytest.mark.thorough),
        pytest.param("lab4", ("4.1", "4.2"), marks=pytest.mark.thorough),
    ],
)
def test_the_solutions_of_a_real_lab_have_full_marks(lab, exercises):
    folder = next((ROOT / "solutions").glob(f"{lab}_*"))
    wanted = ["--exercise", *exercises] if exercises else []
    command = [sys.executable, "-m", "grading.check_lab", lab, "--folder", str(folder), *wanted]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("✓") == (len(exercises) or len(check_lab.find_lab(lab).exercises))
