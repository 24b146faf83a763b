"""Rules of what may be changed: assignments to what a module does not own, and calls that do the same."""

from __future__ import annotations

import ast

from grading.policy.judge import Judge
from grading.policy.scopes import Scope
from grading.policy.syntax import is_class_of, text_of


class ChangeRules(Judge):
    """Whose an attribute or an element is that a module writes to."""

    def _judge_subscript(self, node: ast.Subscript, scope: Scope) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self._judge_change(node, node.value, scope)

    def _judge_change(self, node: ast.AST, owner: ast.expr, scope: Scope) -> None:
        """Whether an assignment changes what the module does not own."""
        path = scope.path_of(owner)
        if path:
            self._refuse(
                node, f"`{text_of(node)} = ...`", f"`{path}` is not yours to change: write a function of your own"
            )
        elif is_class_of(owner):
            self._refuse(node, f"`{text_of(node)} = ...`", "a class is not changed from outside: write one of your own")

    def _judge_call(self, node: ast.Call, scope: Scope) -> None:
        if not isinstance(node.func, ast.Name) or scope.path(node.func.id) is not None:
            return
        name = node.func.id
        self.settled.add(id(node.func))
        if name == "type" and (len(node.args) != 1 or node.keywords):
            self._refuse(node, f"`{text_of(node)}`", "write a class statement")
        elif name in ("getattr", "setattr"):
            self._judge_access(node, name, scope)

    def _judge_access(self, node: ast.Call, name: str, scope: Scope) -> None:
        if len(node.args) < 2 or any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            self._refuse(node, f"`{text_of(node)}`", f"write `{name}(thing, 'name', ...)`")
            return
        owner, attribute = node.args[:2]
        if not (isinstance(attribute, ast.Constant) and isinstance(attribute.value, str)):
            self._refuse(
                node, f"`{text_of(node)}`", "the name of an attribute stands in the source: write `thing.name`"
            )
            return
        self._judge_attribute_name(node, attribute.value)
        path = scope.path_of(owner)
        if path and (name == "setattr" or self.paths.is_module(path)):
            why = "name what you need" if name == "getattr" else f"`{path}` is not yours to change"
            self._refuse(node, f"`{text_of(node)}`", f"{why}: write `{text_of(owner)}.{attribute.value}`")
