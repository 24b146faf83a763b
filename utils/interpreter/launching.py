"""Around an interpreted launch: what it patches in Triton's language, what it refuses, and how its errors read."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import reprlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from utils.interpreter import observation, upstream

import triton  # isort: skip
import triton.language as tl  # isort: skip


#: What a launch may be given besides its kernel's arguments: options of the compiler and of a configuration.
_OPTIONS = {
    *inspect.signature(triton.Config.__init__).parameters,
    *("num_warps", "num_ctas", "num_stages", "maxnreg", "debug", "sanitize_overflow", "enable_fp_fusion"),
    *("ir_override", "launch_cooperative_grid", "launch_pdl", "ptx_options", "arch", "extern_libs"),
    *("instrumentation_mode", "waves_per_eu", "matrix_instr_nonkdim", "kpack"),
}


@contextmanager
def last_programs(seconds: float = math.inf) -> Iterator[None]:
    """Inside the block a launch runs the last program of its grid alone, which sees the grid as it is.

    A last program that writes nothing is one too many, as a grid may have where its size is a bound; then the one
    before it runs, and so on, :data:`SPARE` at most along each axis. Only an observed launch knows what was written.

    So a tensor may be too large to be computed: what of it is not touched takes addresses and no memory. On a GPU such
    tensors are not copied, neither to the host nor back; what one launch writes, the next one in the block reads.

    Args:
        seconds: Of the processor, which other programs may want too, for all launches that are observed.

    Raises:
        TimeIsUp: they take longer.
    """
    state = observation.state
    outer, state.large, state.until = state.large, {}, time.process_time() + seconds
    try:
        yield
    finally:
        state.large, state.until = outer, math.inf


#: How many programs along an axis may have nothing to do before the last that has.
SPARE = 16


class _Last:
    """How many programs an axis of the grid has, for a loop that is to run the last of them."""

    def __init__(self, programs: Any) -> None:
        self.programs = operator.index(programs)

    def __index__(self) -> int:
        return 0 if observation.state.wrote else min(SPARE if observation.state.observer else 1, self.programs)


def whole_grid(set_grid_dim: Callable) -> Callable:
    """Kernels see the whole grid, and the loop over its programs takes the last ones.

    A negative or fractional grid, which would silently launch nothing, is refused.
    """

    @functools.wraps(set_grid_dim)
    def wrapped(self: Any, *grid: Any) -> None:
        self.last_program = [n.programs - 1 if isinstance(n, _Last) else None for n in grid]
        grid = tuple(n.programs if isinstance(n, _Last) else n for n in grid)
        if any(not hasattr(n, "__index__") or operator.index(n) < 0 for n in grid):
            raise ValueError(f"a grid holds whole numbers of programs, none negative, got {grid}")
        set_grid_dim(self, *grid)

    return wrapped


def last_of_grid(set_grid_idx: Callable) -> Callable:
    """The steps of that loop go backwards from the last program, and do nothing once one has written."""

    @functools.wraps(set_grid_idx)
    def wrapped(self: Any, *index: int) -> None:
        if observation.state.wrote:
            observation.state.executor.fn = _nothing
        else:
            set_grid_idx(self, *(i if last is None else last - i for i, last in zip(index, self.last_program)))

    return wrapped


def _nothing(**_: Any) -> None:
    """What a program does that is not to run."""


class _Patches:
    """What one launch has patched in Triton's language, undone in reverse order when the launch ends."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.languages: set[int] = set()

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.languages.clear()


