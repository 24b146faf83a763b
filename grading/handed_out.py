"""Which modules of a lab students get, where the lab's package holds more than the lab asks for.

A package that also holds finished code of its own, such as fast kernels of what the exercises ask for in their simplest
form, lists in its ``__init__.py`` the modules that are handed out::

    HANDED_OUT = ("encoder.py", "given.py")

All others stay behind, and so do the lines of ``__init__.py`` that import them. Without such a list every module is
handed out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LIST = "HANDED_OUT"
INIT = "__init__.py"


def handed_out(package: Path) -> frozenset[str] | None:
    """The names of the modules that are handed out, ``__init__.py`` among them; None for all.

    Raises:
        ValueError: the list names a module that the package does not have.
    """
    if not (package / INIT).is_file():
        return None
    for node in ast.parse((package / INIT).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [LIST]:
            names = frozenset(ast.literal_eval(node.value))
            if missing := sorted(name for name in names if not (package / name).is_file()):
                raise ValueError(f"{package.name}: {LIST} names {', '.join(missing)}, which the package does not have")
            return names | {INIT}
    return None


def modules_of(package: Path) -> list[Path]:
    """The modules of a lab that are handed out, in order."""
    names = handed_out(package)
    return [path for path in sorted(package.glob("*.py")) if names is None or path.name in names]


def init_of(package: Path) -> str:
    """The package's ``__init__.py`` as it is handed out: without the imports of what is not."""
    text, names = (package / INIT).read_text(encoding="utf-8"), handed_out(package)
    if names is None:
        return text
    dropped = {line for node in _imports(text) for line in _lines(node) if f"{node.module}.py" not in names}
    return "".join(line for number, line in enumerate(text.splitlines(True), start=1) if number not in dropped)


def _imports(text: str) -> Iterator[ast.ImportFrom]:
    """The statements of a module that import from a module beside it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            yield node


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, node.end_lineno + 1)


def leave_the_rest(package: Path) -> None:
    """Remove from a copy of a package what is not handed out."""
    names = handed_out(package)
    if names is not None:
        (package / INIT).write_text(init_of(package), encoding="utf-8")
        for path in package.glob("*.py"):
            if path.name not in names:
                path.unlink()
