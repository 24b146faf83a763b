"""Runs a student's function once and reports what happened: a value, an error, too long a wait, a forbidden call."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from utils.checks.forbidden_modules import Forbidden, calls_into
from utils.checks.student_files import is_library

DEADLINE_SECONDS = 10.0
#: Seconds that an import may take after the deadline.
IMPORT_SECONDS = 20.0


class TooLong(BaseException):
    """The student's function did not return in time; no ``Exception``, so that no answer catches it by accident."""


@dataclass
class Attempt:
    """What one call of a student's function led to.

    ``value`` is what it returned, ``error`` what it raised, ``late`` whether it was stopped, and ``called`` the
    functions of forbidden modules that it called.
    """

    value: object = None
    error: Exception | None = None
    late: bool = False
    called: list[str] = field(default_factory=list)


def attempt(function: Callable, arguments: Mapping[str, object], forbidden: Forbidden) -> Attempt:
    """Call ``function`` with its own copies of ``arguments``: an answer may sort or pop what it is given.

    Raises:
        NotImplementedError: the function is a stub; it has a message of its own.
    """
    made, copies = Attempt(), deepcopy(dict(arguments))
    try:
        with deadline(DEADLINE_SECONDS) as rung, calls_into(forbidden, made.called):
            made.value = function(**copies)
        made.late = bool(rung)  # it went on although it was stopped
    except NotImplementedError:
        raise
    except TooLong:
        made.late = True
    except Exception as error:
        made.error = error
    return made


def tail(error: Exception) -> list[str]:
    """Where an error arose, in the student's own lines: ``operators.py, line 12, in f: return 1 / n``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return [f"{Path(f.filename).name}, line {f.lineno}, in {f.name}: {f.line}" for f in frames[-3:]]


@contextmanager
def deadline(seconds: float) -> Iterator[list[float]]:
    """Raise :class:`TooLong` in the block after so many seconds, where the system can (main thread, not Windows).

    The list that it gives holds the seconds once they are over, even if the block goes on: any ``__exit__`` that
    returns True swallows an error. An import that is going on then has :data:`IMPORT_SECONDS` more, for it would leave
    a package in pieces that no later import puts together: SymPy, which PyTorch's optimizers import when the first one
    is made, without ``sympy.printing``.
    """
    rung: list[float] = []
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield rung
        return

    last = time.monotonic() + seconds + (0.0 if _is_importing(sys._getframe()) else IMPORT_SECONDS)

    def ring(signum: int, frame: FrameType | None) -> None:
        if sys.gettrace() is not None:  # a person who steps through the function in a debugger is not hurried
            return
        if _is_importing(frame) and time.monotonic() < last:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        rung.append(seconds)
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is going on in this frame or in one that has called it."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
