"""Hooks on what an interpreted kernel does: launches, programs, loads, stores, atomics and dots.

One observer at a time watches. While none does, each hook costs one comparison.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from utils.interpreter import upstream
from utils.interpreter.bfloat16 import narrow

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip


@dataclass(frozen=True)
class Argument:
    """A tensor that a launch was given: ``host`` is what the interpreter reads, ``given`` what the caller passed.

    They share memory unless ``given`` is on a GPU, and may then be one view of the caller's tensor.
    """

    name: str
    host: torch.Tensor
    given: torch.Tensor


@dataclass(frozen=True)
class Launch:
    """A kernel about to run: its name, its tensors, its other arguments by name; its function and all it is given."""

    kernel: str
    arguments: tuple[Argument, ...]
    scalars: dict[str, Any] = field(default_factory=dict)
    function: Callable | None = None
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of one program.

    ``addresses``: uint64, in the numbering that :meth:`Observer.address` chose; ``mask``: bool, of the same shape;
    ``itemsize`` in bytes.
    """

    addresses: np.ndarray
    mask: np.ndarray
    itemsize: int
    reads: bool
    writes: bool
    atomic: bool


class Observer(Protocol):
    """What :func:`observe` calls back."""

    def launch_begins(self, launch: Launch) -> None: ...

    def launch_ends(self, error: BaseException | None) -> None: ...

    def grid(self, shape: tuple[int, int, int]) -> None: ...

    def program(self, index: tuple[int, int, int]) -> None: ...

    def address(self, tensor: torch.Tensor) -> int:
        """Address that the kernel sees as the start of ``tensor``, one of the launch's ``host`` tensors."""

    def access(self, access: Access) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return real addresses, the lanes that may go through, and the lanes whose loaded value must be poisoned."""

    def dot(self, batch: int, m: int, n: int, k: int) -> None: ...


class _State:
    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.patches: Any = None  # set by utils.interpreter.patches while a launch runs
        self.interpreting = 0  # how many blocks of utils.interpreter.interpreted_kernel are open
        self.launched = False
        self.atomic = False
        self.other = False  # whether the load that runs says what stands where its mask leaves a lane out
        self.large: dict[int, torch.UntypedStorage] | None = None  # by address, in a block of last_programs
        self.executor: Any = None  # of the launch that runs
        self.wrote = False  # in a block of last_programs, whether a program of it has written something
        self.until = math.inf  # when such a block's time is up, on the clock of time.process_time


state = _State()


class TimeIsUp(BaseException):
    """A launch inside of ``last_programs`` did not end in its time; no ``except Exception`` on the way stops this."""


def in_launch() -> bool:
    """Whether an interpreted launch is running, its copying of arguments to the host and back included."""
    return state.patches is not None


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Let ``observer`` watch every interpreted launch inside the block.

    Raises:
        RuntimeError: Another observer is watching.
    """
    if state.observer is not None:
        raise RuntimeError("kernels are being observed already: close the open profile_kernel block first")
    state.observer = observer
    try:
        yield
    finally:
        state.observer = None


@contextmanager
def launching(executor: Any) -> Iterator[None]:
    """Around one launch: tell the observer when it ends, if it began."""
    outer, state.launched = state.launched, False
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        began, state.launched = state.launched, outer
        if began and state.observer is not None:
            state.observer.launch_ends(error)


def _watching() -> bool:
    return state.observer is not None and state.launched


def observed(method: Callable) -> Callable:
    """Around one of the methods by which an interpreted program does what is watched."""
    return _OBSERVED[method.__name__](method)


def _observed_grid(set_grid_dim: Callable) -> Callable:
    return _then(set_grid_dim, lambda *grid: state.observer.grid(grid))


def _observed_program(set_grid_idx: Callable) -> Callable:
    return _then(set_grid_idx, lambda *index: state.observer.program(index))


def _then(method: Callable, tell: Callable) -> Callable:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any) -> None:
        method(self, *args)
        if _watching():
            tell(*args)

    return wrapped


