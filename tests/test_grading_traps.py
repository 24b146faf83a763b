"""A small class through the whole grader: each submission gets its grade for its reason, and nothing is left behind.

Among it is what nbgrader would get wrong about a class: nbgrader only shows the grades here.
"""

from __future__ import annotations

import csv
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from grading_runs import MARK, grade, left_running, results
from hostile import HOSTILE, write
from nbgrader.converters import Autograde, GenerateAssignment
from nbgrader.converters.base import NbGraderException
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import determine_grade
from synthetic_cohort import GENERAL, Member, build
from traitlets.config import Config

from grading import gradebook, outputs
from grading.class_folder import find_submissions
from grading.lab import find_lab, lab_names
from grading.nbgrader_config import course_config, grades_config
from grading.results import Verdict, result
from grading.seeds import seeds_of
from grading.submission import collect

LAB = find_lab("lab1")
FEW = ("correct-with-helpers", "checks-overwritten", "named-pipe", "answers-by-heart")
OUTCOMES = ("failed", "not attempted", "refused", "timed out", "crashed", "tampered", "passed")


def convert(converter: type, config: Config) -> None:
    config.CourseDirectory.assignment_id, config.CourseDirectory.student_id = LAB.name, "ada"
    converter(coursedir=CourseDirectory(config=config), config=config).start()


@pytest.mark.slow
def test_nbgraders_own_autograde_refuses_to_run_a_submission(tmp_path):
    gradebook.register(tmp_path / "gradebook.db", LAB)
    shutil.copytree(LAB.released, tmp_path / "submitted" / "ada" / LAB.name)
    with pytest.raises(NbGraderException):
        convert(Autograde, grades_config(tmp_path))
    assert not [*(tmp_path / "autograded" / "ada").rglob("*")]


