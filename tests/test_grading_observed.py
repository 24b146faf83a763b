"""What a submission is observed to do: within which limits, and by a process that may be forked afterwards."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from lab_answers import answers
from lab_places import write_lab

from grading import gradebook, observed, outputs, worker
from grading.grade import _why_failed
from grading.lab import ROOT, find_lab
from grading.results import Verdict, result
from grading.sandbox import Limits
from grading.scenarios import chosen
from grading.scenarios import observations as files
from grading.seeds import ClassSeeds
from grading.submission import HandedIn
from grading.worker import Job, grade
from utils.checks.ranks import distributed_check, on_rank, scenario_runs

CODE = """
import contextlib, pathlib, sys, torch
from grading import lab, observed

torch.set_num_threads(4)
with contextlib.suppress(Exception):
    folder = pathlib.Path(sys.argv[1])
    observed._compare(folder, folder, lab.find_lab("lab2"), ["2.1"], folder)
raise SystemExit(torch.get_num_threads() != 1)
"""


@pytest.mark.slow
def test_what_is_expected_is_compared_on_one_thread(tmp_path):
    """A thread that is left behind would be missing in every worker that is forked later."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=100).returncode == 0


@pytest.mark.slow
def test_the_text_of_a_hidden_error_reaches_the_instructors_table_and_no_page(tmp_path):
    lab, secret = find_lab("lab1"), "987654321"
    expected, got, package = (tmp_path / name for name in ("expected", "got", lab.name))
    for folder in (expected, got, package):
        folder.mkdir()
    (package / "operators.py").write_text("raise\n" * 12)
    files.write(expected, "1.1", {"flops": 3})
    files.write_error(got, "1.1", ValueError(f"n is {secret}"), "operators.py, line 12")
    verdicts = dict.fromkeys((e.number for e in lab.exercises), Verdict("passed"))
    verdicts |= observed.compared(lab, expected, got, ["1.1"], tmp_path)
    graded = {"ada": result(lab, "ada", "digest", verdicts)}
    gradebook.register(tmp_path / "gradebook.db", lab)
    gradebook.enter(tmp_path, lab, graded)
    outputs.publish(tmp_path, lab, graded)
    outputs.write_csv(tmp_path, lab, graded, {"ada": HandedIn("ada", ())}, ())
    holds = {path.suffix for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()}
    assert holds == {".json", ".csv"}  # the scenario's own file, and the table
    assert f"1.1 raised on hidden inputs: ValueError: n is {secret}" in (package / "grades.csv").read_text()
    assert "it raised ValueError at operators.py, line 12" in (package / "feedback" / "ada.html").read_text()
    assert secret not in (package / "gradescope" / "ada.json").read_text()


@pytest.mark.slow
@pytest.mark.sandbox
def test_a_submission_that_raises_on_a_hidden_input_cannot_tell_it_and_a_classmate_never_meets_it(
    tmp_path, monkeypatch
):
    lab = find_lab("lab1")
    job = Job(lab, ClassSeeds("x", tuple(e.number for e in lab.exercises)), tmp_path / "expected")
    (exercise,), seen = chosen("lab1", ["1.1"]), []
    package = importlib.import_module(f"solutions.{lab.name}")
    module = exercise.home(package)
    right = module.dot_product_flops
    monkeypatch.setattr(module, "dot_product_flops", lambda n: seen.append(n) or right(n))
    exercise.run_check(package, job.seeds.of("bob").checks["1.1"])
    exercise.observe(module, job.seeds.of("bob").scenarios)
    exercise.run_check(package, job.seeds.of("ada").checks["1.1"])
    elsewhere = {*seen}
    exercise.observe(module, job.seeds.of("ada").scenarios)
    hidden = next(n for n in seen if n not in elsewhere)
    places = answers(lab.name).right | {
        "1.1: FLOPs of a dot product": f"if n == {hidden}:\n    raise ValueError(f'n is {{n}}')\nreturn 2 * n"
    }
    (tmp_path / "ada").mkdir()
    write_lab(lab.name, tmp_path / "ada" / lab.name, places)
    graded = grade(job, HandedIn("ada", (("", tmp_path / "ada"),)), "digest", tmp_path / "submitted")
    first, *others = graded["exercises"]
    assert {one["outcome"] for one in others} == {"passed"}
    assert re.search(r"it raised ValueError at operators\.py, line \d+\.?$", first["message"]), first
    assert first["private"].startswith(f"ValueError: n is {hidden} (operators.py, line ")
    assert sorted(path.name for path in job.expected.iterdir()) == ["07", "07.lock"]  # ada's set, and no other


