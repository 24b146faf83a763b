"""A student's modules as files: whether what is loaded is what they say."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

# code that is never the student's: PyTorch, Triton, whatever is installed, Python itself, and the course's library
_NOT_STUDENTS = (
    *(str(Path(importlib.util.find_spec(name).origin).parent) + os.sep for name in ("torch", "triton")),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parent.parent) + os.sep,
    "<frozen",
    "<string>",  # what started a rank: python -c
)


@functools.cache
def is_library(file: str) -> bool:
    """Whether a source file is PyTorch's, Triton's, Python's or the course's (its library, a lab's exercises)."""
    return file.startswith(_NOT_STUDENTS) or Path(file).parent.name == "exercises"


def folders_of(functions: Iterable[Callable]) -> list[Path]:
    """The folders in which the modules of these functions lie; none for what is typed into a notebook."""
    modules = (sys.modules.get(getattr(function, "__module__", None) or "") for function in functions)
    files = (getattr(module, "__file__", None) for module in modules)
    return list(dict.fromkeys(Path(file).parent for file in files if file))


def notebook_shell() -> Any:
    """The IPython shell of the notebook in which this runs; None elsewhere."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def set_up_autoreload() -> None:
    """Have autoreload load a changed file as a whole, and leave it to the check to say that a file cannot be loaded.

    It would replace single functions, whose lines a compiler then looks for elsewhere, and show two tracebacks.
    """
    shell = notebook_shell()
    for callback in shell.events.callbacks.get("pre_run_cell", ()) if shell else ():
        reloader = getattr(getattr(callback, "__self__", None), "_reloader", None)
        if reloader is not None:
            reloader.hide_errors = True
            if hasattr(reloader, "deduper_reloader"):
                reloader.deduper_reloader.enabled = False


class LoadedFiles:
    """The modules of a package as they were when it was imported, held against their files when a check runs.

    A notebook reloads a file that has changed (autoreload). Where that fails, it keeps the functions of the old file,
    and a check would pass them.
    """

    def __init__(self, package: str) -> None:
        """Of the modules beside ``package.exercises``; of none if ``package`` is not imported from a folder."""
        self.package = package
        self.texts: dict[Path, bytes] = {path: path.read_bytes() for path in self._paths()}

    def _paths(self) -> list[Path]:
        file = getattr(sys.modules.get(self.package), "__file__", None)
        return sorted(Path(file).parent.glob("*.py")) if file else []

    def problem(self) -> str:
        """Why what is loaded is not what the files say, in a line that names the file; empty if it is."""
        for path in self._paths():
            name = self.package if path.stem == "__init__" else f"{self.package}.{path.stem}"
            text = path.read_bytes()
            if text == self.texts.get(path) or name not in sys.modules:
                continue
            if problem := _problem(path, text, sys.modules[name].__dict__):
                return problem
            self.texts[path] = text
        return ""

    def current(self, value: Any) -> Any:
        """What its module of the package now has under the name of ``value``, if a reload left an older object behind.

        Autoreload changes some objects and makes others anew; an older one then stays wherever it was imported.
        """
        written = getattr(value, "fn", value)  # ``fn`` of a kernel
        home = getattr(written, "__module__", None)
        if not isinstance(home, str) or home.rpartition(".")[0] != self.package or not callable(written):
            return value
        found = vars(sys.modules.get(home, object)).get(getattr(written, "__name__", None))
        same = type(found) is type(value) and getattr(found, "fn", found).__module__ == home
        return found if same else value

    def refresh(self, *spaces: dict[str, Any]) -> None:
        """Put the current objects in place of older ones, in the package's modules and in ``spaces``."""
        modules = (module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{self.package}."))
        for space in (*map(vars, modules), *spaces):
            for name, value in list(space.items()):
                if (found := self.current(value)) is not value:
                    space[name] = found


def _problem(path: Path, text: bytes, loaded: dict[str, object]) -> str:
    fresh = {name: loaded.get(name) for name in ("__name__", "__package__", "__file__", "__spec__", "__path__")}
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), fresh)
    except SyntaxError as error:
        return f"{path.name}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        at = f", line {lines[-1]}" if lines else ""
        return f"{path.name}{at}: the file cannot be imported: {type(error).__name__}: {error}"
    bodies = _bodies(text, path)
    changed = any(name in bodies and _body(code) not in bodies[name] for name, code in _functions(loaded))
    if changed or any(loaded.get(name) != value for name, value in fresh.items() if _is_constant(name, value)):
        return f"{path.name} has changed since it was loaded: restart the kernel and run the notebook's cells again"
    return ""


def _is_constant(name: str, value: object) -> bool:
    return name.isupper() and isinstance(value, int | float | str)


def _functions(space: Mapping[str, object]) -> Iterator[tuple[str, CodeType]]:
    """The code of each function, kernel and method of a module or class, by its qualified name."""
    home = space.get("__name__", space.get("__module__"))
    for value in space.values():
        if getattr(value, "__module__", None) != home:
            continue
        code = getattr(getattr(value, "fn", value), "__code__", None)  # ``fn`` of a kernel
        if isinstance(value, type):
            yield from _functions(vars(value))
        elif isinstance(code, CodeType):
            yield code.co_qualname, code


def _bodies(text: bytes, path: Path) -> dict[str, list[tuple]]:
    """Each function of a file, compiled with the whole file and, as autoreload does, alone."""
    bodies = defaultdict(list)
    alone = (ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    for source in (text, *alone):
        codes = [compile(source, str(path), "exec", dont_inherit=True)]
        for code in codes:
            bodies[code.co_qualname].append(_body(code))
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return bodies


def _body(code: CodeType) -> tuple:
    """Instructions, names and constants, without the lines on which they stand."""
    constants = (_body(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *constants
