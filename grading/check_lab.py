"""A student's view of a lab: the points of each exercise, as the class grader would give them without hidden tests.

    python -m grading.check_lab lab3                    every exercise, one line each, and the sum
    python -m grading.check_lab lab3 --exercise 3.2     one exercise, with the whole message
    python -m grading.check_lab lab3 --verbose          every exercise, with the whole messages

The checks of the notebook are run on your files in ``labs/``, in your own environment and without a sandbox, on a copy:
nothing in ``labs/`` changes. An exercise that ends Python, or that does not end, costs its own points only. The class
grader draws other cases, and compares with the solution on inputs that nobody sees. The exit status is 0 if everything
that was asked for passed, else 1; a voluntary exercise that is not attempted counts as passed there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from grading.feedback import OUTCOMES, plain, points
from grading.handed_out import leave_the_rest
from grading.lab import ROOT, Exercise, Lab, find_lab
from grading.policy import violations
from grading.release import generate_lab
from grading.strip import strip_source
from grading.submission import HandedIn, collect
from utils.stubs import STUB, not_written

#: Seconds that an exercise's check may take.
TIMEOUT = 120.0
UNWRITTEN = re.compile(r"(?P<number>\d+\.\d+) is not written yet")
PREFIX = re.compile(r"exercise \d+\.\d+ \(.*?\): ")


@dataclass(frozen=True)
class Checked:
    """What became of an exercise: one of :data:`grading.feedback.OUTCOMES`, and what its check said."""

    exercise: Exercise
    outcome: str
    message: str
    seconds: float

    @property
    def score(self) -> float:
        """The exercise's points if it passed, else 0."""
        return self.exercise.points if self.outcome == "passed" else 0.0

    @property
    def is_left(self) -> bool:
        """Whether it is a voluntary exercise that nobody attempted."""
        return self.exercise.voluntary and self.outcome == "not attempted"


def main(arguments: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the command line above on the course in ``root``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m grading.check_lab", description="The points of your answers, exercise by exercise."
    )
    parser.add_argument("lab", help="lab3, 3 or lab3_flash_attention")
    parser.add_argument("--exercise", nargs="+", metavar="N.M", help="only these exercises, with their whole messages")
    parser.add_argument("--verbose", action="store_true", help="show the whole messages")
    parser.add_argument("--folder", type=Path, help="where your files of the lab are (default: labs/LAB)")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT, help="seconds for one exercise (default: %(default)g)"
    )
    options = parser.parse_args(arguments)
    try:
        lab = find_lab(options.lab, root)
        wanted = [lab.exercise(number) for number in options.exercise or ()] or list(lab.exercises)
        started = time.monotonic()
        checked = []
        for found in check(lab, options.folder or lab.released, wanted, timeout=options.timeout, note=print):
            checked.append(found)
            print(line(found, lab, _columns()), flush=True)
            if (options.verbose or options.exercise) and found.message:
                print(_indented(found.message), flush=True)
    except ValueError as error:
        parser.error(str(error))
    return _report(lab, checked, time.monotonic() - started, whole=bool(options.verbose or options.exercise))


def _columns() -> int:
    return shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160


def _indented(message: str) -> str:
    return "".join(f"    {text}".rstrip() + "\n" for text in plain(message).rstrip("\n").split("\n"))


def line(checked: Checked, lab: Lab, columns: int = 160) -> str:
    """One exercise as the table shows it: number, title, points, and the verdict with its first words."""
    exercise = checked.exercise
    name = f"{exercise.number:<5}{exercise.title}"
    width = max(len(f"{e.number:<5}{e.title}") for e in lab.exercises)
    score = "voluntary" if exercise.voluntary else f"{points(checked.score):>3} / {points(exercise.points):<3}"
    text = f"{name:<{width}}  {score}  {_verdict(checked)}"
    return text if len(text) <= columns else text[: columns - 2] + " …"


def _verdict(checked: Checked) -> str:
    outcome = OUTCOMES[checked.outcome]
    if checked.outcome in ("passed", "not attempted") and not UNWRITTEN.match(checked.message):
        return outcome.symbol if checked.outcome == "passed" else f"{outcome.symbol} {outcome.words}"
    if checked.outcome == "not attempted":
        needed = UNWRITTEN.match(checked.message)["number"]
        return f"{outcome.symbol} {outcome.words}" + (f": it needs {needed}" * (needed != checked.exercise.number))
    first = PREFIX.sub("", plain(checked.message).strip().split("\n")[0], count=1)
    return f"{outcome.symbol} {first}" if checked.outcome == "failed" else f"{outcome.symbol} {outcome.words}: {first}"


