"""What upstream's interpreter gets wrong, put right.

Each repair names what was wrong; all are in place after :func:`repair`, which may be called any number of times.

bfloat16 dot
    ``tl.dot`` multiplied the raw 16-bit patterns and returned values near 1e10.
bfloat16 arithmetic
    Sums, products, comparisons and reductions worked on bit patterns, and scalars raised; as on a GPU they are now
    computed in float32 and rounded to nearest even.
bfloat16 rounding
    Casts truncated, or rounded without carrying into the exponent.
8-bit floats
    Casts to ``tl.float8e4nv`` and ``tl.float8e5`` rounded ties away from zero, without carrying, and overflowed to NaN
    or infinity; they round to nearest even and saturate, as ``cvt.rn.satfinite`` does on a GPU.
atomics
    ``tl.atomic_xchg`` of floats, ``tl.atomic_add`` of bfloat16 and a descriptor's atomics raised (up to 3.7).
NaN in maximum and minimum
    ``tl.maximum`` passed NaN on (up to 3.7). A GPU's ``max.f32`` drops it, in ``tl.max`` too: one NaN does not show in
    the maximum of a row. ``tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)`` passes it on, here and there.
autotune without a driver
    ``@triton.autotune`` with several configurations tried to time them; here the first that survives pruning is used.
loop bounds
    A tensor as a loop bound failed on Triton 3.6 with NumPy 2.4 and newer.
boolean arguments
    A Python ``bool`` passed to a kernel raised (up to 3.7).
error messages
    An exception in a kernel now names kernel and program, a bad grid or argument its value; NumPy's warnings on
    infinities are silent, as a GPU is.
copies of huge allocations
    In a GPU session upstream copies the whole allocation behind each argument; see :mod:`utils.interpreter.copies`.
reloaded modules
    A notebook that reloads an edited file empties the file's names, and upstream keeps names of its own among them: a
    kernel of another file that still holds a helper of this one then raised ``NameError``.
overflow checks that nobody reads
    Every sum, difference and product of integers was computed a second time in 64 bits for an assertion that upstream
    makes only of kernels launched with ``debug=True``; now only they pay for it. Whole kernels take half the time.
slow types
    Each operation built a table of all types to look one up in it, and checked and named the shape of every value
    that it read or made; a shape that was met before is known. A check of lab 3 takes a third less time. Operands that
    already have the type of their result, or are numbers that it holds, need no search for one.
slow device functions
    Each call of a ``@triton.jit`` helper patched the whole language again; once per launch is enough, and much faster.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.interpreter import atomics, copies, float8, launching, observation
from utils.interpreter.bfloat16 import narrow, widen

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.runtime import autotuner, interpreter as upstream  # isort: skip

_REPAIRS = (
    "bfloat16 dot",
    "bfloat16 arithmetic",
    "bfloat16 rounding",
    "8-bit floats",
    "atomics",
    "NaN in maximum and minimum",
    "autotune without a driver",
    "loop bounds",
    "boolean arguments",
    "error messages",
    "copies of huge allocations",
    "reloaded modules",
    "overflow checks that nobody reads",
    "slow types",
    "slow device functions",
)
_FLOAT_METHODS = [
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "precise_divf", "approx_divf", "fma", "clampf"),
    *("minimumf", "minnumf", "maximumf", "maxnumf"),
    *(f"fcmp{order}{test}" for order in "OU" for test in ("LT", "GT", "LE", "GE", "EQ", "NE")),
    *("floor", "ceil", "exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt", "sin", "cos", "erf"),
]
_done = False


def repairs() -> tuple[str, ...]:
    """Names of the repairs that are in place; empty before :func:`repair`."""
    return _REPAIRS if _done else ()


def repair() -> None:
    """Put every repair and every hook of :mod:`utils.interpreter.observation` in place. Idempotent."""
    global _done
    if _done:
        return
    _done = True
    builder = upstream.InterpreterBuilder
    for name in _FLOAT_METHODS:
        method = getattr(builder, f"create_{name}", None)
        if method is not None:
            setattr(builder, f"create_{name}", _in_float32(method))
    builder.create_dot = _in_float32(builder.create_dot)
    builder.cast_impl = _rounding_cast(builder.cast_impl)
    builder.create_fp_to_fp = _rounding_fp_to_fp(builder.create_fp_to_fp)
    builder.get_bf16 = lambda self, value: _handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)
    builder.create_minnumf = _in_float32(lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin))
    builder.create_maxnumf = _in_float32(lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax))
    builder.create_atomic_rmw = atomics.more_types(builder.create_atomic_rmw)
    if not hasattr(builder, "create_descriptor_reduce"):
        builder.create_descriptor_reduce = atomics.descriptor_reduce
    upstream.ReduceOps.min_max = _quiet_min_max(upstream.ReduceOps.min_max)
    upstream.ReduceOps.apply_impl = _reduce_in_float32(upstream.ReduceOps.apply_impl)
    upstream.ScanOps.apply_impl = _reduce_in_float32(upstream.ScanOps.apply_impl)
    autotuner.Autotuner._bench = _first_config(autotuner.Autotuner._bench)
    semantic = upstream.interpreter_semantic
    semantic.binary_op_sanitize_overflow_impl = _only_when_asserted(semantic.binary_op_sanitize_overflow_impl)
    upstream._get_np_dtype = _remembered_types(upstream._get_np_dtype)
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _types_agree(semantic.binary_op_type_checking_impl)
    tl.core._unwrap_if_constexpr = _plain_values_at_once(tl.core._unwrap_if_constexpr)
    tl.dtype.__eq__ = _by_name(tl.dtype.__eq__)
    tl.block_type.with_element_ty = _remembered_elements(tl.block_type.with_element_ty)
    upstream.TensorHandle.__post_init__ = _unless_small_enough(upstream.TensorHandle.__post_init__)
    tl.block_type.__init__ = _remembered_shapes(tl.block_type.__init__)
    tl.tensor.__init__ = _remembered_shape_of_type(tl.tensor.__init__)
    builder.set_grid_dim = launching.checked_grid(builder.set_grid_dim)
    upstream._patch_lang_tensor = _index_of_one_element(upstream._patch_lang_tensor)
    upstream._patch_attr = _with_semantic
    upstream._patch_builtin = _patch_known_builtins
    upstream._implicit_cvt = _boolean_argument(upstream._implicit_cvt)
    executor = upstream.GridExecutor
    executor._init_args_hst = copies.sparse_arguments(executor._init_args_hst)
    executor._restore_args_dev = copies.sparse_results(executor._restore_args_dev)
    observation.install()
    upstream._patch_lang = launching.once_per_launch(upstream._patch_lang)
    function = upstream.InterpretedFunction
    function.rewrite = _survives_reload(function.rewrite)
    function.__call__ = launching.inside_launches_only(function.__call__)
    upstream.GridExecutor.__call__ = launching.launch(upstream.GridExecutor.__call__)


def _handle(data: np.ndarray, dtype: tl.dtype) -> upstream.TensorHandle:
    return upstream.TensorHandle(data, dtype)


def _is_bfloat16(value: object) -> bool:
    return isinstance(value, upstream.TensorHandle) and value.dtype.scalar == tl.bfloat16


def _in_float32(method: Callable) -> Callable:
    """Widen bfloat16 operands, run ``method``, and round a floating-point result whose operands were all bfloat16."""

    @functools.wraps(method)
    def operation(self: Any, *operands: Any, **options: Any) -> upstream.TensorHandle:
        if not any(map(_is_bfloat16, operands)):
            return method(self, *operands, **options)
        handles = [operand for operand in operands if isinstance(operand, upstream.TensorHandle)]
        wide = [_handle(widen(o.data), tl.float32) if _is_bfloat16(o) else o for o in operands]
        result = method(self, *wide, **options)
        if result.data.dtype == np.float32 and _is_bfloat16(handles[-1]):  # a dot's last handle is its accumulator
            return _handle(narrow(result.data), tl.bfloat16)
        return result

    return operation


def _rounding_cast(cast: Callable) -> Callable:
    """Casts from and to bfloat16 and 8-bit floats by value, rounded to nearest even; all others as they were."""

    @functools.wraps(cast)
    def cast_impl(self: Any, src: upstream.TensorHandle, dst_type: tl.dtype) -> upstream.TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        special = tl.bfloat16 in (source, target) or float8.is_float8(source) or float8.is_float8(target)
        if source == target or not special:
            return cast(self, src, dst_type)
        values = _wide(src)
        if target == tl.bfloat16:
            return _handle(narrow(values), tl.bfloat16)
        if float8.is_float8(target):
            return _handle(float8.narrow(values, target), target)
        return cast(self, src if values is src.data else _handle(values, tl.float32), dst_type)

    return cast_impl


def _rounding_fp_to_fp(convert: Callable) -> Callable:
    """Conversions that upstream rounds without a carry, and those from and to 8-bit floats."""
    nearest = upstream._ir.ROUNDING_MODE.RTNE

    @functools.wraps(convert)
    def create_fp_to_fp(self: Any, src: upstream.TensorHandle, dst_type: tl.dtype, mode: Any) -> upstream.TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        to_nearest = mode in (None, nearest)
        if target == tl.bfloat16 and source == tl.float32 and to_nearest:
            return _handle(narrow(src.data), tl.bfloat16)
        if float8.is_float8(source) or (float8.is_float8(target) and to_nearest):
            return self.cast_impl(src, dst_type)
        return convert(self, src, dst_type, mode)

    return create_fp_to_fp


def _wide(value: upstream.TensorHandle) -> np.ndarray:
    """The numbers behind a handle whose bits NumPy has no type for; all others as they are."""
    dtype = value.dtype.scalar
    if dtype == tl.bfloat16:
        return widen(value.data)
    return float8.widen(value.data, dtype) if float8.is_float8(dtype) else value.data


def _quiet_min_max(min_max: Callable) -> Callable:
    """Drop NaN as a GPU does, without NumPy's warning on a row that holds nothing else."""
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    @functools.wraps(min_max)
    def without_warning(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return min_max(self, input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    return without_warning


def _reduce_in_float32(apply_impl: Callable) -> Callable:
    """Reductions and scans over bfloat16 run on float32 values; their results are rounded once."""

    @functools.wraps(apply_impl)
    def apply(self: Any, input: tuple) -> Any:
        was_narrow = [value.dtype == tl.bfloat16 for value in input]
        if not any(was_narrow):
            return apply_impl(self, input)
        wide = tuple(
            self.to_tensor(widen(value.handle.data), tl.float32) if flag else value
            for value, flag in zip(input, was_narrow)
        )
        results = apply_impl(self, wide)
        one = not isinstance(results, (list, tuple))
        results = [results] if one else list(results)
        for i, result in enumerate(results):
            if was_narrow[min(i, len(was_narrow) - 1)] and result.dtype == tl.float32:
                handle = _handle(narrow(result.handle.data), tl.bfloat16)
                shape = list(result.shape)
                results[i] = tl.tensor(handle, tl.block_type(tl.bfloat16, shape) if shape else tl.bfloat16)
        return results[0] if one else results

    return apply


def _first_config(bench: Callable) -> Callable:
    """Interpreted configurations are not timed: all take the same time, so that the first is chosen."""

    @functools.wraps(bench)
    def _bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        innermost = self.fn
        while not isinstance(innermost, (upstream.InterpretedFunction, triton.JITFunction)):
            innermost = innermost.fn
        if isinstance(innermost, triton.JITFunction) and not observation.state.twins:
            return bench(self, *args, config=config, **meta)
        conflicts = sorted(meta.keys() & config.kwargs.keys())
        if conflicts:
            raise ValueError(f"{', '.join(conflicts)} must not be passed: @triton.autotune sets it")
        return [0.0, 0.0, 0.0]

    return _bench


def _only_when_asserted(check: Callable) -> Callable:
    """Compute an overflow check only where ``device_assert`` will look at it; ``check`` is a semantic's own method."""

    @functools.wraps(check)
    def binary_op_sanitize_overflow_impl(lhs: tl.tensor, rhs: tl.tensor, binary_op: Callable) -> None:
        if check.__self__.builder.options.debug:
            check(lhs, rhs, binary_op)

    return binary_op_sanitize_overflow_impl


def _remembered_types(numpy_type: Callable) -> Callable:
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
    """A block's shape, as :func:`_remembered_shapes` keeps it; of a scalar None."""
    return type.__dict__.get("_sizes")


def _filled(number: Any, scalar: tl.dtype, block: tl.block_type) -> tl.tensor:
    """A block of one number, of a scalar's type and another block's shape."""
    data = np.empty(_sizes(block), dtype=upstream._get_np_dtype(scalar))
    data.fill(number)
    return tl.tensor(_handle(data, scalar), block.with_element_ty(scalar))


def _stretched(value: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    """A block that is repeated along its axes of size 1."""
    scalar = value.type.scalar
    return tl.tensor(_handle(np.broadcast_to(value.handle.data, sizes), scalar), tl.block_type(scalar, list(sizes)))


def _unless_alike(broadcast: Callable) -> Callable:
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


def _types_agree(check: Callable) -> Callable:
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
                    if _sizes((lhs if left else rhs).type) is None or name == "bf16":  # whose bits NumPy cannot make
                        constant = semantic.scalar_constant(rhs if left else lhs, scalar)
                        pair = (lhs, constant) if left else (constant, rhs)
                        return semantic.broadcast_impl_value(*pair)
                    return (lhs, _filled(rhs, scalar, lhs.type)) if left else (_filled(lhs, scalar, rhs.type), rhs)
            elif left and right and allow_lhs_ptr and scalar.is_ptr() and rhs.type.scalar.name in _OFFSETS:
                return semantic.broadcast_impl_value(lhs, rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


_ASKS_FOR_SEMANTIC = tl.core.builtin(lambda: None).__code__


def _with_semantic(obj: object, name: str, member: Callable, builder: Any, scope: Any) -> None:
    """A function of the language as the interpreter calls it: without a copy of its arguments' names, and without the
    question whether it was given what it is given here."""
    if getattr(member, "__code__", None) is _ASKS_FOR_SEMANTIC:
        member = member.__wrapped__

    def new_member(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = upstream.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, new_member)


#: A module or class of the language -> how many members it had when its functions were looked for, and their names.
_builtins: dict[Any, tuple[int, list[str]]] = {}


def _patch_known_builtins(pkg: Any, builder: Any, scope: Any) -> None:
    """Patch the language's functions in a module or class: looked for once, and again when it has other members."""
    size = len(vars(pkg))
    if _builtins.get(pkg, (None,))[0] != size:
        _builtins[pkg] = size, [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
    for name in _builtins[pkg][1]:
        if tl.core.is_builtin(member := getattr(pkg, name)):
            upstream._patch_attr(pkg, name, member, builder, scope)


def _by_name(equal: Callable) -> Callable:
    """Two types of numbers are compared by their names at once; anything else as it was."""

    @functools.wraps(equal)
    def __eq__(self: tl.dtype, other: object) -> bool:
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    return __eq__


def _plain_values_at_once(unwrap: Callable) -> Callable:
    """Most of what is unwrapped is a tensor, a number or nothing, and is what it is."""
    plain = frozenset({tl.tensor, int, float, bool, str, type(None)})

    @functools.wraps(unwrap)
    def _unwrap_if_constexpr(o: Any) -> Any:
        return o if type(o) in plain else unwrap(o)

    return _unwrap_if_constexpr


def _remembered_elements(with_element_ty: Callable) -> Callable:
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


def _unless_small_enough(post_init: Callable) -> Callable:
    """Values that take no more bytes than a number of their type need not be checked for it."""
    sizes = {"int1": 1, "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}

    @functools.wraps(post_init)
    def __post_init__(self: upstream.TensorHandle) -> None:
        if self.data.itemsize > sizes.get(self.dtype.name, 0):
            post_init(self)

    return __post_init__


def _remembered_shapes(init: Callable) -> Callable:
    """Work a block's type out once: all types of the same elements and shape have the same attributes."""
    known: dict[tuple, dict[str, Any]] = {}

    @functools.wraps(init)
    def __init__(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
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


def _remembered_shape_of_type(init: Callable) -> Callable:
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


def _index_of_one_element(patch: Callable) -> Callable:
    """Let a tensor of one element be a loop bound, whatever NumPy says about its rank."""

    @functools.wraps(patch)
    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return _patch_lang_tensor


def _boolean_argument(convert: Callable) -> Callable:
    """A bool becomes a one-bit tensor instead of 32 bits that do not fit one."""

    @functools.wraps(convert)
    def _implicit_cvt(arg: Any) -> Any:
        if isinstance(arg, bool):
            return tl.tensor(_handle(np.array([arg], dtype=np.bool_), tl.int1), tl.int1)
        return convert(arg)

    return _implicit_cvt


def _survives_reload(rewrite: Callable) -> Callable:
    """Give a function's module the interpreter's names again if they are gone."""

    @functools.wraps(rewrite)
    def _rewrite(self: Any) -> Callable:
        function, names = rewrite(self), self.fn.__globals__
        if "interpreter_semantic" not in names:
            for name, value in vars(upstream).items():
                names.setdefault(name, value)
        return function

    return _rewrite
