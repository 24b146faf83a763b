"""Grades a class: ``python -m grading.grade LAB --submissions DIR``, or ``make grade LAB=lab2 SUBMISSIONS=DIR``.

One process a submission, several at a time. What is done is done: a result is kept with a digest of all that it was
made from, so a second run grades what changed and nothing else, and a run that was killed goes on where it was. Only
this process writes the class's gradebook, and everything in the folder of grades can be made again from the results.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from nbgrader.converters.base import NbGraderException
from tqdm import tqdm

from grading import gradebook, outputs
from grading.lab import ROOT, Lab, find_lab
from grading.observed import SolutionFails, expected_observations
from grading.pool import run_all
from grading.results import digest_of, files_below, read_result
from grading.sandbox import RUNTIME, SandboxUnavailable, remove_leftovers, require
from grading.seeds import Seeds, seeds_of
from grading.submission import UnreadableSubmission, collect, students
from grading.worker import Job

SHOWS_ONLY = ("feedback.py", "gradescope.py", "outputs.py", "check_lab.py")  # what changes no grade
VERSIONED = ("torch", "triton", "numpy", "nbgrader", "ipykernel")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns:
        0 when every submission has a grade, 1 when the grader failed on one, 2 when nothing could be graded.
    """
    given = _parser().parse_args(arguments)
    try:
        lab = find_lab(given.lab)
        if given.no_sandbox:
            print("No sandbox: the submissions' code runs on this machine as you, with your files and your network.")
        else:
            require()
        with _only_one(given.out):
            return _grade_class(lab, given)
    except (ValueError, SandboxUnavailable, SolutionFails, NbGraderException) as error:
        print(f"grading.grade: {error}", file=sys.stderr)
        if isinstance(error, SandboxUnavailable):
            print("Untrusted code is not run without it, unless you say --no-sandbox.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. What is graded is kept; run the same command again to go on.", file=sys.stderr)
        return 130


def _grade_class(lab: Lab, given: argparse.Namespace) -> int:
    out: Path = given.out.resolve()
    if given.submissions.resolve().is_relative_to(out / "submitted"):
        raise ValueError(f"{out / 'submitted'} holds this grader's own copies: choose another --out, or move it away")
    remove_leftovers()
    found = students(given.submissions.resolve())
    if unknown := set(given.students or ()) - set(found):
        raise ValueError(f"no submission of {', '.join(sorted(unknown))} in {given.submissions}")
    if given.students:
        found = {student: path for student, path in found.items() if student in given.students}
    if not found:
        raise ValueError(f"no submission in {given.submissions}: it holds a folder or a .zip for each student")
    seeds = seeds_of(out, lab, fresh=given.fresh_seeds)
    grader = _grader_digest(lab)
    with tempfile.TemporaryDirectory(prefix=f"mlf-{os.getpid()}-", dir=RUNTIME) as scratch:
        job = _job(lab, seeds, grader, out, Path(scratch), isolated=not given.no_sandbox)
        pending: dict[str, tuple[Path, str]] = {}
        finished: dict[str, dict[str, Any]] = {}
        for student, path in found.items():
            digest = digest_of(grader, seeds.name, f"isolated={job.isolated}", _contents(path, lab))
            kept = None if given.regrade else read_result(outputs.result_path(out, lab, student))
            if kept is not None and kept["digest"] == digest and kept["student"] == student:
                finished[student] = kept
            else:
                pending[student] = (path, digest)
        for result in finished.values():
            outputs.publish(out, lab, result)
        gradebook.merge(out / "gradebook.db", lab, finished)
        failed: list[str] = []
        label, bar_off = lab.name, not sys.stderr.isatty() and not given.progress
        with tqdm(total=len(found), initial=len(finished), desc=label, unit="submission", disable=bar_off) as bar:
            for student in run_all(job, pending, out, given.jobs):
                result = read_result(outputs.result_path(out, lab, student))
                if result is None or result["digest"] != pending[student][1]:
                    failed.append(student)
                else:
                    finished[student] = result
                    outputs.publish(out, lab, result)
                    gradebook.merge(out / "gradebook.db", lab, {student: result})
                bar.update()
    outputs.write_csv(out, lab)
    print(outputs.table(lab, finished))
    print(f"{len(found)} submissions: {len(pending) - len(failed)} graded now, {len(found) - len(pending)} as before")
    print(f"{out / lab.name}: grades.csv, feedback/, gradescope/, results/; gradebook: {out / 'gradebook.db'}")
    for student in failed:
        log = outputs.log_path(out, lab, student)
        print(f"NOT GRADED: {student} (the grader failed, see {log}); run again to retry", file=sys.stderr)
    return 1 if failed else 0


def _job(lab: Lab, seeds: Seeds, grader: str, out: Path, scratch: Path, *, isolated: bool) -> Job:
    """What all submissions share: gradebooks with the lab in them, and what the solution gives."""
    template = scratch / "template.db"
    gradebook.register(template, lab, scratch / "release")
    gradebook.register(out / "gradebook.db", lab, scratch / "release")
    outputs.write_config(out)
    expected = out / lab.name / "expected" / digest_of(grader, seeds.name)[:20]
    if expected.parent.is_dir():
        for old in expected.parent.iterdir():
            if old != expected:
                shutil.rmtree(old, ignore_errors=True)
    expected_observations(lab, seeds.scenarios, expected)
    expected.parent.chmod(0o700)
    return Job(lab, seeds, template, expected, isolated)


def _contents(path: Path, lab: Lab) -> dict[str, bytes]:
    """What a grade depends on in a submission, for its digest."""
    try:
        submission = collect(path, lab)
    except UnreadableSubmission as error:
        return {"unreadable": str(error).encode()}
    return {**submission.files, "/notes": "\n".join(submission.notes).encode()}


def _grader_digest(lab: Lab) -> str:
    course = files_below(lab.solution, lab.released, ROOT / "grading", ROOT / "utils")
    course = {path: content for path, content in course.items() if Path(path).name not in SHOWS_ONLY}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in VERSIONED]
    return digest_of(course, f"python {sys.version_info[:2]}", *versions)


@contextlib.contextmanager
def _only_one(out: Path) -> Iterator[TextIO]:
    """Hold the folder of grades for this run alone.

    Raises:
        ValueError: another run has it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another run is grading into {out}; wait for it, or choose another --out") from error
        yield lock


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grading.grade", description="Grade a class's submissions of a lab."
    )
    parser.add_argument("lab", help="lab2, or lab2_triton_kernels")
    parser.add_argument("--submissions", type=Path, required=True, help="a folder with a folder or .zip a student")
    parser.add_argument("--out", type=Path, default=Path("grades"), help="where grades go (default: grades)")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="submissions at a time")
    parser.add_argument("--students", nargs="+", metavar="STUDENT", help="grade these only")
    parser.add_argument("--regrade", action="store_true", help="grade again what is graded already")
    parser.add_argument("--fresh-seeds", action="store_true", help="draw new hidden inputs, and grade everything again")
    parser.add_argument("--no-sandbox", action="store_true", help="run students' code unprotected on this machine")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even where it is not a terminal")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