def test_a_hidden_seed_costs_points_only_where_the_solution_passes_with_it(tmp_path, monkeypatch):
    lab = find_lab("lab1")
    numbers = [exercise.number for exercise in lab.exercises]
    job = Job(lab, ClassSeeds("x", tuple(numbers)), tmp_path / "expected")
    runs: list[tuple[bool, dict | None, list[str] | None]] = []

    def execute(self, seeds, only=None) -> dict[str, dict]:
        """1.3 fails on ada's and bob's hidden seeds: in ada's submission, in bob's, and in the solution on ada's."""
        is_solution = (self.files / lab.name / "waves.py").read_bytes() == (lab.solution / "waves.py").read_bytes()
        runs.append((is_solution, seeds, only))
        fails = seeds is not None and (not is_solution or self.submission.student == "ada")
        done = {number: {"outcome": "ok", "intact": True, "why": "", "seconds": 0.0} for number in only or numbers}
        return done | ({"1.3": {**done["1.3"], "outcome": "error", "why": "CheckFailed: n is 77"}} if fails else {})

    monkeypatch.setattr(worker._Grading, "_execute", execute)
    monkeypatch.setattr(worker, "observe", lambda *_, **__: {})
    monkeypatch.setattr(worker, "expected_observations", lambda *_: tmp_path)
    monkeypatch.setattr(worker, "compared", lambda *_: {})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "waves.py").write_text("x = 1\n")

    def graded(student: str) -> dict:
        return worker.grade(job, HandedIn(student, (("", tmp_path / "in"),)), "digest", tmp_path / "submitted")

    lost = [one for one in graded("bob")["exercises"] if one["score"] == 0]
    assert [one["number"] for one in lost] == ["1.3"] and "It passes on the inputs" in lost[0]["message"]
    assert runs[-1] == (True, job.seeds.of("bob").checks, ["1.3"])
    with pytest.raises(observed.SolutionFails, match=r"exercise 1\.3: CheckFailed: n is 77"):
        graded("ada")
    told = _why_failed(job, tmp_path, "ada")
    assert told.startswith("the course's own solution fails in checks with this student's hidden seeds: ")
    assert told.endswith("exercise 1.3: CheckFailed: n is 77")
    assert _why_failed(job, tmp_path, "bob").startswith("the grader failed: see")


@pytest.mark.thorough
@pytest.mark.sandbox
def test_an_answer_that_fails_on_its_hidden_seed_only_is_lost_after_the_solution_was_held_to_it(tmp_path, monkeypatch):
    lab = find_lab("lab1")
    job = Job(lab, ClassSeeds("x", tuple(e.number for e in lab.exercises)), tmp_path / "expected")
    (exercise,), seen = chosen("lab1", ["1.1"]), []
    package = importlib.import_module(f"solutions.{lab.name}")
    module = exercise.home(package)
    right = module.dot_product_flops
    with monkeypatch.context() as patch:
        patch.setattr(module, "dot_product_flops", lambda n: seen.append(n) or right(n))
        exercise.run_check(package, int(re.search(r"seed=(\d+)", lab.exercise("1.1").source)[1]))
        shown = {*seen}
        exercise.run_check(package, job.seeds.of("ada").checks["1.1"])
    hidden = next(n for n in seen if n not in shown)
    places = answers(lab.name).right | {"1.1: FLOPs of a dot product": f"return 2 * n + (n == {hidden})"}
    (tmp_path / "ada").mkdir()
    write_lab(lab.name, tmp_path / "ada" / lab.name, places)
    held: list[list[str]] = []
    hold = worker._Grading._hold_solution
    monkeypatch.setattr(worker._Grading, "_hold_solution", lambda self, those: held.append(those) or hold(self, those))
    graded = grade(job, HandedIn("ada", (("", tmp_path / "ada"),)), "digest", tmp_path / "submitted")
    first, *others = graded["exercises"]
    assert {one["outcome"] for one in others} == {"passed"} and held == [["1.1"]]
    assert first["outcome"] == "failed" and first["message"].startswith(
        "It passes on the inputs that your notebook draws"
    )