def _tensors(name: str, host: Any, given: Any) -> Iterator[Argument]:
    """Tensors inside one argument: itself, a descriptor's base, or the items of a tuple."""
    if isinstance(host, tuple):
        fields = getattr(host, "_fields", range(len(host)))
        for key, host_item, given_item in zip(fields, host, given):
            yield from _tensors(f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]", host_item, given_item)
    elif isinstance(host, TensorDescriptor):
        yield from _tensors(name, host.base, given.base)
    elif isinstance(host, triton.TensorWrapper):
        yield Argument(name, host.base, given.base)
    elif isinstance(host, torch.Tensor):
        yield Argument(name, host, given)


def observed_arguments(to_host: Callable) -> Callable:
    """Tell the observer of a launch, with its arguments on the host and as they were given."""

    @functools.wraps(to_host)
    def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, options = to_host(self, args_dev, kwargs)
        if state.observer is not None:
            try:
                host = inspect.getcallargs(self.fn, *args, **options)
            except TypeError:  # a missing or surplus argument: the launch itself says which
                return args, options
            given = {**host, **dict(zip(self.arg_names, args_dev)), **kwargs}
            shared = self._sparse is None  # what is on the host are then views, of which no student has a hold
            tensors = tuple(a for name in host for a in _tensors(name, host[name], (host if shared else given)[name]))
            scalars = {name: v for name, v in host.items() if isinstance(v, (int, float, bool, str, torch.dtype))}
            launch = Launch(self.fn.__name__, tensors, scalars, self.fn, given)
            with torch._C.DisableTorchFunction() if shared else nullcontext():  # who listens hears the student alone
                state.observer.launch_begins(launch)
            state.launched = True
        return args, options

    return _init_args_hst


def observed_address(convert: Callable) -> Callable:
    """A kernel sees a tensor at the address that the observer chose."""

    @functools.wraps(convert)
    def _implicit_cvt(arg: Any) -> Any:
        value = convert(arg)
        if _watching() and isinstance(arg, (torch.Tensor, triton.TensorWrapper)):
            base = arg.base if isinstance(arg, triton.TensorWrapper) else arg
            value.handle.data = np.array([state.observer.address(base)], dtype=np.uint64)
        return value

    return _implicit_cvt


def _marked_atomic(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, state.atomic = state.atomic, True
        try:
            return method(self, *args, **kwargs)
        finally:
            state.atomic = outer

    return wrapped


def _mask_of(mask: Any) -> np.ndarray:
    """A mask as booleans: a handle, or up to Triton 3.7 an array where a descriptor made it.

    Upstream keeps ``tensor & (scalar < scalar)`` in 32 bits.
    """
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data).astype(np.bool_, copy=False)


def _boolean(mask: Any) -> Any:
    """A mask as Triton 3.9 takes it: a tensor's comparison and a scalar's make one of integers in the interpreter."""
    data = mask if isinstance(mask, np.ndarray) else mask.data
    return mask if data.dtype == np.bool_ else upstream.TensorHandle(_mask_of(mask), tl.int1)


def _access(pointers: Any, mask: np.ndarray, reads: bool, writes: bool, atomic: bool) -> tuple[Any, Any, Any]:
    if state.until < math.inf and time.process_time() > state.until:  # to ask for the time takes as long as the rest
        raise TimeIsUp
    itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    if writes and state.large is not None:
        state.wrote = state.wrote or bool(mask.any())
    real, allowed, poison = state.observer.access(Access(pointers.data, mask, itemsize, reads, writes, atomic))
    return (
        upstream.TensorHandle(real, pointers.dtype),
        upstream.TensorHandle(allowed, tl.int1),
        poison,
    )


