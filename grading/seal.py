"""A seal on what the checks rely on: taken before a student's code is imported, looked at after each check.

:func:`snapshot` notes, by identity, the functions and classes of the course's library, of PyTorch, Triton, NumPy,
Python and IPython that a check uses: what each name stands for, each function's code, defaults and what it closes over,
each class's methods; and what a program can hook into (signals, tracing, import hooks, the notebook's own machinery).
:meth:`Seal.verify` looks again and names what differs.

The seal stands in the process that the student's code runs in. It catches what changes the checks by accident or by a
trick, but code that knows of it could forge it: that is why the policy reads a module first, and why the scenarios'
expected values never enter the process. Nothing here needs more than Python's own library.
"""

from __future__ import annotations

import builtins
import gc
import re
import signal
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules whose every name is noted, with all that was loaded below them.
WHOLE = ("utils", "labs", "grading.seal")

#: Modules whose functions, classes and data types are noted.
USED = _names(
    "ast builtins collections contextlib copy dataclasses functools heapq importlib importlib._bootstrap inspect io "
    "itertools json linecache math multiprocessing operator os os.path pathlib pickle queue random re secrets select "
    "signal socket statistics struct subprocess sys tempfile textwrap threading time tokenize traceback types typing "
    "warnings weakref _thread "
    "torch torch._tensor torch._tensor_str torch._ops torch._utils torch._C torch._C._nn torch._C._linalg "
    "torch._C._special torch.functional torch.linalg torch.special torch.fft torch.overrides torch.random "
    "torch.storage torch.testing torch.testing._comparison torch.autograd torch.autograd.function torch.autograd.graph "
    "torch.autograd.grad_mode torch.nn torch.nn.functional torch.nn.init torch.nn.parameter torch.nn.modules.module "
    "torch.nn.modules.linear torch.nn.modules.container torch.optim torch.optim.optimizer torch.utils._pytree "
    "torch.utils._python_dispatch torch.utils.checkpoint torch.distributed torch.distributed.distributed_c10d "
    "numpy numpy.linalg numpy.random numpy.testing "
    "triton triton.language triton.language.core triton.language.standard triton.language.math "
    "triton.language.semantic triton.language.random triton.runtime triton.runtime.jit triton.runtime.interpreter "
    "triton.runtime.autotuner triton.tools.tensor_descriptor "
    "IPython.core.interactiveshell IPython.core.ultratb IPython.core.displayhook IPython.core.events "
    "IPython.core.displaypub IPython.display ipykernel.ipkernel ipykernel.kernelbase ipykernel.zmqshell "
    "ipykernel.iostream ipykernel.displayhook"
)

#: Names that Python, a notebook or a check itself sets anew as it runs.
SET_ANEW = _names(
    "_ __ ___ _oh _dh _ih _i _ii _iii __annotations__ __builtins__ __cached__ __warningregistry__ __spec__ __file__ "
    "excepthook last_exc last_type last_value last_traceback ps1 ps2 stdin stdout stderr tracebacklimit argv path "
    "__firstlineno__ __static_attributes__ __abstractmethods__ _abc_impl __weakref__ __dict__ __orig_bases__ "
    "__parameters__ __protocol_attrs__ __non_callable_proto_members__ __slotnames__ __doc__"
)

#: What PyTorch itself wraps once more, when its compiler is first imported or an optimizer is first made.
WRAPPED_LATE = re.compile(r"torch\.manual_seed|torch\.optim\..*\.step")

#: Modules and classes that get no new name: it would stand before a builtin, or before a method that is inherited.
GROWS_NOT = re.compile(r"(utils|labs)\.|torch\.(_tensor\.)?Tensor\.|random\.Random\.")

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.BuiltinMethodType)
_MISSING = object()


class SealBroken(AssertionError):
    """Something that the checks rely on is not what it was; the text names it."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the text alone."""
        return [f"{type(self).__name__}: {self}"]


