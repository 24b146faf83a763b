"""A class is graded once: runs are resumed, killed ones too, and what did not change is not graded again."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from nbgrader.api import Gradebook

from grading import grade, gradebook, observed, outputs, sandbox, worker
from grading.lab import ROOT, find_lab
from grading.observed import FAILED, UNFINISHED, SolutionFails
from grading.results import Verdict, result, write_folder, write_json
from grading.seeds import ClassSeeds

LAB = find_lab("lab1")


@pytest.fixture
def submissions(tmp_path: Path) -> Path:
    for student, source in (("ada", LAB.solution), ("bob", LAB.released), ("cyd", LAB.released)):
        shutil.copytree(source, tmp_path / "submissions" / student, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "submissions"


@pytest.fixture
def quick(monkeypatch, tmp_path) -> list[str]:
    """The grader with workers that give every submission full marks at once; whom they graded is listed."""
    worked: list[str] = []

    def run_all(job, pending: Mapping, out: Path, jobs: int) -> Iterator[str]:
        for student, (_, digest) in pending.items():
            worked.append(student)
            if student != "the-worker-dies":
                verdicts = {exercise.number: Verdict("passed") for exercise in LAB.exercises}
                write_json(outputs.result_path(out, LAB, student), result(LAB, student, digest, verdicts))
            yield student

    monkeypatch.setattr(grade, "run_all", run_all)
    monkeypatch.setattr(grade, "_grader_digest", lambda lab: "this grader")
    monkeypatch.setattr(grade, "similar_in", lambda lab, folders, together: [])
    return worked


def run(submissions: Path, *more: str) -> int:
    out = submissions.parent / "grades"
    return grade.main(["lab1", "--submissions", str(submissions), "--out", str(out), "--no-sandbox", *more])


def rows(submissions: Path) -> list[dict[str, str]]:
    with open(submissions.parent / "grades" / LAB.name / "grades.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def book(submissions: Path) -> dict[str, float]:
    path = submissions.parent / "grades" / "gradebook.db"
    students = [folder.name.removesuffix(".zip") for folder in submissions.iterdir()]
    return {student: sum(gradebook.scores(path, LAB, student).values()) for student in students}


@pytest.mark.slow
def test_a_second_run_grades_only_what_changed(submissions, quick, capsys):
    assert run(submissions) == 0
    assert quick == ["ada", "bob", "cyd"]
    assert run(submissions) == 0
    assert quick == ["ada", "bob", "cyd"]
    (submissions / "bob" / "warp.py").write_text("x = 1\n")
    assert run(submissions) == 0
    assert quick[3:] == ["bob"]
    assert "1 graded, 2 up to date" in capsys.readouterr().out
    assert book(submissions) == {"ada": 100, "bob": 100, "cyd": 100}


@pytest.mark.slow
def test_a_result_depends_on_the_students_own_seeds_and_on_no_classmate(submissions, quick):
    def digests() -> dict[str, str]:
        folder = submissions.parent / "grades" / LAB.name / "results"
        return {path.stem: json.loads(path.read_text())["digest"] for path in folder.iterdir()}

    assert run(submissions) == 0
    before = digests()
    assert before["bob"] != before["cyd"]  # the same files
    shutil.copytree(submissions / "bob", submissions / "aaron")
    assert run(submissions) == 0
    assert quick == ["ada", "bob", "cyd", "aaron"]
    after = digests()
    assert after == before | {"aaron": after["aaron"]} and len(set(after.values())) == 4


def test_what_the_solution_gave_is_kept_for_the_same_seeds_and_removed_with_others_or_unfinished(tmp_path):
    def found(secret: str) -> set[str]:
        folder = grade._expected(LAB, ClassSeeds(secret, ()), "this grader", tmp_path)
        there = {path.name for path in folder.iterdir()}
        assert [*folder.parent.iterdir()] == [folder] and folder.parent.stat().st_mode & 0o777 == 0o700
        write_folder(folder / "03", {"1.1.json": b""})
        write_folder(folder / f"{UNFINISHED}abc", {"1.1.json": b""})
        write_json(folder / "untouched.json", {})
        (folder / f"04{FAILED}").write_text("the solution fails")
        return there

    assert found("x") == set()
    assert found("x") == {"03", "untouched.json"}
    assert found("y") == set()
    assert found("x") == set()


@pytest.mark.slow
def test_what_is_asked_for_is_graded_again(submissions, quick):
    assert run(submissions, "--students", "bob") == 0
    assert run(submissions, "--regrade", "--students", "bob") == 0
    assert quick == ["bob", "bob"]
    assert run(submissions, "--fresh-seeds") == 0
    assert quick[2:] == ["ada", "bob", "cyd"]
    lines = (submissions.parent / "grades" / LAB.name / "grades.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["student", "ada", "bob", "cyd"]
    assert lines[0].endswith(",status,submission,look,notes")


@pytest.mark.slow
def test_a_worker_that_dies_leaves_its_submission_to_the_next_run(submissions, quick, capsys):
    (submissions / "cyd").rename(submissions / "the-worker-dies")
    assert run(submissions) == 1
    assert "NOT GRADED: the-worker-dies" in capsys.readouterr().err
    assert run(submissions) == 1
    assert quick == ["ada", "bob", "the-worker-dies", "the-worker-dies"]


@pytest.mark.slow
def test_a_solution_that_fails_on_some_hidden_inputs_is_named_and_costs_nobody_points(submissions, monkeypatch, capsys):
    fails: list[int] = []
    worked: list[str] = []

    def run_solution(lab, seed: int, folder: Path, timeout: float) -> None:
        if seed in fails:
            raise SolutionFails("lab1_roofline: the solution fails in the scenario of exercise 1.3: n is 77")
        folder.mkdir()

    def run_all(job, pending: Mapping, out: Path, jobs: int) -> Iterator[str]:
        if not worked:
            fails.append(job.seeds.of("ada").scenarios)
        for student, (one, digest) in pending.items():
            worked.append(student)
            with contextlib.suppress(SolutionFails):
                done = worker.grade(job, one, digest, outputs.submitted_path(out, LAB, student))
                write_json(outputs.result_path(out, LAB, student), done)
            yield student

    ok = {e.number: {"outcome": "ok", "intact": True, "why": "", "seconds": 0.0} for e in LAB.exercises}
    monkeypatch.setattr(worker._Grading, "_checks", lambda self: ok)
    monkeypatch.setattr(worker, "observe", lambda *_, **__: {})
    monkeypatch.setattr(worker, "compared", lambda *_: {})
    monkeypatch.setattr(observed, "_run_solution", run_solution)
    monkeypatch.setattr(grade, "run_all", run_all)
    monkeypatch.setattr(grade, "_grader_digest", lambda lab: "this grader")
    monkeypatch.setattr(grade, "similar_in", lambda lab, folders, together: [])
    (submissions.parent / "grades").mkdir()
    (submissions.parent / "grades" / "seeds.json").write_text(json.dumps({LAB.name: "x"}))
    assert run(submissions) == 1
    table = {row["student"]: row for row in rows(submissions)}
    assert [table[student]["score"] for student in ("ada", "bob", "cyd")] == ["", "100", "100"]
    told = "the course's own solution fails on set 7 of the hidden inputs, which is this student's: the"
    assert table["ada"]["status"] == "not graded" and table["ada"]["notes"].startswith(told)
    assert "exercise 1.3: n is 77" in table["ada"]["notes"] and "--fresh-seeds" in table["ada"]["notes"]
    assert f"NOT GRADED: ada ({told}" in capsys.readouterr().err
    assert not (submissions.parent / "grades" / LAB.name / "feedback" / "ada.html").exists()
    fails.clear()  # the solution was corrected
    assert run(submissions) == 0 and worked == ["ada", "bob", "cyd", "ada"]
    assert {row["student"]: row["score"] for row in rows(submissions)} == {"ada": "100", "bob": "100", "cyd": "100"}


@pytest.mark.slow
def test_a_score_that_a_person_gave_stays_when_the_results_are_entered_again(submissions, quick):
    run(submissions)
    path = submissions.parent / "grades" / "gradebook.db"
    with Gradebook(f"sqlite:///{path}") as opened:
        given = opened.find_grade("check-1-1", LAB.name, LAB.name, "bob")
        given.manual_score = 3
        opened.db.commit()
    run(submissions, "--regrade")
    assert gradebook.scores(path, LAB, "bob")["1.1"] == 3


@pytest.mark.slow
def test_a_score_that_a_person_gave_is_to_be_looked_at_again_when_the_automatic_one_changes(tmp_path):
    def made(outcome: str) -> dict[str, dict]:
        return {"bob": result(LAB, "bob", "d", {exercise.number: Verdict(outcome) for exercise in LAB.exercises})}

    def marked() -> list[str]:
        with Gradebook(f"sqlite:///{path}") as opened:
            grades = opened.find_submission_notebook(LAB.name, LAB.name, "bob").grades
            return [grade.name for grade in grades if grade.needs_manual_grade]

    path = tmp_path / "gradebook.db"
    gradebook.register(path, LAB)
    gradebook.enter(tmp_path, LAB, made("failed"))
    assert marked() == []
    with Gradebook(f"sqlite:///{path}") as opened:
        opened.find_grade("check-1-1", LAB.name, LAB.name, "bob").manual_score = 3
        opened.db.commit()
    for outcome, expected in (("failed", []), ("passed", ["check-1-1"]), ("passed", ["check-1-1"])):
        gradebook.enter(tmp_path, LAB, made(outcome))
        assert marked() == expected and gradebook.scores(path, LAB, "bob")["1.1"] == 3


def test_a_lab_or_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert grade.main(["lab9", "--submissions", str(tmp_path), "--out", str(tmp_path / "g"), "--no-sandbox"]) == 2
    assert "no lab 'lab9'" in capsys.readouterr().err
    assert grade.main(["lab1", "--submissions", "nowhere", "--out", str(tmp_path / "g"), "--no-sandbox"]) == 2
    assert "no folder of submissions" in capsys.readouterr().err


def test_two_runs_into_one_folder_of_grades_are_kept_apart(tmp_path, capsys):
    with grade._only_one(tmp_path / "g"):
        assert grade.main(["lab1", "--submissions", ".", "--out", str(tmp_path / "g"), "--no-sandbox"]) == 2
    assert "another run is grading" in capsys.readouterr().err


def test_without_a_sandbox_nothing_is_run_unless_told_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "available", lambda: "bubblewrap is not installed: apt install bubblewrap")
    assert grade.main(["lab1", "--submissions", str(tmp_path), "--out", str(tmp_path / "g")]) == 2
    told = capsys.readouterr().err
    assert "apt install bubblewrap" in told and "--no-sandbox" in told
    assert not (tmp_path / "g").exists()


#: A caller whose event loop holds a socket with something to read, as that of a notebook does: a fork of it would never
#: get any further, since ZeroMQ answers a fork of a socket's process with "interrupted", again and again.
CALLER = """
import asyncio, sys, zmq, zmq.asyncio
from jupyter_core.utils import ensure_event_loop

