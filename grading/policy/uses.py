"""How the parts of a module are used: whether what they stand for stays there or can be kept, called or changed.

A class of a class, an object's table of fields and a text with places to fill lead out of a lab once a variable holds
them: by a metaclass, a table or a text one reaches attributes whose names do not stand in the source.
"""

from __future__ import annotations

import ast
import builtins
import string
from collections import Counter
from collections.abc import Callable

from grading.policy.syntax import LOCAL, Function, Named, Scope, chain_of, is_class_of, is_plain_name

DISPLAY = (
    ast.Constant | ast.JoinedStr | ast.Tuple | ast.List | ast.Dict | ast.Set
    | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
)  # fmt: skip
"""Expressions whose value has one of Python's own types."""


class Uses:
    """What stands around each node of a module, and how often it binds each name."""

    def __init__(self, tree: ast.Module) -> None:
        self._around = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._bound: Counter[str] = Counter()
        self._values: dict[str, list[ast.expr]] = {}
        self._read: dict[str, list[ast.Name]] = {}
        for node in ast.walk(tree):
            self._bound.update(_bound_by(node))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._read.setdefault(node.id, []).append(node)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._values.setdefault(node.targets[0].id, []).append(node.value)

    def around(self, node: ast.AST) -> ast.AST | None:
        """What a node stands in."""
        return self._around.get(id(node))

    def _is_call_of(self, node: ast.AST | None, names: tuple[str, ...]) -> bool:
        """Whether a node calls one of Python's own functions of these names."""
        called = node.func if isinstance(node, ast.Call) else None
        return isinstance(called, ast.Name) and called.id in names and not self._bound[called.id]

    def _values_of(self, node: ast.expr) -> list[ast.expr]:
        """What an expression stands for: itself, or all that is ever assigned to a name; empty if that is unknown."""
        if not isinstance(node, ast.Name):
            return [node]
        values = self._values.get(node.id, [])
        return values if len(values) == self._bound[node.id] else []

    def _is_always(self, node: ast.expr, kind: type[ast.expr]) -> bool:
        """Whether an expression is such a literal, or a name that never stands for anything else."""
        values = self._values_of(node)
        return bool(values) and all(isinstance(value, kind) for value in values)

    # ---- decorators and types
    def decorates(self, node: ast.expr) -> bool:
        """Whether a function stands above a function or class with an ``@``, called or not."""
        call = self.around(node)
        whole = call if isinstance(call, ast.Call) and call.func is node else node
        below = self.around(whole)
        return isinstance(below, Named) and whole in below.decorator_list

    def is_base(self, node: ast.expr) -> bool:
        """Whether a class is one that a class statement inherits from."""
        below = self.around(node)
        return isinstance(below, ast.ClassDef) and node in below.bases

    def is_type(self, node: ast.expr) -> bool:
        """Whether a class is named in an annotation, of a function or a variable; a class keeps those of its fields."""
        outer = self.around(node)
        while isinstance(outer, ast.Tuple | ast.List | ast.BinOp | ast.Subscript):
            node, outer = outer, self.around(outer)
        if isinstance(outer, ast.AnnAssign):
            return outer.annotation is node and not isinstance(self.around(outer), ast.ClassDef)
        return isinstance(outer, ast.arg) or (isinstance(outer, Function) and getattr(outer, "returns", None) is node)

    def is_tested(self, node: ast.expr) -> bool:
        """Whether a class is named as in ``isinstance(x, (int, C))``."""
        outer = self.around(node)
        if isinstance(outer, ast.Tuple):
            node, outer = outer, self.around(outer)
        return self._is_call_of(outer, ("isinstance", "issubclass")) and node is not outer.args[0]

    def class_around(self, node: ast.AST) -> str | None:
        """The name of the class in whose methods a node stands."""
        outer = self.around(node)
        while outer is not None and not isinstance(outer, ast.ClassDef):
            outer = self.around(outer)
        return outer.name if outer is not None else None

    # ---- a class that an expression gives: `type(x)`, `x.__class__`, `type`
    def keeps_class(self, node: ast.expr, scope: Scope, names: int = 0) -> bool:
        """Whether a class may be called as a metaclass, or kept: not if it is compared, shown, or makes an instance."""
        outer = self.around(node)
        if isinstance(_asked(node), DISPLAY):  # `type(None)`, `type([])`: Python's own types are no secret
            return False
        if isinstance(outer, ast.Tuple | ast.List | ast.Set):
            above = self.around(outer)
            return not (isinstance(above, ast.Compare) and self._compares_classes(above, node, scope)) and not (
                self._is_call_of(above, ("isinstance", "issubclass", "print")) or _is_filled(above, outer)
            )
        if isinstance(outer, ast.Attribute):
            return outer.attr in ("__class__", "__call__", "__init__", "__new__")
        if isinstance(outer, ast.Compare):
            return not self._compares_classes(outer, node, scope)
        if isinstance(outer, ast.Call) and outer.func is node:
            return not self._makes_instance(outer)
        if isinstance(outer, ast.Call):
            shown = ("isinstance", "issubclass", "print", "repr", "str", "id", "len", "hash")
            called = outer.func
            method = called.attr if isinstance(called, ast.Attribute) else ""
            return not self._is_call_of(outer, shown) and not (
                (method == "format" and isinstance(called.value, ast.Constant))
                or (method == "get" and node is outer.args[0] and self._is_always(called.value, ast.Dict))
            )
        if isinstance(outer, ast.Subscript):
            return not (outer.slice is node and self._is_always(outer.value, ast.Dict))
        if isinstance(outer, ast.Assign) and names < 4:
            return not self._is_local(outer) or any(
                self.keeps_class(use, scope, names + 1) for use in self._read.get(outer.targets[0].id, ())
            )
        return not (isinstance(outer, ast.FormattedValue | ast.Expr) or _is_filled(outer, node))

    def _makes_instance(self, call: ast.Call) -> bool:
        """Whether a call of a class gives no class: a metaclass takes three arguments, `type` itself also one."""
        if any(isinstance(given, ast.Starred) for given in call.args) or any(k.arg is None for k in call.keywords):
            return False
        return len(call.args) != 3 and (len(call.args) != 1 or self._is_no_class(call.args[0]))

    def _is_no_class(self, node: ast.expr) -> bool:
        """Whether an expression gives a number, a text or a container for certain."""
        if isinstance(node, ast.BinOp):
            return self._is_no_class(node.left) and self._is_no_class(node.right)
        return isinstance(node, DISPLAY) or self._is_call_of(
            node, ("bool", "dict", "float", "int", "len", "list", "repr", "set", "sorted", "str", "tuple")
        )

    def _compares_classes(self, compare: ast.Compare, node: ast.expr, scope: Scope) -> bool:
        """Whether all that a class is compared with are classes: others may keep what they are compared with."""
        if all(isinstance(op, ast.Is | ast.IsNot) for op in compare.ops):
            return True
        inside = ast.Tuple | ast.List | ast.Set
        sides = [part for side in (compare.left, *compare.comparators) for part in getattr(side, "elts", [side])]
        return all(side is node or (not isinstance(side, inside) and self._is_class(side, scope)) for side in sides)

    def _is_class(self, node: ast.expr, scope: Scope) -> bool:
        if is_class_of(node) or (isinstance(node, ast.Constant) and node.value is None):
            return True
        path, chain = scope.path_of(node), chain_of(node)
        if path is None:
            return isinstance(node, ast.Name) and isinstance(getattr(builtins, node.id, None), type)
        known = path != LOCAL or isinstance(scope.made_of(chain[-1]), ast.ClassDef)
        return known and self._bound[chain[0]] == 1

    def _is_local(self, assign: ast.Assign) -> bool:
        """Whether an assignment binds one name that nobody outside of a function sees."""
        (target, *more), place = assign.targets, self.around(assign)
        while place is not None and not isinstance(place, Named | ast.Lambda | ast.Module):
            place = self.around(place)
        if more or not isinstance(target, ast.Name) or not isinstance(place, Function):
            return False
        shared = (inner.names for inner in ast.walk(place) if isinstance(inner, ast.Global | ast.Nonlocal))
        return not any(target.id in names for names in shared)

    # ---- the table of an object's fields, `x.__dict__`
    def keeps_fields(self, node: ast.expr) -> bool:
        """Whether a table of fields may be kept, or changed under a name that does not stand in the source."""
        outer = self.around(node)
        above = self.around(outer) if outer is not None else None
        if isinstance(outer, ast.Subscript):
            return outer.value is not node or not is_plain_name(outer.slice)
        if isinstance(outer, ast.Attribute):
            if not (isinstance(above, ast.Call) and above.func is outer):
                return True
            named = outer.attr in ("get", "pop", "setdefault") and above.args and is_plain_name(above.args[0])
            return not (named or outer.attr in ("items", "keys", "values", "copy"))
        if isinstance(outer, ast.Call):
            return not self._is_call_of(
                outer, ("dict", "len", "list", "print", "repr", "set", "sorted", "str", "tuple")
            )
        if isinstance(outer, ast.Compare):
            looked_up = outer.left is not node and all(isinstance(op, ast.In | ast.NotIn) for op in outer.ops)
            sides = (outer.left, *outer.comparators)
            return not looked_up and not all(isinstance(s, ast.Attribute) and s.attr == "__dict__" for s in sides)
        if isinstance(outer, ast.For | ast.comprehension):
            return outer.iter is not node
        copied = isinstance(outer, ast.Dict) and node in outer.values and outer.keys[outer.values.index(node)] is None
        return not copied and not (
            isinstance(outer, ast.FormattedValue) or (isinstance(outer, ast.keyword) and outer.arg is None)
        )

    # ---- texts and enumerations
    def is_written(self, node: ast.expr) -> bool:
        """Whether all places of a text to fill stand in the source.

        That is so for a literal, and for literals that are put together by ``+``, ``* 3``, ``* len(x)`` and ``join`` if
        each is complete by itself: then the fields of the whole are the fields of its parts.
        """
        return self._is_always(node, ast.Constant) or self._is_template(node)

    def _is_template(self, node: ast.expr, names: int = 0) -> bool:
        values = self._values_of(node) if names < 4 else []
        if isinstance(node, ast.Name):
            return bool(values) and all(self._is_template(value, names + 1) for value in values)
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and _is_complete(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._is_template(node.left, names) and self._is_template(node.right, names)
        if isinstance(node, ast.BinOp):
            return self._is_repeated(node, lambda part: self._is_template(part, names))
        method = node.func if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords else None
        return (
            isinstance(method, ast.Attribute)
            and method.attr == "join"
            and self._is_template(method.value, names)
            and self._holds_templates(node.args[0], names)
        )

    def _holds_templates(self, node: ast.expr, names: int) -> bool:
        """Whether an expression is a list, a tuple or a comprehension of complete texts."""
        if isinstance(node, ast.List | ast.Tuple):
            return all(self._is_template(element, names) for element in node.elts)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self._is_template(node.elt, names)
        return self._is_repeated(node, lambda part: self._holds_templates(part, names))

    def _is_repeated(self, node: ast.expr, is_part: Callable[[ast.expr], bool]) -> bool:
        """Whether an expression is a part times a whole number: any other factor could say what the product is."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            return False
        pairs = ((node.left, node.right), (node.right, node.left))
        return any(is_part(part) and self._is_count(times) for part, times in pairs)

    def _is_count(self, node: ast.expr) -> bool:
        number = isinstance(node, ast.Constant) and isinstance(node.value, int)
        return number or self._is_call_of(node, ("int", "len"))

    def has_member(self, node: ast.ClassDef, scope: Scope) -> bool:
        """Whether an enumeration has a member for certain, so that nobody adds others by calling it."""
        assigned = [inner for inner in node.body if isinstance(inner, ast.Assign | ast.AnnAssign) and inner.value]
        names = {each.id for inner in assigned for each in ast.walk(inner) if isinstance(each, ast.Name)}
        return "_ignore_" not in names and any(self._is_member(inner, scope) for inner in assigned)

    def _is_member(self, assign: ast.Assign | ast.AnnAssign, scope: Scope) -> bool:
        target = assign.targets[0] if isinstance(assign, ast.Assign) else assign.target
        value = assign.value
        names = [part.id for part in getattr(target, "elts", [target]) if isinstance(part, ast.Name)]
        if not names or any(name.startswith("_") for name in names):
            return False
        called = value.func if isinstance(value, ast.Call) else None
        path = scope.path_of(called or value) or ""
        literal = not any(isinstance(part, ast.Name | ast.Call | ast.Lambda) for part in ast.walk(value))
        return literal or path.startswith("torch.") or path == "enum.auto" or self._is_call_of(value, ("range",))


def _is_complete(text: str) -> bool:
    """Whether each place to fill that begins in a text ends in it too."""
    try:
        list(string.Formatter().parse(text))
    except ValueError:
        return False
    return True


def _asked(node: ast.expr) -> ast.expr | None:
    """Of what ``type(x)`` or ``x.__class__`` is the class."""
    if isinstance(node, ast.Call):
        return node.args[0] if node.args else None
    return node.value if isinstance(node, ast.Attribute) else None


def _bound_by(node: ast.AST) -> list[str]:
    """The names that a node binds by itself."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.split(".")[0]]
    name = node.rest if isinstance(node, ast.MatchMapping) else getattr(node, "name", None)
    return [name] if isinstance(name, str) else []


def _is_filled(node: ast.AST | None, inner: ast.AST) -> bool:
    """Whether a node is ``"... %s ..." % inner``."""
    text = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else None
    return isinstance(text, ast.Constant) and isinstance(text.value, str) and node.right is inner
