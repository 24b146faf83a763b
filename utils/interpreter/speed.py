"""The same results as those of upstream's interpreter, sooner: for students, who check again and again, on a CPU.

Overflow checks that nobody reads
    Every sum, difference and product of integers was computed a second time in 64 bits for an assertion that upstream
    makes only of kernels launched with ``debug=True``; now only they pay for it.
Slow types
    Each operation built a table of all types to look one up in it, and checked and named the shape of every value
    that it read or made; what was met before is known. Operands that already have the type of their result, or are
    numbers that it holds, need no search for one; nor do blocks of one rank for their common shape. What comes of an
    operator is remembered, see :mod:`utils.interpreter.operators`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from utils.interpreter import operators, upstream

import triton.language as tl  # isort: skip


def only_when_asserted(check: Callable) -> Callable:
    """Compute an overflow check only where ``device_assert`` will look at it; ``check`` is a semantic's own method."""

    @functools.wraps(check)
    def binary_op_sanitize_overflow_impl(lhs: tl.tensor, rhs: tl.tensor, binary_op: Callable) -> None:
        if check.__self__.builder.options.debug:
            check(lhs, rhs, binary_op)

    return binary_op_sanitize_overflow_impl


def remembered_types(numpy_type: Callable) -> Callable:
    """Look a type up once for all operations on it."""
    known: dict[str, np.dtype] = {}

    @functools.wraps(numpy_type)
    def _get_np_dtype(tt_dtype: tl.dtype) -> np.dtype:
        name = tt_dtype.scalar.name  # of a block its elements', which decide
        if name not in known:
            known[name] = numpy_type(tt_dtype)
        return known[name]

    return _get_np_dtype


def _sizes(type: tl.dtype) -> tuple[int, ...] | None:
    """A block's shape, as :func:`remembered_shapes` keeps it; of a scalar None."""
    sizes = type.__dict__.get("_sizes")
    return tuple(type.shape) if sizes is None and type.is_block() else sizes


def _filled(number: Any, scalar: tl.dtype, block: tl.block_type) -> tl.tensor:
    """A block of one number, of a scalar's type and another block's shape."""
    data = np.empty(_sizes(block), dtype=upstream.module._get_np_dtype(scalar))
    data.fill(number)
    return tl.tensor(upstream.TensorHandle(data, scalar), block.with_element_ty(scalar))


