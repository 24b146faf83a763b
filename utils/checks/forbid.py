"""Whether a student's function does the work itself: no built-in operator, no N x N tensor, and a kernel of its own.

:func:`record_calls` records what happens while the function runs: PyTorch's functions and operators, allocations and
launches of Triton kernels. :class:`Rules` says what an exercise forbids; :func:`broken_rule` holds one
against the other.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from utils.checks.problem import Problem
from utils.checks.student_files import is_library
from utils.checks.uninitialized import mark


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Built-in operators by group, by the last part of their names in PyTorch.
OPERATOR_GROUPS: Mapping[str, frozenset[str]] = {
    "softmax": _names("softmax log_softmax softmin logsumexp gumbel_softmax safe_softmax"),
    "matmul": _names(
        "matmul mm bmm addmm addbmm baddbmm addmv mv dot vdot inner linear bilinear einsum tensordot kron chain_matmul "
        "rmatmul multi_dot scaled_mm int_mm grouped_mm conv1d conv2d conv3d convolution"
    ),
    "attention": _names(
        "scaled_dot_product_attention scaled_dot_product_attention_math scaled_dot_product_flash_attention "
        "scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention "
        "scaled_dot_product_cudnn_attention flash_attention_forward efficient_attention_forward flex_attention "
        "multi_head_attention_forward"
    ),
    "activation": _names("gelu relu relu6 silu mish elu celu selu hardtanh threshold softplus sigmoid"),
    "normalisation": _names(
        "layer_norm native_layer_norm rms_norm fused_rms_norm group_norm batch_norm native_batch_norm"
    ),
    "loss": _names("cross_entropy cross_entropy_loss nll_loss nll_loss_nd"),
    "NumPy": _names("numpy array tolist"),
    "Python": _names("apply map map2"),
}

#: Operators that only allocate, copy, convert or look at memory: a function may use them around its kernel.
BOOKKEEPING = _names(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones "
    "ones_like new_ones full full_like new_full zero fill scalar_tensor tensor lift lift_fresh arange clone copy "
    "to_copy contiguous to view reshape expand permute transpose t mT numpy_T unsqueeze squeeze select slice narrow "
    "split split_with_sizes chunk unbind as_strided detach alias flatten unflatten movedim unsafe_view reshape_alias "
    "view_as_real resize set pad constant_pad_nd is_pinned pin_memory record_stream local_scalar_dense item equal "
    "is_same_size broadcast_tensors unsafe_split set_data version is_set_to stack cat swapaxes ravel squeeze_copy"
)

#: All of them.
READY_MADE = frozenset().union(*OPERATOR_GROUPS.values())

#: Single elements that a function may fetch into Python around its kernel, and different values that it may write from
#: there: a length, a flag, a number to begin with.
MOST_FETCHED = 16

_LIBRARIES = _names(
    "xformers flash_attn flash_attn_interface flash_attn_3 liger_kernel transformer_engine apex torchao flashinfer "
    "jax tensorflow sklearn scipy cupy"
)
_COMPILERS = ("torch.compile", "torch.jit", "torch._inductor", "torch._dynamo")


@dataclass(frozen=True)
class Call:
    """A PyTorch operator that ran: its name as written (``torch.softmax``) or ``aten.mm``, and the student's line."""

    name: str
    base: str
    where: str


@dataclass(frozen=True)
class Allocation:
    """Memory that a PyTorch operator allocated: elements, the tensor's shape, and the line that asked for it."""

    elements: int
    shape: tuple[int, ...]
    name: str
    where: str


@dataclass
class RecordedCalls:
    """What :func:`record_calls` recorded."""

    calls: list[Call] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    foreign: list[tuple[str, str]] = field(default_factory=list)  # (what, who) of tensors with values out of hearing
    kernels: list[tuple[str, str]] = field(default_factory=list)  # (name, module) of each launch
    written: set[str] = field(default_factory=set)  # different floating-point values that Python put into tensors
    launching: int = 0

    @property
    def largest(self) -> Allocation | None:
        """The largest allocation; None when nothing was allocated."""
        return max(self.allocations, key=lambda allocation: allocation.elements, default=None)


