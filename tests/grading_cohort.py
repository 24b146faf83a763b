"""Grades a class of synthetic submissions and holds every grade against what it must be: ``make test-grading``.

    python -m tests.grading_cohort [lab1 lab2 ...] [--jobs N] [--students A B] [--seed N]

For each lab the class is built, graded by ``python -m grading.grade``, and every score and reason is compared. In two
labs, a part of the class is then graded once more by a grader that is killed again and again at random times: no result
may be lost, and the gradebook must be the same. In the end nothing may be left running, and nothing may have been
written beside the submissions and the grades.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from grading_runs import MARK, Surroundings, grade, left_running, listing, results, scores  # noqa: E402
from nbgrader.api import Gradebook  # noqa: E402
from synthetic_cohort import FAILED, Member, build  # noqa: E402

from grading.lab import Lab, find_lab, lab_names  # noqa: E402

AGAIN = 6
"""Submissions of the run that is killed."""

KILLS = 4
KILLED = (1, 4)
"""The labs in which the grader is killed: one whose exercises run in one process, and the one whose run in ranks."""

PATIENCE = 3600.0


def grade_class(lab: Lab, folder: Path, members: Sequence[Member], jobs: int) -> list[str]:
    """Grade a class that was built in ``folder / "submissions"``; returns what is wrong, a line each."""
    handed_in = listing(folder / "submissions")
    MARK.unlink(missing_ok=True)
    before = Surroundings()
    started = time.monotonic()
    run = grade(lab, folder / "submissions", folder / "grades", "--jobs", str(jobs))
    output, _ = run.communicate()
    seconds = time.monotonic() - started
    if run.returncode:
        return [f"the grader ended with {run.returncode}: {output[-1500:]}"]
    found = results(lab, folder / "grades")
    wrong = [
        f"{member.student}: {complaint}"
        for member in members
        for complaint in member.complaints(lab, found.get(member.student))
    ]
    table(lab, members, found, wrong, seconds)
    wrong += [f"a result of nobody: {student}" for student in found.keys() - {member.student for member in members}]
    time.sleep(0.5)
    wrong += left_running(folder)
    wrong += before.faults()
    if listing(folder / "submissions") != handed_in:
        wrong.append("the submissions were changed")
    return wrong


def table(lab: Lab, members: Sequence[Member], found: Mapping[str, Any], wrong: Sequence[str], seconds: float) -> None:
    """Print each student's points and verdict."""
    print(f"\n{lab.name}: {len(members)} submissions in {seconds:.0f} s", flush=True)
    for member in members:
        result = found.get(member.student)
        mark = "✗" if any(line.startswith(f"{member.student}: ") for line in wrong) else "✓"
        points = f"{result['score']:g}" if result else "-"
        spent = f"{result['seconds']:.1f} s" if result else ""
        lost = sorted({e["outcome"] for e in result["exercises"] if e["outcome"] != "passed"}) if result else []
        print(f"  {mark} {member.student:36} {points:>5}  {spent:>8}  {', '.join(lost)}")
    hostile = sum(member.hostile for member in members)
    print(
        f"  {hostile} hostile; {len(members) - len({line.split(':')[0] for line in wrong})} as they must be", flush=True
    )


