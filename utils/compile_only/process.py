"""The process that compiles, kept from one order to the next: to start one takes longer than to read a kernel."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_CHILD = Path(__file__).resolve().with_name("child.py")
#: Not for the compiler: it is never interpreted, and the name of the test that runs would mean a process for each test.
_LEFT_OUT = ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST")
#: Answers that may wait in the pipe, which holds 64 kB; a check that fails leaves some behind.
MOST_UNREAD = 16
_lock = threading.Lock()
_kept: Compiler | None = None


class CompileError(RuntimeError):
    """A kernel does not compile; the text is the compiler's."""


class Compiler:
    """One such process, of one environment; a process that was forked from its owner's has to start its own."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self.owner, self.env = os.getpid(), dict(env)
        self._sent = self._read = 0
        self._answers: dict[int, str] = {}  # by number, of those that are read
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],  # by its path: as a module it would import the course's runtime first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self.env,
            text=True,
        )

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether this process may go on with it, in this environment."""
        return self.owner == os.getpid() and self.env == env and self._process.poll() is None

    def send(self, orders: Sequence[dict[str, Any]]) -> int:
        """Hand it orders; returns the number by which :meth:`answer` knows them.

        Raises:
            CompileError: it ended before.
        """
        while self._sent - self._read >= MOST_UNREAD:
            self._fetch()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(orders) + "\n")
            self._process.stdin.flush()
        self._sent += 1
        return self._sent

    def answer(self, number: int) -> list[dict[str, Any]]:
        """What it says of each of these orders. Answers to orders before them are dropped.

        Raises:
            CompileError: it ended instead.
        """
        while self._read < number:
            self._fetch()
        line = self._answers[number]
        self._answers = {later: text for later, text in self._answers.items() if later > number}
        return json.loads(line)

    def _fetch(self) -> None:
        if self._process.stdout.closed:
            raise CompileError("the compiler's process was ended")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise CompileError(f"the compiler's process failed:\n{self._errors.read()[-4000:]}")
        self._read += 1
        self._answers[self._read] = line

    def end(self) -> None:
        """End it, if it is this process's own."""
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def ask(orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a compiler's process says of each order.

    Raises:
        CompileError: the process ended instead.
        OSError: it cannot be started.
    """
    return begin(orders)()


def begin(orders: Sequence[dict[str, Any]]) -> Callable[[], list[dict[str, Any]]]:
    """Let a compiler's process work on orders meanwhile; what is returned waits for its answer.

    The answers are fetched in the order in which they were asked for, each at most once.

    Raises:
        CompileError: the process ended instead, now or when the answer is fetched.
        OSError: it cannot be started.
    """
    global _kept
    env = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    with _lock:
        if _kept is None or not _kept.serves(env):
            end()
            _kept = Compiler(env)
        compiler = _kept
        try:
            number = compiler.send(orders)
        except BaseException:
            end()
            raise

    def answer() -> list[dict[str, Any]]:
        with _lock:
            try:
                return compiler.answer(number)
            except BaseException:  # half of a line must not be taken for the next answer
                end()
                raise

    return answer


@atexit.register
def end() -> None:
    """End the process that is kept, if there is one."""
    global _kept
    if _kept is not None:
        _kept.end()
    _kept = None
