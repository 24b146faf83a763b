"""Grades a class of synthetic submissions and holds every grade against what it must be: ``make test-grading``.

    python -m tests.grading_cohort [lab1 lab2 ...] [--jobs N] [--students A B] [--quick] [--hostile N]
    python -m tests.grading_cohort --killed [300] [--run-at-all 12] [--seed N]

For each lab the class is built, graded by ``python -m grading.grade``, and every score and reason is compared. Then the
grader is killed in the middle of a second run, started again, and must come to the same gradebook. In the end nothing
may be left running, and nothing may have been written beside the submissions and the grades. ``--killed`` grades a
large class of lab 1 instead, kills the grader again and again, and compares the gradebook with that of a run in peace.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import grading_killed  # noqa: E402
from grading_runs import MARK, Surroundings, grade, left_running, listing, results, scores  # noqa: E402
from synthetic_cohort import Member, build  # noqa: E402

from grading.lab import Lab, find_lab, lab_names  # noqa: E402

AGAIN = 6
"""Submissions of the run that is killed."""


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
    faults, others = before.changes()
    wrong += faults
    if others:
        print(f"  new beside the class, from whatever ran meanwhile: {', '.join(others)}")
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


def killed_and_resumed(lab: Lab, folder: Path, jobs: int) -> list[str]:
    """Kill the grader in the middle of a few submissions, start it again, and compare with what it said before."""
    found = results(lab, folder / "grades")
    run_at_all = [student for student, result in found.items() if result["seconds"] > 1]
    few = sorted(run_at_all or found, key=lambda student: found[student]["seconds"])[:AGAIN]
    again = folder / "again"
    again.mkdir()
    shutil.copyfile(folder / "grades" / "seeds.json", again / "seeds.json")
    chosen = ("--jobs", str(jobs), "--students", *few)
    run = grade(lab, folder / "submissions", again, *chosen)
    deadline = time.monotonic() + 300
    while run.poll() is None and not results(lab, again) and time.monotonic() < deadline:
        time.sleep(0.2)
    done = len(results(lab, again))
    run.send_signal(signal.SIGKILL)
    run.communicate()
    second = grade(lab, folder / "submissions", again, *chosen)
    output, _ = second.communicate()
    if second.returncode:
        return [f"after a kill the grader ended with {second.returncode}: {output[-1500:]}"]
    print(f"  killed after {done} of {len(few)}, then finished")
    first = {row[0]: row for row in scores(lab, folder / "grades")}
    rows = {row[0]: row for row in scores(lab, again)}
    wrong = [f"{name}: {first[name]} became {rows.get(name)}" for name in few if rows.get(name) != first[name]]
    return wrong + _differences(found, results(lab, again), few)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], students: Sequence[str]) -> list[str]:
    """The exercises that came to something else the second time, with what the student would read."""
    return [
        f"{student}: {one['number']} was {one['outcome']} and is {other['outcome']}: {other['message']}"
        for student in students
        if student in after
        for one, other in zip(before[student]["exercises"], after[student]["exercises"], strict=True)
        if (one["score"], one["outcome"]) != (other["score"], other["outcome"])
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when everything is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading_cohort", description="Grade a synthetic class.")
    parser.add_argument("labs", nargs="*", default=lab_names(), help="labs to grade; all by default")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--students", nargs="+", help="only these")
    parser.add_argument("--quick", action="store_true", help="leave out those that take long")
    parser.add_argument("--hostile", type=int, metavar="N", help="about so many of the hostile ones, evenly spread")
    parser.add_argument("--killed", type=int, nargs="?", const=300, help="a class of so many, killed again and again")
    parser.add_argument("--run-at-all", type=int, default=grading_killed.RUN_AT_ALL, metavar="N", help="of that class")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which the grader is killed")
    given = parser.parse_args(arguments)
    wrong = []
    for name in ["lab1"] if given.killed else given.labs:
        lab = find_lab(name)
        with tempfile.TemporaryDirectory(prefix="mlf-class-") as place:
            folder = Path(place)
            if given.killed:
                found = grading_killed.run(lab, folder, given.killed, given.jobs, given.seed, given.run_at_all)
            else:
                members = build(lab, folder / "submissions", given.students, not given.quick, given.hostile)
                found = grade_class(lab, folder, members, given.jobs)
                if not found and len(members) > 1:
                    found += killed_and_resumed(lab, folder, given.jobs)
        wrong += [f"{lab.name}: {line}" for line in found]
        for line in found:
            print(f"  ✗ {line}", flush=True)
    print(f"\n{len(wrong)} complaints" if wrong else "\neverything as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
