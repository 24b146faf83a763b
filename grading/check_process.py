"""The process in which :mod:`grading.check_lab` runs a student's files: what it is given, what it does and reports."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grading.lab import ROOT, Exercise, Lab
from grading.policy import violations
from grading.strip import strip_source
from utils.stubs import STUB, not_written


@dataclass(frozen=True)
class Work:
    """What checks run on.

    Attributes:
        lab: the lab, ``released`` as it was handed out.
        copy: the lab's folder in which the checks run.
        files: the student's modules that are put there unless the policy refuses them, by name.
        imports: what is run before the checks.
    """

    lab: Lab
    copy: Path
    files: Mapping[str, bytes]
    imports: str


class CheckProcess:
    """A fresh Python that runs the checks of some exercises in order and reports each; with all that it starts, it is
    gone at the end of the ``with`` block.

    Its first report says whether it is "ready", or the "error" of the imports; which exercises stand in a "refused"
    file, and why; and "notes" for the student. Each further one gives an exercise's "outcome" and "message".
    """

    def __init__(self, work: Work, exercises: Iterable[Exercise]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._reports, theirs = spawn.Pipe(duplex=False)
        checks = [strip_source(exercise.source, exercise.grade_id) for exercise in exercises]  # without hidden tests
        self._process = spawn.Process(target=_work, args=(theirs, work, checks))
        self._theirs = theirs

    def __enter__(self) -> CheckProcess:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session, with the ranks that it started
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.join()
        self._reports.close()

    def answer(self, timeout: float) -> Mapping[str, Any]:
        """The next report; empty when none came in time, or when the process ended."""
        try:
            return json.loads(self._reports.recv_bytes()) if self._reports.poll(timeout) else {}
        except EOFError:
            self._process.join(5)
            return {}

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def how_it_ended(self) -> str:
        """Why a process that was to go on did not."""
        status = self._process.exitcode
        if status is None:
            return "Python did not answer in time: if other programs keep this machine busy, try again"
        if status < 0:
            return f"it ended Python itself, by {signal.Signals(-status).name}"
        return f"it ended Python itself, with exit status {status}"


# ---- in the process
def _work(reports: Connection, work: Work, checks: Sequence[str]) -> None:
    os.setsid()
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    with contextlib.suppress(Exception):  # the notebook's imports then fail with the same words
        import utils.runtime  # noqa: F401  (first: PyTorch takes less time through it, and the policy imports it)
    told = _place(work)
    os.chdir(work.copy)
    sys.path.insert(0, str(ROOT))
    folder, space = str(work.copy), {"__name__": "check_lab"}
    try:
        exec(compile(work.imports, "<the notebook's imports>", "exec"), space)
    except BaseException as error:
        reports.send_bytes(json.dumps(told | {"error": _told(error, folder)}).encode())
        return
    gc.freeze()  # what is imported stays: the checks need not look through it for garbage
    reports.send_bytes(json.dumps(told | {"ready": "yes"}).encode())
    for source in checks:
        reports.send_bytes(json.dumps(_outcome(source, space, folder)).encode())


def _place(work: Work) -> dict[str, Any]:
    """Put the student's files into the copy, but for those that the policy refuses; what the first report says of it.

    It reads them and runs nothing. It is done here because it looks names up in PyTorch.
    """
    refused: dict[str, str] = {}
    notes: list[str] = []
    for name, content in work.files.items():
        found = violations(content, name, work.lab)
        if not found:
            (work.copy / name).write_bytes(content)
            continue
        why = "\n".join(f"{name}, {violation}" for violation in found)
        released = work.lab.released / name
        stub = released.read_text(encoding="utf-8") if released.is_file() else ""
        numbers = sorted({match["number"] for match in STUB.finditer(stub)})
        refused |= dict.fromkeys(numbers, why)
        if not numbers:
            notes.append(f"note: {why}\nnote: {name} is refused, so the lab's own is used")
    return {"refused": refused, "notes": notes}


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
