"""Grades a class of synthetic submissions and holds every grade against what it must be: ``make test-grading``.

    python -m tests.grading_class [lab1 lab2 ...] [--jobs N] [--students A B] [--quick]

For each lab the class is built, graded by ``python -m grading.grade``, and every score and reason is compared. Then the
grader is killed in the middle of a second run, started again, and must come to the same gradebook. In the end nothing
may be left running, and nothing may have been written beside the submissions and the grades.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
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

from synthetic_class import Member, build  # noqa: E402

from grading.lab import Lab, find_lab, lab_names  # noqa: E402

MARK = Path("/tmp/mlf-hostile-was-here")
TOKEN = "MLF_SYNTHETIC_CLASS"
"""The variable by which a grader's processes are known: it holds the class's folder."""

AGAIN = 6
"""Submissions of the run that is killed."""


def grade(lab: Lab, submissions: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Start the grader, in a session of its own."""
    command = [sys.executable, "-m", "grading.grade", lab.name, "--submissions", str(submissions), "--out", str(out)]
    environment = os.environ | {"MLF_DEVICE": "cpu", "PYTHONPATH": str(ROOT), TOKEN: str(out.parent)}
    return subprocess.Popen(
        [*command, *more], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def results(lab: Lab, out: Path) -> dict[str, Any]:
    """The results that the grader wrote, by student."""
    folder = out / lab.name / "results"
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def left_running(folder: Path) -> list[str]:
    """Processes of a grader that worked in ``folder``, and what their submissions started, that still run."""
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (place / "environ").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if f"{TOKEN}={folder}\0" in environment or str(folder) in line:
            found.append(f"process {place.name}: {line[:100]}")
    return found


def listing(folder: Path) -> dict[str, int]:
    """What lies in a folder of submissions, with its times of change."""
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def scores(lab: Lab, out: Path) -> list[list[str]]:
    """The rows of ``grades.csv``."""
    with (out / lab.name / "grades.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def grade_class(lab: Lab, folder: Path, members: Sequence[Member], jobs: int) -> list[str]:
    """Grade a class that was built in ``folder / "submissions"``; returns what is wrong, a line each."""
    handed_in = listing(folder / "submissions")
    MARK.unlink(missing_ok=True)
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
    if MARK.exists():
        wrong.append(f"{MARK} was written")
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


def killed_and_resumed(lab: Lab, folder: Path, members: Sequence[Member], jobs: int) -> list[str]:
    """Kill the grader in the middle of a few submissions, start it again, and compare with what it said before."""
    few = [member.student for member in members if not member.lost][:3]
    few += [member.student for member in members if member.student not in few][: AGAIN - len(few)]
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
    return [f"{name}: {first[name]} became {rows.get(name)}" for name in few if rows.get(name) != first[name]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when everything is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.grading_class", description="Grade a synthetic class.")
    parser.add_argument("labs", nargs="*", default=lab_names(), help="labs to grade; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--students", nargs="+", help="only these")
    parser.add_argument("--quick", action="store_true", help="leave out those that take long")
    given = parser.parse_args(arguments)
    wrong = []
    for name in given.labs:
        lab = find_lab(name)
        with tempfile.TemporaryDirectory(prefix="mlf-class-") as place:
            folder = Path(place)
            members = build(lab, folder / "submissions", given.students, slow=not given.quick)
            found = grade_class(lab, folder, members, given.jobs)
            if not found and len(members) > 1:
                found += killed_and_resumed(lab, folder, members, given.jobs)
        wrong += [f"{lab.name}: {line}" for line in found]
        for line in found:
            print(f"  ✗ {line}")
    print(f"\n{len(wrong)} complaints" if wrong else "\neverything as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