def killed_and_resumed(lab: Lab, folder: Path, jobs: int, draw: random.Random) -> list[str]:
    """Grade a few submissions with a grader that is killed at random times, and compare with what it said before."""
    found = results(lab, folder / "grades")
    run_at_all = [student for student, result in found.items() if result["seconds"] > 1]
    few = sorted(run_at_all or found, key=lambda student: found[student]["seconds"])[:AGAIN]
    mean = sum(found[student]["seconds"] for student in few) / jobs / KILLS
    again = folder / "again"
    again.mkdir()
    shutil.copyfile(folder / "grades" / "seeds.json", again / "seeds.json")
    wrong: list[str] = []
    done, kills, deadline = 0, 0, time.monotonic() + PATIENCE
    while True:
        run = grade(lab, folder / "submissions", again, "--jobs", str(jobs), "--students", *few)
        wait = draw.uniform(0.2, 6 + 4 * mean)  # a start takes some seconds before the first submission
        if kills < KILLS and kills % 2:  # every other kill comes after one more result
            wait = 0.0
            while run.poll() is None and len(results(lab, again)) == done and time.monotonic() < deadline:
                time.sleep(0.1)
        try:
            output, _ = run.communicate(timeout=wait if kills < KILLS else max(0.0, deadline - time.monotonic()))
            break
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.communicate()
            if kills == KILLS:
                return [*wrong, f"it did not finish in {PATIENCE:g} s"]
            kills += 1
            time.sleep(0.5)
            now = len(results(lab, again))
            wrong += [f"results were lost: {done} became {now}"] if now < done else []
            wrong += [f"after a kill: {line}" for line in left_running(folder)]
            done = now
    if run.returncode:
        return [*wrong, f"after {kills} kills the grader ended with {run.returncode}: {output[-1500:]}"]
    print(f"  killed {kills} times, at last after {done} of {len(few)}, then finished")
    for name, of in (("grades.csv", _rows), ("the gradebook", _gradebook)):
        first, second = of(lab, folder / "grades"), of(lab, again)
        wrong += [f"{name}: {row} is missing or another" for row in first if row[0] in few and row not in second]
    return wrong + _differences(found, results(lab, again), few)


def _rows(lab: Lab, out: Path) -> list[list[str]]:
    """The rows of ``grades.csv`` without the column ``look``, which compares a submission with its class."""
    head, *rows = scores(lab, out)
    left_out = head.index("look")
    return [row[:left_out] + row[left_out + 1 :] for row in rows]


def _gradebook(lab: Lab, out: Path) -> list[tuple[Any, ...]]:
    """What stands in nbgrader's gradebook about every submission of the lab."""
    with Gradebook(f"sqlite:///{out / 'gradebook.db'}") as book:
        return [
            (submission.student.id, grade.name, grade.auto_score, grade.manual_score, grade.needs_manual_grade)
            for submission in book.assignment_submissions(lab.name)
            for notebook in submission.notebooks
            for grade in notebook.grades
        ]


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], students: Sequence[str]) -> list[str]:
    """The exercises that came to something else the second time, with what the student would read.

    What fills the memory while a check's time runs out may be ended by either limit.
    """

    def came_to(exercise: Mapping[str, Any]) -> tuple[float, str]:
        return exercise["score"], "ended" if exercise["outcome"] in FAILED else exercise["outcome"]

    return [
        f"{student}: {one['number']} was {one['outcome']} and is {other['outcome']}: {other['message']}"
        for student in students
        if student in after
        for one, other in zip(before[student]["exercises"], after[student]["exercises"], strict=True)
        if came_to(one) != came_to(other)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when everything is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading_cohort", description="Grade a synthetic class.")
    parser.add_argument("labs", nargs="*", default=lab_names(), help="labs to grade; all by default")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--students", nargs="+", help="only these")
    parser.add_argument("--seed", type=int, default=1, help="of the times at which the grader is killed")
    given = parser.parse_args(arguments)
    wrong = []
    for name in given.labs:
        lab = find_lab(name)
        with tempfile.TemporaryDirectory(prefix="mlf-class-") as place:
            folder = Path(place)
            members = build(lab, folder / "submissions", given.students)
            found = grade_class(lab, folder, members, given.jobs)
            if not found and len(members) > 1 and lab.number in KILLED:
                found += killed_and_resumed(lab, folder, given.jobs, random.Random(given.seed))
        wrong += [f"{lab.name}: {line}" for line in found]
        for line in found:
            print(f"  ✗ {line}", flush=True)
    print(f"\n{len(wrong)} complaints" if wrong else "\neverything as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
