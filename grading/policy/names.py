"""Rules of what may be named: imports, names and attributes."""

from __future__ import annotations

import ast

from grading.policy import tables
from grading.policy.changes import ChangeRules
from grading.policy.scopes import LOCAL, Scope
from grading.policy.syntax import home_of, is_special, text_of


class NameRules(ChangeRules):
    """What a module imports, and what its expressions reach for."""

    def _judge_import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == self.own.package and not self.paths.allowed(alias.name):
                self._refuse(node, f"`import {alias.name}`", f"the modules of this lab are {self._own_modules()}")
            elif not self.paths.allowed(alias.name):
                why = self.paths.refusal(alias.name) or self.paths.not_allowed(alias.name)
                self._refuse(node, f"`import {alias.name}`", why)

    def _judge_importfrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        home = home_of(node, self.own.package)
        written = f"from {'.' * node.level}{node.module or ''} import {', '.join(alias.name for alias in node.names)}"
        if node.level > 1:
            self._refuse(node, f"`{written}`", "a lab's module imports its neighbours with one dot")
            return
        if not self.paths.allowed(home):
            if home.startswith(self.own.package + "."):
                self._refuse(node, f"`{written}`", f"the modules of this lab are {self._own_modules()}")
            else:
                self._refuse(node, f"`{written}`", self.paths.refusal(home) or self.paths.not_allowed(home))
            return
        for alias in node.names:
            if alias.name == "*":
                self._refuse(node, f"`{written}`", "name what you import")
            elif (why := self.paths.refusal(f"{home}.{alias.name}")) is not None:
                self._refuse(node, f"`{written}`", why)

    def _own_modules(self) -> str:
        return ", ".join(sorted(self.own.modules - {"__init__", "__main__"}))

    def _judge_name(self, node: ast.Name, scope: Scope) -> None:
        name = node.id
        if isinstance(node.ctx, ast.Store | ast.Del):
            if name.startswith("__") and name.endswith("__") and name not in tables.SPECIAL_NAMES | {"__hash__"}:
                self._refuse(node, f"`{name} = ...`", "special names belong to Python: choose another name")
            return
        path = scope.path(name)
        if path is None:
            if name in tables.BUILTINS:
                self._refuse(node, f"`{name}`", tables.BUILTINS[name])
            elif name == "BaseException" and id(node) not in self.settled:
                self._refuse(node, "`BaseException`", "catch `Exception`, or the error that you expect")
            elif name.startswith("__") and name.endswith("__") and name not in tables.SPECIAL_NAMES:
                self._refuse(node, f"`{name}`", "special names belong to Python: a lab does without it")
            elif name in ("getattr", "setattr") and id(node) not in self.settled:
                self._refuse(node, f"`{name}` as a value", f"call it: `{name}(thing, 'name', ...)`")
        elif path != LOCAL and self.paths.is_module(path):
            self._refuse(node, f"the module `{name}` as a value", f"name what you need of it, such as `{name}.thing`")

    def _judge_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        self._judge_attribute_name(node, node.attr)
        if isinstance(node.ctx, ast.Store | ast.Del):
            self._judge_change(node, node.value, scope)
            if is_special(node.attr) and node.attr not in ("__name__", "__doc__", "__qualname__"):
                self._refuse(node, f"`{text_of(node)} = ...`", "special attributes belong to Python")

    def _judge_path(self, node: ast.Attribute, scope: Scope) -> bool:
        """Judge an attribute that begins at an imported name; returns whether it does."""
        path = scope.path_of(node)
        if not path:
            return False
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and inner is not node:
                self._judge_attribute_name(inner, inner.attr)
        why = self.paths.refusal(path)
        if why is not None or ".__dict__" in path:
            self._refuse(node, f"`{text_of(node)}`", why or "name what you need of it")
        elif self.paths.is_module(path):
            self._refuse(node, f"the module `{text_of(node)}` as a value", "name what you need of it")
        return True
