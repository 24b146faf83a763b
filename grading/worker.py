"""Grades one submission, from its files to its result; runs in a process of its own.

A failure costs one submission only: the worker has its own scratch folder and its own sandboxes, and writes nothing
but this submission's result and copy. The gradebook is written afterwards, by another process.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grading.archives import UnreadableSubmission
from grading.broken_modules import find_broken
from grading.graded_copy import VERIFY, graded_copy, notebook_notes
from grading.handed_out import leave_the_rest
from grading.kernel import run_checks
from grading.lab import EXERCISES, ROOT, Lab, checks_of
from grading.observed import (
    SolutionFails,
    compared,
    expected_observations,
    keep_failure,
    observe,
    scenario_limits,
)
from grading.policy import violations
from grading.results import Verdict, result, write_folder, write_json
from grading.sandbox import RUNTIME, Limits, Sandbox
from grading.seeds import ClassSeeds, Seeds
from grading.submission import HandedIn, Submission, collect
from grading.verdicts import attempted, explain, judge, not_graded

UNTOUCHED = "untouched.json"
SHOWN = {name: ROOT / name for name in ("grading/__init__.py", "grading/seal.py")}


@dataclass(frozen=True)
class Job:
    """What all submissions of one run have in common; ``expected`` is the folder of what the solution gives."""

    lab: Lab
    seeds: ClassSeeds
    expected: Path
    isolated: bool = True
    limits: Limits = field(default_factory=Limits)
    cell_seconds: int = 120
    import_seconds: int = 60

    def expected_of(self, seeds: Seeds) -> Path:
        """The folder of what the solution gives on a student's set of hidden inputs."""
        return self.expected / f"{seeds.input_set:02}"

    def checked_of(self, seeds: Seeds) -> Path:
        """Beside this is kept why the solution fails in a student's checks, if it does."""
        return self.expected / seeds.name


def grade(job: Job, handed_in: HandedIn, digest: str, submitted: Path) -> dict[str, Any]:
    """Grade a submission and return its result.

    Args:
        job: the run that it belongs to.
        handed_in: whose submission it is, and where.
        digest: what the result is filed under.
        submitted: the folder for a copy of the files that were read.

    Raises:
        SolutionFails: the course's own solution fails on this student's hidden seeds; the reason is kept.
    """
    started = time.monotonic()
    try:
        submission = collect(handed_in, job.lab)
    except UnreadableSubmission as error:
        write_folder(submitted, {})
        verdicts, seconds = not_graded(job.lab, str(error)), time.monotonic() - started
        return result(job.lab, handed_in.student, digest, verdicts, [str(error)], seconds, "unreadable")
    write_folder(submitted, submission.files)
    with tempfile.TemporaryDirectory(prefix=f"mlf-{os.getpid()}-", dir=RUNTIME) as scratch:
        grading = _Grading(job, submission, Path(scratch).resolve())
        verdicts = grading.verdicts()
    seconds = time.monotonic() - started
    return result(job.lab, submission.student, digest, verdicts, grading.notes, seconds)