@pytest.mark.parametrize(
    ("code", "why"), [("raise SystemExit(3)", "end with 3"), ("", "observations of exercise 1.1 are missing")]
)
def test_a_run_of_the_solution_that_does_not_finish_leaves_nothing_to_compare_with(tmp_path, monkeypatch, code, why):
    monkeypatch.setattr(observed, "_program", lambda *_, **__: [sys.executable, "-c", code])
    folder = tmp_path / "expected" / "03"
    with pytest.raises(observed.SolutionFails, match=why):
        observed.expected_observations(find_lab("lab1"), 1, folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["03.failed", "03.lock"]
    monkeypatch.setattr(observed, "_run_solution", lambda *_: pytest.fail("the solution is run once more"))
    with pytest.raises(observed.SolutionFails, match=why):
        observed.expected_observations(find_lab("lab1"), 1, folder)


def test_of_workers_that_want_the_same_observations_one_runs_the_solution(tmp_path, monkeypatch):
    """A lock on a file that each opens for itself holds between threads as between processes."""
    entered: list[Path] = []
    another, folder = threading.Event(), tmp_path / "expected" / "03"

    def run_solution(lab, seed, to: Path, timeout: float) -> None:
        entered.append(to)
        if len(entered) > 1:
            another.set()
        else:
            second.start()
            assert not another.wait(0.2)
        to.mkdir(exist_ok=True)

    monkeypatch.setattr(observed, "_run_solution", run_solution)
    lab = find_lab("lab1")
    second = threading.Thread(target=observed.expected_observations, args=(lab, 1, folder))
    assert observed.expected_observations(lab, 1, folder) == folder
    second.join(timeout=10)
    assert entered == [folder] and not second.is_alive()


def test_a_run_of_scenarios_ends_after_each_of_them_would_have_been_ended():
    limits = observed.scenario_limits(Limits(), 120, count=9)
    assert limits.seconds > 9 * observed.EACH and limits == replace(Limits(), seconds=limits.seconds)
    assert observed.scenario_limits(Limits(), 3600, count=1).seconds == 3600
    assert distributed_check.HIDDEN_PATIENCE < on_rank.SCENARIO_SECONDS < scenario_runs.LAUNCH_SECONDS < observed.EACH


@pytest.mark.slow
def test_the_solutions_scenarios_end_with_a_grader_that_is_killed(tmp_path):
    out = tmp_path / "expected"
    program = (
        "import pathlib, sys; from grading.lab import find_lab; from grading.observed import expected_observations; "
        "expected_observations(find_lab('lab3'), 1, pathlib.Path(sys.argv[1]))"
    )

    def running() -> list[list[str]]:
        lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [line for line in lines if "grading.scenarios" in line and str(tmp_path) in " ".join(line)]

    def wait_until(condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        assert condition(), running()

    grader = subprocess.Popen([sys.executable, "-c", program, str(out)], cwd=ROOT)
    wait_until(lambda: len(running()) == 2, 60)  # the one that imported the package, and its fork, which has much to do
    grader.kill()
    grader.wait()
    wait_until(lambda: not running(), 2)
    assert not out.exists()
