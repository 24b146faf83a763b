"""The source of a Triton kernel together with all that it refers to, as a module that stands alone.

So a kernel can be compiled by another process, wherever it was written: in a module, a notebook, or a test.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.runtime.jit import ConstexprFunction  # isort: skip

_KNOWN: WeakKeyDictionary[FunctionType, tuple[str, list[str]]] = WeakKeyDictionary()
_CONSTANT = (bool, int, float, str, type(None), tuple)


def is_gluon(kernel: Any) -> bool:
    """Whether a kernel is under ``@gluon.jit``."""
    return hasattr(kernel, "is_gluon") and kernel.is_gluon()


def standalone_source(function: FunctionType, gluon: bool = False) -> str:
    """Source of a module that defines ``function`` under ``@triton.jit`` and needs nothing but Triton.

    Functions that it calls come with it, constants with their values, modules as imports.

    Args:
        gluon: It is under ``@gluon.jit``.

    Raises:
        ValueError: The source cannot be found, or the kernel refers to something that is none of these.
    """
    lines = ["import triton", "import triton.language as tl"]
    if gluon:
        lines.insert(0, "from triton.experimental import gluon")
    _collect(function, lines, set(), "gluon.jit" if gluon else "triton.jit")
    return "\n".join(lines) + "\n"


def _collect(function: FunctionType, lines: list[str], done: set[str], decorator: str) -> None:
    done.add(function.__name__)
    source, names = _read(function)
    for name in names:
        if name not in done and name in function.__globals__:
            done.add(name)
            _define(name, function.__globals__[name], lines, done, function.__name__)
    lines += ["", "", f"@{decorator}", source]


def _decorator(function: Any) -> str:
    """Under what a function is that a kernel calls."""
    if isinstance(function, ConstexprFunction):
        return "triton.constexpr_function"
    return "gluon.jit" if is_gluon(function) else "triton.jit"


def _read(function: FunctionType) -> tuple[str, list[str]]:
    """A function's source, and the names that it takes from outside; a check asks for the same ones many times."""
    if function not in _KNOWN:
        source = _undecorated(function)
        _KNOWN[function] = source, _names(source, set(function.__code__.co_varnames))
    return _KNOWN[function]


def _undecorated(function: FunctionType) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of {function.__name__} cannot be found: {error}") from error
    tree = ast.parse(source).body[0]
    return "\n".join(source.splitlines()[tree.lineno - 1 :])


def _names(source: str, local: set[str]) -> list[str]:
    """Names that a function takes from outside, in order of appearance: not ``local`` ones, which its body assigns.

    Those in annotations and defaults always come from outside.
    """
    definition = ast.parse(source).body[0]
    head = set(ast.walk(definition.args))
    nodes = [
        node for node in ast.walk(definition) if isinstance(node, ast.Name) and (node in head or node.id not in local)
    ]
    return list(dict.fromkeys(node.id for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset))))


def _define(name: str, value: Any, lines: list[str], done: set[str], user: str) -> None:
    if isinstance(value, ModuleType):
        if (name, value) not in (("tl", tl), ("triton", triton)):
            lines.insert(0, f"import {value.__name__} as {name}")
        return
    inner = getattr(value, "fn", None)
    if isinstance(inner, FunctionType):
        if inner.__module__.startswith("triton."):
            lines.insert(0, f"from {inner.__module__} import {inner.__name__} as {name}")
        else:
            _collect(inner, lines, done, _decorator(value))
            if inner.__name__ != name:
                lines.append(f"{name} = {inner.__name__}")
    elif isinstance(value, tl.constexpr):
        lines.append(f"{name} = tl.constexpr({value.value!r})")
    elif isinstance(value, tl.dtype):
        lines.append(f"{name} = tl.dtype({value.name!r})")
    elif isinstance(value, _CONSTANT):
        lines.append(f"{name} = {value!r}")
    elif getattr(value, "__module__", "").startswith(("triton.", "builtins", "math")):
        lines.insert(0, f"from {value.__module__} import {value.__name__} as {name}")
    else:
        raise ValueError(f"{user} refers to {name!r}, a {type(value).__name__}, which cannot be sent to the compiler")
