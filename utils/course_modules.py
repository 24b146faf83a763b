"""The course's modules as syntax trees: what a file defines at its top level, and what an imported name leads to."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Found(NamedTuple):
    """What a dotted name leads to.

    ``path`` is the course's file, or None for a library. ``name`` is the definition in that file, None for the module
    itself; for a library it is the full dotted name. ``rest`` are the attributes behind the definition.
    """

    path: str | None
    name: str | None
    rest: tuple[str, ...]


@dataclass
class Module:
    """One parsed file.

    Attributes:
        statements: The top-level statements that do something: no imports, no docstring, no ``__all__``.
        definitions: Name -> the statements that bind it, each as (index, position among the names it binds).
        imports: Name -> (module, attribute or None), absolute, from every import statement in the file.
    """

    statements: list[ast.stmt]
    definitions: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)


class Course:
    """The files under a root, read when they are first asked for: one object sees each file as it was then."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = ROOT if root is None else root
        self.module = functools.cache(self.module)
        self.path_of = functools.cache(self.path_of)

    def module(self, path: str) -> Module:
        """The parsed file at ``path``, relative to the root.

        Raises:
            ValueError: the file is not Python.
        """
        file = self.root / path
        return parse(file.read_text(encoding="utf-8") if file.is_file() else "", path)

    def path_of(self, dotted: str) -> str | None:
        """The file of a module of the course, None if it is not the course's. A folder counts as an empty module."""
        path = Path(*dotted.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (self.root / candidate).is_file():
                return candidate.as_posix()
        return (path / "__init__.py").as_posix() if (self.root / path).is_dir() else None

    def find(self, dotted: str, attributes: tuple[str, ...]) -> Found:
        """Where ``dotted.attributes`` is defined; imports in the course's modules are followed."""
        path = self.path_of(dotted)
        if path is None:
            return Found(None, ".".join((dotted, *attributes)), ())
        if not attributes:
            return Found(path, None, ())
        first, *rest = attributes
        module = self.module(path)
        target = module.imports.get(first)
        if first not in module.definitions and target not in (None, (dotted, first)):
            return self.find(target[0], (*([target[1]] if target[1] else []), *rest))
        if first not in module.definitions and self.path_of(f"{dotted}.{first}"):
            return self.find(f"{dotted}.{first}", tuple(rest))
        return Found(path, first, tuple(rest))


@functools.lru_cache(maxsize=1024)
def parse(text: str, path: str) -> Module:
    """Parse one file; ``path`` resolves its relative imports.

    Raises:
        ValueError: ``text`` is not Python.
    """
    try:
        tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        raise ValueError(f"{path} does not parse: {error}") from error
    module = Module([node for node in body_of(tree) if not _is_declaration(node)])
    for i, statement in enumerate(module.statements):
        for position, name in enumerate(bound_names([statement])):
            module.definitions.setdefault(name, []).append((i, position))
    package = Path(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                module.imports[alias.asname or whole] = (whole, None)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*parents, *([node.module] if node.module else [])))
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (source, alias.name)
    return module


def body_of(node: ast.AST) -> list[ast.stmt]:
    """The statements of a module, class or function that do something: no docstring, no import, no ``pass``."""
    body = node.body
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        body = body[1:]
    return [statement for statement in body if not isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)]


def is_main_guard(node: ast.AST) -> bool:
    """Whether a statement is ``if __name__ == "__main__":`` without an ``else``: an import skips what stands there."""
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"


def bound_names(nodes: list[ast.AST]) -> list[str]:
    """Names that statements bind in their own scope, in the order in which they appear; imports are not among them."""
    names: dict[str, None] = {}
    outer: set[str] = set()
    waiting = list(nodes)[::-1]
    while waiting:
        node = waiting.pop()
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            names |= {n.target.id: None for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
            continue
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names[node.id] = None
        elif isinstance(node, ast.arg):
            names[node.arg] = None
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names[node.name] = None
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names[node.rest] = None
        waiting += inner[::-1]
    return [name for name in names if name not in outer]


def _is_declaration(node: ast.stmt) -> bool:
    """``__all__ = ...`` or ``if TYPE_CHECKING: ...``, which do nothing when the course runs."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
    return isinstance(node, ast.Assign) and bound_names([node]) == ["__all__"]
