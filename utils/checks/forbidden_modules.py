"""Finds the use of modules that an exercise forbids, such as the course's own solution.

In two ways: by the imports in the student's module, and by every Python call made while the answer is computed.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from utils.course_modules import is_main_guard

#: Modules that an answer may not use, with the names in them that it may.
Forbidden = Mapping[str, Set[str]]


def _belongs(module: str, forbidden: Forbidden) -> str | None:
    """The forbidden module that ``module`` is or lies in."""
    return next((name for name in forbidden if module == name or module.startswith(name + ".")), None)


def forbidden_imports(source: str, forbidden: Forbidden) -> list[str]:
    """What Python ``source`` imports although it is forbidden, as ``line 3: utils.roofline`` (none if unparsable).

    What stands under ``if __name__ == "__main__":`` does not count: no check runs it.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    tree.body = [node for node in tree.body if not is_main_guard(node)]
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _belongs(alias.name, forbidden)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            home = _belongs(node.module, forbidden)
            for alias in node.names:
                inside = home is not None and alias.name not in forbidden[home]
                if inside or _belongs(f"{node.module}.{alias.name}", forbidden) not in (None, home):
                    names.append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in forbidden:
            names = [node.value]  # importlib.import_module("utils.roofline")
        found += [f"line {node.lineno}: {name}" for name in names]
    return found


def imports_of(function: Callable, forbidden: Forbidden) -> list[str]:
    """The forbidden imports of the module that defines ``function``, each with its file; none for a notebook's cell."""
    module = inspect.getmodule(inspect.unwrap(function))
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file() or Path(file).suffix != ".py":
        return []
    return [f"{Path(file).name}, {found}" for found in forbidden_imports(Path(file).read_text("utf-8"), forbidden)]


@contextmanager
def calls_into(forbidden: Forbidden, called: list[str]) -> Iterator[None]:
    """While the block runs, add the functions of forbidden modules that anything in it calls to ``called``."""
    before = sys.getprofile()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            home = _belongs(module, forbidden)
            name = frame.f_code.co_name
            if home is not None and name not in forbidden[home] and name != "<module>":
                called.append(f"{module}.{name}")

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