def files(folder: Path) -> list[Path]:
    """The files below a folder, without what Python compiled."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.mark.slow
def test_nbgraders_own_release_holds_no_solution(tmp_path):
    gradebook.register(tmp_path / "gradebook.db", LAB)
    convert(GenerateAssignment, grades_config(tmp_path))
    made = files(tmp_path / "release")
    assert {path.name for path in made} == {path.name for path in files(LAB.released)}
    assert not [path for path in made if b"BEGIN SOLUTION" in path.read_bytes()]
    shutil.copytree(LAB.solution, tmp_path / "solutions" / LAB.name)
    shutil.copytree(LAB.released, tmp_path / "labs" / LAB.name)
    with pytest.raises(NbGraderException):
        convert(GenerateAssignment, course_config(tmp_path, release_directory=tmp_path / "labs"))
    waves = f"labs/{LAB.name}/waves.py"
    assert (tmp_path / waves).read_bytes() == (LAB.released / "waves.py").read_bytes()


@pytest.mark.slow
def test_the_notebook_that_nbgrader_shows_has_the_scores_of_the_gradebook(tmp_path):
    verdicts = {e.number: Verdict(OUTCOMES[index % len(OUTCOMES)]) for index, e in enumerate(LAB.exercises)}
    gradebook.register(tmp_path / "gradebook.db", LAB)
    gradebook.enter(tmp_path, LAB, {"ada": result(LAB, "ada", "d", verdicts)})
    shown = nbformat.read(outputs.autograded_path(tmp_path, LAB, "ada") / LAB.notebook.name, as_version=4)
    read = {cell.id: determine_grade(cell)[0] for cell in shown.cells if cell.metadata.get("nbgrader", {}).get("grade")}
    entered = gradebook.scores(tmp_path / "gradebook.db", LAB, "ada")
    points = {e.number: e.points if verdicts[e.number].passed else 0 for e in LAB.exercises}
    assert {e.number: read[e.grade_id] for e in LAB.exercises} == entered == points


@pytest.mark.slow
def test_exercises_may_change_until_a_submission_is_entered(tmp_path):
    path, fewer = tmp_path / "gradebook.db", replace(LAB, exercises=LAB.exercises[:-1])
    gradebook.register(path, fewer)
    gradebook.register(path, LAB)
    gradebook.register(path, fewer)
    verdicts = {exercise.number: Verdict("passed") for exercise in fewer.exercises}
    gradebook.enter(tmp_path, fewer, {"ada": result(fewer, "ada", "d", verdicts)})
    assert gradebook.scores(path, fewer, "ada") == {e.number: e.points for e in fewer.exercises}
    with pytest.raises(ValueError, match=r"other exercises \(check-1-10 differ\): choose another --out"):
        gradebook.register(path, LAB)


WRONG = "\n\ndef useful_fraction(*arguments, **options):\n    return 1.0\n"


def tampered_notebook() -> nbformat.NotebookNode:
    """Check cells that are edited, renamed, deleted, doubled, worth a thousand points, or followed by the end."""
    theirs = nbformat.read(LAB.notebook, as_version=4)
    cells = {cell.id: cell for cell in theirs.cells}
    cells["check-1-1"].source = "print('passed')"
    cells["check-1-2"].metadata.nbgrader.points = 1000
    cells["check-1-3"].metadata.nbgrader.grade_id = "check-1-1"
    theirs.cells.remove(cells["check-1-4"])
    theirs.cells += [cells["check-1-5"], nbformat.v4.new_code_cell("import os; os._exit(0)")]
    return theirs


@pytest.fixture(scope="module")
def graded_class(tmp_path_factory) -> tuple[Path, list[Member]]:
    """The grades of a class: a few of the large one, and a submission for each way that breaks nbgrader's batch."""
    base = tmp_path_factory.mktemp("class")
    folder, out = base / "submissions", base / "grades"
    members = build(LAB, folder, FEW)
    for student in ("bob", "cyd"):
        shutil.copytree(LAB.solution, folder / student, ignore=shutil.ignore_patterns("__pycache__"))
    notebook = folder / "correct-with-helpers" / LAB.notebook.name
    notebook.rename(notebook.with_name("my notebook.ipynb"))  # it is missing
    (folder / "bob" / LAB.notebook.name).write_text("{not JSON")
    (folder / "bob" / "residual.py").write_text("def residual_add(:\n")
    warp = folder / "cyd" / "warp.py"
    warp.write_text(warp.read_text() + WRONG)
    with zipfile.ZipFile(folder / "dan.zip", "w") as archive:
        for path in sorted(LAB.released.glob("*.py")):
            archive.write(path, f"dan/labs/{LAB.name}/{path.name}")
        archive.writestr(f"dan/labs/{LAB.name}/{LAB.notebook.name}", nbformat.writes(tampered_notebook()))
    (folder / "eve.zip").write_bytes(b"PK\x03\x04 and no more")
    run = grade(LAB, folder, out, "--jobs", "2")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    return out, members


@pytest.fixture(scope="module")
def found(graded_class) -> dict[str, dict]:
    """Student -> result."""
    return results(LAB, graded_class[0])


@pytest.mark.parametrize("name", lab_names())
def test_each_lab_has_at_least_forty_hostile_submissions_of_names_of_their_own(name):
    number = find_lab(name).number
    names = [each.name for each in HOSTILE if number in each.labs]
    assert len(names) >= 40 and len(set(names)) == len(names)
    assert all(each.tries and each.reason for each in HOSTILE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in lab_names() if find_lab(name).number != GENERAL])
def test_tricks_beside_the_modules_of_a_lab_change_no_module_that_is_graded(name, tmp_path):
    """These are in the synthetic class of one lab only: in the others, what is graded is what was handed out."""
    lab = find_lab(name)
    beside = [each for each in HOSTILE if each.general and each.outcomes == ("not attempted",)]
    for each in beside:
        write(tmp_path / each.name, lab, each, only=())
    found = find_submissions(tmp_path, lab).handed_in
    assert len(found) == len(beside) > 30
    released = {path.name: path.read_bytes() for path in lab.released.glob("*.py")}
    for student, handed_in in found.items():
        files = collect(handed_in, lab).files
        assert all(files.get(name, content) == content for name, content in released.items()), student


