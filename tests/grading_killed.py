"""A large class whose grader is killed again and again, against the same class graded in peace."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grading_runs import Surroundings, grade, left_running, results, scores
from hostile import honest
from nbgrader.api import Gradebook

from grading.lab import Lab

RUN_AT_ALL = 12
"""Submissions that are really run, of all kinds alike; the rest cannot be read and costs only its bookkeeping."""

KILLS = 8
PATIENCE = 3600.0


def _solved(folder: Path, lab: Lab) -> None:
    honest(folder, lab, solved=True)


def _without_one(folder: Path, lab: Lab) -> None:
    honest(folder, lab)


def _untouched(folder: Path, lab: Lab) -> None:
    shutil.copytree(lab.released, folder, ignore=shutil.ignore_patterns("__pycache__"))


def _refused(folder: Path, lab: Lab) -> None:
    _untouched(folder, lab)
    (folder / "waves.py").write_text("import os\n", encoding="utf-8")


def _empty(folder: Path, lab: Lab) -> None:
    folder.mkdir()


def _essay(folder: Path, lab: Lab) -> None:
    folder.mkdir()
    (folder / "essay.txt").write_text("The dog ate it.\n", encoding="utf-8")


def _broken_zip(folder: Path, lab: Lab) -> None:
    folder.with_suffix(".zip").write_bytes(b"PK\x03\x04 and no more")


def _empty_zip(folder: Path, lab: Lab) -> None:
    zipfile.ZipFile(folder.with_suffix(".zip"), "w").close()


def _zip_of_others(folder: Path, lab: Lab) -> None:
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w") as archive:
        archive.writestr("lab9/mine.py", "x = 1\n")


def _link(folder: Path, lab: Lab) -> None:
    folder.symlink_to(lab.released)


def _too_large(folder: Path, lab: Lab) -> None:
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(9):
            archive.writestr(f"{number}.bin", bytes(2**22))


def _other_lab(folder: Path, lab: Lab) -> None:
    folder.mkdir()
    (folder / "gelu.py").write_text("x = 1\n", encoding="utf-8")


RUN: tuple[Callable[[Path, Lab], None], ...] = (_solved, _without_one, _untouched, _refused)
READ: tuple[Callable[[Path, Lab], None], ...] = (
    *(_empty, _essay, _broken_zip, _empty_zip, _zip_of_others, _link, _too_large, _other_lab),
)


def run(lab: Lab, folder: Path, size: int, jobs: int, seed: int, run_at_all: int = RUN_AT_ALL) -> list[str]:
    """Grade a class of ``size`` in peace and then under kills at random moments; returns what differs, a line each."""
    draw = random.Random(seed)
    build(lab, folder / "submissions", size, draw, run_at_all)
    before = Surroundings()
    started = time.monotonic()
    peaceful = grade(lab, folder / "submissions", folder / "in-peace", "--jobs", str(jobs))
    output, _ = peaceful.communicate()
    if peaceful.returncode:
        return [f"the grader ended with {peaceful.returncode}: {output[-1500:]}"]
    seconds = time.monotonic() - started
    ran = min(size, run_at_all)
    print(f"\n{lab.name}: {size} submissions, {ran} of them run, in peace in {seconds:.0f} s", flush=True)
    again = folder / "killed"
    again.mkdir()
    shutil.copyfile(folder / "in-peace" / "seeds.json", again / "seeds.json")
    wrong = _under_kills(lab, folder, again, jobs, draw, seconds / KILLS)
    if len(found := results(lab, again)) != size:
        wrong.append(f"{len(found)} results of {size}")
    for name, of in (("the results", _plain_results), ("grades.csv", scores), ("the gradebook", _gradebook)):
        if of(lab, folder / "in-peace") != of(lab, again):
            wrong.append(f"{name} differ")
    time.sleep(0.5)
    wrong += left_running(folder)
    faults, _ = before.changes()
    return wrong + faults


def build(lab: Lab, folder: Path, size: int, draw: random.Random, run_at_all: int) -> None:
    """Write a class: ``run_at_all`` of the kinds in :data:`RUN`, the rest of those in :data:`READ`, in any order."""
    folder.mkdir(parents=True)
    kinds = [RUN[index % len(RUN)] for index in range(min(size, run_at_all))]
    kinds += [READ[index % len(READ)] for index in range(size - len(kinds))]
    draw.shuffle(kinds)
    for index, kind in enumerate(kinds):
        kind(folder / f"student-{index:03}", lab)


def _under_kills(lab: Lab, folder: Path, again: Path, jobs: int, draw: random.Random, mean: float) -> list[str]:
    """Run the grader to its end, killing it at random moments on the way."""
    wrong: list[str] = []
    done, kills, deadline = 0, 0, time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        attempt = grade(lab, folder / "submissions", again, "--jobs", str(jobs))
        try:
            # a start takes some seconds before the first submission: one kill in three falls into them
            wait = draw.uniform(0.2, 6) if draw.random() < 1 / 3 else draw.uniform(6, 6 + 2 * mean)
            output, _ = attempt.communicate(timeout=wait if kills < KILLS else deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            attempt.send_signal(signal.SIGKILL)
            attempt.communicate()
            kills += 1
            time.sleep(0.5)
            now = len(results(lab, again))
            print(f"  killed after {wait:.1f} s, with {now} results", flush=True)
            if now < done:
                wrong.append(f"results were lost: {done} became {now}")
            if running := left_running(folder):
                wrong += [f"after a kill: {line}" for line in running]
            done = now
            continue
        last = output.strip().splitlines()[-2:]
        print(f"  killed {kills} times, then finished: {' '.join(last)[:120]}", flush=True)
        return wrong if attempt.returncode == 0 else [*wrong, f"it ended with {attempt.returncode}: {output[-1500:]}"]
    return [*wrong, f"it did not finish in {PATIENCE:g} s"]


def _plain_results(lab: Lab, out: Path) -> dict[str, Any]:
    """The results without what the clock says."""
    found = results(lab, out)
    for result in found.values():
        for part in (result, *result["exercises"]):
            part.pop("seconds", None)
            part.pop("graded", None)
    return found


def _gradebook(lab: Lab, out: Path) -> list[tuple[Any, ...]]:
    """What stands in nbgrader's gradebook about every submission of the lab."""
    with Gradebook(f"sqlite:///{out / 'gradebook.db'}") as book:
        return sorted(
            (submission.student.id, grade.name, grade.auto_score, grade.manual_score, grade.needs_manual_grade)
            for submission in book.assignment_submissions(lab.name)
            for notebook in submission.notebooks
            for grade in notebook.grades
        )
