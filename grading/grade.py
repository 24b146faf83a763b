"""Grades a class: ``python -m grading.grade LAB --submissions DIR``, or ``make grade LAB=lab2 SUBMISSIONS=DIR``.

One process per submission, several at a time. Each result is stored with a digest of everything that it was made from,
so a second run grades what changed and nothing else, and a run that was killed continues where it was. At the end the
gradebook, the feedback pages and the table are written from the results.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from grading import feedback_archive, lateness, outputs
from grading.archives import UnreadableSubmission
from grading.class_folder import Class, Ungraded, find_submissions
from grading.cluster import run_on
from grading.lab import ROOT, Lab, find_lab
from grading.look import OUTDATED, Note
from grading.observed import FAILED, UNFINISHED, solution_failure
from grading.pool import run_all
from grading.results import corrected, digest_of, files_below, read_result, without
from grading.roster import Roster, key, read_roster, turned
from grading.sandbox import SandboxUnavailable, remove_leftovers, require
from grading.seeds import ClassSeeds, seeds_of
from grading.similar import NotCompared, Similar, similar_in
from grading.submission import HandedIn, collect
from grading.term import FILE, Term, read_term
from grading.worker import Job

if TYPE_CHECKING:
    from grading.gradebook import Correction

#: Modules that change no grade.
SHOWS_ONLY = (
    "feedback.py",
    "gradescope.py",
    "export.py",
    "gradebook.py",
    "nbgrader_config.py",
    "outputs.py",
    "check_lab.py",
    "roster.py",
    "class_folder.py",
    "cluster.py",
    "times.py",
    "term.py",
    "lateness.py",
    "feedback_archive.py",
    "look.py",
    "similar.py",
)
WAITING = "not graded yet"  # a line of the table: handed in, and not chosen so far
VERSIONED = ("torch", "triton", "numpy", "nbclient", "ipykernel")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns:
        0 when every submission has a grade, but for those that the table calls *not graded*; 1 when the grader failed
        on one; 2 when nothing could be graded.
    """
    given = _parser().parse_args(arguments)
    try:
        lab = find_lab(given.lab)
        if given.no_sandbox:
            print("No sandbox: the submissions' code runs on this machine as you, with your files and your network.")
        elif not given.cluster:  # its workers are asked themselves
            require()
        with _only_one(given.out):
            return _grade_class(lab, given)
    except (ValueError, SandboxUnavailable) as error:
        print(f"grading.grade: {error}", file=sys.stderr)
        if isinstance(error, SandboxUnavailable):
            print("Untrusted code is not run without it, unless you say --no-sandbox.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. What is graded is kept; run the same command again to go on.", file=sys.stderr)
        return 130


def _grade_class(lab: Lab, given: argparse.Namespace) -> int:
    from grading import gradebook  # nbgrader takes seconds to import, and a worker does without

    out: Path = given.out.resolve()
    if given.submissions.resolve().is_relative_to(out / "submitted"):
        raise ValueError(f"{out / 'submitted'} holds this grader's own copies: choose another --out, or move it away")
    remove_leftovers()
    roster = read_roster(given.roster) if given.roster else None
    term = read_term(out / FILE, lab, roster)
    everyone, chosen = _submissions(lab, given, roster)
    absent = lateness.prepared(term, term.assigned(lab), everyone)
    gradebook.register(out / "gradebook.db", lab, term.skip)
    outputs.write_config(out)
    seeds = seeds_of(out, lab, fresh=given.fresh_seeds)
    grader = _grader_digest(lab)
    job = Job(lab, seeds, _expected(lab, seeds, grader, out), isolated=not given.no_sandbox)
    results: dict[str, dict[str, Any]] = {}
    pending: dict[str, tuple[HandedIn, str]] = {}
    for student, handed_in in chosen.items():
        digest = digest_of(grader, seeds.of(student).name, f"isolated={job.isolated}", _contents(handed_in, lab))
        kept = None if given.regrade else _result_of(digest, out, lab, student)
        if kept is None:
            pending[student] = (handed_in, digest)
        else:
            results[student] = kept
    failed: list[str] = []
    with tqdm(total=len(chosen), initial=len(results), desc=lab.name, unit="submission", disable=None) as bar:
        ended = (
            run_on(given.cluster, job, pending, out, _grader_digest)
            if given.cluster
            else run_all(job, pending, out, given.jobs)
        )
        for student in ended:
            result = _result_of(pending[student][1], out, lab, student)
            if result is None:
                failed.append(student)
            else:
                results[student] = result
            bar.update()
    gradebook.enter(out, lab, {student: without(one, term.skip) for student, one in (results | absent).items()})
    everyone.ungraded += [Ungraded(student, _why_failed(job, out, student)) for student in failed]
    results = _publish(out, lab, everyone, set(failed), gradebook.corrections(out / "gradebook.db", lab), term, absent)
    gradebook.enter_term(out / "gradebook.db", lab, results, term.due)
    shown = {student: result for student, result in results.items() if student in chosen}
    _report(out, term.assigned(lab), shown, len(pending) - len(failed), everyone)
    return 1 if failed else 0


