"""Holds a lab's right answers to full marks many times in a row, on the GPU if there is one.

    python -m tests.gpu_rounds lab3                                          ten rounds of each answer, then a table
    python -m tests.gpu_rounds lab3 --answers solution --rounds 3            of the lab's solution alone
    python -m tests.gpu_rounds lab3 --answers unusual --exercise 3.4 3.5     of unusual answers to two exercises
    python -m tests.gpu_rounds lab3 --budget 540                             as many rounds as end within nine minutes

Each round is what ``make check-lab`` does with a lab, but on the cases of another seed each time.
A limit of a speed or an error that is too tight, or a kernel that races, shows after some rounds as an exercise that
fails. The answers are the lab's solution, and hand-ins with one unusual answer to each exercise: as many hand-ins as it
takes until each unusual answer in ``solutions/LAB/answers`` was in one of them. Of such a hand-in the exercises with an
unusual answer are checked; the plain ones beside them are the solution's. With ``--exercise`` the other exercises have
plain answers, which shows whether an unusual one fails alone or only beside another. The first round starts with
an empty compiler cache, as a student's does; in later rounds the cache holds what the earlier ones compiled.

The rounds run one after another, because the checks compare times. Jupyter and nbgrader need not be installed, nor what
the lab's notebook imports for plots and servers. The exit status is 0 if every round was run and had full marks.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lab_places import write_lab  # noqa: E402

from grading.check_lab import TIMEOUT, Checked, check  # noqa: E402
from grading.feedback import plain, points  # noqa: E402
from grading.lab import Exercise, Lab, find_lab  # noqa: E402
from utils.checks.answers import Answers, EditedAnswer, answers_of  # noqa: E402

DEVICE = "from utils import runtime; print(runtime.gpu_name() or 'no GPU: the kernels run in the interpreter')"


@dataclass(frozen=True)
class HandIn:
    """Answers to all exercises of a lab; those named in ``unusual``, by exercise, are not the plain ones."""

    name: str
    unusual: Mapping[str, EditedAnswer] = field(default_factory=dict)

    def tried(self, wanted: Sequence[Exercise]) -> list[Exercise]:
        """Which of these exercises it is checked for: those with unusual answers, or all if it has none."""
        return [exercise for exercise in wanted if not self.unusual or exercise.number in self.unusual]

    def places(self, right: Mapping[str, str]) -> dict[str, str]:
        """What stands in each place of the lab: the plain answers with the edits of the unusual ones."""
        places = dict(right)
        for answer in self.unusual.values():
            places = answer.filled(places)
        return places

    def files(self, lab: Lab, right: Mapping[str, str], folder: Path) -> Path:
        """The folder of its files: the solution's own, or ``folder``, which is made."""
        if not self.unusual:
            return lab.solution
        write_lab(lab.name, folder, self.places(right))
        return folder