def _report(lab: Lab, checked: Sequence[Checked], seconds: float, *, whole: bool) -> int:
    score, most = sum(found.score for found in checked), sum(found.exercise.points for found in checked)
    print(f"\n{points(score)} of {points(most)} points, in {seconds:.0f} s")
    missed = [found for found in checked if found.outcome != "passed" and not found.is_left]
    told = [found.exercise.number for found in missed if found.outcome != "not attempted"]
    if told and not whole:
        short = lab.name.split("_")[0]
        print(
            f"The whole message of one: {Path(sys.executable).name} -m grading.check_lab {short} --exercise {told[0]}"
        )
    if not missed:
        print("The class grader draws other cases, so an answer that fits these only will not pass there.")
    return 1 if missed else 0


# ---- what is run ----
def check(
    lab: Lab,
    folder: Path,
    wanted: Iterable[Exercise],
    *,
    timeout: float = TIMEOUT,
    note: Callable[[str], object] = print,
    imports: str | None = None,
) -> Iterator[Checked]:
    """Check the ``wanted`` exercises on the files in ``folder``, one after another; yields each as it ends.

    Args:
        lab: the lab, with its solutions.
        folder: the student's files of it.
        wanted: exercises of the lab, in the order in which they are to be checked.
        timeout: seconds for one exercise.
        note: is told what a student should know about the files as a whole.
        imports: what is run before the checks; by default :func:`imports_of` the lab.

    Raises:
        ValueError: ``folder`` holds no file of the lab.
    """
    with tempfile.TemporaryDirectory(prefix="check-lab-") as scratch, _Process() as first:
        copy = Path(scratch) / lab.name
        refused = _prepare(lab, folder, copy, Path(scratch) / "released", note)
        for found in _run(first, copy, imports_of(lab) if imports is None else imports, list(wanted), timeout):
            stub = UNWRITTEN.match(found.message) if found.outcome == "not attempted" else None
            if stub and stub["number"] in refused:
                found = replace(found, outcome="refused", message=refused[stub["number"]])
            yield found


def _prepare(lab: Lab, folder: Path, copy: Path, released: Path, note: Callable[[str], object]) -> dict[str, str]:
    """Make the lab that is checked: as handed out, with the student's files where the grader would take them.

    Returns:
        For each exercise that is written in a refused file: why it is refused.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}")
    for home in (released, copy):
        hand_out(lab, home)
    if folder.resolve() == lab.solution.resolve():
        folder = _finished(lab, released.with_name("finished"))
    lab = replace(lab, released=released)
    submission = collect(HandedIn("", (("", folder),)), lab)
    for text in submission.notes:
        note(f"note: {text}")
    refused: dict[str, str] = {}
    for name, content in submission.files.items():
        if not name.endswith(".py"):
            continue
        found = violations(content, name, lab)
        if not found:
            (copy / name).write_bytes(content)
            continue
        why = "\n".join(f"{name}, {violation}" for violation in found)
        stub = (released / name).read_text(encoding="utf-8") if (released / name).is_file() else ""
        numbers = sorted({match["number"] for match in STUB.finditer(stub)})
        refused |= dict.fromkeys(numbers, why)
        if not numbers:
            note(f"note: {why}\nnote: {name} is refused, so the lab's own is used")
    return refused


def _finished(lab: Lab, folder: Path) -> Path:
    """A copy of the lab's solutions, without what is not handed out: its modules need no more."""
    shutil.copytree(lab.solution, folder, ignore=shutil.ignore_patterns("__pycache__", "answers"))
    leave_the_rest(folder)
    return folder


