"""Names, and what they stand for in the function, class or module that binds them."""

from __future__ import annotations

import ast

from grading.policy.syntax import Comprehension, Function, Named, chain_of, imports_of, inside

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
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            self.bound |= {argument.arg for argument in every if argument is not None}
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
