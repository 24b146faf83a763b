"""The hidden scenarios of a lab, run on a submission in a sandbox and on the solution outside of one.

What is expected is computed from ``solutions/`` in a process of its own that the student's code never meets, once for a
lab and a seed, by the first worker that needs it. What the submission gives comes out of its sandbox as files, and is
compared here.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grading.lab import ROOT, Lab, checks_of
from grading.results import Verdict
from grading.sandbox import Limits, Sandbox
from utils.atomic_write import write_atomically

SHOWN = {"grading/__init__.py": ROOT / "grading" / "__init__.py", "grading/scenarios": ROOT / "grading" / "scenarios"}
DIFFERENT = "The check passes, but "
#: Seconds that a scenario may take.
EACH = 60.0
#: What the name of a folder begins with while the solution writes into it.
UNFINISHED = ".expected-"
#: What the name of the file ends with that says why the solution failed.
FAILED = ".failed"


class SolutionFails(RuntimeError):
    """The course's own solution does not get through its checks or scenarios: a mistake in the course."""


def expected_observations(lab: Lab, seed: int, folder: Path, *, timeout: float = 600.0) -> Path:
    """The folder with what the solution gives, made in ``folder`` unless it is there.

    Of several processes that want the same folder at the same time, one makes it and the others wait for it. Where the
    solution fails, it is not run again for the others: the reason is kept, for :func:`solution_failure`.

    Raises:
        SolutionFails: the scenarios do not run on the solution.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failure := solution_failure(folder):
            raise SolutionFails(failure)
        if not folder.is_dir():
            try:
                _run_solution(lab, seed, folder, timeout)
            except SolutionFails as error:
                keep_failure(folder, error)
                raise
    return folder


def keep_failure(folder: Path, error: SolutionFails) -> None:
    """Keep why the solution failed beside ``folder``, for :func:`solution_failure`."""
    write_atomically(folder.with_name(f"{folder.name}{FAILED}"), str(error).encode(), mode=0o600)


def solution_failure(folder: Path) -> str:
    """Why the solution failed where ``folder`` would be; empty if it did not. The text may hold hidden inputs."""
    try:
        return folder.with_name(f"{folder.name}{FAILED}").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _run_solution(lab: Lab, seed: int, folder: Path, timeout: float) -> None:
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=UNFINISHED))
    environment = {**os.environ, "MLF_DEVICE": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        # whatever ends the worker ends what it waits for
        program = _program(lab.name, lab.solution.parent, seed, made, parent=os.getpid())
        ran = subprocess.run(
            program, env=environment, cwd=made, capture_output=True, text=True, timeout=timeout, check=False
        )
        if ran.returncode:
            raise SolutionFails(f"{lab.name}: the scenarios end with {ran.returncode}:\n{ran.stderr[-2000:]}")
        _compare(made, made, lab, [exercise.number for exercise in lab.exercises], lab.solution)
        os.rename(made, folder)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise SolutionFails(f"{lab.name}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def observe(
    lab: Lab, submission: Path, seed: int, numbers: Sequence[str], out: Path, *, limits: Limits, isolated: bool
) -> dict[str, Verdict]:
    """Run the scenarios of ``numbers`` on a submission; a verdict for each that never came to an end.

    A scenario that ends its process or takes too long costs itself only: the rest runs in a new sandbox.
    """
    ended: dict[str, Verdict] = {}
    left = list(numbers)
    out.mkdir(parents=True, exist_ok=True)
    while left:
        with Sandbox(submission, shown=SHOWN | checks_of(lab), limits=limits, isolated=isolated) as sandbox:
            place = sandbox.folder / "observed"
            place.mkdir()
            status = sandbox.run(_program(lab.name, sandbox.work, seed, place, left))
            begun = [number for number in left if os.path.lexists(place / f"{number}.started")]
            _take(place, out, begun)
            if status == 0:
                break
            stopped = begun[-1] if begun else left[0]
            why, late = sandbox.killed or "it ended Python itself", bool(sandbox.killed and "longer" in sandbox.killed)
        ended[stopped] = Verdict("timed out" if late else "crashed", f"{DIFFERENT}on hidden inputs {why}.")
        if not begun:
            ended |= dict.fromkeys(left, ended[stopped])
            break
        left = left[left.index(stopped) + 1 :]
    return ended


def compared(lab: Lab, expected: Path, got: Path, numbers: Sequence[str], submission: Path) -> dict[str, Verdict]:
    """A verdict for each of ``numbers`` whose observations are not those of the solution."""
    reasons, errors = _compare(expected, got, lab, numbers, submission / lab.name)
    return {
        number: Verdict("failed", DIFFERENT + reason, private=errors.get(number, ""))
        for number, reason in reasons.items()
        if reason
    }


def scenario_limits(limits: Limits, seconds: float, count: int) -> Limits:
    """The limits of one run of ``count`` scenarios: those of the submission, in ``seconds`` or more.

    Each scenario has :data:`EACH` seconds of its own; the run must not end before, for it would end one that is right
    because others took long.
    """
    return replace(limits, seconds=max(seconds, (count + 1) * EACH))


def _compare(
    expected: Path, got: Path, lab: Lab, numbers: Sequence[str], package: Path
) -> tuple[dict[str, str | None], dict[str, str]]:
    import torch  # the rest of the grader does without

    from grading.scenarios.compare import compare, errors

    # a process that is forked finds the threads of its parent's torch gone, and would wait for them forever
    torch.set_num_threads(1)
    if not numbers:
        return {}, {}
    return compare(expected, got, lab.name, list(numbers), package), errors(got, numbers)


def _program(
    name: str, root: Path, seed: int, out: Path, only: Sequence[str] = (), parent: int | None = None
) -> list[str]:
    program = [sys.executable, "-P", "-m"]
    program += [] if parent is None else ["grading.with_parent", str(parent)]
    program += ["grading.scenarios", name, "--package-root", str(root)]
    program += ["--seed", str(seed), "--out", str(out), "--limit", str(EACH)]
    return [*program, *(["--only", *only] if only else [])]


def _take(place: Path, out: Path, numbers: Sequence[str]) -> None:
    """Copy what a sandbox wrote for ``numbers``: plain files of the expected names only."""
    for number in numbers:
        for ending in (".started", ".json", ".safetensors"):
            path = place / f"{number}{ending}"
            if path.is_file() and not path.is_symlink():
                shutil.copyfile(path, out / path.name, follow_symlinks=False)