def hand_out(lab: Lab, folder: Path) -> None:
    """Write the lab into a folder as it is handed out."""
    for name, content in generate_lab(lab.solution).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _run(first: _Process, copy: Path, imports: str, pending: list[Exercise], timeout: float) -> Iterator[Checked]:
    """Run checks in one process after another: a new one only when an exercise has ended or outlasted the old one."""
    for process in itertools.chain([first], iter(_Process, None)):
        with process:
            process.begin(copy, imports, pending)
            ready = process.answer(TIMEOUT)  # to import PyTorch and Triton takes seconds, however short an exercise is
            if "ready" not in ready:
                why = ready.get("error") or process.how_it_ended()
                for exercise in pending:
                    yield Checked(exercise, "failed", f"your files cannot be imported: {why}", 0.0)
                return
            while pending:
                exercise, started = pending.pop(0), time.monotonic()
                answer = process.answer(timeout)
                seconds = time.monotonic() - started
                if answer:
                    yield Checked(exercise, answer["outcome"], answer["message"], seconds)
                    continue
                if process.is_alive():
                    yield Checked(exercise, "timed out", f"it did not end within {timeout:g} seconds", seconds)
                else:
                    yield Checked(exercise, "crashed", process.how_it_ended(), seconds)
                break
        if not pending:
            return


def imports_of(lab: Lab) -> str:
    """The notebook's cell of imports, without the magics of a notebook."""
    notebook = json.loads((lab.solution / f"{lab.name}.ipynb").read_text(encoding="utf-8"))
    cell = next((cell for cell in notebook["cells"] if cell.get("id") == "imports"), None)
    if cell is None:
        raise ValueError(f"{lab.name}: the notebook has no cell with the id 'imports'")
    return "\n".join(text for text in "".join(cell["source"]).split("\n") if not text.startswith("%"))


class _Process:
    """A fresh Python that runs the checks of some exercises in order and reports each; with all that it starts, it is
    gone at the end of the ``with`` block.

    It imports PyTorch at once, so that what it is to run may be made ready meanwhile.
    """

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._reports, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(theirs,))
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reports.closed:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session, with the ranks that it started
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.join()
        self._reports.close()

    def begin(self, copy: Path, imports: str, exercises: Iterable[Exercise]) -> None:
        """Let it run the ``imports`` and the checks of these exercises on the files in ``copy``."""
        checks = [strip_source(exercise.source, exercise.grade_id) for exercise in exercises]  # without hidden tests
        job = {"folder": str(copy), "imports": imports, "checks": checks}
        with contextlib.suppress(BrokenPipeError):  # then it gives no answer, which the caller sees
            self._reports.send_bytes(json.dumps(job).encode())

    def answer(self, timeout: float) -> Mapping[str, str]:
        """The next report; empty when none came in time, or when the process ended."""
        try:
            return json.loads(self._reports.recv_bytes()) if self._reports.poll(timeout) else {}
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return {}

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def how_it_ended(self) -> str:
        """Why a process that was to go on did not."""
        status = self._process.exitcode
        if status is None:
            return "Python did not answer in time"
        if status < 0:
            return f"it ended Python itself, by {signal.Signals(-status).name}"
        return f"it ended Python itself, with exit status {status}"


# ---- in the process that runs a student's code ----
def _work(reports: Connection) -> None:
    os.setsid()
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    sys.path.insert(0, str(ROOT))
    with contextlib.suppress(Exception):  # the notebook's imports then fail with the same words
        import utils.runtime  # noqa: F401  (with PyTorch)
    try:
        job = json.loads(reports.recv_bytes())
    except EOFError:
        return
    folder = job["folder"]
    os.chdir(folder)
    space: dict[str, object] = {"__name__": "check_lab"}
    try:
        exec(compile(job["imports"], "<the notebook's imports>", "exec"), space)
    except BaseException as error:
        reports.send_bytes(json.dumps({"error": _told(error, folder)}).encode())
        return
    reports.send_bytes(json.dumps({"ready": "yes"}).encode())
    for source in job["checks"]:
        reports.send_bytes(json.dumps(_outcome(source, space, folder)).encode())


def _outcome(source: str, space: dict[str, object], folder: str) -> dict[str, str]:
    try:
        exec(compile(source, "<the notebook's check>", "exec"), space)
    except BaseException as error:
        unwritten = not_written(error, [Path(folder)])
        return {"outcome": "not attempted" if unwritten else "failed", "message": unwritten or _told(error, folder)}
    return {"outcome": "passed", "message": ""}


def _told(error: BaseException, folder: str) -> str:
    """An error as a student reads it: a check's own words, or the error with the line of theirs that raised it."""
    text = str(error)
    if isinstance(error, AssertionError):
        return text or type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    where = [f"  {Path(f.filename).name}, line {f.lineno}, in {f.name}: {f.line}" for f in frames]
    return "\n".join([f"{type(error).__name__}: {text}".rstrip(": "), *where])


if __name__ == "__main__":
    sys.exit(main())