def _base(name: str) -> str:
    parts = name.split(".")
    return (parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]).strip("_")  # aten.detach.default


@functools.cache
def _place(file: str) -> str:
    return "a cell" if file.startswith("<") or "ipykernel" in file else Path(file).name


def _caller() -> str:
    """The nearest line of code that is not a library's, as ``softmax (kernels.py, line 12)``."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_library(file):
            name = frame.f_code.co_name
            return f"{name} ({_place(file)}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


#: Functions written in C, and Python's own: others may say of themselves that they equal one of these.
_HASHED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)


def _name(function: Any) -> str:
    return _known_name(function) if type(function) in _HASHED else _resolved_name(function)


def _resolved_name(function: Any) -> str:
    return resolve_name(function) or getattr(function, "__name__", "")


_known_name = functools.lru_cache(maxsize=4096)(_resolved_name)


class _Functions(TorchFunctionMode):
    """Notes PyTorch's functions under the names that the student wrote."""

    def __init__(self, seen: RecordedCalls) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = _name(func)
        if not (name.endswith(("__get__", "__set__")) or (self.seen.launching and _base(name) not in READY_MADE)):
            self.seen.calls.append(Call(name, _base(name), _caller()))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Notes the operators that run and the memory they allocate, and marks fresh memory as never written."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch.compile makes is refused, and skipping it here would import it: two seconds

    def __init__(self, seen: RecordedCalls) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket) if func is not torch.ops.aten.view.dtype else "aten.view_dtype"  # bare bits
        if self.seen.launching and _is_of_the_launch(sys._getframe(1), _base(name) in BOOKKEEPING):
            return result  # Triton's interpreter copies the arguments, and the profiler looks at them
        if _base(name) in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"):
            mark(result)
        where = _caller()
        self.seen.calls.append(Call(name, _base(name), where))
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        self.seen.foreign += [(kind, where) for kind in filter(None, map(_foreign, given))]
        self.seen.written |= _written(name, args, result)
        inputs = {_memory(value) for value in given}
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and _memory(value) not in inputs:
                elements = value.untyped_storage().nbytes() // value.element_size()
                self.seen.allocations.append(Allocation(elements, tuple(value.shape), name, where))
        return result


