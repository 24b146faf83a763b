"""Operators of tensors, sooner: the type of a result is worked out once for all operands of the same types and shapes.

The first ``x + y`` of such operands is upstream's, which takes many steps to find the type of the result. From the next
one on NumPy alone computes the values, in the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from utils.interpreter import upstream

import triton.language as tl  # isort: skip

#: Operators that NumPy computes as upstream's interpreter does, operand by operand.
_ARITHMETIC = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
}  # fmt: skip
_BITWISE = ("__and__", "__or__")
_REFLECTED = {"__radd__": np.add, "__rsub__": np.subtract, "__rmul__": np.multiply}
_COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}  # fmt: skip
#: Types on which it does; of the others NumPy has only the bits.
_COMPUTED = frozenset({"int1", "int32", "int64", "fp16", "fp32", "fp64"})
#: Conversions that it does, too.
_CONVERTED = frozenset({
    ("int32", "int64"), ("int64", "int32"), ("int1", "int32"), ("int1", "fp32"), ("int32", "fp32"), ("fp16", "fp32"),
    ("fp32", "fp64"), ("fp16", "fp64"),
})  # fmt: skip
_ALL = slice(None)
_ONLY_SEMANTIC = {"_semantic"}
_UNKNOWN = object()


class _Known(NamedTuple):
    """How an operator's result comes of its operands' data, and the types of its handle and of its tensor."""

    compute: Callable[..., np.ndarray]
    handle: tl.dtype
    type: tl.dtype


def remembering(name: str, member: Callable) -> Callable:
    """A method of tensors that remembers the types of its results; any other than these operators as it is."""
    if name == "__getitem__":
        return _new_axes(member)
    if name == "to":
        return _converting(member)
    if name in _COMPARISONS:
        return _elementwise(member, _COMPARISONS[name], _compares_alike)
    if name in _ARITHMETIC:
        return _elementwise(member, _ARITHMETIC[name], _computes if name in _BITWISE else _adds)
    if name in _REFLECTED:
        return _elementwise(member, lambda tensor, number: _REFLECTED[name](number, tensor), _adds)
    return member


def _elementwise(member: Callable, compute: Callable, may: Callable[[Any, Any], bool]) -> Callable:
    """An operator of two operands, the first of which is a tensor."""
    known: dict[tuple, _Known | None] = {}
    builder = upstream.interpreter_builder

    def of_two(self: tl.tensor, other: Any, **semantic: Any) -> tl.tensor:
        right = _kind(other)
        if right is None or builder.options.debug:  # which looks whether integers overflow
            return member(self, other, **semantic)
        left = _kind(self)
        key = left[0], right[0]
        found = known.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            result = member(self, other, **semantic)
            known[key] = _learned(_way(self, other, compute, may), result, left[1], right[1])
            return result
        if found is None:
            return member(self, other, **semantic)
        return tl.tensor(upstream.TensorHandle(found.compute(left[1], right[1]), found.handle), found.type)

    return of_two


def _new_axes(member: Callable) -> Callable:
    """An index that adds axes, ``x[:, None]``, as NumPy's does."""
    known: dict[tuple, _Known | None] = {}

    def __getitem__(self: tl.tensor, slices: Any, **semantic: Any) -> tl.tensor:
        if type(slices) is not tuple or not all(s is None or (type(s) is slice and s == _ALL) for s in slices):
            return member(self, slices, **semantic)
        kind, data = _kind(self)
        key = kind, tuple([s is None for s in slices])
        found = known.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            result = member(self, slices, **semantic)
            alike = self.type.is_block() and key[1].count(False) <= data.ndim  # upstream passes over an axis too many
            known[key] = _learned(operator.getitem, result, data, slices) if alike else None
            return result
        if found is None:
            return member(self, slices, **semantic)
        return tl.tensor(upstream.TensorHandle(data[slices], found.handle), found.type)

    return __getitem__


def _converting(member: Callable) -> Callable:
    """A conversion between integers, or to numbers that hold as much, as NumPy's."""
    known: dict[tuple, _Known | None] = {}

    def to(self: tl.tensor, dtype: Any, *rounding: Any, **options: Any) -> tl.tensor:
        if type(dtype) is not tl.dtype or rounding or options.keys() - _ONLY_SEMANTIC:
            return member(self, dtype, *rounding, **options)
        if dtype.name == self.type.scalar.name:
            return self
        kind, data = _kind(self)
        key = kind, dtype.name
        found = known.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            result = member(self, dtype, **options)
            kept = result.handle.data.dtype
            alike = (self.type.scalar.name, dtype.name) in _CONVERTED
            known[key] = _learned(lambda data: data.astype(kept), result, data) if alike else None
            return result
        if found is None:
            return member(self, dtype, **options)
        return tl.tensor(upstream.TensorHandle(found.compute(data), found.handle), found.type)

    return to


def _kind(value: Any) -> tuple[Any, Any] | None:
    """What of an operand decides on the type of the result, and what NumPy computes with; None of what is unusual."""
    kind = type(value)
    if kind is tl.tensor:
        handle = value.handle
        data = handle.data
        return (value.type.name, handle.dtype.name, data.dtype, data.shape), data
    if kind is float or (kind is int and -(2**31) <= value < 2**31):
        return kind, value
    return None


def _learned(compute: Callable | None, result: Any, *operands: Any) -> _Known | None:
    """None where the result is no array, or NumPy alone would give another one."""
    if compute is None or not isinstance(result, tl.tensor) or not isinstance(result.handle.data, np.ndarray):
        return None
    again, data = compute(*operands), result.handle.data
    same = (again.dtype, again.shape) == (data.dtype, data.shape)
    return _Known(compute, result.handle.dtype, result.type) if same else None


def _way(tensor: tl.tensor, other: Any, compute: Callable, may: Callable[[Any, Any], bool]) -> Callable | None:
    """How NumPy computes an operator of such operands; None where it would not do it as upstream."""
    scalar = tensor.type.scalar
    if compute is np.add and scalar.is_ptr() and isinstance(other, tl.tensor):
        if type(scalar.element_ty) is not tl.dtype or other.type.scalar.name not in ("int32", "int64"):
            return None
        step = max(1, scalar.element_ty.primitive_bitwidth // 8)
        return lambda pointers, offsets: pointers + step * offsets.astype(np.uint64)
    return compute if may(tensor, other) else None


def _computes(tensor: tl.tensor, other: Any) -> bool:
    """Whether NumPy has the types of both operands; what comes of them then has to have upstream's type."""
    values = [value for value in (tensor, other) if isinstance(value, tl.tensor)]
    return all(value.type.scalar.name in _COMPUTED for value in values)


def _adds(tensor: tl.tensor, other: Any) -> bool:
    """The same for sums, differences and products: of two booleans Triton 3.9 adds the bits, NumPy takes either."""
    both = tensor.type.scalar.name == "int1" and (not isinstance(other, tl.tensor) or other.type.scalar.name == "int1")
    return not both and _computes(tensor, other)


def _compares_alike(tensor: tl.tensor, other: Any) -> bool:
    """Whether NumPy compares what upstream does, which makes a tensor of a number, and one type of two."""
    if not _computes(tensor, other):
        return False
    kind = tensor.handle.data.dtype.kind
    return kind == other.handle.data.dtype.kind if isinstance(other, tl.tensor) else kind == "i" and type(other) is int
