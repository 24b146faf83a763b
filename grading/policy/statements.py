"""Rules of functions, classes, ``try`` blocks and texts."""

from __future__ import annotations

import ast
import re

from grading.policy import tables
from grading.policy.kernels import KernelRules, is_jit
from grading.policy.scopes import Scope
from grading.policy.syntax import inside, is_special, text_of


class StatementRules(KernelRules):
    """What stands in a statement and in what it defines."""

    def _judge_functiondef(self, node: ast.FunctionDef, scope: Scope) -> None:
        if is_special(node.name) and node.name not in tables.SPECIAL_METHODS:
            self._refuse(node, f"`def {node.name}`", "a lab needs no such special method: choose another name")
        if any(is_jit(decorator, scope) for decorator in node.decorator_list):
            self._judge_kernel(node, Scope(node, scope, self.own.package))

    _judge_asyncfunctiondef = _judge_functiondef

    def _judge_classdef(self, node: ast.ClassDef, scope: Scope) -> None:
        for keyword in node.keywords:
            if keyword.arg == "metaclass" and text_of(keyword.value) not in ("ABCMeta", "abc.ABCMeta"):
                self._refuse(node, f"`class {node.name}(metaclass=...)`", "a lab needs no metaclass")
        bases = {text_of(base).rpartition(".")[2] for base in node.bases}
        if "type" in bases:
            self._refuse(node, f"`class {node.name}(type)`", "a lab needs no metaclass")
        plain = bases & tables.PLAIN_TYPES
        own = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef) and is_special(inner.name)]
        own = [name for name in own if name not in ("__init__", "__new__", "__post_init__", "__repr__", "__str__")]
        if plain and own:
            self._refuse(
                node, f"`class {node.name}({plain.pop()})` with `{own[0]}`", "return a plain value, not one in disguise"
            )

    def _judge_excepthandler(self, node: ast.ExceptHandler, scope: Scope) -> None:
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for kind in kinds:
            if kind is None or (isinstance(kind, ast.Name) and kind.id == "BaseException"):
                self.settled.add(id(kind))
                if not any(isinstance(statement, ast.Raise) and statement.exc is None for statement in node.body):
                    what = "`except:`" if kind is None else "`except BaseException:`"
                    why = "it would also swallow the grader's own signals: catch `Exception`, or the error you expect"
                    self._refuse(node, what, why)

    def _judge_constant(self, node: ast.Constant, scope: Scope) -> None:
        if isinstance(node.value, str) and re.search(r"\{[^{}]*(\.|\[)_[^{}]*\}", node.value):
            self._refuse(node, "a format that reaches for special attributes", "write the attribute out")

    def _judge_try(self, node: ast.Try, scope: Scope) -> None:
        for inner in inside(node.finalbody):
            if isinstance(inner, ast.Return):
                self._refuse(inner, "`return` inside `finally`", "it swallows every error: return after the block")
        for statement in node.finalbody:
            if isinstance(statement, ast.Break | ast.Continue):
                self._refuse(statement, "a jump out of `finally`", "it swallows every error: leave after the block")

    def _judge_matchclass(self, node: ast.MatchClass, scope: Scope) -> None:
        for name in node.kwd_attrs:
            self._judge_attribute_name(node, name)