def _foreign(value: Any) -> str:
    """What of a tensor is not PyTorch's own: its memory, which NumPy or Python can change, or what its operators do."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ""
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"{type(value).__name__}, a tensor with operators of its own,"
    return "" if value.untyped_storage().resizable() else "a tensor in the memory of NumPy or Python"


#: Operators whose last argument is a number that fills a tensor.
_FILLING = frozenset(
    f"aten.{name}" for name in ("constant_pad_nd", "fill_", "full", "full_like", "new_full", "scalar_tensor")
)


def _written(name: str, args: Sequence[Any], result: Any) -> set[str]:
    """The floating-point values that an operator takes from Python: of a list, or a number that fills a tensor."""
    if not (isinstance(result, torch.Tensor) and result.dtype.is_floating_point) or result.is_meta:
        return set()
    if name in ("aten.lift_fresh", "aten.lift"):
        with torch._C.DisableTorchFunction():  # this reading is not the student's
            return set(map(repr, result.flatten().tolist()))
    return {repr(float(args[-1]))} if name in _FILLING and isinstance(args[-1], int | float) else set()


def _is_of_the_launch(frame: types.FrameType | None, copies: bool) -> bool:
    """Whether what watches a launch has called, or, to copy, Triton: with nothing but libraries between."""
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):  # who else listens, and passes it on
            frame = frame.f_back
            continue
        home = frame.f_globals.get("__name__", "")
        if frame.f_code is _asked.__code__:  # a grid of the student's, which may be a function written in C
            return False
        if home.startswith(("utils.interpreter", "utils.kernel_profile")) or (copies and home.startswith("triton.")):
            return True
        frame = frame.f_back
    return False


def _asked(grid: Callable[..., Any], meta: Any) -> Any:
    return grid(meta)


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def kernel_name(kernel: Any) -> tuple[str, str]:
    """Name and module of the Python function behind a Triton kernel, autotuned or not."""
    while not isinstance(kernel, types.FunctionType) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", repr(kernel)), getattr(kernel, "__module__", "") or ""


#: The blocks of :func:`record_calls` that listen now, the innermost last.
_LISTENING: list[RecordedCalls] = []


def _note_launches() -> None:
    """Let every ``kernel[grid]`` tell the blocks that listen.

    Installed once, when this module is imported, and left in place: CPython 3.13 stops following changes of a class's
    ``__getitem__`` once the class has been changed about a thousand times, and calls one that was put back long ago.
    """
    index = KernelInterface.__getitem__

    def launcher(kernel, grid):
        if not _LISTENING:
            return index(kernel, grid)
        launch = index(kernel, functools.partial(_asked, grid) if callable(grid) else grid)

        def run(*args, **kwargs):
            listening = tuple(_LISTENING)
            found = [(kind, _caller()) for kind in map(_foreign, (*args, *kwargs.values())) if kind]
            for seen in listening:
                seen.kernels.append(kernel_name(kernel))
                seen.foreign += found
                seen.launching += 1
            try:
                return launch(*args, **kwargs)
            finally:
                for seen in listening:
                    seen.launching -= 1

        return run

    KernelInterface.__getitem__ = launcher


_note_launches()


@contextlib.contextmanager
def record_calls() -> Iterator[RecordedCalls]:
    """Listen to what runs inside the block; everything is as it was afterwards, also after an exception.

    Memory from ``torch.empty`` and its relatives is filled with the value of :mod:`utils.checks.uninitialized`.
    """
    seen = RecordedCalls()
    compile_function = torch.compile

    def noted_compile(*args, **kwargs):
        seen.calls.append(Call("torch.compile", "compile", _caller()))
        return compile_function(*args, **kwargs)

    torch.compile = noted_compile
    _LISTENING.append(seen)
    try:
        with _Operators(seen), _Functions(seen):
            yield seen
    finally:
        _LISTENING.pop()
        torch.compile = compile_function


#: What is wrong with an operator, or with a group that holds no operators.
_WHY = {
    "tolist": "the host waits until the GPU has computed the values: use them in the kernel, or in tensors",
    "NumPy": "it converts to NumPy: implement the operation yourself",
    "Python": "it calls a Python function for each element: implement the operation yourself",
}


@dataclass(frozen=True)
class Rules:
    """What an exercise forbids.

    Args:
        groups: Groups of :data:`OPERATOR_GROUPS` that may not be called.
        kernel: The work must be done by Triton kernels of the student's own: at least one is launched, none comes
            from a library, and PyTorch only allocates, copies and views (:data:`BOOKKEEPING`).
        allow: Operators allowed all the same, by the last part of their name: ``("sum",)``.
        largest: Most elements that one allocated tensor may have: a number, or a function of the case.
        place: Of a larger one, in the list of classic wrong answers; 0 for none.

    Raises:
        ValueError: a group is unknown.
    """

    groups: Sequence[str] = tuple(OPERATOR_GROUPS)
    kernel: bool = True
    allow: Sequence[str] = ()
    largest: int | Callable[[Any], int] | None = None
    place: int = 0

    def __post_init__(self) -> None:
        for group in self.groups:
            if group not in OPERATOR_GROUPS:
                raise ValueError(f"{group!r} is not a group of operators: choose from {', '.join(OPERATOR_GROUPS)}")


def broken_rule(rules: Rules, seen: RecordedCalls, case: Any = None, empty: bool = False) -> Problem | None:
    """The first rule that a call broke, or None.

    Args:
        rules: What the exercise forbids.
        seen: What :func:`record_calls` noted.
        case: Handed to ``rules.largest``.
        empty: The output has no element, so no kernel needs to be launched.
    """
    for call in seen.calls:
        if call.base == "compile":
            return Problem(
                f"torch.compile is called by {call.where}", "write the kernel that it would generate yourself"
            )
        for group in rules.groups:
            if call.base in OPERATOR_GROUPS[group] and call.base not in rules.allow:
                why = _WHY.get(group, f"it is a built-in {group} operator: implement the operation yourself")
                return Problem(f"{call.name} is called by {call.where}", _WHY.get(call.base, why))
    limit = rules.largest(case) if callable(rules.largest) else rules.largest
    if limit is not None and seen.largest is not None and seen.largest.elements > max(limit, 1):
        big = seen.largest
        shape = " x ".join(map(str, big.shape)) or "1"
        cause = "a whole intermediate tensor is written to memory: keep one part of it, a tile, at a time"
        return Problem(
            f"largest allocation: expected at most {int(limit):,} elements, got {big.elements:,} ({shape})",
            f'{cause}: see "classic wrong answers" {rules.place}' if rules.place else cause,
            (f"by {big.name} in {big.where}",),
        )
    if not rules.kernel:
        return None
    for name, module in seen.kernels:
        if module.split(".")[0] in ("utils", "torch", *_LIBRARIES):
            return Problem(f"the kernel {name} from {module} is launched", "write that kernel yourself")
    if not seen.kernels and not empty:
        return Problem("no Triton kernel is launched", "launch your kernel: kernel[grid](...)")
    if seen.foreign:
        kind, where = seen.foreign[0]
        return Problem(
            f"{kind} is used by {where}",
            "what is written there is computed outside of your kernel: allocate with torch.empty",
        )
    if len(seen.written) > MOST_FETCHED:
        return Problem(
            f"{len(seen.written):,} different values are written into tensors from Python",
            "Python does the kernel's work: do it inside the kernel",
        )
    fetched = [call for call in seen.calls if call.name in ("aten._local_scalar_dense", "aten.equal")]
    if len(fetched) > MOST_FETCHED:
        return Problem(
            f"{len(fetched):,} single elements are fetched into Python by {fetched[0].where}",
            "each one waits for the GPU, and Python does the kernel's work: do it inside the kernel",
        )
    cause = "each such operator is a kernel of its own, with its own pass over memory: do this inside yours"
    if rules.allow:
        cause += f"; allowed are {', '.join(rules.allow)}, and what only copies, joins or views"
    for call in seen.calls:
        if call.name.startswith("aten.") and call.base not in BOOKKEEPING and call.base not in rules.allow:
            return Problem(
                f"PyTorch computes part of the result: {call.name} is called by {call.where}",
                cause,
            )
    return None


def find_library(function: Callable) -> str | None:
    """A library or compiler that solves the exercise for a function, found in its source, or None.

    Follows the functions of the same package that it names. Finds imports inside functions, names imported at the top
    of the module, ``torch.compile`` and its relatives, and functions that were compiled earlier.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return _scan(inspect.unwrap(function), set())


