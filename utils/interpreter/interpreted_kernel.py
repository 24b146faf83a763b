"""Runs compiled kernels in Triton's interpreter, on copies of their arguments on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from utils.interpreter import observation, upstream
from utils.interpreter.patches import apply_patches

import triton  # isort: skip
import triton.language as tl  # isort: skip

Autotuner = upstream.autotuner.Autotuner
_interpreted_kernels: dict[Any, upstream.InterpretedFunction] = {}


def interpreted_kernel(kernel: triton.JITFunction) -> upstream.InterpretedFunction:
    """The interpreted function made from the same source as ``kernel``."""
    if kernel.fn not in _interpreted_kernels:
        _interpreted_kernels[kernel.fn] = upstream.InterpretedFunction(kernel.fn)
    return _interpreted_kernels[kernel.fn]


@contextmanager
def interpret_launches() -> Iterator[None]:
    """Inside the block each launch of a compiled kernel runs its interpreted version instead.

    Arguments on a GPU are copied to the host and what the kernel wrote is copied back, so the launch has the effects
    that it has on the GPU. Device functions (those of ``triton.language`` too) are interpreted with it, and
    ``@triton.autotune`` takes its first configuration without remembering it. Changes nothing for interpreted
    kernels.
    """
    apply_patches()
    jit = triton.JITFunction
    saved = {(jit, "run"): jit.run, (jit, "__call__"): jit.__call__, (Autotuner, "run"): Autotuner.run}
    members = {(tl.tensor, name): fn for name, fn in vars(tl.tensor).items() if isinstance(fn, jit)}
    jit.run = _interpreted(jit.run)
    jit.__call__ = _call
    Autotuner.run = _forgetful(Autotuner.run)
    for (owner, name), fn in members.items():  # x.sum(): a JITFunction on the class does not bind its tensor by itself
        setattr(owner, name, _method(fn))
    observation.state.interpreting += 1
    try:
        yield
    finally:
        observation.state.interpreting -= 1
        for (owner, name), original in {**saved, **members}.items():
            setattr(owner, name, original)


def _interpreted(compiled_run: Any) -> Any:
    def run(self: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:  # asks for the compiled kernel, launches nothing
            return compiled_run(self, *args, grid=grid, warmup=True, **kwargs)
        interpreted = interpreted_kernel(self)
        interpreted.pre_run_hooks = list(self.pre_run_hooks)
        return interpreted.run(*args, grid=grid, warmup=False, **kwargs)

    return run


def _call(self: triton.JITFunction, *args: Any, **kwargs: Any) -> Any:
    if observation.state.patches is None:
        raise RuntimeError(f"{self.__name__} is a @triton.jit function: launch it as a kernel, or call it inside one")
    return interpreted_kernel(self)(*args, **kwargs)


def _method(fn: triton.JITFunction) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(self, *args, **kwargs)

    return method


@dataclass
class Tuning:
    """What autotuned kernels do inside a :func:`configuration` block.

    ``number``: which of its configurations a kernel takes, from 0; ``most``: how many the kernel with the most had;
    ``taken``: the constants of the last one taken.
    """

    number: int = 0
    most: int = 1
    taken: dict[str, Any] = field(default_factory=dict)


_tuning = Tuning()


@contextmanager
def configuration(number: int) -> Iterator[Tuning]:
    """Inside the block, :func:`interpret_launches` gives autotuned kernels configuration ``number``, from 0.

    Configurations that the kernel prunes are passed over; a kernel that has fewer starts again with its first.
    """
    global _tuning
    outer, _tuning = _tuning, Tuning(number)
    try:
        yield _tuning
    finally:
        _tuning = outer


def _forgetful(run: Any) -> Any:
    """The configuration that an untimed run picks must not be what the GPU uses afterwards, nor the reverse."""

    def run_and_forget(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        cache, configs, on_disk = dict(self.cache), self.configs, self.cache_results
        first = _tuning.number % len(configs)
        self.cache.clear()
        self.configs = configs[first:] + configs[:first]
        self.cache_results = False  # no file must remember it either
        try:
            return run(self, *args, **kwargs)
        finally:
            _tuning.most = max(_tuning.most, len(configs))
            _tuning.taken = dict(getattr(getattr(self, "best_config", None), "kwargs", {}))
            self.configs, self.cache_results = configs, on_disk
            self.cache.clear()
            self.cache.update(cache)

    return run_and_forget
