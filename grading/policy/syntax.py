"""Pieces of Python's syntax trees, as the rules need them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def imports_of(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and the dotted path that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{home_of(node, package)}.{alias.name}"


def home_of(node: ast.ImportFrom, package: str) -> str:
    return ".".join(part for part in ((package if node.level else ""), node.module or "") if part)


def chain_of(node: ast.AST) -> list[str]:
    """``["torch", "nn", "Linear"]`` for such an attribute, nothing for one that does not begin at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def inside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a block, without what functions, lambdas and classes inside it hold."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Named):
            waiting += [*node.decorator_list, *getattr(node, "bases", ()), *defaults_of(node)]
        elif isinstance(node, Comprehension):  # only `:=` binds a name outside of it
            waiting += [inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
            waiting += [inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
        elif not isinstance(node, ast.Lambda | ast.NamedExpr):
            waiting += ast.iter_child_nodes(node)
        elif isinstance(node, ast.NamedExpr):
            waiting += [node.target, node.value]


def defaults_of(node: ast.AST) -> list[ast.expr]:
    given = getattr(node, "args", None)
    return [value for value in (*given.defaults, *given.kw_defaults) if value is not None] if given else []


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_class_of(node: ast.AST) -> bool:
    """Whether an expression is ``type(x)`` or ``x.__class__``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def is_attribute_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def text_of(node: ast.AST) -> str:
    """A piece of source on one short line."""
    written = " ".join(ast.unparse(node).split())
    return written if len(written) <= 60 else written[:57] + "..."