def _submissions(lab: Lab, given: argparse.Namespace, roster: Roster | None) -> tuple[Class, dict[str, HandedIn]]:
    """Everything in the folder of submissions, and what is to be graded of it, by student.

    Raises:
        ValueError: there is nothing in it, or one that was chosen is missing.
    """
    folder: Path = given.submissions
    found = find_submissions(folder.resolve(), lab, roster)
    chosen = [_student(name, found, roster or Roster()) for name in given.students or ()]
    if unknown := set(chosen) - set(found.handed_in):
        why = [f"{line.student}: {line.why}" for line in found.ungraded if line.student in unknown]
        raise ValueError("; ".join([f"no submission of {', '.join(sorted(unknown))} in {folder}", *why]))
    if not found.handed_in and not found.ungraded:
        raise ValueError(f"no submission in {folder}: it must hold a folder or an archive for each student")
    return found, {student: one for student, one in found.handed_in.items() if student in (chosen or found.handed_in)}


def _student(name: str, found: Class, roster: Roster) -> str:
    """The id of the student who is meant: by the id, by a name in the roster, or by a name that files write so."""
    if name in found.handed_in:
        return name
    alike = [student for student in found.handed_in if key(student) in (key(name), turned(name))]
    return roster.id_of([name]) or (alike[0] if len(alike) == 1 else name)