class Seal:
    """What was noted; :meth:`verify` compares it with what there is now."""

    def __init__(self) -> None:
        self._modules = {name: module for name, module in sys.modules.items() if _is_noted(name)}
        self._noted = dict(_look(self._modules))

    def verify(self) -> None:
        """Look again.

        Raises:
            SealBroken: a name, a function's code, a hook or a handler is another one than it was; the text names up to
                three of them.
        """
        now = dict(_look(self._modules))
        changed = [name for name, was in self._noted.items() if not _same(was, now.get(name, _MISSING))]
        added = (name for name in now if name not in self._noted and GROWS_NOT.match(name) and not self._is_lent(name))
        changed += [name for name in added if name.endswith("__") or not _is_book(name)]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise SealBroken(f"what the checks rely on was changed: {', '.join(changed[:3])}{more}")

    def _is_lent(self, name: str) -> bool:
        """Whether a new name is one of Triton's interpreter: it lends all of its own to the module of a kernel that it
        runs for the first time."""
        for module in filter(lambda module: name.startswith(module + "."), self._modules):
            key = name.removeprefix(module + ".").partition(".")[0]
            given = vars(self._modules[module]).get(key, _MISSING)
            if given is vars(sys.modules.get("triton.runtime.interpreter", types)).get(key):
                return True
        return False


def snapshot() -> Seal:
    """Note what the checks rely on, as it is now. Takes about a tenth of a second."""
    return Seal()


def _is_noted(name: str) -> bool:
    return name in USED or any(name == whole or name.startswith(whole + ".") for whole in WHOLE)