def _stretched(value: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    """A block that is repeated along its axes of size 1."""
    scalar = value.type.scalar
    return tl.tensor(
        upstream.TensorHandle(np.broadcast_to(value.handle.data, sizes), scalar), tl.block_type(scalar, list(sizes))
    )


def unless_alike(broadcast: Callable) -> Callable:
    """Two blocks of one shape need no broadcasting; blocks of one rank, and a number beside one, no search for how."""
    common: dict[tuple, tuple[int, ...] | None] = {}

    def shape_of_both(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        """None where upstream adds an axis or says what is wrong."""
        if len(left) != len(right) or any(m != n and 1 not in (m, n) for m, n in zip(left, right)):
            return None
        return tuple([n if m == 1 else m for m, n in zip(left, right)])

    @functools.wraps(broadcast)
    def broadcast_impl_value(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        left, right = _sizes(lhs.type), _sizes(rhs.type)
        if left == right:  # of two scalars both are None
            return lhs, rhs
        if left is not None and right is not None:
            if (left, right) not in common:
                common[left, right] = shape_of_both(left, right)
            if both := common[left, right]:
                lhs = lhs if left == both else _stretched(lhs, both)
                return lhs, rhs if right == both else _stretched(rhs, both)
        elif left is not None and rhs.type.name in _CLOSED and rhs.handle.data.size == 1:
            return lhs, _filled(rhs.handle.data.item(), rhs.type, lhs.type)
        elif right is not None and lhs.type.name in _CLOSED and lhs.handle.data.size == 1:
            return _filled(lhs.handle.data.item(), lhs.type, rhs.type), rhs
        return broadcast(lhs, rhs)

    return broadcast_impl_value


#: Types that the result of an operation on two of their values has, too, but for quotients of the narrow ones; those of
#: them with fractions; and types of offsets.
_CLOSED = frozenset({"int32", "int64", "fp16", "bf16", "fp32", "fp64"})
_FRACTIONS = frozenset({"fp16", "bf16", "fp32", "fp64"})
_OFFSETS = frozenset({"int32", "int64"})
_NARROW = frozenset({"fp16", "bf16"})


def types_agree(check: Callable) -> Callable:
    """Operands of one type keep it, and a number takes the type of the tensor beside it; ``check`` is a semantic's own
    method, for everything else."""
    semantic = check.__self__

    def takes(tensor_type: tl.dtype, number: object) -> bool:
        """Whether a tensor's type holds any such number."""
        if tensor_type.name in _FRACTIONS:
            return type(number) is float or (type(number) is int and -(2**31) <= number < 2**31)
        return type(number) is int and -(2**31) <= number < 2**31

    @functools.wraps(check)
    def binary_op_type_checking_impl(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
        left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if arithmetic_check and (left or right):
            scalar = (lhs if left else rhs).type.scalar
            name = scalar.name
            if name in _CLOSED and not (div_or_mod and name in _NARROW):
                if left and right:
                    other = rhs.type.scalar
                    if other.name == name or (allow_rhs_ptr and name in _OFFSETS and other.is_ptr()):
                        return semantic.broadcast_impl_value(lhs, rhs)
                elif takes(scalar, rhs if left else lhs):
                    tensor, number = (lhs, rhs) if left else (rhs, lhs)
                    if _sizes(tensor.type) is None or name == "bf16":  # whose bits NumPy cannot make
                        constant = semantic.scalar_constant(number, scalar)
                    else:
                        constant = _filled(number, scalar, tensor.type)
                    return semantic.broadcast_impl_value(*((tensor, constant) if left else (constant, tensor)))
            elif left and right and allow_lhs_ptr and scalar.is_ptr() and rhs.type.scalar.name in _OFFSETS:
                return semantic.broadcast_impl_value(lhs, rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


_ASKS_FOR_SEMANTIC = tl.core.builtin(lambda: None).__code__


def _given_semantic(member: Callable) -> Callable:
    """A function of the language as the interpreter calls it: without a copy of its arguments' names, and without the
    question whether it was given what it is given here."""
    if getattr(member, "__code__", None) is _ASKS_FOR_SEMANTIC:
        member = member.__wrapped__

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = upstream.interpreter_semantic
        return member(*args, **kwargs)

    return new_member


@functools.cache
def _members(package: Any) -> tuple[tuple[str, Callable], ...]:
    """The functions of a part of the language that the interpreter replaces, and what takes their places."""
    members = [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    remembering = operators.remembering if package is tl.tensor else lambda name, member: member
    return tuple((name, remembering(name, _given_semantic(member))) for name, member in members)


def remembered_members(patch: Callable) -> Callable:
    """Look for them once, not at each launch."""

    @functools.wraps(patch)
    def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        members = _members(package)
        if members and getattr(package, members[0][0]) is members[0][1]:  # it is a part of two modules
            return
        for name, new_member in members:
            scope._changes.append((package, name, getattr(package, name)))
            setattr(package, name, new_member)

    return _patch_builtin


def by_name(equal: Callable) -> Callable:
    """Two types of numbers are compared by their names at once; anything else as it was."""

    @functools.wraps(equal)
    def __eq__(self: tl.dtype, other: object) -> bool:
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    return __eq__


def plain_values_at_once(unwrap: Callable) -> Callable:
    """Most of what is unwrapped is a tensor, a number or nothing, and is what it is."""
    plain = frozenset({tl.tensor, int, float, bool, str, type(None)})

    @functools.wraps(unwrap)
    def _unwrap_if_constexpr(o: Any) -> Any:
        return o if type(o) in plain else unwrap(o)

    return _unwrap_if_constexpr


def remembered_elements(with_element_ty: Callable) -> Callable:
    """A block's type with other elements, made once for each kind of number."""

    @functools.wraps(with_element_ty)
    def of_block(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        if type(scalar_ty) is not tl.dtype:
            return with_element_ty(self, scalar_ty)
        known = self.__dict__.setdefault("_with_elements", {})
        if scalar_ty.name not in known:
            known[scalar_ty.name] = with_element_ty(self, scalar_ty)
        return known[scalar_ty.name]

    return of_block


def without_a_check(init: Callable) -> Callable:
    """Values that take no more bytes than a number of their type need not be checked for it."""
    sizes = {"int1": 1, "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}

    @functools.wraps(init)
    def __init__(self: upstream.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
        if attr is not None or data.itemsize > sizes.get(dtype.name, 0):
            init(self, data, dtype, {} if attr is None else attr)
        else:
            self.data, self.dtype, self.attr = data, dtype, {}

    known = [*inspect.signature(init).parameters] == ["self", "data", "dtype", "attr"]
    return __init__ if known else init


def remembered_shapes(init: Callable) -> Callable:
    """Work a block's type out once: all types of the same elements and shape have the same attributes.

    Those of Gluon, which are classes of their own, have a layout too.
    """
    known: dict[tuple, dict[str, Any]] = {}

    @functools.wraps(init)
    def __init__(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        if type(self) is not tl.block_type:
            return init(self, element_ty, shape)
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        for size in sizes:
            if type(size) is not int:  # upstream says what is wrong with it
                return init(self, element_ty, shape)
        key = (type(element_ty), element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        attributes = known.get(key)
        if attributes is None:
            init(self, element_ty, shape)
            self._sizes = sizes
            known[key] = self.__dict__
        else:
            self.__dict__ = attributes

    return __init__


def remembered_shape_of_type(init: Callable) -> Callable:
    """Make the shape of tensors once for their type, and once for all scalars."""
    of_scalars: list[tuple] = []

    @functools.wraps(init)
    def __init__(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        block = isinstance(type, tl.block_type)
        known = type.__dict__.get("_of_tensors") if block else of_scalars and of_scalars[0]
        if known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known
            return
        init(self, handle, type)
        if block:
            type._of_tensors = (self.shape, self.numel)
        else:
            of_scalars.append((self.shape, self.numel))

    return __init__