def _publish(
    out: Path,
    lab: Lab,
    everyone: Class,
    failed: Set[str],
    corrections: Mapping[str, Mapping[str, Correction]],
    term: Term,
    absent: Mapping[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Write pages, Gradescope's files, feedback archives and the table, with the scores that count; these results.

    Everybody's are written, also those of earlier runs, as long as the submission is still there.
    """
    kept = outputs.kept_results(out, lab, everyone.handed_in.keys() - failed - absent.keys()) | absent
    handed_in = dict(everyone.handed_in)
    results = {}
    for student, result in kept.items():
        by_hand = {number: one for number, one in corrections.get(student, {}).items() if number not in term.skip}
        results[student] = corrected(without(result, term.skip), {number: one.score for number, one in by_hand.items()})
        if outdated := sorted(number for number, one in by_hand.items() if one.outdated):
            note = (
                f"the automatic score of {', '.join(outdated)} has changed since it was corrected by hand: look again"
            )
            handed_in[student] = replace(handed_in[student], notes=(*handed_in[student].notes, Note(note, OUTDATED)))
    results = lateness.applied(term, results, everyone)
    outputs.publish(out, lab, results)
    for student, why in feedback_archive.write(out / lab.name, results, handed_in).items():
        handed_in[student] = replace(handed_in[student], notes=(*handed_in[student].notes, why))
    waiting = everyone.handed_in.keys() - kept.keys() - {line.student for line in everyone.ungraded}
    everyone.ungraded += [Ungraded(student, "grade without --students", WAITING) for student in sorted(waiting)]
    everyone.ungraded = lateness.lines(term, everyone.ungraded, results)
    pairs = _similar(out, lab, handed_in, results)
    outputs.write_csv(out, term.assigned(lab), results, handed_in, everyone.ungraded, pairs)
    return results


def _similar(out: Path, lab: Lab, handed_in: Mapping[str, HandedIn], students: Iterable[str]) -> list[Similar]:
    """The pairs of similar submissions, written to ``similar.csv``; no grade depends on them."""
    groups: dict[tuple[tuple[str, Path], ...], list[str]] = {}
    for student in students:
        groups.setdefault(handed_in[student].paths, []).append(student)
    folders = {student: outputs.submitted_path(out, lab, student) for student in students}
    try:
        pairs = similar_in(lab, folders, groups.values())
    except NotCompared as error:
        print(f"Similar submissions were not looked for: {error}.")
        outputs.similar_path(out, lab).unlink(missing_ok=True)
        return []
    outputs.write_similar(out, lab, pairs)
    return pairs


def _result_of(digest: str, out: Path, lab: Lab, student: str) -> dict[str, Any] | None:
    """The stored result of a student if it was made from what ``digest`` stands for, else None."""
    result = read_result(outputs.result_path(out, lab, student))
    return result if result and (result["digest"], result["student"]) == (digest, student) else None


def _why_failed(job: Job, out: Path, student: str) -> str:
    """Why a submission has no result, and what to do about it: for the instructor."""
    seeds = job.seeds.of(student)
    for place, where in (
        (job.expected_of(seeds), f"on set {seeds.input_set} of the hidden inputs, which is this student's"),
        (job.checked_of(seeds), "in checks with this student's hidden seeds"),
    ):
        if failure := solution_failure(place):
            return (
                f"the course's own solution fails {where}: the submission has no score yet, and may well be right; "
                "correct the course, or draw other hidden inputs for the class (--fresh-seeds). "
                f"What the solution said: {failure}"
            )
    return f"the grader failed: see {outputs.log_path(out, job.lab, student)}; run again"


def _expected(lab: Lab, seeds: ClassSeeds, grader: str, out: Path) -> Path:
    """The folder for what the solution gives in the hidden scenarios.

    What is older or unfinished is removed, and where the solution failed it is tried again.
    """
    expected = out / lab.name / "expected" / digest_of(grader, seeds.name)[:20]
    expected.mkdir(parents=True, exist_ok=True)
    expected.parent.chmod(0o700)
    old = [folder for folder in expected.parent.iterdir() if folder != expected]
    for folder in [*old, *expected.glob(f"{UNFINISHED}*")]:
        shutil.rmtree(folder, ignore_errors=True)
    for failure in expected.glob(f"*{FAILED}"):
        failure.unlink()
    return expected


def _report(out: Path, lab: Lab, results: Mapping[str, Any], graded: int, everyone: Class) -> None:
    ungraded = [line for line in everyone.ungraded if line.status != WAITING]
    print(outputs.table(lab, results, ungraded))
    rest = f"; without a score: {len(ungraded)}" if ungraded else ""
    count = f"{len(results)} submission" + "s" * (len(results) != 1)
    print(f"{count}: {graded} graded, {len(results) - graded} up to date{rest}")
    if gone := sorted({path.stem for path in (out / lab.name / "results").glob("*.json")} - everyone.handed_in.keys()):
        print(f"No longer handed in, so not in grades.csv: {', '.join(gone)}")
    print(f"{out / lab.name}: grades.csv, feedback/, gradescope/, results/; gradebook: {out / 'gradebook.db'}")
    print("What was left out, and what is odd about a submission, is in the column notes of grades.csv.")
    if unknown := sorted(student for student, one in results.items() if one["term"]["status"] == "time unknown"):
        print(f"TIME UNKNOWN, so no penalty: {', '.join(unknown)} (see times.csv in the guide)", file=sys.stderr)
    for line in ungraded:
        if line.status == "not graded":
            print(f"NOT GRADED: {line.student} ({line.why})", file=sys.stderr)


def _contents(handed_in: HandedIn, lab: Lab) -> dict[str, bytes]:
    """What a grade depends on in a submission, for its digest."""
    try:
        submission = collect(handed_in, lab)
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
    parser.add_argument(
        "--submissions", type=Path, required=True, help="the folder that holds a folder or an archive for each student"
    )
    parser.add_argument("--roster", type=Path, help="a CSV file of the class: who is missing is in the table")
    parser.add_argument("--out", type=Path, default=Path("grades"), help="where grades go (default: grades)")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="submissions at a time")
    parser.add_argument("--cluster", metavar="ADDRESS", help="grade on the workers of this Dask scheduler")
    parser.add_argument("--students", nargs="+", metavar="STUDENT", help="grade these only, by id or name")
    parser.add_argument("--regrade", action="store_true", help="grade again what is graded already")
    parser.add_argument("--fresh-seeds", action="store_true", help="draw new hidden inputs, and grade everything again")
    parser.add_argument("--no-sandbox", action="store_true", help="run students' code unprotected on this machine")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