@dataclass(frozen=True)
class Round:
    """One check of a whole hand-in: the seed of its cases, the exercises that did not pass, and the seconds it took."""

    seed: int
    failed: Sequence[Checked]
    score: float
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Run the command line above; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_rounds", description=__doc__.split("\n")[0])
    parser.add_argument("lab", help="lab3, 3 or lab3_flash_attention")
    parser.add_argument("--rounds", type=int, default=10, help="of each answer (default: %(default)s)")
    parser.add_argument("--answers", choices=("solution", "unusual", "all"), default="all")
    parser.add_argument("--hand-in", type=int, nargs="+", metavar="N", help="only these of the unusual hand-ins")
    parser.add_argument("--budget", type=float, help="seconds: no round begins that would probably end after them")
    parser.add_argument("--exercise", nargs="+", metavar="N.M", help="only these exercises")
    parser.add_argument(
        "--seed", type=int, default=1000, help="of the first round; then one more each (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds per exercise (default: %(default)g)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    try:
        lab = find_lab(options.lab)
        wanted = [lab.exercise(number) for number in options.exercise or ()] or list(lab.exercises)
    except ValueError as error:
        parser.error(str(error))
    answers = answers_of(f"solutions.{lab.name}.answers")
    hand_ins = [HandIn("solution")] if options.answers != "unusual" else []
    hand_ins += unusual(answers, [exercise.number for exercise in wanted]) if options.answers != "solution" else []
    if options.hand_in:
        names = {f"unusual {number}" for number in options.hand_in}
        if missing := names - {hand_in.name for hand_in in hand_ins}:
            parser.error(f"there is no hand-in called {', '.join(sorted(missing))}")
        hand_ins = [hand_in for hand_in in hand_ins if hand_in.name in names]
    print(f"{lab.name} on {_device()}: {len(hand_ins)} answers, {options.rounds} rounds each", flush=True)
    end = time.monotonic() + options.budget if options.budget else float("inf")
    found: dict[str, list[Round]] = {}
    for hand_in in hand_ins:
        rounds = found[hand_in.name] = []
        seeds = range(options.seed, options.seed + options.rounds)
        tried = hand_in.tried(wanted)
        for played in play(hand_in, lab, answers.right, tried, seeds, options.timeout, end):
            rounds.append(played)
            print(told(hand_in, len(rounds), played, tried), flush=True)
    print(table(found, options.rounds))
    every = [played for rounds in found.values() for played in rounds]
    return int(len(every) < options.rounds * len(hand_ins) or any(played.failed for played in every))


def unusual(answers: Answers, numbers: Collection[str]) -> list[HandIn]:
    """Hand-ins that hold each unusual answer to these exercises once, as many in each as get along.

    Two answers to one exercise do not, nor two that edit the same place.
    """
    left = [answer for answer in answers.unusual if answer.exercise in numbers]
    hand_ins: list[HandIn] = []
    while left:
        taken: dict[str, EditedAnswer] = {}
        edited: set[str] = set()
        for answer in left:
            if answer.exercise not in taken and edited.isdisjoint(answer.edits):
                taken[answer.exercise] = answer
                edited |= answer.edits.keys()
        left = [answer for answer in left if answer is not taken.get(answer.exercise)]
        hand_ins.append(HandIn(f"unusual {len(hand_ins) + 1}", taken))
    return hand_ins


def play(
    hand_in: HandIn,
    lab: Lab,
    right: Mapping[str, str],
    wanted: Sequence[Exercise],
    seeds: Iterable[int],
    timeout: float,
    end: float,
) -> Iterator[Round]:
    """Check a hand-in once with each seed, from an empty compiler cache on.

    No round begins that may not be over at ``end``, in seconds of the monotonic clock. Each is taken to need what the
    one before it did; the first one takes longest.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-rounds-") as scratch, _compiler_cache(Path(scratch, "triton")):
        folder = hand_in.files(lab, right, Path(scratch, lab.name))
        note = print if hand_in.unusual else _ignored
        seconds = 0.0
        for seed in seeds:
            started = time.monotonic()
            if started + seconds > end:
                return
            drawn = [seeded(exercise, seed) for exercise in wanted]
            checked = list(check(lab, folder, drawn, timeout=timeout, note=note))
            seconds = time.monotonic() - started
            failed = [found for found in checked if found.outcome != "passed"]
            yield Round(seed, failed, sum(found.score for found in checked), seconds)


def seeded(exercise: Exercise, seed: int) -> Exercise:
    """An exercise whose check cell draws the cases of another seed.

    Raises:
        ValueError: the cell does not name exactly one seed.
    """
    source, count = re.subn(r"\bseed=\d+", f"seed={seed}", exercise.source)
    if count != 1:
        raise ValueError(f"the check cell of {exercise.number} must name one seed, it names {count}")
    return replace(exercise, source=source)


def _ignored(note: str) -> None:
    """Of the solution the grader only says that it is the solution."""


@contextmanager
def _compiler_cache(folder: Path) -> Iterator[None]:
    """Let Triton keep what it compiles in this folder."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["TRITON_CACHE_DIR"]
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


def _device() -> str:
    """What kernels run on. Another process asks, so that this one takes no memory of the GPU."""
    return subprocess.run(
        [sys.executable, "-c", DEVICE], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


# ---- what is printed ----
def told(hand_in: HandIn, number: int, played: Round, wanted: Sequence[Exercise]) -> str:
    """A round in one line, and below it the exercises that failed with their whole messages."""
    most = sum(exercise.points for exercise in wanted)
    lines = [
        f"{'✗' if played.failed else '✓'} {hand_in.name}, round {number}, seed {played.seed}: "
        f"{points(played.score)} of {points(most)} points in {played.seconds:.1f} s"
    ]
    for checked in played.failed:
        answer = hand_in.unusual.get(checked.exercise.number)
        which = f"unusual answer {answer.name!r}" if answer else "plain answer"
        lines.append(f"  {checked.exercise.number}, {which}: {checked.outcome} after {checked.seconds:.1f} s")
        lines += [f"    {text}".rstrip() for text in plain(checked.message).rstrip("\n").split("\n")]
    return "\n".join(lines)


def table(found: Mapping[str, Sequence[Round]], most: int) -> str:
    """For each answer: rounds, those with full marks, seconds of the first, median and maximum of the later ones."""
    rows = [("answers", "rounds", "full marks", "cold, s", "warm, s", "longest warm, s", "failed")]
    for name, rounds in found.items():
        warm = [played.seconds for played in rounds[1:]]
        times = [rounds[0].seconds] if rounds else []
        times += [statistics.median(warm), max(warm)] if warm else []
        failed = [checked.exercise.number for played in rounds for checked in played.failed]
        rows.append((
            name,
            f"{len(rounds)} of {most}",
            str(sum(not played.failed for played in rounds)),
            *(f"{seconds:.1f}" for seconds in times),
            *["-"] * (3 - len(times)),
            ", ".join(f"{number} ({failed.count(number)} x)" for number in dict.fromkeys(failed)) or "-",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = [
        [cell.rjust(width) if place else cell.ljust(width) for cell in column]
        for place, (column, width) in enumerate(zip(zip(*rows, strict=True), widths, strict=True))
    ]
    return "\n" + "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


if __name__ == "__main__":
    sys.exit(main())