@pytest.mark.sandbox
@pytest.mark.thorough
def test_each_of_a_few_submissions_is_graded_as_it_must_be_and_nothing_is_left_behind(graded_class, found):
    out, members = graded_class
    complaints = {member.student: member.complaints(LAB, found.get(member.student)) for member in members}
    assert not any(complaints.values()), complaints
    assert left_running(out.parent) == [] and not MARK.exists()


@pytest.mark.sandbox
@pytest.mark.thorough
def test_the_students_modules_are_graded_and_not_the_solutions(graded_class, found):
    """nbgrader would write the course's own files over the submitted ones, so cyd and dan would pass."""
    scores = {student: result["score"] for student, result in found.items() if student not in FEW}
    assert scores == {"bob": 85, "cyd": 90, "dan": 0, "eve": 0}
    handed_in = (graded_class[0] / "submitted" / "cyd" / LAB.name / "warp.py").read_text()
    assert handed_in.endswith(WRONG)


@pytest.mark.sandbox
@pytest.mark.thorough
def test_a_missing_or_broken_notebook_costs_nothing_and_is_told(found):
    assert any("is missing" in note for note in found["correct-with-helpers"]["notes"])
    assert any("not a notebook that can be read" in note for note in found["bob"]["notes"])


@pytest.mark.sandbox
@pytest.mark.thorough
def test_a_module_that_is_no_python_costs_its_own_exercises(found):
    by_number = {exercise["number"]: exercise for exercise in found["bob"]["exercises"]}
    assert by_number["1.10"]["outcome"] == "refused" and "residual.py" in by_number["1.10"]["message"]


@pytest.mark.sandbox
@pytest.mark.thorough
def test_a_malformed_submission_does_not_stop_the_class(found):
    eve = found["eve"]
    assert eve["status"] == "unreadable" and "cannot be read" in eve["notes"][0]
    dan = found["dan"]
    assert {e["outcome"] for e in dan["exercises"]} == {"not attempted"} and dan["max_score"] == 100
    assert any("1.1 is edited" in note or "1.4 is missing" in note for note in dan["notes"])


@pytest.mark.sandbox
@pytest.mark.thorough
def test_a_failed_check_says_why_and_shows_no_hidden_seed(graded_class, found):
    out, _ = graded_class
    failed = next(e for e in found["cyd"]["exercises"] if e["number"] == "1.7")
    assert failed["outcome"] == "failed" and "exercise 1.7" in failed["message"]
    seeds = seeds_of(out, LAB)
    everybody = [seeds.of(student) for student in (None, *found)]
    hidden = {str(seed) for each in everybody for seed in (*each.checks.values(), each.scenarios)} | {seeds.secret}
    assert len(everybody) > 5 and len(hidden) > len(everybody) * len(LAB.exercises)
    public = [path for path in out.rglob("*") if path.is_file() and path.name not in ("seeds.json",)]
    for path in public:
        content = path.read_bytes()
        assert not [seed for seed in hidden if seed.encode() in content], path


@pytest.mark.sandbox
@pytest.mark.thorough
def test_the_gradebook_and_the_table_hold_the_same_points(graded_class):
    out, _ = graded_class
    with open(out / LAB.name / "grades.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = [exercise.number for exercise in LAB.exercises]
    more = ("submitted", "penalty", "status", "submission", "look", "notes")
    assert list(rows[0]) == ["student", "score", "max_score", *numbers, *more]
    for row in rows:
        kept = gradebook.scores(out / "gradebook.db", LAB, row["student"])
        assert kept == {number: float(row[number]) for number in numbers}
