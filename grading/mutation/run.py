"""Holds every mutant of a lab's solutions to the exercise's check and to its hidden cases.

Each mutant meets them in a process of its own, forked from one that has imported PyTorch, Triton and the course: it may
end that process, or never end. What it prints is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

import utils.runtime  # noqa: F401  (first: PyTorch takes less time through it)
from grading.lab import ROOT, find_lab
from grading.mutation.operators import Mutant, mutants
from grading.scenarios import chosen
from grading.scenarios.__main__ import where
from grading.scenarios.compare import difference
from grading.scenarios.observations import raised_text, read, write
from grading.strip import Place, places
from utils.checks.core import CheckFailed, Exercise

#: Seeds of the check and of the hidden cases that every mutant meets, as a submission does.
SEEDS = (3, 11)
#: Seeds of the wide search that a survivor meets besides.
WIDE = (101, 102, 103, 104, 105, 106, 107, 108)
#: An exercise with fewer mutants than these has variables taken for one another, too.
ENOUGH = 64
#: Seconds of processor time that a mutant may take on one seed.
LIMIT = 60.0
#: How many times as long it may take by the clock: other work on the machine is no fault of the mutant's.
PATIENCE = 10
#: Bytes of memory that a mutant may fill (a submission: ``Limits`` in grading/watcher.py).
MEMORY = 4 << 30


@dataclass(frozen=True)
class Result:
    """What became of a mutant: ``fate`` is ``check``, ``hidden``, ``error``, ``timeout``, ``wide`` or ``survived``.

    ``wide`` is one that passed as a submission and failed in the wide search. ``said`` is what the student is told.
    """

    place: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    fate: str
    said: str
    seconds: float


@functools.cache
def _few(lab: str, number: str) -> bool:
    """Whether an exercise has fewer mutants than :data:`ENOUGH` as long as no variable is taken for another."""
    return (
        sum(len(mutants(place.text)) for place in places(ROOT / "solutions" / lab) if place.number == number) < ENOUGH
    )


def mutants_of(lab: str, place: Place) -> Iterator[tuple[Mutant, str]]:
    """The mutants of a place, each with the whole text of its module."""
    lines = (ROOT / "solutions" / lab / f"{place.module}.py").read_text(encoding="utf-8").splitlines()
    for mutant in mutants(place.text, names=_few(lab, place.number)):
        inside = textwrap.indent(mutant.text, place.indent).splitlines()
        yield mutant, "\n".join([*lines[: place.first], *inside, *lines[place.last :]]) + "\n"


@contextlib.contextmanager
def package_with(lab: str, module: str, text: str) -> Iterator[ModuleType]:
    """The lab's solutions as a package of a name of its own, one module of it with another text."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        name = f"mutant_{os.getpid()}"
        folder = Path(scratch) / name
        folder.mkdir()
        for path in (ROOT / "solutions" / lab).glob("*.py"):
            shutil.copy(path, folder)
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, scratch)
        yield importlib.import_module(name)


def _meets(exercise: Exercise, package: ModuleType, seed: int, expected: Path) -> tuple[str, str]:
    """Fate and words of a package on one seed: ``("", "")`` if it passes the check and the hidden cases."""
    folder = Path(package.__file__).resolve().parent
    try:
        exercise.run_check(package, seed)
    except CheckFailed as failed:
        return "check", str(failed)
    except BaseException as error:
        return "error", raised_text(error, where(error, folder))
    try:
        observed = exercise.observe(exercise.home(package), seed)
    except BaseException as error:
        return "hidden", f"it raised {type(error).__name__}: {error}"
    write(folder, exercise.number, observed)
    told = difference(exercise, read(expected / str(seed), exercise.number), read(folder, exercise.number))
    return ("hidden", told) if told else ("", "")


def in_a_process(seconds: float, work: Callable[..., Any], *arguments: object) -> Any:
    """What ``work`` returns, run in a forked process; None if it ended the process or took too long.

    Too long is more than ``seconds`` of processor time, or :data:`PATIENCE` times that by the clock.
    """
    with tempfile.NamedTemporaryFile(prefix="mutant-", suffix=".json") as answer:
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                with contextlib.redirect_stdout(io.StringIO()):
                    found = work(*arguments)
                Path(answer.name).write_text(json.dumps(found), encoding="utf-8")
            finally:
                os._exit(0)
        end = time.monotonic() + PATIENCE * seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            computed, resident = _taken(child)
            if time.monotonic() > end or computed > seconds or resident > MEMORY:  # an endless loop may fill a list
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        text = Path(answer.name).read_text(encoding="utf-8")
        return json.loads(text) if text else None


