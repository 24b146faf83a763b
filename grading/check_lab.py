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
import ast
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grading.check_process import CheckProcess, Work
from grading.feedback import OUTCOMES, plain, points
from grading.handed_out import leave_the_rest
from grading.lab import ROOT, Exercise, Lab, find_lab
from grading.release import generate_lab
from grading.submission import HandedIn, collect

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
) -> Iterator[Checked]:
    """Check the ``wanted`` exercises on the files in ``folder``, one after another; yields each as it ends.

    Args:
        lab: the lab, with its solutions.
        folder: the student's files of it.
        wanted: exercises of the lab, in the order in which they are to be checked.
        timeout: seconds for one exercise.
        note: is told what a student should know about the files as a whole.

    Raises:
        ValueError: ``folder`` holds no file of the lab.
    """
    wanted = list(wanted)
    with tempfile.TemporaryDirectory(prefix="check-lab-") as scratch:
        copy = Path(scratch) / lab.name
        lab, files = _handed_in(lab, folder, copy, Path(scratch) / "released", note)
        work = Work(lab, copy, files, needed(imports_of(lab), wanted))
        yield from _run(work, wanted, timeout, note)


def _handed_in(
    lab: Lab, folder: Path, copy: Path, released: Path, note: Callable[[str], object]
) -> tuple[Lab, dict[str, bytes]]:
    """Hand the lab out, twice: into ``released``, and into ``copy``, where it is checked.

    Returns:
        The lab as ``released``, and the modules of the student's that the grader would take and that are not as
        released, by name.
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
    modules = {name: content for name, content in submission.files.items() if name.endswith(".py")}
    return lab, {name: content for name, content in modules.items() if not _is_as_released(released / name, content)}


def _is_as_released(file: Path, content: bytes) -> bool:
    return file.is_file() and file.read_bytes() == content


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


def _run(work: Work, pending: list[Exercise], timeout: float, note: Callable[[str], object]) -> Iterator[Checked]:
    """Run checks in one process after another: a new one only when an exercise has ended or outlasted the old one."""
    refused: dict[str, str] = {}
    while pending:
        with CheckProcess(work, pending) as process:
            ready = process.answer(TIMEOUT)  # to import PyTorch and Triton takes seconds, however short an exercise is
            refused |= ready.get("refused", {})
            for text in ready.get("notes", ()):
                note(text)
            if "ready" not in ready:
                why = ready.get("error") or process.how_it_ended()
                for exercise in pending:
                    yield Checked(exercise, "failed", f"your files cannot be imported: {why}", 0.0)
                return
            work = replace(work, files={})  # what may be taken stands in the copy now
            while pending:
                exercise, started = pending.pop(0), time.monotonic()
                answer = process.answer(timeout)
                seconds = time.monotonic() - started
                if answer:
                    yield Checked(exercise, *_outcome(answer, refused), seconds)
                    continue
                if process.is_alive():
                    yield Checked(exercise, "timed out", f"it did not end within {timeout:g} seconds", seconds)
                else:
                    yield Checked(exercise, "crashed", process.how_it_ended(), seconds)
                break


def _outcome(answer: Mapping[str, str], refused: Mapping[str, str]) -> tuple[str, str]:
    """What became of an exercise, and what is said of it; it may not be written only because its file was refused."""
    outcome, message = answer["outcome"], answer["message"]
    stub = UNWRITTEN.match(message) if outcome == "not attempted" else None
    if stub and stub["number"] in refused:
        return "refused", refused[stub["number"]]
    return outcome, message


def imports_of(lab: Lab) -> str:
    """The notebook's cell of imports, without the magics of a notebook."""
    notebook = json.loads((lab.solution / f"{lab.name}.ipynb").read_text(encoding="utf-8"))
    cell = next((cell for cell in notebook["cells"] if cell.get("id") == "imports"), None)
    if cell is None:
        raise ValueError(f"{lab.name}: the notebook has no cell with the id 'imports'")
    return "\n".join(text for text in "".join(cell["source"]).split("\n") if not text.startswith("%"))


def needed(imports: str, wanted: Iterable[Exercise]) -> str:
    """Of a notebook's imports, the statements that give its checks their names: no plots, no servers."""
    statements = ast.parse(imports).body
    others = [each for each in statements if not isinstance(each, ast.Import | ast.ImportFrom)]
    used = [node for tree in (*others, *(ast.parse(e.source) for e in wanted)) for node in ast.walk(tree)]
    names = {node.id for node in used if isinstance(node, ast.Name)}
    kept = [each for each in statements if each in others or names & {a.asname or a.name for a in each.names}]
    return "\n".join(map(ast.unparse, kept))


if __name__ == "__main__":
    sys.exit(main())
