"""Each trap of nbgrader that a class could fall into, sprung on purpose."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbgrader.converters import Autograde
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import determine_grade

from grading import grade, gradebook, sandbox
from grading.lab import ROOT, find_lab
from grading.nbgrader_config import course_config
from grading.preprocessors import GradeCells, RestoreCells
from grading.results import Verdict

LAB = find_lab("lab1")
needs_sandbox = pytest.mark.skipif(sandbox.available() is not None, reason=f"no sandbox: {sandbox.available()}")
FAILED = Verdict("failed", "exercise 1.1: wrong")


def graded(outputs: list, verdict: Verdict) -> float:
    """The points that nbgrader reads off a check cell after ours, whatever a submission had made it print."""
    notebook = nbformat.read(LAB.notebook, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.id == "check-1-1")
    cell.outputs = outputs
    verdicts = {exercise.grade_id: FAILED for exercise in LAB.exercises} | {"check-1-1": verdict}
    GradeCells(grade=lambda: verdicts).preprocess(notebook, {})
    return determine_grade(cell)[0]


def test_text_on_stderr_does_not_cost_the_points_of_a_right_answer():
    warned = nbformat.v4.new_output("stream", name="stderr", text="UserWarning: slow\n")
    assert graded([warned], Verdict("passed")) == 5


def test_a_check_cell_that_ends_in_a_number_gets_no_partial_credit():
    number = nbformat.v4.new_output("execute_result", data={"text/plain": "5.0"}, execution_count=1)
    assert graded([number], FAILED) == 0
    half = nbformat.v4.new_output("execute_result", data={"text/plain": "2.5"}, execution_count=1)
    assert graded([half], Verdict("passed")) == 5


@pytest.mark.parametrize("outcome", ["failed", "not attempted", "refused", "timed out", "crashed", "tampered"])
def test_every_verdict_but_passed_is_no_points_without_any_output(outcome):
    assert graded([], Verdict(outcome)) == 0


def test_whatever_was_done_to_the_check_cells_is_undone():
    theirs = nbformat.read(LAB.notebook, as_version=4)
    cells = {cell.id: cell for cell in theirs.cells}
    cells["check-1-1"].source = "print('passed')"
    cells["check-1-2"].metadata.nbgrader.points = 1000
    cells["check-1-3"].metadata.nbgrader.grade_id = "check-1-1"
    theirs.cells.remove(cells["check-1-4"])
    theirs.cells += [cells["check-1-5"], nbformat.v4.new_code_cell("import os; os._exit(0)")]
    restored, _ = RestoreCells(released=str(LAB.notebook)).preprocess(theirs, {})
    assert nbformat.writes(restored) == nbformat.writes(nbformat.read(LAB.notebook, as_version=4))


@pytest.mark.slow
def test_nbgraders_release_is_what_make_labs_writes_and_holds_no_solution(tmp_path):
    for name in ("lab1", "lab4"):
        lab = find_lab(name)
        gradebook.register(tmp_path / "gradebook.db", lab, tmp_path)
        made = tmp_path / "labs" / lab.name
        files = {path.name for path in lab.released.iterdir() if path.is_file()}
        assert {path.name for path in made.iterdir()} == files
        for file in files:
            assert (made / file).read_bytes() == (lab.released / file).read_bytes(), file
            assert b"BEGIN SOLUTION" not in (made / file).read_bytes()


@pytest.mark.slow
def test_nbgraders_own_autograde_refuses_to_run_a_submission(tmp_path):
    gradebook.register(tmp_path / "gradebook.db", LAB, tmp_path)
    shutil.copytree(LAB.released, tmp_path / "submitted" / "ada" / LAB.name)
    config = course_config(tmp_path)
    config.CourseDirectory.assignment_id, config.CourseDirectory.student_id = LAB.name, "ada"
    converter = Autograde(coursedir=CourseDirectory(config=config), config=config)
    converter.log = gradebook.QUIET
    with pytest.raises(NbGraderException):
        converter.start()
    kept = {path.name for path in (tmp_path / "autograded" / "ada").rglob("*")}
    assert not kept  # an exception in a hook would have been swallowed, and the submission graded


WRONG = "\n\ndef useful_fraction(*arguments, **options):\n    return 1.0\n"


@pytest.fixture(scope="module")
def graded_class(tmp_path_factory) -> Path:
    """A class with a right answer and a submission for each way that breaks nbgrader's batch."""
    base = tmp_path_factory.mktemp("class")
    folder, out = base / "submissions", base / "grades"
    for student in ("ada", "bob", "cyd"):
        shutil.copytree(LAB.solution, folder / student, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "ada" / LAB.notebook.name).rename(folder / "ada" / "my notebook.ipynb")  # renamed: it is missing
    (folder / "bob" / LAB.notebook.name).write_text("{not JSON")
    (folder / "bob" / "layer.py").write_text("def layer_flops(:\n")
    warp = folder / "cyd" / "warp.py"
    warp.write_text(warp.read_text() + WRONG)
    with zipfile.ZipFile(folder / "dan.zip", "w") as archive:
        for path in sorted(LAB.released.iterdir()):
            if path.is_file():
                archive.write(path, f"dan/labs/{LAB.name}/{path.name}")
    (folder / "eve.zip").write_bytes(b"PK\x03\x04 and no more")
    status = grade.main(["lab1", "--submissions", str(folder), "--out", str(out), "--jobs", "2"])
    assert status == 0
    return out