def _scan(function: Any, visited: set[int]) -> str | None:
    if id(function) in visited:
        return None
    visited.add(id(function))
    if hasattr(function, "_torchdynamo_orig_callable") or type(function).__module__.startswith("torch._dynamo"):
        return f"{getattr(function, '__name__', 'a function')}, compiled by torch.compile"
    if isinstance(function, torch.jit.ScriptFunction):
        return f"{function.name}, compiled by torch.jit"
    if inspect.isclass(function):
        members = [getattr(value, "__func__", value) for value in vars(function).values()]
        found = (_scan(value, visited) for value in members if isinstance(value, types.FunctionType))
        return next((text for text in found if text), None)
    if not isinstance(function, types.FunctionType):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # typed into a session, or a lambda amid an expression
        return None
    package = (function.__module__ or "").split(".")[0]
    local = dict(inspect.getclosurevars(function).nonlocals)
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            modules = [_dotted(node, function.__globals__)]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            value = local.get(node.id, function.__globals__.get(node.id))
            modules = [
                value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "") or ""
            ]
            if value is torch.compile:
                modules.append("torch.compile")
            same = str(getattr(value, "__module__", "")).split(".")[0] == package
            deeper = _scan(value, visited) if same or hasattr(value, "_torchdynamo_orig_callable") else None
            if deeper:
                return deeper
        for module in modules:
            if module.split(".")[0] in _LIBRARIES or any(_within(module, name) for name in _COMPILERS):
                return module
    return None


def _within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _dotted(node: ast.AST, names: Mapping[str, Any]) -> str:
    """``torch.nn.functional`` for an attribute chain that starts at a module, else the empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    root = names.get(node.id) if isinstance(node, ast.Name) else None
    return ".".join([root.__name__, *reversed(parts)]) if isinstance(root, types.ModuleType) else ""
