"""What upstream's interpreter gets wrong, put right; `speed.py` and `observation.py` beside it patch it too.

Each patch names what was wrong; all are in place after :func:`apply_patches`, which may be called any number of times.

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
overflow checks that nobody reads, slow types
    See :mod:`utils.interpreter.speed`: the same results, sooner.
slow device functions
    Each call of a ``@triton.jit`` helper patched the whole language again; once per launch is enough, and much faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from utils.interpreter import atomics, copies, float8, launching, observation, speed
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


def patches() -> tuple[str, ...]:
    """Names of the patches that are in place; empty before :func:`apply_patches`."""
    return _REPAIRS if _done else ()


def apply_patches() -> None:
    """Put every patch and every hook of :mod:`utils.interpreter.observation` in place. Idempotent."""
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
    builder.set_grid_dim = launching.checked_grid(builder.set_grid_dim)
    upstream._patch_lang_tensor = _index_of_one_element(upstream._patch_lang_tensor)
    upstream._implicit_cvt = _boolean_argument(upstream._implicit_cvt)
    executor = upstream.GridExecutor
    executor._init_args_hst = copies.sparse_arguments(executor._init_args_hst)
    executor._restore_args_dev = copies.sparse_results(executor._restore_args_dev)
    speed.install()
    observation.install()
    builder.set_grid_dim = launching.whole_grid(builder.set_grid_dim)
    builder.set_grid_idx = launching.last_of_grid(builder.set_grid_idx)
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
            for name, value in vars(upstream).items():
                names.setdefault(name, value)
        return function

    return _rewrite
