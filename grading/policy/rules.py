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
    is_special,
    text_of,
)
from utils.checks.forbidden_modules import is_main_guard


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

    def __init__(self, own: Own, filename: str) -> None:
        self.own = own
        self.paths = Paths(own, filename)
        self.released = own.statements.get(filename, frozenset())
        self.found: set[Violation] = set()
        self.settled: set[int] = set()  # names that what stands around them makes harmless
        self.around: dict[int, ast.AST] = {}  # id of a node -> the node that it stands in
        self.uses: dict[str, list[ast.Name]] = {}  # name -> where it is read
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
        elif name == "__setattr__" and is_attribute_of(node, "object"):
            pass  # a frozen dataclass sets its own fields so
        elif name == "__dict__" and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pass  # an object's own fields; a module's are out of reach, for no module is ever a value
        elif is_special(name) and name not in tables.SPECIAL_ATTRIBUTES:
            self._refuse(node, f"`.{name}`", "special attributes belong to Python: a lab does without it")

    # ---- the walk
    def read(self, tree: ast.Module) -> None:
        """Judge a whole module."""
        self.around = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.uses.setdefault(node.id, []).append(node)
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
            elif name == "type" and id(node) not in self.settled and not self._is_a_type(node):
                self._refuse(node, "`type` as a value", "call it: `type(thing).__name__`; a lab needs no metaclass")
        elif path != LOCAL and self.paths.is_module(path):
            self._refuse(node, f"the module `{name}` as a value", f"name what you need of it, such as `{name}.thing`")
        elif path != LOCAL and not isinstance(self.around.get(id(node)), ast.Attribute):
            self._judge_maker(node, path, scope)

    def _judge_attribute(self, node: ast.Attribute, scope: Scope) -> None:
        self._judge_attribute_name(node, node.attr)
        if node.attr == "__dict__" and not self._only_reads_fields(node):
            self._refuse(
                node, f"`{text_of(node)}`", "the name of an attribute stands in the source: write `thing.name`"
            )
        if is_class_of(node):
            self._judge_class_of(node)
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
        else:
            self._judge_maker(node, path, scope)
        return True

    # ---- names and classes that are made from text when the module runs
    def _judge_maker(self, node: ast.expr, path: str, scope: Scope) -> None:
        """Judge the use of a library's function or class that takes names as texts."""
        outer = self.around.get(id(node))
        call = outer if isinstance(outer, ast.Call) and outer.func is node else None
        shown = text_of(call or node)
        if path == "functools.wraps" and (call is None or len(call.args) != 1 or call.keywords):
            self._refuse(node, f"`{shown}`", "write `@functools.wraps(function)`: no attribute is named in a text")
        elif path == "types.SimpleNamespace" and not self._is_a_type(node):
            if call is None or call.args or any(keyword.arg is None for keyword in call.keywords):
                self._refuse(node, f"`{shown}`", "its names stand in the source: write `SimpleNamespace(name=...)`")
        elif path.startswith("enum.Enum") or path.startswith(("enum.ReprEnum", "enum.Flag", "enum.Int", "enum.Str")):
            if not (isinstance(outer, ast.ClassDef) or self._is_a_type(node)):
                self._refuse(node, f"`{shown}`", "write an enumeration as a class statement with its members")
        elif is_jit(node, scope) and not (isinstance(outer, Named) or isinstance(self.around.get(id(outer)), Named)):
            self._refuse(node, f"`{shown}`", "write `@triton.jit` above the kernel: what is in it is read then")
        elif path == "abc.ABCMeta" and not isinstance(outer, ast.keyword):
            self._refuse(node, f"`{shown}`", "write a class statement: a lab needs no metaclass")
        elif path.split(".")[0] in tables.STANDARD and path.endswith(".register"):
            self._refuse(node, f"`{shown}`", "Python's classes are not yours to change: write a class of your own")
        elif path in (
            "dataclasses.dataclass",
            "functools.total_ordering",
            "typing.final",
            "abc.update_abstractmethods",
        ):
            if isinstance(outer, Named) or (call is not None and not call.args):
                return
            self._refuse(node, f"`{shown}`", "it changes a class that is not yours: write it above a class statement")

    def _only_reads_fields(self, node: ast.Attribute) -> bool:
        """Whether an object's table of fields is read, or changed under a name that stands in the source."""
        outer = self.around.get(id(node))
        above = self.around.get(id(outer))
        if isinstance(outer, ast.Subscript) and outer.value is node:
            return self._is_plain_name(outer.slice)
        if isinstance(outer, ast.Attribute) and isinstance(above, ast.Call) and above.func is outer:
            if outer.attr in ("items", "keys", "values", "copy"):
                return True
            return (
                outer.attr in ("get", "pop", "setdefault") and bool(above.args) and self._is_plain_name(above.args[0])
            )
        if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name):
            return outer.func.id in ("dict", "len", "list", "repr", "set", "sorted", "str", "tuple")
        return isinstance(outer, ast.Compare | ast.For | ast.comprehension | ast.FormattedValue) or (
            isinstance(outer, ast.keyword) and outer.arg is None
        )

    def _is_plain_name(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_special(node.value)

    def _is_a_type(self, node: ast.expr) -> bool:
        """Whether a class is named where a type is asked for: in an annotation, or as ``isinstance(x, (int, C))``."""
        outer = self.around.get(id(node))
        while isinstance(outer, ast.Tuple | ast.BinOp | ast.Subscript | ast.Attribute):
            node, outer = outer, self.around.get(id(outer))
        if isinstance(outer, ast.arg | ast.Compare) or (isinstance(outer, ast.AnnAssign) and outer.annotation is node):
            return True
        if isinstance(outer, Function):
            return outer.returns is node
        asks = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
        return asks and outer.func.id in ("isinstance", "issubclass") and node is not outer.args[0]

    def _judge_class_of(self, node: ast.expr) -> None:
        """A thing's class: that of a class is a metaclass, which makes classes of tables of texts."""
        if not self._asks_for_class(node):
            why = "write `type(thing).__name__`, or name the class itself: a lab needs no metaclass"
            self._refuse(node, f"`{text_of(node)}` as a value", why)

    def _asks_for_class(self, node: ast.expr, names: int = 0) -> bool:
        """Whether a class is compared, shown, or called as a class of the module's is: with a few arguments."""
        outer = self.around.get(id(node))
        if isinstance(outer, ast.Tuple):
            return self._asks_for_class(outer, names)
        if isinstance(outer, ast.Attribute):
            return outer.attr not in ("__class__", "__call__", "__new__")
        if isinstance(outer, ast.Call) and outer.func is node:
            unpacked = [a.value for a in outer.args if isinstance(a, ast.Starred)]
            named = all(keyword.arg is not None for keyword in outer.keywords)
            return named and len(outer.args) <= 2 and all(isinstance(a, ast.GeneratorExp) for a in unpacked)
        if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name):
            return outer.func.id in ("isinstance", "issubclass", "print", "repr", "str", "len", "id", "sorted")
        if isinstance(outer, ast.Assign) and names < 4:  # a name for it is used like it
            targets = [target.id if isinstance(target, ast.Name) else None for target in outer.targets]
            return None not in targets and all(
                self._asks_for_class(use, names + 1) for name in targets for use in self.uses.get(name, ())
            )
        return isinstance(outer, ast.Compare | ast.FormattedValue | ast.Subscript | ast.Expr)

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
        if isinstance(node.func, ast.Attribute):
            self._judge_method(node, node.func, scope)
        if not isinstance(node.func, ast.Name) or scope.path(node.func.id) is not None:
            return
        name = node.func.id
        self.settled.add(id(node.func))
        if name == "type":
            self._judge_class_of(node)
        if name == "type" and (len(node.args) != 1 or node.keywords):
            self._refuse(node, f"`{text_of(node)}`", "write a class statement")
        elif name in ("getattr", "setattr"):
            self._judge_access(node, name, scope)

    def _judge_method(self, node: ast.Call, method: ast.Attribute, scope: Scope) -> None:
        """A method that reads or writes an attribute, or reaches for one, by a name in a text."""
        if method.attr == "__setattr__" and (len(node.args) != 3 or not self._is_plain_name(node.args[1])):
            self._refuse(node, f"`{text_of(node)}`", "the name of an attribute stands in the source")
        elif method.attr in ("format", "format_map") and self._is_made(method.value, scope):
            self._refuse(node, f"`{text_of(node)}`", "a text with places to fill stands in the source as one text")

    def _is_made(self, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
        """Whether a text is put together when the module runs."""
        if isinstance(node, ast.Name) and depth < 4:
            found, inner = [], scope
            while inner is not None and not found:
                found, inner = inner.aliases.get(node.id, []), inner.outer
            return any(self._is_made(value, scope, depth + 1) for value in found)
        return isinstance(node, ast.BinOp | ast.JoinedStr | ast.Call)

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
        plain = {text_of(base) for base in node.bases if self._is_plain(base, scope)}
        functions = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
        harmless = ("__init__", "__new__", "__post_init__", "__repr__", "__str__")
        own = [name for name in functions if is_special(name) and name not in harmless]
        own += [name for name in functions if self._is_tensor(node) and name in _METHODS]
        members = [inner for inner in node.body if isinstance(inner, ast.Assign | ast.AnnAssign)]
        if any(self._root(base, scope).startswith("enum.") for base in node.bases) and not members:
            self._refuse(node, f"`class {node.name}` without members", "write the members of an enumeration into it")
        for inner in members:
            names = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            if any(isinstance(name, ast.Name) and name.id == "__match_args__" for name in names):
                given = inner.value.elts if isinstance(inner.value, ast.Tuple) else [None]
                if not all(map(self._is_plain_name, given)):
                    self._refuse(
                        inner, f"`{text_of(inner)}`", "an attribute's name stands in the source, and is no special one"
                    )
        if plain and own:
            self._refuse(
                node, f"`class {node.name}({plain.pop()})` with `{own[0]}`", "return a plain value, not one in disguise"
            )

    def _root(self, base: ast.expr, scope: Scope, depth: int = 0) -> str:
        """What a base class is at last: the path or builtin name of it, or of what a class of this module inherits."""
        if isinstance(base, ast.Call):  # collections.namedtuple("Pair", ...)
            called = scope.path_of(base.func) or text_of(base.func)
            return "tuple" if called.rpartition(".")[2] in ("namedtuple", "NamedTuple") else called
        if not isinstance(base, ast.Name):
            return scope.path_of(base) or text_of(base)
        inner: Scope | None = scope
        while inner is not None and depth < 8:
            made = inner.made.get(base.id)
            if isinstance(made, ast.ClassDef):
                roots = [self._root(each, inner, depth + 1) for each in made.bases if text_of(each) != base.id]
                return next((root for root in roots if _is_plain_type(root) or root.startswith("enum.")), "")
            if isinstance(made, ast.expr) and not (isinstance(made, ast.Name) and made.id == base.id):
                return self._root(made, inner, depth + 1)
            inner = inner.outer
        return scope.path(base.id) or base.id

    def _is_plain(self, base: ast.expr, scope: Scope) -> bool:
        return _is_plain_type(self._root(base, scope))

    def _is_tensor(self, node: ast.ClassDef) -> bool:
        return any(text_of(base).rpartition(".")[2] == "Tensor" for base in node.bases)

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


#: Methods by which others look at a tensor.
_METHODS = frozenset(
    [
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "data_ptr",
        "detach",
        "double",
        "dim",
        "element_size",
        "equal",
        "float",
        "half",
        "item",
        "is_contiguous",
        "numel",
        "numpy",
        "reshape",
        "size",
        "stride",
        "sum",
        "to",
        "tolist",
        "untyped_storage",
        "view",
    ]
)
#: Classes of Python's library whose instances are numbers, texts or containers.
_ALSO_PLAIN = frozenset(["Fraction", "IntEnum", "IntFlag", "NamedTuple", "ReprEnum", "Size", "StrEnum"])


def _is_plain_type(path: str) -> bool:
    return path.rpartition(".")[2] in tables.PLAIN_TYPES | _ALSO_PLAIN


def is_jit(decorator: ast.expr, scope: Scope) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return scope.path_of(called) in ("triton.jit", "triton.runtime.jit", "triton.experimental.gluon.jit")