def once_per_launch(patch: Callable) -> Callable:
    """Patch the language modules that a function sees, unless this launch has patched them already."""
    seen: WeakKeyDictionary[Callable, frozenset[int]] = WeakKeyDictionary()

    def languages(fn: Callable) -> frozenset[int]:
        if fn not in seen:
            values = fn.__globals__.values()
            seen[fn] = frozenset(id(v) for v in values if inspect.ismodule(v) and v in (tl, tl.core))
        return seen[fn]

    @functools.wraps(patch)
    def _patch_lang(fn: Callable) -> Any:
        patches = observation.state.patches
        if patches is None:  # a device function called outside of a launch
            return patch(fn)
        needed = languages(fn)
        if not needed or not needed <= patches.languages:
            patches.scopes.append(patch(fn))
            patches.languages |= needed
        return patches

    return _patch_lang


def launch(call: Callable) -> Callable:
    """One launch: begins and ends an observation, restores the language, and lets an error name its program."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_launch(self, args, kwargs)
        state = observation.state
        outer, state.patches = state.patches, _Patches()
        function, state.executor, state.wrote = self.fn, self, False
        builder = upstream.interpreter_builder
        builder.grid_idx = None
        try:
            with np.errstate(all="ignore"), observation.launching(self):
                try:
                    call(self, *args, **kwargs)
                except triton.InterpreterError as error:
                    self.fn = function
                    raise triton.InterpreterError(_describe(self, builder, error)) from _root(error)
        finally:
            self.fn, state.executor, state.wrote = function, None, False
            state.patches.restore()
            state.patches = outer

    return __call__


def _check_launch(executor: Any, args: tuple, kwargs: dict) -> None:
    """Refuse a grid or an argument that no kernel can take, by name; a list as a grid becomes a tuple, as on a GPU."""
    name, grid = executor.fn.__name__, executor.grid
    executor.grid = (lambda meta: _checked_shape(name, grid(meta))) if callable(grid) else _checked_shape(name, grid)
    takes_tensors = set(executor.arg_names) - set(executor.constexprs)
    for argument, value in [*zip(executor.arg_names, args), *kwargs.items()]:
        if argument not in takes_tensors:
            continue
        if isinstance(value, (str, list, dict, set, np.ndarray)):
            shown = f"{type(value).__name__} {reprlib.repr(value)}"
            raise TypeError(f"{name}: {argument} must be a tensor or a number, got {shown}")
        if isinstance(value, torch.Tensor) and (
            value.is_complex() or value.layout != torch.strided or value.device.type == "meta"
        ):
            shown = f"{value.dtype}, {value.layout}, on {value.device}"
            raise TypeError(f"{name}: {argument} must be a dense tensor of real numbers, got one of {shown}")
    for option in kwargs.keys() - set(executor.arg_names) - _OPTIONS:
        known = ", ".join(executor.arg_names)
        raise TypeError(f"{name} has no argument {option!r}, and no launch option is called so; it takes: {known}")
    warps = kwargs.get("num_warps", 1)
    if "num_warps" not in executor.arg_names and warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"{name}: num_warps must be a power of two from 1 to 32, got {warps!r}")


def _checked_shape(name: str, grid: Any) -> tuple:
    if not isinstance(grid, (tuple, list)) or not 1 <= len(grid) <= 3:
        raise TypeError(f"{name}: grid must be a tuple of one to three numbers of programs, got {grid!r}")
    if observation.state.large is not None and all(hasattr(n, "__index__") and n >= 0 for n in grid):
        return tuple(map(_Last, grid))
    return tuple(grid)


def inside_launches_only(call: Callable) -> Callable:
    """A kernel called like a function, without a grid, says so instead of failing on its first operation."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if observation.state.patches is None:
            name = self.fn.__name__
            raise RuntimeError(
                f"{name} is a @triton.jit function: launch it with a grid, {name}[grid](...), or call it in a kernel"
            )
        return call(self, *args, **kwargs)

    return __call__


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _describe(executor: Any, builder: Any, error: BaseException) -> str:
    cause = _root(error)
    where = "" if builder.grid_idx is None else f" in program {builder.grid_idx} of grid {builder.grid_dim}"
    return f"kernel {executor.fn.__name__} raised {type(cause).__name__}{where}: {cause}"
