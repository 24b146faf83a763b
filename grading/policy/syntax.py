"""Pieces of Python's syntax trees, as the rules need them, and what names stand for."""

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


def arguments_of(node: ast.AST) -> list[ast.arg]:
    given = node.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    return [argument for argument in every if argument is not None]


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_plain_name(node: ast.AST) -> bool:
    """Whether an expression is a text that stands in the source and is no special name."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_special(node.value)


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


LOCAL = ""  # what a name stands for that the module itself binds


class Scope:
    """The names that one function, class or module binds: an import's path, an alias, or something of its own."""

    def __init__(self, node: ast.AST, outer: Scope | None, package: str) -> None:
        while outer is not None and outer.of_class and not isinstance(node, ast.ClassDef):
            outer = outer.outer  # a method does not see the names of its class
        self.outer = outer
        self.of_class = isinstance(node, ast.ClassDef)
        self.paths: dict[str, str] = {}
        self.aliases: dict[str, list[ast.expr]] = {}
        self.bound: set[str] = set()
        self.made: dict[str, ast.AST] = {}
        if isinstance(node, Function):
            self.bound |= {argument.arg for argument in arguments_of(node)}
        outside: set[str] = set()
        if isinstance(node, Comprehension):
            targets = (inner for part in node.generators for inner in ast.walk(part.target))
            self.bound |= {inner.id for inner in targets if isinstance(inner, ast.Name)}
            return
        body = node.body if isinstance(node.body, list) else [node.body]
        for inner in inside(body):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                self.paths.update(imports_of(ast.Module([inner], []), package))
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del):
                self.bound.add(inner.id)
            elif isinstance(inner, Named | ast.ExceptHandler) and inner.name:
                self.bound.add(inner.name)
            elif isinstance(inner, ast.Global | ast.Nonlocal):
                outside.update(inner.names)
            if isinstance(inner, Named):
                self.made[inner.name] = inner
            if isinstance(inner, ast.Assign | ast.AnnAssign | ast.NamedExpr) and inner.value is not None:
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.aliases.setdefault(target.id, []).append(inner.value)
                        self.made[target.id] = inner.value
        self.bound -= outside

    def made_of(self, name: str) -> ast.AST | None:
        """The statement or value that a name of the module's own stands for, where the nearest scope says so."""
        scope: Scope | None = self
        while scope is not None and name not in scope.bound:
            scope = scope.outer
        return scope.made.get(name) if scope is not None else None

    def path(self, name: str, depth: int = 0) -> str | None:
        """The dotted path that a name stands for; ``LOCAL`` for one of the module's own; None for a builtin."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.paths:
                return scope.paths[name]
            if name in scope.aliases and depth < 4:
                known = (scope.path_of(value, depth + 1) for value in scope.aliases[name])
                if path := next(filter(None, known), None):
                    return path
            if name in scope.bound:
                return LOCAL
            scope = scope.outer
        return None

    def path_of(self, node: ast.AST, depth: int = 0) -> str | None:
        """The dotted path of an expression that is a name or an attribute of one."""
        parts = chain_of(node) if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
        root = self.path(parts[0], depth) if parts else None
        return ".".join([root, *parts[1:]]) if root else root