def _taken(process: int) -> tuple[float, int]:
    """Seconds of processor time that a process has used, and bytes of its resident memory."""
    try:
        found = psutil.Process(process)
        used = found.cpu_times()
        return used.user + used.system + used.children_user + used.children_system, found.memory_info().rss
    except psutil.NoSuchProcess:
        return 0.0, 0


def _fate(exercise: Exercise, lab: str, module: str, text: str, seeds: Sequence[int], expected: Path) -> list[str]:
    try:
        with package_with(lab, module, text) as package:
            for seed in seeds:
                fate, said = _meets(exercise, package, seed, expected)
                if fate:
                    return [fate, said]
    except BaseException as error:
        return ["error", f"it cannot be imported: {type(error).__name__}: {error}"]
    return ["survived", ""]


def _one(job: tuple) -> Result:
    exercise, lab, place, mutant, text, expected = job
    started = time.monotonic()

    def met(seeds: Sequence[int]) -> list[str]:
        found = in_a_process(LIMIT * len(seeds), _fate, exercise, lab, place.module, text, seeds, expected)
        return found or ["timeout", ""]

    fate, said = met(SEEDS)
    if fate == "survived" and (wide := met(WIDE))[0] != "survived":
        fate, said = "wide", wide[1]
    return Result(place.label, f"{place.module}.py", place.first + mutant.line, mutant.operator, mutant.before,
                  mutant.after, fate, said, round(time.monotonic() - started, 2))  # fmt: skip


def _expected(exercise: Exercise, lab: str, folder: Path, seeds: Sequence[int]) -> str:
    package = importlib.import_module(f"solutions.{lab}")
    for seed in seeds:
        (folder / str(seed)).mkdir(parents=True, exist_ok=True)
        write(folder / str(seed), exercise.number, exercise.observe(exercise.home(package), seed))
    return "written"


_JOBS: list[tuple] = []


def _numbered(index: int) -> Result:
    return _one(_JOBS[index])


def count(lab: str, number: str) -> int:
    """How many mutants an exercise has."""
    found = places(ROOT / "solutions" / lab)
    return sum(len(list(mutants_of(lab, place))) for place in found if place.number == number)


def run(lab_name: str, only: Sequence[str] | None = None, jobs: int = 2, sample: int | None = None) -> Iterator[Result]:
    """Yield what became of each mutant of a lab's solutions, exercise by exercise.

    Args:
        lab_name: ``"lab3"``.
        only: exercises; all by default.
        jobs: processes side by side.
        sample: take at most so many of an exercise, drawn at random, the same ones each time; None: all.

    Raises:
        ValueError: there is no such lab or exercise.
        RuntimeError: an exercise's hidden cases do not run on the solution.
    """
    lab = find_lab(lab_name).name
    exercises = {exercise.number: exercise for exercise in chosen(lab, only)}
    sys.path.insert(0, str(ROOT / "labs"))
    importlib.import_module(f"solutions.{lab}")
    with tempfile.TemporaryDirectory(prefix="expected-") as scratch:
        for exercise in exercises.values():
            if not in_a_process(600, _expected, exercise, lab, Path(scratch), (*SEEDS, *WIDE)):
                raise RuntimeError(f"the hidden cases of {exercise} do not run on the solution")
        filled = [place for place in places(ROOT / "solutions" / lab) if place.number in exercises]
        filled.sort(key=lambda place: list(exercises).index(place.number))
        _JOBS.clear()
        for number, some in itertools.groupby(filled, key=lambda place: place.number):
            found = [
                (exercises[number], lab, place, mutant, text, Path(scratch))
                for place in some
                for mutant, text in mutants_of(lab, place)
            ]
            taken = range(len(found))
            if sample is not None:
                taken = sorted(random.Random(number).sample(taken, min(sample, len(found))))
            _JOBS.extend(found[k] for k in taken)
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=50) as pool:
            yield from pool.imap(_numbered, range(len(_JOBS)))
