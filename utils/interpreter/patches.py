"""All that the course replaces in Triton's interpreter, in one table (:data:`POINTS`), and what puts it right.

Each point says what it is for, what upstream says of it, and the version of Triton from which it is not needed: it is
not applied there. All are in place after :func:`apply_patches`, which may be called any number of times.
``tests/test_interpreter_points.py`` tries what each repair is for on a Triton without it, and so tells which repairs a
newer version does not need.

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
    ``tl.atomic_xchg`` of floats, ``tl.atomic_add`` of bfloat16 and a descriptor's atomics raise.
NaN in maximum and minimum
    ``tl.maximum`` passed NaN on (up to 3.7). A GPU's ``max.f32`` drops it, in ``tl.max`` too: one NaN does not show in
    the maximum of a row. ``tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)`` passes it on, here and there.
autotune without a driver
    ``@triton.autotune`` with several configurations tried to time them; here the first that survives pruning is used.
loop bounds
    A tensor as a loop bound failed on Triton 3.6 with NumPy 2.4 and newer.
loop variables
    The variable of a loop over ``range`` or ``tl.range`` was a number of Python's, which never overflows. It is a
    tensor of 32 bits, or of 64 where a bound is one; see :mod:`utils.interpreter.loops`.
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
overflow checks that nobody reads, slow types
    See :mod:`utils.interpreter.speed`: the same results, sooner.
slow device functions
    Each call of a ``@triton.jit`` helper patched the whole language again; once per launch is enough, and much faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from utils.interpreter import atomics, copies, float8, launching, loops, observation, speed, upstream
from utils.interpreter.bfloat16 import narrow, widen

import triton  # isort: skip
import triton.language as tl  # isort: skip


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
    nearest = upstream.ir.ROUNDING_MODE.RTNE

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


def _bfloat16_constant(_: None) -> Callable:
    """A constant of this type."""
    return lambda self, value: _handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)


def _without_nan(method: Callable) -> Callable:
    """The other operand where one is NaN, as a GPU's ``max.f32`` and ``min.f32`` have it."""

    @functools.wraps(method)
    def create(self: Any, lhs: upstream.TensorHandle, rhs: upstream.TensorHandle) -> upstream.TensorHandle:
        result = method(self, lhs, rhs)
        result.data = np.where(np.isnan(lhs.data), rhs.data, np.where(np.isnan(rhs.data), lhs.data, result.data))
        return result

    return create


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
        if isinstance(innermost, triton.JITFunction) and not observation.state.interpreting:
            return bench(self, *args, config=config, **meta)
        conflicts = sorted(meta.keys() & config.kwargs.keys())
        if conflicts:
            raise ValueError(f"{', '.join(conflicts)} must not be passed: @triton.autotune sets it")
        return [0.0, 0.0, 0.0]

    return _bench


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
            for name, value in vars(upstream.module).items():
                names.setdefault(name, value)
        return function

    return _rewrite


