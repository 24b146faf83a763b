"""The walk over a module that asks every rule about every node."""

from __future__ import annotations

import ast

from grading.policy.names import NameRules
from grading.policy.scopes import Scope
from grading.policy.statements import StatementRules
from grading.policy.syntax import Comprehension, Function, Named, defaults_of, text_of


class Reader(NameRules, StatementRules):
    """Walks over a module once and collects what is against the rules."""

    def read(self, tree: ast.Module) -> None:
        """Judge a whole module."""
        self._visit_children(tree, Scope(tree, None, self.own.package), "")

    def _visit_children(self, node: ast.AST, scope: Scope, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, place)

    def _visit(self, node: ast.AST, scope: Scope, place: str) -> None:
        if isinstance(node, ast.stmt) and self.released and (place, ast.dump(node)) in self.released:
            return
        judge = getattr(self, f"_judge_{type(node).__name__.lower()}", None)
        if judge is not None:
            judge(node, scope)
        if isinstance(node, ast.Attribute) and self._judge_path(node, scope):
            return  # the whole chain is judged, its beginning too
        if isinstance(node, Named | ast.Lambda):
            outer = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), *defaults_of(node)]
            for child in (*outer, *getattr(node, "keywords", ())):
                self._visit(child, scope, place)
            if isinstance(node, Function):
                self._visit_annotations(node, scope)
            inside = place if isinstance(node, ast.Lambda) else f"{place}.{node.name}"
            inner = Scope(node, scope, self.own.package)
            for child in node.body if isinstance(node.body, list) else [node.body]:
                self._visit(child, inner, inside)
            return
        if isinstance(node, Comprehension):
            scope = Scope(node, scope, self.own.package)
        if isinstance(node, ast.AnnAssign):
            self._visit_annotation(node.annotation, scope)
            for child in (node.target, node.value):
                if child is not None:
                    self._visit(child, scope, place)
            return
        self._visit_children(node, scope, place)

    def _visit_annotations(self, node: ast.AST, scope: Scope) -> None:
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        notes = [argument.annotation for argument in every if argument is not None]
        for note in [*notes, getattr(node, "returns", None)]:
            if note is not None:
                self._visit_annotation(note, scope)

    def _visit_annotation(self, note: ast.expr, scope: Scope) -> None:
        """A type: `BaseException` may be named here, and nothing may be called."""
        for node in ast.walk(note):
            if isinstance(node, ast.Call | ast.Lambda | ast.NamedExpr | ast.Await | ast.Yield):
                self._refuse(node, f"`{text_of(node)}` in a type", "a type names classes and calls nothing")
            elif isinstance(node, ast.Name) and node.id == "BaseException":
                self.settled.add(id(node))
        self._visit(note, scope, "")