def _same(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if type(was) is tuple and type(now) is tuple and len(was) == len(now):
        return all(map(_same, was, now))
    if type(was) is types.MethodType and type(now) is types.MethodType:  # ipykernel puts a new `input` in for each cell
        return was.__func__ is now.__func__ and was.__self__ is now.__self__
    return type(was) in _PLAIN and type(was) is type(now) and was == now


def _look(modules: Mapping[str, types.ModuleType]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, module in modules.items():
        yield f"sys.modules[{name!r}]", sys.modules.get(name)
        whole = any(name == each or name.startswith(each + ".") for each in WHOLE)
        for key, value in list(vars(module).items()):
            if key in SET_ANEW or WRAPPED_LATE.fullmatch(f"{name}.{key}"):
                continue
            if issubclass(type(value), types.ModuleType):
                if not value.__name__.startswith(name + "."):  # a package's own appears when it is first imported
                    yield f"{name}.{key}", value
                continue
            yield from _value(f"{name}.{key}", value, seen, whole)
    yield from _hooks()
    yield from _notebook(seen)


def _value(name: str, value: Any, seen: set[int], whole: bool) -> Iterator[tuple[str, Any]]:
    kind = type(value)  # not isinstance: it would ask a lazy object for its class
    if issubclass(kind, type):
        yield name, value
        if id(value) not in seen and _is_open(value):
            seen.add(id(value))
            for key, member in list(vars(value).items()):
                if key not in SET_ANEW and not WRAPPED_LATE.fullmatch(f"{name}.{key}"):
                    yield f"{name}.{key}", _member(member)
    elif kind is types.FunctionType:
        yield name, value
        if id(value) not in seen:
            seen.add(id(value))
            yield f"{name}()", _function(value)
    elif kind in _FUNCTIONS or not whole:
        if callable(value) or kind.__name__ in ("dtype", "layout", "memory_format"):
            yield name, _behind(value)
    elif kind in (dict, list, set):
        if not _is_book(name):
            yield name, (value, _content(value))
    elif kind is not int and not (value is None and _is_book(name)):  # a counter goes on, a cache is filled
        yield name, _behind(value)


def _is_open(kind: type) -> bool:
    """Whether a class can be changed at all: those written in C cannot."""
    return bool(kind.__flags__ & (1 << 9))


def _is_book(name: str) -> bool:
    """Whether a container is one that its module fills as it works: by our convention it has a leading underscore."""
    return name.rpartition(".")[2].startswith("_")


def _content(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return tuple(value) if isinstance(value, list) else tuple(sorted(value, key=repr))


def _function(function: types.FunctionType) -> tuple[Any, ...]:
    defaults = function.__defaults__ or ()
    given = function.__kwdefaults__ or {}
    return (function.__code__, tuple(defaults), tuple(given.values()), function.__globals__, *_closed_over(function))


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        if isinstance(inside, types.FunctionType):
            yield inside
            yield inside.__code__


def _member(member: Any) -> Any:
    """A method as it is kept: the object in the class, and the code of the function in it."""
    function = member
    if isinstance(member, staticmethod | classmethod):
        function = member.__func__
    elif isinstance(member, property):
        return (member, *(each.__code__ for each in (member.fget, member.fset) if hasattr(each, "__code__")))
    if isinstance(function, types.FunctionType):
        return (member, function, _function(function))
    if isinstance(member, dict | list | set | int | float | str):
        return None  # a class's own books
    return _behind(member)


def _behind(value: Any) -> Any:
    """An object with the function that it wraps, as Triton's kernels do."""
    try:
        inner = getattr(value, "__dict__", None)
    except Exception:  # an object that refuses to be looked at, as some libraries' placeholders do
        inner = None
    function = inner.get("fn") if isinstance(inner, dict) else None
    if isinstance(function, types.FunctionType):
        return (value, function, _function(function))
    return value


def _hooks() -> Iterator[tuple[str, Any]]:
    """What a program can hook into Python and PyTorch."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            yield (
                f"the handler of {signal.Signals(number).name if number in _NAMED else number}",
                signal.getsignal(number),
            )
    yield "sys.settrace", sys.gettrace()
    yield "sys.setprofile", sys.getprofile()
    yield "sys.setrecursionlimit", sys.getrecursionlimit()
    for name in ("meta_path", "path_hooks"):
        yield f"sys.{name}", tuple(getattr(sys, name))
    for name in ("displayhook", "unraisablehook", "breakpointhook"):
        yield f"sys.{name}", getattr(sys, name)
    yield "gc.callbacks", tuple(gc.callbacks)
    yield "builtins", tuple(sorted(set(vars(builtins)) - SET_ANEW))
    torch = sys.modules.get("torch")
    if torch is not None:
        yield "torch's default dtype", torch.get_default_dtype()
        yield "torch.is_grad_enabled", torch.is_grad_enabled()
        yield "torch's function modes", torch._C._len_torch_function_stack()
        yield "torch's dispatch modes", torch._C._len_torch_dispatch_stack()
        module = sys.modules.get("torch.nn.modules.module")
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
            yield f"torch.nn.modules.module.{name}", tuple(getattr(module, name, ()))
        library = sys.modules.get("torch.library")
        replaced = (
            name for name in getattr(library, "_impls", ()) if name.startswith("aten/") and name.endswith("CPU")
        )
        yield "torch's operators", tuple(sorted(replaced))


_NAMED = frozenset(int(each) for each in signal.Signals)


def _notebook(seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The notebook's own machinery, where there is one, and what its cells imported from the course."""
    main = sys.modules.get("__main__")
    for name, value in list(vars(main).items()) if main is not None else ():
        home = getattr(value, "__module__", None) or ""
        if isinstance(home, str) and _is_noted(home) and isinstance(value, types.FunctionType | type):
            yield f"{name} in the notebook", value
    interactive = sys.modules.get("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell._instance if interactive is not None else None
    if shell is None:
        return
    for name in ("run_cell", "run_cell_async", "run_code", "showtraceback", "_showtraceback", "showsyntaxerror"):
        yield f"IPython's {name}", vars(shell).get(name)
    for name in ("CustomTB", "custom_exceptions", "InteractiveTB", "events", "display_pub", "displayhook"):
        yield f"IPython's {name}", _bare(getattr(shell, name, None))
    for name in ("ast_transformers", "input_transformers_post", "input_transformers_cleanup"):
        yield f"IPython's {name}", tuple(getattr(shell, name, ()))
    for event, called in shell.events.callbacks.items():
        yield f"IPython's {event}", tuple(map(_bare, called))
    yield "IPython's error formatter", _bare(vars(shell.InteractiveTB).get("structured_traceback"))


def _bare(value: Any) -> Any:
    """A bound method is made anew at each look: its function and its object are what stays."""
    return (value.__func__, value.__self__) if isinstance(value, types.MethodType) else value
