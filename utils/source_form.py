"""The form of Python source that a fingerprint is taken of: what the code does, whatever its own names are.

Names of the course's own (functions, classes, parameters, local variables, attributes, modules) are replaced by what
they stand for, so that a renamed one leaves the form as it was, while one that is exchanged for another changes it:

- a local variable or parameter is a number, counted from its first use in its top-level definition;
- a top-level definition is the hash of its own form;
- an attribute or a keyword is its position in the definitions that introduce it.

Names of libraries stay (``torch.sum``, ``tl.load``, ``num_warps``, ``.amax``). Texts stay, but for those of errors,
warnings and prints. Comments, docstrings, formatting, imports, annotations (``tl.constexpr`` is no mere annotation) and
the order of top-level definitions do not count. The form is the same on Python 3.11 to 3.14 (``ast.dump`` is
not: later versions add fields, omit defaults and parse f-strings differently).
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from utils.course_modules import Course, body_of, bound_names

# Positions, and hints that do not change what code does.
_IGNORED_FIELDS = {"lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "kind", "type_comment", "simple"}
_IGNORED_FIELDS |= {"annotation", "returns"}

# What Triton takes at a launch: never the course's, though a parameter of the course may be called the same.
_LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "grid", "warmup"}

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_MESSAGE_CALLS = {"print", "warnings.warn"}

# How often the hashes of definitions are put in for the names that lead to them: so deep is a difference seen.
_ROUNDS = 4


class Reference(NamedTuple):
    """A name of the course's own in a form: ``kind`` is "definition", "attribute" or "keyword".

    ``key`` is (path, name) for a definition and the name for the others; ``otherwise`` stands for what is not measured.
    """

    kind: str
    key: tuple[str, str] | str
    otherwise: str


def form(course: Course, statements: Iterable[tuple[str, int]]) -> list[str]:
    """Hashes of top-level statements, given as (path, index in the module's statements); in no particular order."""
    writers = {where: written(course, *where) for where in sorted(statements)}
    hashes = dict.fromkeys(writers, "")
    for _ in range(_ROUNDS):
        places = _places(course, writers, hashes)
        hashes = {
            where: hashlib.sha256("".join(_rendered(writer, places)).encode()).hexdigest()
            for where, writer in writers.items()
        }
    return list(hashes.values())


@functools.lru_cache(maxsize=4096)
def written(course: Course, path: str, index: int) -> _Writer:
    """One top-level statement, written."""
    writer = _Writer(course, path)
    writer.write(course.module(path).statements[index])
    return writer


def definitions_used(course: Course, path: str, index: int) -> set[tuple[str, str | None]]:
    """The course's own definitions that a top-level statement names, as (path, name); name None: the module itself."""
    tokens = written(course, path, index).tokens
    return {token.key for token in tokens if isinstance(token, Reference) and token.kind == "definition"}


def _places(course: Course, writers: dict, hashes: dict) -> dict:
    """(kind, key) -> where the name is introduced among the measured definitions, as sorted "hash.position"."""
    places: dict[tuple, list[str]] = {}
    for where, writer in writers.items():
        for kind, names in (("attribute", writer.attributes), ("keyword", writer.keywords)):
            for position, name in enumerate(names):
                places.setdefault((kind, name), []).append(f"{hashes[where]}.{position}")
    for path in {path for path, _ in writers}:
        for name, bindings in course.module(path).definitions.items():
            found = [f"{hashes[path, i]}.{position}" for i, position in bindings if (path, i) in hashes]
            if found:
                places["definition", (path, name)] = found
    return {key: ",".join(sorted(found)) for key, found in places.items()}


def _rendered(writer: _Writer, places: dict) -> Iterator[str]:
    for token in writer.tokens:
        if isinstance(token, Reference):
            place = places.get((token.kind, token.key))
            yield token.otherwise if place is None else f"{token.kind}:{place}"
        else:
            yield token


class _Scope:
    """The names that a function, lambda, comprehension or class body binds."""

    def __init__(self, nodes: list[ast.AST], is_class: bool = False) -> None:
        self.names, self.is_class = bound_names(nodes), is_class


class _Writer:
    """Writes one top-level statement as tokens: texts, and references that are known once all statements are written.

    Attributes:
        attributes: Attributes that the statement introduces: what classes bind, and what methods set on their object.
        keywords: Names by which its functions and classes take arguments.
    """

    def __init__(self, course: Course, path: str) -> None:
        self.course, self.path, self.module = course, path, course.module(path)
        self.tokens: list[str | Reference] = []
        self.attributes: dict[str, None] = {}
        self.keywords: dict[str, None] = {}
        self.scopes: list[_Scope] = []
        self.objects: list[str] = []  # what methods call their object
        self.numbers: dict[object, str] = {}
        self.in_message = False

    def write(self, node: object) -> None:
        """Append the tokens of a node, a list of nodes or a constant."""
        special = getattr(self, f"_{type(node).__name__}", None)
        if special is not None:
            special(node)
        elif isinstance(node, _FUNCTIONS | ast.Lambda):
            self._function(node)
        elif isinstance(node, _COMPREHENSIONS):
            self._comprehension(node)
        elif isinstance(node, ast.AST):
            self._generic(node)
        elif isinstance(node, list):
            self._text("[")
            for item in node:
                self.write(item)
            self._text("]")
        else:
            self._text(_constant(node))

    def _generic(self, node: ast.AST, skip: tuple[str, ...] = ()) -> None:
        """Absent fields and empty lists are left out: newer versions add fields that are mostly empty."""
        self._text(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name in skip or name in _IGNORED_FIELDS or value is None or value == []:
                continue
            self._text(f" {name}=")
            if name in ("name", "rest") and isinstance(value, str):
                self._name(value)
            elif name == "body" and isinstance(value, list):
                self.write([s for s in value if not isinstance(s, ast.Import | ast.ImportFrom | ast.Pass)])
            else:
                self.write(value)
        self._text(")")

    def _text(self, text: str) -> None:
        self.tokens.append(text)

    def _number(self, prefix: str, key: object) -> str:
        return self.numbers.setdefault((prefix, key), f"{prefix}:{len(self.numbers)}")

    # ---- names

    def _name(self, name: str) -> None:
        scope = self._scope_of(name)
        if scope is not None and scope.is_class:
            self._attribute(name)
        elif scope is not None:
            self._text(self._number("local", (scope, name)))
        elif name in self.module.definitions:
            self._definition(self.path, name)
        else:
            self._global(name, ())

    def _scope_of(self, name: str) -> _Scope | None:
        for depth, scope in enumerate(reversed(self.scopes)):
            if name in scope.names and not (scope.is_class and depth):
                return scope
        return None

    def _definition(self, path: str, name: str | None) -> None:
        self.tokens.append(Reference("definition", (path, name), self._number("unmeasured", (path, name))))

    def _attribute(self, name: str) -> None:
        literal = f"attribute:{name}"
        self.tokens.append(literal if _is_dunder(name) else Reference("attribute", name, literal))

    def _global(self, name: str, attributes: tuple[str, ...]) -> None:
        """A name that this file does not define, with the attributes behind it: imported, or built in."""
        module, member = self.module.imports.get(name, (None, None))
        if module is None:
            found = (None, ".".join((name, *attributes)), ())
        else:
            found = self.course.find(module, (*([member] if member else []), *attributes))
        path, inner, rest = found
        if path is None:
            self._text(f"library:{inner} ")
        else:
            self._definition(path, inner)
        for attribute in rest:
            self._attribute(attribute)

    def _Name(self, node: ast.Name) -> None:
        self._name(node.id)

    def _Attribute(self, node: ast.Attribute) -> None:
        chain, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            chain, root = [root.attr, *chain], root.value
        if isinstance(root, ast.Name) and self._scope_of(root.id) is None and root.id not in self.module.definitions:
            self._global(root.id, tuple(chain))
            return
        if isinstance(node.ctx, ast.Store) and node.value is root and _id(root) in self.objects:
            self.attributes[chain[0]] = None
        self._text("(Attribute ")
        self.write(root)
        for attribute in chain:
            self._attribute(attribute)
        self._text(")")

    def _library_name(self, node: ast.AST) -> str | None:
        """The full name of what a name or a chain of attributes leads to in a library, ``"torch.sum"``; else None."""
        chain = []
        while isinstance(node, ast.Attribute):
            chain, node = [node.attr, *chain], node.value
        if not isinstance(node, ast.Name) or self._scope_of(node.id) or node.id in self.module.definitions:
            return None
        module, member = self.module.imports.get(node.id, (None, None))
        if module is None:
            return ".".join((node.id, *chain))
        found = self.course.find(module, (*([member] if member else []), *chain))
        return found.name if found.path is None else None

    # ---- calls

    def _Call(self, node: ast.Call) -> None:
        was, self.in_message = self.in_message, self.in_message or self._library_name(node.func) in _MESSAGE_CALLS
        self._text("(Call ")
        self.write(node.func)
        self.write(node.args)
        own = self._takes_own_keywords(node)
        for keyword in node.keywords:
            name = keyword.arg
            if name is None:
                self._text("**")
            elif own and name not in _LAUNCH_OPTIONS:
                self.tokens.append(Reference("keyword", name, self._keyword_elsewhere(node.func, name)))
            else:
                self._text(f"keyword:{name}=")
            self.write(keyword.value)
        self._text(")")
        self.in_message = was

    def _takes_own_keywords(self, node: ast.Call) -> bool:
        """Whether what is called may be the course's own: not a library's function, nor a method of its objects."""
        called = node.func
        if self._library_name(called) == "functools.partial" and node.args:
            called = node.args[0]
        while isinstance(called, ast.Subscript):  # kernel[grid](...)
            called = called.value
        return self._library_name(called) is None

    def _keyword_elsewhere(self, called: ast.expr, name: str) -> str:
        """What stands for a keyword of no measured function: a number if the course's own function takes it."""
        while isinstance(called, ast.Attribute | ast.Subscript):
            called = called.value
        own = isinstance(called, ast.Name) and self._scope_of(called.id) is None
        return self._number("keyword", name) if own else f"keyword:{name}="

    # ---- scopes

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.write(node.generators[0].iter)  # belongs to the scope outside
        self.scopes.append(_Scope([generator.target for generator in node.generators]))
        self._generic(node, skip=("generators",))
        for generator in node.generators:
            self._generic(generator, skip=("iter",) if generator is node.generators[0] else ())
        self.scopes.pop()

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        parameters = node.args
        named = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
        self._text("(Function ")
        is_method = bool(self.scopes) and self.scopes[-1].is_class
        if not isinstance(node, ast.Lambda):
            self._name(node.name)
            self.write(node.decorator_list)
            self.keywords |= dict.fromkeys(argument.arg for argument in named)
        self.write([*parameters.defaults, *(default or "none" for default in parameters.kw_defaults)])
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        self.objects += [named[0].arg] if is_method and named else []
        self.scopes.append(_Scope([parameters, *body]))
        self._generic(parameters, skip=("defaults", "kw_defaults"))
        if isinstance(node, ast.Lambda):
            self.write(node.body)
        else:
            self._generic(ast.Module(body=body_of(node), type_ignores=[]))
        self.scopes.pop()
        if is_method and named:
            self.objects.pop()
        self._text(f"{type(node).__name__})")

    def _arg(self, node: ast.arg) -> None:
        self._name(node.arg)
        kind = self._library_name(node.annotation) if isinstance(node.annotation, ast.Name | ast.Attribute) else None
        if isinstance(node.annotation, ast.Constant) and isinstance(node.annotation.value, str):
            kind = f"triton.{node.annotation.value}" if node.annotation.value.endswith("constexpr") else None
        if kind and kind.startswith("triton."):
            self._text(f"annotation:{kind.split('.')[-1]} ")

    def _ClassDef(self, node: ast.ClassDef) -> None:
        self._text("(Class ")
        self._name(node.name)
        self.write([*node.decorator_list, *node.bases])
        for keyword in node.keywords:
            self.write(keyword)
        scope = _Scope(body_of(node), is_class=True)
        self.attributes |= dict.fromkeys(scope.names)
        self.keywords |= dict.fromkeys(scope.names)
        self.scopes.append(scope)
        self.write(body_of(node))
        self.scopes.pop()
        self._text(")")

    def _Global(self, node: ast.Global | ast.Nonlocal) -> None:
        for name in node.names:
            self._name(name)

    _Nonlocal = _Global

    # ---- statements and texts of which less counts

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        if self.scopes and self.scopes[-1].is_class:
            self._generic(node)
        elif node.value is not None:
            self.write(ast.Assign(targets=[node.target], value=node.value))

    def _Raise(self, node: ast.Raise) -> None:
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        self._generic(ast.Raise(exc=error, cause=None))

    def _Assert(self, node: ast.Assert) -> None:
        self._generic(node, skip=("msg",))

    def _JoinedStr(self, node: ast.JoinedStr) -> None:
        if self.in_message:
            for value in node.values:
                if isinstance(value, ast.FormattedValue):
                    self.write(value.value)
        else:
            self._generic(ast.JoinedStr(values=_merged(node.values)))

    def _Constant(self, node: ast.Constant) -> None:
        self._text("(text)" if self.in_message and isinstance(node.value, str) else f"({_constant(node.value)})")


def _id(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string, neighbouring texts joined, empty ones dropped: versions differ in how they split them."""
    merged: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(value=merged[-1].value + value.value)
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            merged.append(value)
    return merged


def _constant(value: object) -> str:
    """Type and value. Texts as hexadecimal bytes: which characters ``repr`` escapes depends on the Unicode version."""
    if isinstance(value, str):
        return "str:" + value.encode("utf-8", "surrogatepass").hex()
    return f"{type(value).__name__}:{value!r}"
