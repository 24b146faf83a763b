"""Compiles what a function will launch, all kernels side by side, before it is run: for a GPU session's first check.

Triton compiles a kernel at its launch, once for each dtype and for each argument that is 1 or a multiple of 16, and one
after the other. A check launches a kernel in a dozen such forms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

from utils import runtime  # before triton: it decides between GPU and interpreter

import triton  # isort: skip
from triton.runtime.autotuner import Autotuner  # isort: skip

#: A check says that it compiles if that takes longer than these seconds.
PATIENCE = 2.0
_MOST_THREADS = 16


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
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            with asynchronous.AsyncCompileMode(pool, ignore_errors=True) as mode, _compiling_only():
                for call in calls:
                    with suppress(Exception):  # the check runs the call again, and says what is wrong
                        call()
                unfinished = wait(mode.raw_futures, timeout=PATIENCE).not_done
                if unfinished:
                    print(f"compiling {len(mode.raw_futures)} forms of your kernels for the GPU ...", flush=True)
        except Exception:  # the launch itself compiles then, and says what is wrong
            pass
        finally:
            asynchronous.active_mode.set(None)


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
