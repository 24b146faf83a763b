"""A class graded on a Dask cluster: the grades of one machine, whatever becomes of a worker, and clear errors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from distributed import LocalCluster
from grading_runs import grade as start_grader
from grading_runs import left_running, scores

from grading import cluster, grade, gradebook, outputs
from grading.lab import ROOT, find_lab
from grading.results import Verdict, digest_of, result, write_folder, write_json
from grading.seeds import ClassSeeds
from grading.submission import HandedIn
from grading.worker import Job

LAB = find_lab("lab1")


@pytest.fixture
def scheduler() -> Iterator[LocalCluster]:
    """A scheduler in this process, without workers."""
    with LocalCluster(n_workers=0, processes=False, protocol="tcp://", dashboard_address=None) as started:
        yield started


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "expected").mkdir()
    return Job(LAB, ClassSeeds("x", ()), tmp_path / "expected", isolated=False)


def pending(tmp_path: Path, *students: str) -> dict[str, tuple[HandedIn, str]]:
    for student in students:
        (tmp_path / student).mkdir()
    return {student: (HandedIn(student, (("", tmp_path / student),)), f"of {student}") for student in students}


def this_course(lab) -> str:
    return digest_of("this course")


def wait_for(what, seconds: float, of: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline and (of is None or of.poll() is None)
        time.sleep(0.05)


# ---- two workers, in processes of their own


def worker(address: str, folder: Path) -> subprocess.Popen:
    """A worker of the cluster, started as the guide says."""
    command = [sys.executable, "-m", "dask", "worker", address, "--no-nanny", "--nthreads", "1", "--no-dashboard"]
    return subprocess.Popen(
        [*command, "--local-directory", str(folder)],
        cwd=ROOT, env=os.environ | {"MLF_DEVICE": "cpu"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def runs_a_submission(process: subprocess.Popen) -> bool:
    """Whether a sandbox runs below a worker's own processes, not only the attempt to make one."""

    def is_one(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            return child.name() == "bwrap" and child.ppid() != process.pid
        return False

    return any(map(is_one, psutil.Process(process.pid).children(recursive=True)))


@pytest.mark.sandbox
@pytest.mark.thorough
def test_a_class_graded_by_two_workers_of_which_one_is_killed_has_the_same_gradebook(tmp_path, scheduler):
    folder = tmp_path / "submissions"
    for student, source in (("ada", LAB.solution), ("bob", LAB.released), ("cyd", LAB.solution)):
        shutil.copytree(source, folder / student, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(LAB.released / "warp.py", folder / "cyd")
    (folder / "dan.zip").write_bytes(b"no zip")
    here, there = tmp_path / "here" / "grades", tmp_path / "there" / "grades"
    for out in (here, there):
        out.mkdir(parents=True)
        (out / "seeds.json").write_text(json.dumps({LAB.name: "one secret"}))
    assert grade.main(["lab1", "--submissions", str(folder), "--out", str(here), "--jobs", "2"]) == 0

    address = scheduler.scheduler_address
    workers = [worker(address, tmp_path) for _ in range(2)]
    try:
        scheduler.wait_for_workers(2, timeout=60)
        run = start_grader(LAB, folder, there, "--cluster", address)
        wait_for(lambda: runs_a_submission(workers[0]), 60, of=run)
        family = psutil.Process(workers[0].pid).children(recursive=True)
        workers[0].kill()
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 0, printed
        assert not psutil.wait_procs(family, timeout=20)[1]
    finally:
        for process in workers:
            process.kill()
            process.wait()
    assert [row[0] for row in scores(LAB, there)] == ["student", "ada", "bob", "cyd", "dan"]
    for name in ("grades.csv", "similar.csv"):
        assert (there / LAB.name / name).read_bytes() == (here / LAB.name / name).read_bytes()
    for student in ("ada", "bob", "cyd", "dan"):
        theirs = [gradebook.scores(out / "gradebook.db", LAB, student) for out in (here, there)]
        assert theirs[0] == theirs[1] and len(theirs[0]) == len(LAB.exercises)
        kept = [outputs.submitted_path(out, LAB, student) for out in (here, there)]
        read = [{path.name: path.read_bytes() for path in place.iterdir()} for place in kept]
        assert read[0] == read[1]
    assert left_running(there.parent) == []


# ---- what comes back, and what is told


@pytest.fixture
def workers_here(scheduler, monkeypatch) -> LocalCluster:
    """The scheduler with one worker in this process, which gives full marks, but fails on cyd."""

    def run_all(job, given, out, jobs) -> Iterator[str]:
        ((student, (_, digest)),) = given.items()
        outputs.log_path(out, job.lab, student).parent.mkdir(parents=True)
        outputs.log_path(out, job.lab, student).write_text(f"graded {student}\n")
        if student != "cyd":
            write_folder(outputs.submitted_path(out, job.lab, student), {"warp.py": b"x = 1\n"})
            verdicts = {exercise.number: Verdict("passed") for exercise in LAB.exercises}
            write_json(outputs.result_path(out, LAB, student), result(LAB, student, digest, verdicts))
        yield student

    monkeypatch.setattr(cluster, "run_all", run_all)
    scheduler.scale(1)
    scheduler.wait_for_workers(1, timeout=30)
    return scheduler


def test_result_log_and_files_come_back_to_the_callers_folder_and_a_failure_brings_its_log(tmp_path, workers_here, job):
    out = tmp_path / "grades"
    given = pending(tmp_path, "ada", "bob", "cyd", "dan")
    (tmp_path / "dan").rmdir()  # on a disk that the worker does not see
    ended = cluster.run_on(workers_here.scheduler_address, job, given, out, this_course)
    assert sorted(ended) == ["ada", "bob", "cyd", "dan"]
    results = sorted(path.name for path in (out / LAB.name / "results").iterdir())
    assert results == ["ada.json", "bob.json"]
    assert json.loads((out / LAB.name / "results" / "ada.json").read_text())["digest"] == "of ada"
    assert (outputs.submitted_path(out, LAB, "ada") / "warp.py").read_bytes() == b"x = 1\n"
    assert outputs.log_path(out, LAB, "cyd").read_text() == "graded cyd\n"
    told = outputs.log_path(out, LAB, "dan").read_text()
    assert told.startswith("the cluster did not grade it: ") and "the folder of submissions must be shared" in told


def test_a_worker_that_cannot_grade_here_is_named_before_anything_is_graded(tmp_path, workers_here, job, monkeypatch):
    def refused() -> str:
        with pytest.raises(ValueError, match="not every worker of the cluster can grade; tcp://") as told:
            list(cluster.run_on(workers_here.scheduler_address, job, given, tmp_path / "grades", course))
        return str(told.value)

    given, course = pending(tmp_path, "ada"), this_course
    job.expected.rmdir()
    assert f"cannot write into {job.expected}: the folder of grades must be shared" in refused()
    job.expected.mkdir()
    monkeypatch.setattr(cluster.multiprocessing.current_process(), "_config", {"daemon": True})
    assert "start it with --no-nanny" in refused()
    monkeypatch.undo()
    answers = iter(["mine", "the worker's"])
    course = lambda lab: next(answers)  # noqa: E731
    assert f"its course, Python or PyTorch is not the caller's: start it in {ROOT}" in refused()
    answers = iter(["mine"])
    assert f"StopIteration: : start it in {ROOT}" in refused()  # as an error of an import would be
    assert not (tmp_path / "grades").exists()
    late = cluster._Here(job, this_course, "another course")  # as one that joins after the others were asked
    with pytest.raises(RuntimeError, match="a worker of the cluster cannot grade: its course, Python or PyTorch"):
        cluster._grade(late, given["ada"][0], "digest")


def test_a_scheduler_without_workers_one_that_does_not_answer_and_no_dask_are_told(
    tmp_path, scheduler, job, monkeypatch
):
    def told(address: str) -> str:
        with pytest.raises(ValueError) as error:
            list(cluster.run_on(address, job, {}, tmp_path / "grades", this_course))
        return str(error.value)

    assert "has no workers: start some" in told(scheduler.scheduler_address)
    monkeypatch.setattr(cluster, "CONNECT", 0.3)
    assert "no Dask scheduler answers at tcp://127.0.0.1:9: " in told("tcp://127.0.0.1:9")
    assert "no Dask scheduler answers at nonsense://x: " in told("nonsense://x")
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "pip install -e '.[cluster]'" in told(scheduler.scheduler_address)