def results(out: Path, student: str) -> dict:
    return json.loads((out / LAB.name / "results" / f"{student}.json").read_text())


@needs_sandbox
@pytest.mark.slow
def test_the_students_modules_are_graded_and_not_the_solutions(graded_class):
    """nbgrader would have written the course's own files over the submitted ones, and cyd and dan would have passed."""
    scores = {student: results(graded_class, student)["score"] for student in ("ada", "bob", "cyd", "dan", "eve")}
    assert scores == {"ada": 100, "bob": 85, "cyd": 90, "dan": 0, "eve": 0}
    handed_in = (graded_class / "autograded" / "cyd" / LAB.name / "warp.py").read_text()
    assert handed_in.endswith(WRONG)


@needs_sandbox
@pytest.mark.slow
def test_a_missing_or_broken_notebook_costs_nothing_and_is_told(graded_class):
    assert any("is missing" in note for note in results(graded_class, "ada")["notes"])
    assert any("not a notebook that can be read" in note for note in results(graded_class, "bob")["notes"])


@needs_sandbox
@pytest.mark.slow
def test_a_module_that_is_no_python_costs_its_own_exercises(graded_class):
    by_number = {exercise["number"]: exercise for exercise in results(graded_class, "bob")["exercises"]}
    assert by_number["1.10"]["outcome"] == "refused" and "layer.py" in by_number["1.10"]["message"]


@needs_sandbox
@pytest.mark.slow
def test_a_malformed_submission_does_not_stop_the_class(graded_class):
    eve = results(graded_class, "eve")
    assert eve["status"] == "unreadable" and "cannot be read" in eve["notes"][0]
    assert {e["outcome"] for e in results(graded_class, "dan")["exercises"]} == {"not attempted"}


@needs_sandbox
@pytest.mark.slow
def test_a_failed_check_says_why_and_shows_no_hidden_seed(graded_class):
    failed = next(e for e in results(graded_class, "cyd")["exercises"] if e["number"] == "1.7")
    assert failed["outcome"] == "failed" and "exercise 1.7" in failed["message"]
    seeds = json.loads((graded_class / "seeds.json").read_text())[LAB.name]
    hidden = [str(seed) for seed in (*seeds["checks"].values(), seeds["scenarios"])]
    public = [path for path in graded_class.rglob("*") if path.is_file() and path.name not in ("seeds.json",)]
    for path in public:
        content = path.read_bytes()
        assert not [seed for seed in hidden if seed.encode() in content], path


@needs_sandbox
@pytest.mark.slow
def test_the_gradebook_and_the_table_hold_the_same_points(graded_class):
    lines = (graded_class / LAB.name / "grades.csv").read_text().splitlines()
    assert lines[0] == "student,score,max_score," + ",".join(e.number for e in LAB.exercises) + ",status"
    for line in lines[1:]:
        student, *points = line.split(",")[0:1] + line.split(",")[3:-1]
        kept = gradebook.scores(graded_class / "gradebook.db", LAB, student)
        assert [kept[e.number] for e in LAB.exercises] == [float(value) for value in points]


def test_students_files_are_never_named_for_overwriting():
    kept = course_config(ROOT).Autograde.exclude_overwriting[LAB.name]
    assert {path.name for path in LAB.solution.glob("*.py")} <= set(kept)