def _modules(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def _read_untouched(path: Path, lab: Lab) -> dict[str, dict[str, Any]] | None:
    """What became of the checks of the release, if that is known."""
    try:
        ran = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return ran if ran.keys() == {exercise.number for exercise in lab.exercises} else None


class _Grading:
    """One submission on its way through policy, checks and scenarios."""

    def __init__(self, job: Job, submission: Submission, scratch: Path) -> None:
        self.job, self.lab, self.submission, self.scratch = job, job.lab, submission, scratch
        self.seeds = job.seeds.of(submission.student)
        self.files = scratch / "files"
        self.left_out: dict[str, Verdict] = {}
        self.notes = [*submission.notes, *notebook_notes(submission.files.get(job.lab.notebook.name), job.lab)]

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of each exercise, by its number.

        Checks with hidden seeds come first, then hidden scenarios for what passed them, then a run without anything
        hidden for the messages. What fails on a hidden seed only costs points if the solution passes there.

        Raises:
            SolutionFails: the course's own solution fails on this student's hidden seeds.
        """
        self._lay_out()
        lab, job = self.lab, self.job
        ran = self._checks()
        verdicts = judge(lab, ran, self.left_out)
        passing = [number for number, verdict in verdicts.items() if verdict.passed]
        if passing:
            observed = self.scratch / "observed"
            limits = scenario_limits(job.limits, job.cell_seconds, len(passing))
            seed = self.seeds.scenarios
            ended = observe(lab, self.files, seed, passing, observed, limits=limits, isolated=job.isolated)
            finished = [number for number in passing if number not in ended]
            expected = expected_observations(lab, seed, job.expected_of(self.seeds))
            verdicts |= ended | compared(lab, expected, observed, finished, self.files)
        wanted = [number for number in attempted(verdicts, self.left_out) if ran[number]["outcome"] == "error"]
        if wanted:
            shown = self._execute(None, wanted)
            verdicts |= explain(verdicts, shown)
            self._hold_solution([number for number in wanted if shown[number]["outcome"] == "ok"])
        return verdicts

    def _hold_solution(self, numbers: list[str]) -> None:
        """Hold the solution to the checks of ``numbers`` with the student's hidden seeds, where they cost points.

        Raises:
            SolutionFails: it fails one of them too.
        """
        if not numbers:
            return
        solution = _Grading(self.job, Submission(self.submission.student), self.scratch / "solution")
        left_out = shutil.ignore_patterns("__pycache__", "*.ipynb", EXERCISES, "answers")
        shutil.copytree(self.lab.solution, solution.files / self.lab.name, ignore=left_out)
        leave_the_rest(solution.files / self.lab.name)
        ran = solution._execute(self.seeds.checks, numbers)
        failing = [f"exercise {number}: {one['why']}" for number, one in ran.items() if one["outcome"] != "ok"]
        if failing:
            error = SolutionFails("; ".join(failing))
            keep_failure(self.job.checked_of(self.seeds), error)
            raise error

    def _lay_out(self) -> None:
        """The package that is imported: the release, with every module of the student's that the policy accepts."""
        package = self.files / self.lab.name
        shutil.copytree(self.lab.released, package, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb", EXERCISES))
        for name, content in self.submission.files.items():
            if not name.endswith(".py"):
                continue
            released = package / name
            found = violations(content, name, self.lab)
            if not found:
                released.write_bytes(content)
                continue
            why = "\n".join(map(str, found))
            self.left_out[name] = Verdict("refused", f"{name} was not run, because it breaks the rules:\n{why}")
            first = f"{name} was not run: {found[0]}"
            self.notes.append(first + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))

    def _checks(self) -> dict[str, dict[str, Any]]:
        """What became of each check with its hidden seed.

        Where nothing of the student's is left to run (nothing was written, or all of it was refused), the package is
        the release, and comes to the same for everybody: it is run once, with seeds that are no student's, and the
        others take what became of it.
        """
        kept = self.job.expected / UNTOUCHED
        if (untouched := self._is_untouched()) and (ran := _read_untouched(kept, self.lab)) is not None:
            return ran
        seeds = self.job.seeds.of(None) if untouched else self.seeds
        ran = self._execute(seeds.checks)
        if not any(one.get("imported", True) for one in ran.values()) and self._replace_broken():
            return self._checks()
        if untouched and all(one["outcome"] == "error" and one.get("intact") for one in ran.values()):
            write_json(kept, ran)
        return ran

    def _is_untouched(self) -> bool:
        """Whether the package that is imported is the release."""
        return _modules(self.files / self.lab.name) == _modules(self.lab.released)

    def _replace_broken(self) -> bool:
        """Put the handed out module in the place of one that cannot be imported; False when there is none."""
        package = self.files / self.lab.name

        def sandbox(shown: Mapping[str, Path]) -> Sandbox:
            limits = replace(self.job.limits, seconds=self.job.import_seconds)
            return Sandbox(self.files, shown=shown, limits=limits, isolated=self.job.isolated)

        broken = find_broken(self.lab, package, sandbox, self.job.import_seconds)
        if broken is None:
            return False
        released = self.lab.released / broken.module
        if released.is_file():
            shutil.copyfile(released, package / broken.module)
        else:
            (package / broken.module).unlink()
        self.left_out[broken.module] = Verdict(broken.outcome, f"{broken.why}. Nothing that is written in it counts.")
        self.notes.append(f"{broken.why}; the other modules were graded without it")
        return True

    def _execute(self, seeds: Mapping[str, int] | None, numbers: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Run checks in a sandboxed kernel; what became of each by exercise."""
        notebook = graded_copy(self.lab, seeds, numbers)
        job = self.job

        def sandbox() -> Sandbox:
            return Sandbox(self.files, shown=SHOWN | checks_of(self.lab), limits=job.limits, isolated=job.isolated)

        seconds, budget = job.cell_seconds, job.limits.seconds
        run_checks(notebook, sandbox, verify=VERIFY, seconds=seconds, import_seconds=job.import_seconds, budget=budget)
        numbers_by_id = {exercise.grade_id: exercise.number for exercise in self.lab.exercises}
        return {numbers_by_id[c.id]: c.metadata.grading["ran"] for c in notebook.cells if c.id in numbers_by_id}
