"""``python -m grading.scenarios LAB --package-root DIR --seed N --out DIR [--only 2.1 2.2]``: run a lab's scenarios.

It imports the lab's package from ``DIR`` and writes what each exercise's scenario observes as soon as it is done. They
run in a process forked from the one that imported the package: a scenario that kills it, or takes longer than
``--limit`` seconds, costs its own exercise alone, and another process goes on with the next. An exercise that was begun
has a marker, ``2.1.started``, so that one that did not come to its end is known.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType

import torch

from grading import die_with
from grading.scenarios import chosen
from grading.scenarios.observations import write, write_error
from utils.checks.core import Exercise


def run(exercises: Sequence[Exercise], package: ModuleType, seed: int, out: Path) -> None:
    """Observe exercises in order and write what is seen; one that raises does not stop the next."""
    for exercise in exercises:
        _marker(out, exercise).touch()
        try:
            write(out, exercise.number, exercise.observe(exercise.home(package), seed))
        except BaseException as error:  # a student's code may raise anything, SystemExit too
            write_error(out, exercise.number, error, where(error, _folder(package)))


def run_apart(exercises: Sequence[Exercise], package: ModuleType, seed: int, out: Path, limit: float) -> None:
    """:func:`run` in a forked process; when an exercise ends it or takes over ``limit`` seconds, another goes on."""
    left = list(exercises)
    while left:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, child = os.getpid(), os.fork()
        if child == 0:
            die_with(parent)
            with contextlib.suppress(OSError):
                os.setsid()  # the leader of what it starts, which ends with it
            try:
                run(left, package, seed, out)
            finally:
                os._exit(0)
        _watch(child, left, out, limit)
        begun = _begun(left, out)
        if not begun:  # it did not get that far
            _marker(out, left[0]).touch()
        left = left[max(1, begun) :]


def _watch(child: int, exercises: Sequence[Exercise], out: Path, limit: float) -> None:
    """Wait for a process, at most ``limit`` seconds an exercise, and end it and what it started."""
    begun, end = 0, time.monotonic() + limit
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if (now := _begun(exercises, out)) > begun:
            begun, end = now, time.monotonic() + limit
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _marker(out: Path, exercise: Exercise) -> Path:
    return out / f"{exercise.number}.started"


def _begun(exercises: Sequence[Exercise], out: Path) -> int:
    """How many of the exercises, from the first on, have their marker."""
    count = 0
    while count < len(exercises) and os.path.lexists(_marker(out, exercises[count])):
        count += 1
    return count


def _folder(package: ModuleType) -> Path | None:
    return Path(package.__file__).resolve().parent if getattr(package, "__file__", None) else None


def where(error: BaseException, folder: Path | None) -> str:
    """The last line of the package that the error passed through: ``"gelu.py, line 12"``; empty if there is none."""
    if folder is None:
        return ""
    found = ""
    for frame in _frames(error.__traceback__):
        path = Path(frame.tb_frame.f_code.co_filename)
        if path.is_absolute() and path.resolve().is_relative_to(folder):
            found = f"{path.resolve().relative_to(folder)}, line {frame.tb_lineno}"
    if isinstance(error, SyntaxError) and error.filename and not found:
        found = f"{Path(error.filename).name}, line {error.lineno}"
    return found


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when every scenario was begun, whatever came of it."""
    parser = argparse.ArgumentParser(prog="python -m grading.scenarios", description=__doc__.split("\n")[0])
    parser.add_argument("lab", help="the lab's package, such as lab2_triton_kernels")
    parser.add_argument("--package-root", type=Path, required=True, help="the folder that holds the package")
    parser.add_argument("--seed", type=int, required=True, help="what the inputs are drawn from")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the observations")
    parser.add_argument("--only", nargs="+", metavar="EXERCISE", help="run these exercises, not all")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="what an exercise may take")
    given = parser.parse_args(arguments)
    exercises = chosen(given.lab, given.only)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # before a process is forked: threads do not come along
    root = given.package_root.resolve()
    sys.path.insert(0, str(root))
    try:
        package = importlib.import_module(given.lab)
    except BaseException as error:
        for exercise in exercises:
            _marker(given.out, exercise).touch()
            write_error(given.out, exercise.number, error, where(error, root / given.lab))
        return 0
    run_apart(exercises, package, given.seed, given.out, given.limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