async def listen():
    mine, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    mine.bind("inproc://x")
    other.connect("inproc://x")
    waiting = asyncio.ensure_future(mine.recv())
    await asyncio.sleep(0.05)
    return other, waiting

context = zmq.asyncio.Context()
other, waiting = ensure_event_loop().run_until_complete(listen())
zmq.Socket.shadow(other).send(b"something")
from grading import grade
status = grade.main(sys.argv[1:])
print("status", status, flush=True)
"""


@pytest.mark.sandbox
@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_gradebook(submissions):
    shutil.rmtree(submissions / "cyd")
    out = submissions.parent / "grades"
    given = ["lab1", "--submissions", str(submissions), "--out", str(out), "--jobs", "1"]
    command = [sys.executable, "-m", "grading.grade", *given]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = out / LAB.name / "results"
    deadline = time.monotonic() + 120
    while not (results / "ada.json").exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    before = json.loads((results / "ada.json").read_text())
    called = [sys.executable, "-c", CALLER, *given]  # and from a process that must not be forked
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    again = subprocess.run(called, cwd=ROOT, env=path, capture_output=True, text=True, timeout=170)
    assert "status 0" in again.stdout, again.stdout + again.stderr
    assert "1 graded, 1 up to date" in again.stdout
    assert json.loads((results / "ada.json").read_text()) == before
    assert book(submissions) == {"ada": 100, "bob": 0}
    assert (out / LAB.name / "feedback" / "ada.html").exists() and (out / LAB.name / "gradescope" / "bob.json").exists()


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for files in ({"waves.py": b"x = 1"}, {"warp.py": b"y = 1"}):
        write_folder(tmp_path / "submitted" / "ada" / "lab1", files)
    kept = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept == ["submitted/ada/lab1/warp.py"]


@pytest.mark.slow
def test_submissions_in_the_place_of_the_graders_own_copies_are_refused(tmp_path, capsys):
    (tmp_path / "submitted" / "ada").mkdir(parents=True)
    arguments = ["lab1", "--submissions", str(tmp_path / "submitted"), "--out", str(tmp_path), "--no-sandbox"]
    assert grade.main(arguments) == 2
    assert "holds this grader's own copies" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fork_server_that_cannot_start_leaves_its_submissions_to_the_next_run(tmp_path):
    pending = "{'bob': (Path('.'), '1'), 'ada': (Path('.'), '2')}"
    code = (
        "import os; from pathlib import Path; from grading import pool; os.environ['PYTHONHOME'] = '/nowhere'; "
        f"print(list(pool.run_all(None, {pending}, Path('.'), 1)), list(pool.run_all(None, {{}}, Path('.'), 1)))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ran.stdout == "['bob', 'ada'] []\n", ran.stderr
    assert not any(tmp_path.iterdir())