_MODULE, _SEMANTIC, _CORE = upstream.module, upstream.interpreter_semantic, upstream.core
_BUILDER, _EXECUTOR = _MODULE.InterpreterBuilder, _MODULE.GridExecutor
_FLOAT_METHODS = " ".join(
    f"create_{name}"
    for name in [
        *("fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "precise_divf", "approx_divf", "fma", "clampf"),
        *("minimumf", "minnumf", "maximumf", "maxnumf"),
        *(f"fcmp{order}{test}" for order in "OU" for test in ("LT", "GT", "LE", "GE", "EQ", "NE")),
        *("floor", "ceil", "exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt", "sin", "cos", "erf"),
    ]
)
_WATCHED = (
    "create_masked_load create_masked_store create_atomic_rmw create_atomic_cas create_atomic_load create_atomic_store "
    "create_atomic_poll create_dot create_dot_scaled set_grid_dim set_grid_idx"
)


class Point(NamedTuple):
    """Functions of Triton's interpreter that the course replaces for one reason.

    Attributes:
        owner: Their class, classes, object or module.
        names: Their names, separated by blanks. What the installed version has not got is passed over.
        wrap: Takes each of them and returns what takes its place.
        repair: What is put right, or made faster, as :func:`patches` names it; "" for what the course adds.
        upstream: The issue or change of triton-lang/triton that is about it; "" where there is none.
        until: The version of Triton from which it is not needed; "" while each version needs it.
        missing: The other way round: ``wrap`` makes what Triton has not got, and what it has stays.
    """

    owner: Any
    names: str
    wrap: Callable[[Callable | None], Callable]
    repair: str = ""
    upstream: str = ""
    until: str = ""
    missing: bool = False

    @property
    def needed(self) -> bool:
        """Whether the version of Triton that is installed needs it."""
        return not self.until or _version(triton.__version__) < _version(self.until)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


#: In the order in which they are applied: a later one is around an earlier one.
# fmt: off
POINTS = (
    Point(_BUILDER, "create_dot", _in_float32, "bfloat16 dot", "#11584"),
    Point(_BUILDER, "create_minnumf create_maxnumf", _without_nan, "NaN in maximum and minimum", "#10333", "3.8"),
    Point(_BUILDER, _FLOAT_METHODS, _in_float32, "bfloat16 arithmetic", "#10945"),
    Point((_MODULE.ReduceOps, _MODULE.ScanOps), "apply_impl", _reduce_in_float32, "bfloat16 arithmetic", "#10945"),
    Point(_BUILDER, "get_bf16", _bfloat16_constant, "bfloat16 arithmetic", "#10945", "3.9", missing=True),
    Point(_BUILDER, "cast_impl", _rounding_cast, "bfloat16 rounding"),
    Point(_BUILDER, "create_fp_to_fp", _rounding_fp_to_fp, "8-bit floats", "#8322"),
    Point(_BUILDER, "create_atomic_rmw", atomics.more_types, "atomics", "#11904"),
    Point(_BUILDER, "create_descriptor_reduce", atomics.descriptors, "atomics", missing=True),
    Point(_MODULE.ReduceOps, "min_max", _quiet_min_max, "NaN in maximum and minimum", "#11615"),
    Point(upstream.autotuner.Autotuner, "_bench", _first_config, "autotune without a driver", "#6570"),
    Point(_MODULE, "_patch_lang_tensor", _index_of_one_element, "loop bounds", "#9171", "3.7"),
    Point(_MODULE.ASTTransformer, "visit_For", loops.typed_variable, "loop variables", missing=True),
    Point(_MODULE, "_implicit_cvt", _boolean_argument, "boolean arguments", "#9565", "3.8"),
    Point(upstream.InterpretedFunction, "__call__", launching.inside_launches_only, "error messages"),
    Point(_EXECUTOR, "_init_args_hst", copies.sparse_arguments, "copies of huge allocations"),
    Point(_EXECUTOR, "_restore_args_dev", copies.sparse_results, "copies of huge allocations"),
    Point(upstream.InterpretedFunction, "rewrite", _survives_reload, "reloaded modules"),
    Point(_SEMANTIC, "binary_op_sanitize_overflow_impl", speed.only_when_asserted, "overflow checks that nobody reads"),
    Point(_MODULE, "_get_np_dtype", speed.remembered_types, "slow types"),
    Point(_SEMANTIC, "broadcast_impl_value", speed.unless_alike, "slow types"),
    Point(_SEMANTIC, "binary_op_type_checking_impl", speed.types_agree, "slow types"),
    Point(_CORE, "_unwrap_if_constexpr", speed.plain_values_at_once, "slow types"),
    Point(_CORE.dtype, "__eq__", speed.by_name, "slow types"),
    Point(_CORE.block_type, "with_element_ty", speed.remembered_elements, "slow types"),
    Point(upstream.TensorHandle, "__init__", speed.without_a_check, "slow types"),
    Point(_CORE.block_type, "__init__", speed.remembered_shapes, "slow types"),
    Point(_CORE.tensor, "__init__", speed.remembered_shape_of_type, "slow types"),
    Point(_MODULE, "_patch_builtin", speed.remembered_members, "slow device functions"),
    Point(_MODULE, "_patch_lang", launching.once_per_launch, "slow device functions"),
    Point(_BUILDER, _WATCHED, observation.observed),
    Point(upstream.semantic.TritonSemantic, "load", observation.noted_other),
    Point(_MODULE, "_implicit_cvt", observation.observed_address),
    Point(_EXECUTOR, "_init_args_hst", observation.observed_arguments),
    Point(_BUILDER, "set_grid_dim", launching.whole_grid, "error messages"),
    Point(_BUILDER, "set_grid_idx", launching.last_of_grid),
    Point(_EXECUTOR, "__call__", launching.launch, "error messages"),
)
# fmt: on
_done = False


def patches() -> tuple[str, ...]:
    """Names of the repairs that are in place; empty before :func:`apply_patches`."""
    return tuple(dict.fromkeys(point.repair for point in POINTS if point.repair and point.needed)) if _done else ()


def apply_patches() -> None:
    """Put each point of :data:`POINTS` in place that this version of Triton needs. Idempotent."""
    global _done
    if _done:
        return
    _done = True
    for point in filter(lambda point: point.needed, POINTS):
        for owner in point.owner if isinstance(point.owner, tuple) else (point.owner,):
            for name in point.names.split():
                if hasattr(owner, name) != point.missing:
                    setattr(owner, name, point.wrap(getattr(owner, name, None)))
