"""Atomics that Triton's interpreter refuses: exchange of floating-point values, sums in bfloat16, descriptors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from utils.interpreter import upstream
from utils.interpreter.bfloat16 import narrow, widen

import triton.language as tl  # isort: skip

_OP = upstream.ir.ATOMIC_OP


def more_types(rmw: Callable) -> Callable:
    """Exchange floating-point values as the bits they are; add bfloat16 lane by lane, rounding each sum to even."""

    @functools.wraps(rmw)
    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        scalar = val.dtype.scalar
        if op == _OP.XCHG and scalar.is_floating():
            bits = upstream.TensorHandle(val.data.view(f"u{val.data.itemsize}"), val.dtype)
            old = rmw(self, op, ptr, bits, mask, *args, **kwargs)
            return upstream.TensorHandle(old.data.view(val.data.dtype), scalar)
        if op == _OP.FADD and scalar == tl.bfloat16:
            return upstream.TensorHandle(_add_bfloat16(ptr.data, val.data, np.asarray(mask.data)), scalar)
        return rmw(self, op, ptr, val, mask, *args, **kwargs)

    return create_atomic_rmw


def _add_bfloat16(addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Add to the bfloat16 (uint16 bits) at each address, one lane after the other; return what was there before."""
    old = np.zeros(values.shape, dtype=np.uint16)
    lanes = zip(addresses.flat, widen(values).flat, np.broadcast_to(mask, values.shape).flat)
    for lane, (address, value, active) in enumerate(lanes):
        if active:
            cell = ctypes.c_uint16.from_address(int(address))
            old.flat[lane] = cell.value
            cell.value = narrow(widen(np.uint16(cell.value)) + value).item()
    return old


def descriptors(_: None) -> Callable:
    """A descriptor's atomics."""
    return _descriptor_reduce


def _descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, offsets: Any) -> None:
    """``desc.atomic_add(...)`` and its relatives: an atomic on each element that lies inside of the tensor."""
    name = kind.name if hasattr(kind, "name") else str(kind).rpartition(".")[2]
    scalar = value.dtype.scalar
    if scalar.is_floating() and name == "ADD":
        name = "FADD"
    elif scalar.is_int_unsigned() and name in ("MIN", "MAX"):
        name = f"U{name}"
    if not hasattr(_OP, name) or (scalar.is_floating() and name != "FADD"):
        raise NotImplementedError(f"a descriptor's atomic {name.lower()} of {scalar} is not interpreted")
    pointers, inside = desc.materialize_pointers(offsets)
    mask = inside if isinstance(inside, upstream.TensorHandle) else upstream.TensorHandle(inside, tl.int1)
    order, scope = upstream.ir.MEM_SEMANTIC.RELAXED, upstream.ir.MEM_SYNC_SCOPE.GPU
    self.create_atomic_rmw(getattr(_OP, name), pointers, value, mask, order, scope)
