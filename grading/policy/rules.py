"""The rules, and the walk over a module that asks them about every node.

For a node of type ``T`` the walk calls ``_judge_t`` if there is one, with the scope that the node stands in.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from grading.policy import tables
from grading.policy.paths import Own, Paths
from grading.policy.syntax import (
    LOCAL,
    Comprehension,
    Function,
    Named,
    Scope,
    arguments_of,
    defaults_of,
    home_of,
    inside,
    is_attribute_of,
    is_class_of,
    is_plain_name,
    is_special,
    text_of,
)
from grading.policy.uses import Uses
from utils.course_modules import is_main_guard


@dataclass(frozen=True, order=True)
class Violation:
    """One thing that a module may not do: ``what`` stands in ``line`` (1 is the first), ``why`` says what to do."""

    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}: {self.why}"


class Reader:
    """Walks over a module once and collects what is against the rules."""

    uses: Uses

    def __init__(self, own: Own, filename: str) -> None:
        self.own = own
        self.paths = Paths(own, filename)
        self.released = own.statements.get(filename, frozenset())
        self.found: set[Violation] = set()
        self.settled: set[int] = set()  # names that what stands around them makes harmless
        self.memory = tables.BARE_MEMORY - own.attributes

    def _refuse(self, node: ast.AST, what: str, why: str) -> None:
        self.found.add(Violation(getattr(node, "lineno", 1), what, why))

    def _judge_attribute_name(self, node: ast.AST, name: str) -> None:
        if name in tables.INTERNALS:
            self._refuse(node, f"`.{name}`", "a lab does without the internals of Python and PyTorch")
        elif name in self.memory and not is_attribute_of(node, "self"):
            self._refuse(
                node, f"`.{name}`", "work on tensors with their operators or in your kernel, not on bare memory"
            )
        elif name in tables.AS_WRITTEN and not isinstance(node, ast.Attribute):
            self._refuse(node, f"`{name}` by a name", f"write `thing.{name}`")
        elif name == "__setattr__" and is_attribute_of(node, "object"):
            self._judge_setattr(node)
        elif name == "__dict__":
            self._judge_fields(node)
        elif is_special(name) and name not in tables.SPECIAL_ATTRIBUTES:
            self._refuse(node, f"`.{name}`", "special attributes belong to Python: a lab does without it")

    # ---- the walk
    def read(self, tree: ast.Module) -> None:
        """Judge a whole module."""
        self.uses = Uses(tree)
        self._visit_children(tree, Scope(tree, None, self.own.package), "")

    def _visit_children(self, node: ast.AST, scope: Scope, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, place)

    def _visit(self, node: ast.AST, scope: Scope, place: str) -> None:
        if isinstance(node, ast.stmt) and self.released and (place, ast.dump(node)) in self.released:
            return
        if place == "" and is_main_guard(node):
            return  # the grader imports a module and nothing may bind `__name__`, so this never runs
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
            within = place if isinstance(node, ast.Lambda) else f"{place}.{node.name}"
            inner = Scope(node, scope, self.own.package)
            for child in node.body if isinstance(node.body, list) else [node.body]:
                self._visit(child, inner, within)
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
        notes = [argument.annotation for argument in arguments_of(node)]
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

    # ---- what may be named: imports, names and attributes
    def _judge_binding(self, node: ast.AST, name: str | None) -> None:
        if name is not None and is_special(name) and name not in tables.MAY_BE_SET:
            self._refuse(node, f"`{name} = ...`", "special names belong to Python: choose another name")

    def _judge_alias(self, node: ast.alias, scope: Scope) -> None:
        self._judge_binding(node, node.asname)

    def _judge_matchas(self, node: ast.MatchAs, scope: Scope) -> None:
        self._judge_binding(node, node.name)

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
            self._judge_binding(node, name)
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
            elif name == "type" and id(node) not in self.settled and not self.uses.is_type(node):
                self._judge_class_of(node, scope)
        elif path != LOCAL and self.paths.is_module(path):
            self._refuse(node, f"the module `{name}` as a value", f"name what you need of it, such as `{name}.thing`")
        elif path != LOCAL and not isinstance(self.uses.around(node), ast.Attribute):
            self._judge_maker(node, path)

    def _judge_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        self._judge_attribute_name(node, node.attr)
        self._judge_use(node, scope)
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
                self._judge_use(inner, scope)
        why = self.paths.refusal(path)
        if why is not None or ".__dict__" in path:
            self._refuse(node, f"`{text_of(node)}`", why or "name what you need of it")
        elif self.paths.is_module(path):
            self._refuse(node, f"the module `{text_of(node)}` as a value", "name what you need of it")
        else:
            self._judge_maker(node, path)
        return True

    def _judge_use(self, node: ast.Attribute, scope: Scope) -> None:
        """An attribute by which one could name others in a text."""
        if node.attr == "__class__":
            self._judge_class_of(node, scope)
        elif node.attr in ("format", "format_map") and not self.uses.is_written(node.value):
            why = "what is filled stands in the source, whole or joined of whole texts by `+`, `* 3` or `join`"
            self._refuse(node, f"`{text_of(node)}`", why)
        elif node.attr == "register" and (is_class_of(node.value) or self._roots(node.value, scope) & tables.ABSTRACT):
            self._refuse(node, f"`{text_of(node)}`", "Python's classes are not yours to change")

    def _judge_class_of(self, node: ast.expr, scope: Scope) -> None:
        """A thing's class: that of a class is a metaclass, which makes classes of tables of texts."""
        if not self.uses.keeps_class(node, scope):
            return
        call = self.uses.around(node)
        if isinstance(call, ast.Call) and call.func is node:
            name = self.uses.class_around(node) or "TheClass"
            why = f"write the class's name, `{name}(...)`, or name the arguments: a lab needs no metaclass"
            self._refuse(node, f"`{text_of(call)}`", why)
            return
        why = "write `type(thing).__name__`, compare it, or name the class itself: a lab needs no metaclass"
        self._refuse(node, f"`{text_of(node)}` as a value", why)

    def _judge_fields(self, node: ast.Attribute) -> None:
        """An object's own fields; a module's are out of reach, for no module is ever a value."""
        if not isinstance(node.value, ast.Name) or self.uses.keeps_fields(node):
            why = "the name of an attribute stands in the source: write `thing.name`"
            self._refuse(node, f"`{text_of(node)}`", why)

    def _judge_setattr(self, node: ast.Attribute) -> None:
        """A frozen dataclass sets its own fields so."""
        call = self.uses.around(node)
        called = isinstance(call, ast.Call) and call.func is node and len(call.args) == 3
        if not called or not is_plain_name(call.args[1]):
            self._refuse(node, f"`{text_of(node)}`", "write `object.__setattr__(self, 'name', value)`")

    # ---- names and classes that are made from text when the module runs
    def _judge_maker(self, node: ast.expr, path: str) -> None:
        """Judge the use of a library's function or class that changes a class, or makes one."""
        path = re.sub(r"(\.__\w+__)+$", "", path)  # `wraps.__call__` is no other function
        call = self.uses.around(node)
        call = call if isinstance(call, ast.Call) and call.func is node else None
        shown = f"`{text_of(call or node)}`"
        if path in tables.DECORATORS and not self.uses.decorates(node):
            self._refuse(node, shown, f"write `@{text_of(node)}` above a function or class of your own")
        elif path == "functools.wraps" and (call is None or len(call.args) != 1 or call.keywords):
            self._refuse(node, shown, "write `@functools.wraps(function)`: no attribute is named in a text")
        elif path in tables.ENUMERATIONS and not (self.uses.is_base(node) or self._is_asked_for(node)):
            self._refuse(node, shown, "write an enumeration as a class statement with its members")
        elif path == "abc.ABCMeta" and not isinstance(self.uses.around(self.uses.around(node)), ast.ClassDef):
            self._refuse(node, shown, "write a class statement: a lab needs no metaclass")

    def _is_asked_for(self, node: ast.expr) -> bool:
        """Whether a class is named as a type: in an annotation, or in ``isinstance(x, C)``."""
        return self.uses.is_type(node) or self.uses.is_tested(node)

    # ---- what may be changed: assignments to what a module does not own, and calls that do the same
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
        elif name == "type":
            self._judge_class_of(node, scope)
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

    # ---- functions, classes, `try` blocks and texts
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
        roots = set().union(*(self._roots(base, scope) for base in node.bases))
        if roots & tables.ENUMERATIONS and not self.uses.has_member(node, scope):
            self._refuse(node, f"`class {node.name}` without members", "write the members of an enumeration into it")
        kinds = {root.rpartition(".")[2] for root in roots} & tables.PLAIN_TYPES
        may = tables.HARMLESS | (tables.ARITHMETIC if kinds <= {"NamedTuple"} else frozenset())
        for inner in node.body if kinds else ():
            name = inner.name if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) else ""
            looks = kinds & {"Tensor", "Parameter"} and name in tables.LOOKS
            if looks or (is_special(name) and name not in may):
                what = f"`class {node.name}({', '.join(map(text_of, node.bases))})` with `{name}`"
                self._refuse(node, what, "return a plain value, not one in disguise")

    def _roots(self, base: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
        """What a class inherits from at last: paths of libraries' classes, and names of Python's own."""
        if isinstance(base, ast.Call):  # collections.namedtuple("Pair", ...)
            called = scope.path_of(base.func) or text_of(base.func)
            return {"NamedTuple" if called.rpartition(".")[2] == "namedtuple" else called}
        made = scope.made_of(base.id) if isinstance(base, ast.Name) and depth < 8 else None
        if isinstance(made, ast.ClassDef):
            return set().union(*(self._roots(each, scope, depth + 1) for each in made.bases))
        if isinstance(made, ast.expr):
            return self._roots(made, scope, depth + 1)
        return {scope.path_of(base) or text_of(base)}

    def _judge_excepthandler(self, node: ast.ExceptHandler, scope: Scope) -> None:
        self._judge_binding(node, node.name)
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

    # ---- kernels
    def _judge_kernel(self, kernel: ast.FunctionDef, scope: Scope) -> None:
        """A kernel computes by itself: on a GPU it could not call PyTorch, in the interpreter nobody would notice."""
        for node in (inner for statement in kernel.body for inner in ast.walk(statement)):
            path = scope.path_of(node) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None
            if path and path.split(".")[0] in ("torch", "numpy", "utils"):
                why = "a kernel is written in triton.language or Gluon alone: what it needs is passed to it"
                self._refuse(node, f"`{node.id}` in the kernel `{kernel.name}`", why)
            elif path == LOCAL and self._is_python(node.id, scope):
                why = "a kernel calls kernels and triton.language or Gluon, and uses tl.constexpr from outside"
                self._refuse(node, f"`{node.id}` in the kernel `{kernel.name}`", why)

    def _is_python(self, name: str, scope: Scope) -> bool:
        """Whether a name that a kernel uses stands for a Python object of the module that is no kernel nor constant."""
        module = scope
        while module.outer is not None:
            if name in module.bound:
                return False
            module = module.outer
        node = module.made.get(name)
        if isinstance(node, ast.FunctionDef):
            return not any(is_jit(decorator, module) for decorator in node.decorator_list)
        return isinstance(node, ast.List | ast.Dict | ast.Lambda | ast.ClassDef | ast.ListComp | ast.DictComp)


def is_jit(decorator: ast.expr, scope: Scope) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return scope.path_of(called) in tables.JIT
