"""Compiles what a function will launch, all kernels side by side, before it is run: for a GPU session's first check.

Triton compiles a kernel at its launch, once for each dtype and for each argument that is 1 or a multiple of 16, and one
after the other. A check launches a kernel in a dozen such forms. Most of a compilation is Python, which threads do not
share, so that forked processes compile; what they leave in Triton's cache is then found there.
"""

from __future__ import annotations

import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager, suppress
from typing import Any

from utils import runtime  # before triton: it decides between GPU and interpreter

import triton  # isort: skip
from triton.runtime.autotuner import Autotuner  # isort: skip

#: A check says that it compiles if that takes longer than these seconds.
PATIENCE = 2.0
#: Seconds after which processes that still compile are ended; each launch then compiles for itself.
LIMIT = 120.0
_MOST_PROCESSES = 16
_NUMBER = struct.Struct("I")


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Compile what these calls launch; nothing is launched, and what the calls return or raise is dropped.

    Where kernels are interpreted nothing happens, nor without Triton's asynchronous compilation: each kernel is then
    compiled when it is launched.
    """
    if runtime.INTERPRET:
        return
    try:
        from triton.runtime import _async_compile as asynchronous
    except ImportError:
        return
    pool = _Compilations()
    try:
        with asynchronous.AsyncCompileMode(pool, ignore_errors=True), _compiling_only():
            try:
                for call in calls:
                    with suppress(Exception):  # the check runs the call again, and says what is wrong
                        call()
                pool.run()
            finally:
                pool.cancel()  # what an interrupt has left, for which Triton would wait
    except Exception:  # the launch itself compiles then, and says what is wrong
        pass
    finally:
        asynchronous.active_mode.set(None)


class _Compilations(Executor):
    """Collects compilations; :meth:`run` does them in forked processes, and then takes their results from the cache."""

    def __init__(self) -> None:
        self._works: list[tuple[Callable[[], Any], Future]] = []

    def submit(self, work: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._works.append((work, future))
        return future

    def run(self) -> None:
        """Do all that was submitted."""
        if len(self._works) > 1:
            self._fill_cache()
        for work, future in self._works:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def cancel(self) -> None:
        """Drop what was not done."""
        for _, future in self._works:
            if not future.done():
                future.set_exception(CancelledError())

    def _fill_cache(self) -> None:
        """Let processes take one compilation after the other, from a pipe of their numbers."""
        numbers, end = os.pipe()
        os.write(end, b"".join(map(_NUMBER.pack, range(len(self._works)))))
        os.close(end)
        children: set[int] = set()
        try:
            for _ in range(min(_MOST_PROCESSES, os.cpu_count() or 1, len(self._works))):
                children.add(self._fork(numbers))
            self._wait(children)
        finally:
            os.close(numbers)
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def _fork(self, numbers: int) -> int:
        """Start a process that compiles; nothing of it is seen but what it leaves in the cache."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads in a process that forks: none compiles
            child = os.fork()
        if child:
            return child
        try:
            for output in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            while number := os.read(numbers, _NUMBER.size):
                with suppress(Exception):
                    self._works[_NUMBER.unpack(number)[0]][0]()
        finally:
            os._exit(0)

    def _wait(self, children: set[int]) -> None:
        """Until all have ended, or the limit is reached: those are left in the set."""
        started, announced = time.monotonic(), False
        while children and (waited := time.monotonic() - started) < LIMIT:
            for child in list(children):
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    children.remove(child)
            if waited > PATIENCE and not announced:
                print(f"compiling {len(self._works)} forms of your kernels for the GPU ...", flush=True)
                announced = True
            time.sleep(0.01)


@contextmanager
def _compiling_only() -> Iterator[None]:
    """Inside the block a launch compiles its kernel; an autotuned one, which times launches, is left alone."""
    launch, tune = triton.JITFunction.run, Autotuner.run

    def compile_only(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    triton.JITFunction.run, Autotuner.run = compile_only, lambda *args, **kwargs: None
    try:
        yield
    finally:
        triton.JITFunction.run, Autotuner.run = launch, tune