def noted_other(load: Callable) -> Callable:
    """Upstream asks ``if other``, so that an ``other`` of one element, 0, would be taken for none."""

    @functools.wraps(load)
    def noted(self: Any, ptr: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        state.other = other is not None
        try:
            return load(self, ptr, mask, other, *args, **kwargs)
        finally:
            state.other = False

    return noted


def _observed_load(load: Callable) -> Callable:
    @functools.wraps(load)
    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watching():
            return load(self, ptrs, _boolean(mask), other, *args, **kwargs)
        asked = _mask_of(mask)
        real, allowed, poison = _access(ptrs, asked, True, False, state.atomic)
        result = load(self, real, allowed, other, *args, **kwargs)
        if other is None and not state.other and not asked.all():  # upstream has zeros there, a GPU anything
            unasked = ~np.broadcast_to(asked, result.data.shape)
            poison = unasked if poison is None else poison | unasked
        if poison is not None:
            _poison(result, poison)
        return result

    return create_masked_load


def _poison(result: Any, lanes: np.ndarray) -> None:
    """NaN where the type has one, 0 elsewhere (a 0 is the safest index)."""
    if result.dtype.scalar == tl.bfloat16:
        result.data[lanes] = narrow(np.array(np.nan, dtype=np.float32))
    else:
        result.data[lanes] = np.nan if result.data.dtype.kind == "f" else 0


def _observed_store(store: Callable) -> Callable:
    @functools.wraps(store)
    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watching():
            return store(self, ptrs, value, _boolean(mask), *args, **kwargs)
        real, allowed, _ = _access(ptrs, _mask_of(mask), False, True, state.atomic)
        return store(self, real, value, allowed, *args, **kwargs)

    return create_masked_store


def _observed_rmw(rmw: Callable) -> Callable:
    @functools.wraps(rmw)
    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watching():
            return rmw(self, op, ptr, val, _boolean(mask), *args, **kwargs)
        real, allowed, _ = _access(ptr, _mask_of(mask), True, True, True)
        return rmw(self, op, real, val, allowed, *args, **kwargs)

    return create_atomic_rmw


def _observed_cas(cas: Callable) -> Callable:
    @functools.wraps(cas)
    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watching():
            return cas(self, ptr, cmp, val, *args, **kwargs)
        real, allowed, _ = _access(ptr, np.ones(ptr.data.shape, dtype=bool), True, True, True)
        scratch = np.zeros(1, dtype=np.uint64)  # compare-and-swap takes no mask: lanes out of bounds go nowhere
        real.data = np.where(allowed.data, real.data, np.uint64(scratch.ctypes.data))
        return cas(self, real, cmp, val, *args, **kwargs)

    return create_atomic_cas


def _observed_dot(dot: Callable) -> Callable:
    @functools.wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if _watching():
            *batch, m, k = a.data.shape
            state.observer.dot(int(np.prod(batch, dtype=int)), m, b.data.shape[-1], k)
        return dot(self, a, b, *args, **kwargs)

    return create_dot


def _observed_dot_scaled(dot: Callable) -> Callable:
    @functools.wraps(dot)
    def create_dot_scaled(self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, *args: Any, **kwargs: Any) -> Any:
        result = dot(self, lhs, lhs_scale, lhs_format, *args, **kwargs)
        if _watching():
            *batch, m, n = result.data.shape
            packed = 2 if lhs_format == upstream.ir.ScaleDotElemTypeTY.E2M1 else 1  # two 4-bit values to a byte
            k = packed * lhs.data.size // (m * int(np.prod(batch, dtype=int)))
            state.observer.dot(int(np.prod(batch, dtype=int)), m, n, k)
        return result

    return create_dot_scaled


_OBSERVED = {
    "set_grid_dim": _observed_grid,
    "set_grid_idx": _observed_program,
    "create_masked_load": _observed_load,
    "create_masked_store": _observed_store,
    "create_atomic_rmw": _observed_rmw,
    "create_atomic_cas": _observed_cas,
    "create_atomic_load": _marked_atomic,
    "create_atomic_store": _marked_atomic,
    "create_atomic_poll": _marked_atomic,
    "create_dot": _observed_dot,
    "create_dot_scaled": _observed_dot_scaled,
}
