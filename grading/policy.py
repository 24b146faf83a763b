"""The rule book for a student's module: what its source may name, decided without running it.

:func:`violations` reads the syntax tree and refuses what leads out of a lab: imports beyond the listed modules, the
system, files, frames and other internals, names made from text, and changes of what the module does not own. A released
statement that stands where it was released is the course's own and passes. Each :class:`Violation` says what is
there, in which line, and what to write instead.

What this cannot do. Python is too lively for a reader of source to be sure what runs: an object handed over may be
changed by its methods, a class passed to a function may be patched there, a loop may never end. So the policy only
narrows what a module can try. Behind it stand the sandbox (no network, no files of the course, limits on time, memory
and processes), the seal (:mod:`grading.seal`: PyTorch, Triton and the checks are what they were), and the scenarios,
whose expected values never enter the process that runs a student's code. A point needs all of them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from grading import policy_tables as tables
from grading.lab import ROOT, Lab

LONGEST = 200_000
"""Most characters of a module: several times the longest solution."""

DEEPEST = 120
"""Most levels of brackets, blocks and operators inside each other."""

MOST = 20
"""Violations that are listed; more of them teach nothing."""

_LOCAL = ""  # what a name stands for that the module itself binds


@dataclass(frozen=True, order=True)
class Violation:
    """One thing that a module may not do: ``what`` stands in ``line`` (1 is the first), ``why`` says what to do."""

    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}: {self.why}"


def violations(source: str | bytes, filename: str, lab: Lab) -> list[Violation]:
    """What in a student's module is against the rules, in the order of its lines; empty for an ordinary module.

    Args:
        source: the module as it was handed in; bytes are read as UTF-8.
        filename: its name in the lab's folder, such as ``"gelu.py"``: the released module of that name is known.
        lab: the lab that it belongs to.

    Returns:
        At most :data:`MOST` violations. Source that cannot be read (too long, too deep, no Python) is a violation too;
        nothing that stands in a module makes this function raise.
    """
    try:
        text = source.decode("utf-8-sig") if isinstance(source, bytes) else source
    except UnicodeDecodeError as error:
        return [Violation(1, "bytes that are no UTF-8", f"save the file as UTF-8 ({error.reason})")]
    tree = _parsed(text)
    if isinstance(tree, Violation):
        return [tree]
    own = _own(lab)
    reader = _Reader(own, Path(filename).name)
    try:
        reader.read(tree)
    except (RecursionError, MemoryError):
        reader.found.add(Violation(1, "code nested too deeply", "split it into functions"))
    return sorted(reader.found)[:MOST]


def _parsed(text: str) -> ast.Module | Violation:
    if len(text) > LONGEST:
        return Violation(1, f"{len(text):,} characters", f"a module of a lab has at most {LONGEST:,}")
    if "\0" in text:
        return Violation(text[: text.index("\0")].count("\n") + 1, "a null byte", "save the file as plain UTF-8 text")
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text, maxsplit=2)[:2], start=1):
        coding = re.match(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", line)
        if coding and coding[1].lower().replace("_", "-") not in ("utf-8", "utf8", "utf-8-sig", "ascii"):
            return Violation(number, f"the encoding {coding[1]!r}", "save the file as UTF-8 and take this line out")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return Violation(error.lineno or 1, "not Python", f"{error.msg}: run the module before you hand it in")
    except (RecursionError, MemoryError):
        return Violation(1, "code nested too deeply for Python to read", "split it into functions")
    except (ValueError, OverflowError, UnicodeError) as error:
        return Violation(1, "not Python", f"{error}: run the module before you hand it in")
    level: list[ast.AST] = [tree]
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    return Violation(getattr(level[0], "lineno", 1), "code nested too deeply", "split it into functions")


# ---- what the lab's own modules use --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Own:
    """What the released modules of a lab hold and use."""

    package: str
    modules: frozenset[str]
    statements: dict[str, frozenset[tuple[str, str]]]  # module -> (function it stands in, the statement)
    imports: dict[str, frozenset[str]]  # file -> modules that it imports
    utils: frozenset[str]  # dotted names: modules, and what is used of them
    attributes: frozenset[str]


def _own(lab: Lab) -> _Own:
    return _read_own(lab.name, lab.released, lab.solution)


@functools.lru_cache(maxsize=16)
def _read_own(package: str, released: Path, solution: Path) -> _Own:
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(released.glob("*.py"))}
    solved = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(solution.glob("*.py"))]
    used: set[str] = set()
    attributes: set[str] = set()
    for tree in [*trees.values(), *solved]:
        names = dict(_imports(tree, package))
        used.update(path for path in names.values() if path.startswith("utils."))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                parts = _chain(node)
                if parts and names.get(parts[0], "").startswith("utils."):
                    used.add(f"{names[parts[0]]}.{parts[1]}")
    used |= {path.rpartition(".")[0] for path in used}
    statements = {name: frozenset(_placed(tree)) for name, tree in trees.items()}
    imports = {
        name: frozenset(_module_part(path) for _, path in _imports(tree, package)) for name, tree in trees.items()
    }
    modules = frozenset(Path(name).stem for name in trees)
    return _Own(package, modules, statements, imports, frozenset(used), frozenset(attributes))


def _module_part(path: str) -> str:
    return path.split(".")[0]


def _placed(tree: ast.AST, place: str = "") -> Iterator[tuple[str, str]]:
    """Every statement with the function or class it stands in, as text that ignores where it stands in the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield place, ast.dump(node)
        inside = f"{place}.{node.name}" if isinstance(node, _Named) else place
        yield from _placed(node, inside)


_Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and the dotted path that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{_home(node, package)}.{alias.name}"


def _home(node: ast.ImportFrom, package: str) -> str:
    return ".".join(part for part in ((package if node.level else ""), node.module or "") if part)


def _chain(node: ast.AST) -> list[str]:
    """``["torch", "nn", "Linear"]`` for such an attribute, nothing for one that does not begin at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


# ---- what a dotted path may be -------------------------------------------------------------------------------------


@functools.cache
def _public_of_standard(module: str) -> frozenset[str]:
    found = importlib.import_module(module)
    public = getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]
    return frozenset(name for name in public if not isinstance(getattr(found, name, None), types.ModuleType))


@functools.cache
def _submodules(package: str) -> frozenset[str]:
    """The modules and packages that lie in an installed package, found on disk: nothing is imported."""
    folders = None
    for end in range(1, package.count(".") + 2):
        spec = PathFinder.find_spec(".".join(package.split(".")[:end]), folders)
        if spec is None or spec.submodule_search_locations is None:
            return frozenset()
        folders = list(spec.submodule_search_locations)
    entries = (entry for folder in folders or () for entry in Path(folder).iterdir())
    return frozenset(entry.name.split(".")[0] for entry in entries if entry.suffix in (".py", ".so") or entry.is_dir())


_EVERYWHERE = frozenset(
    ["F", "dist", "grading", "labs", "nn", "np", "numpy", "solutions", "tl", "torch", "triton", "utils"]
)


@functools.cache
def _is_utils_module(path: str) -> bool:
    place = ROOT.joinpath(*path.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


_FUNCTIONS_NAMED_LIKE_MODULES = {"torch": {"chunk", "select", "trace"}, "numpy": {"array", "copy", "select", "trace"}}


class _Paths:
    """Judges dotted paths such as ``torch.nn.Linear`` for one file of one lab."""

    def __init__(self, own: _Own, filename: str) -> None:
        self.own = own
        self.extra = {
            module
            for module in own.imports.get(filename, ())
            if module in sys.stdlib_module_names and module not in tables.NEVER
        }

    def is_module(self, path: str) -> bool:
        """Whether a path is a module, allowed or not, as far as its name tells."""
        if path == _LOCAL:
            return False
        if path.startswith("utils."):
            return _is_utils_module(path)
        if path.split(".")[0] == self.own.package:
            return path == self.own.package  # a function may be named like its module
        if self.allowed(path) or path in sys.stdlib_module_names or path.split(".")[0] == path:
            return True
        home, _, name = path.rpartition(".")
        return home in tables.PACKAGES and name in _submodules(home)

    def allowed(self, path: str) -> bool:
        """Whether a module may be used."""
        if path in tables.STANDARD or path in tables.PACKAGES or path in self.extra:
            return True
        if path.startswith("utils."):
            return path in self.own.utils and _is_utils_module(path)
        home, _, name = path.rpartition(".")
        return path == self.own.package or (home == self.own.package and self._may_be_own(name))

    def _may_be_own(self, name: str) -> bool:
        """Whether a module beside the others may have this name: one of the release, or one that a student added."""
        elsewhere = name in sys.stdlib_module_names or name in _EVERYWHERE
        return name.isidentifier() and (name in self.own.modules or not elsewhere)

    def refusal(self, path: str) -> str | None:
        """Why a path may not be named; None when it may."""
        parts = path.split(".")
        if not self.allowed(parts[0]):
            return self._not_allowed(parts[0])
        home = parts[0]
        for name in parts[1:]:
            here = f"{home}.{name}"
            if home.split(".")[0] == "utils":
                if here in self.own.utils:
                    home = here
                    continue
                listed = sorted(path for path in self.own.utils if path.startswith(home + "."))
                return f"this lab's modules may use {', '.join(listed) or 'nothing'} of `{home}`"
            if self.allowed(here):
                home = here
                continue
            return self._member_refusal(home, name)
        return None

    def _not_allowed(self, module: str) -> str:
        return (
            f"a lab's module may not use `{module}`: it does its work with torch, triton, math and the like, "
            "the names from utils that the lab imports already, and the lab's own modules"
        )

    def _member_refusal(self, home: str, name: str) -> str | None:
        path = f"{home}.{name}"
        if path in tables.UNDERSCORED:
            return None
        if home in tables.ONLY and name not in tables.ONLY[home]:
            listed = ", ".join(sorted(tables.ONLY[home]))
            return f"of `{home}` a lab's module may use {listed}" if listed else f"import what you need of `{home}`"
        if name in tables.EXCEPT.get(home, ()) or (home == "torch" and tables.TORCH_MACHINERY.match(name)):
            return f"`{path}` is not needed in a lab: use the ordinary functions of `{home}`"
        if name.startswith("_"):
            return f"names of `{home}` with a leading underscore are its own: use its public functions"
        if home == self.own.package or home.startswith(self.own.package + "."):
            if name in sys.stdlib_module_names and name not in tables.STANDARD and name not in self.own.modules:
                return self._not_allowed(name)
            if name in _EVERYWHERE:
                return f"import `{name}` itself, not through another module"
            return None
        if home in tables.STANDARD or home in self.extra:
            return None if name in _public_of_standard(home) else f"`{home}` gives no public `{name}` to a lab"
        module = name in sys.stdlib_module_names or name in _submodules(home) or name in ("torch", "np")
        if module and name not in _FUNCTIONS_NAMED_LIKE_MODULES.get(home, ()):
            return f"the module `{path}` is not needed in a lab: use the ordinary functions of `{home}`"
        return None


# ---- names and what they stand for ---------------------------------------------------------------------------------


class _Scope:
    """The names that one function, class or module binds: an import's path, an alias, or something of its own."""

    def __init__(self, node: ast.AST, outer: _Scope | None, package: str) -> None:
        while outer is not None and outer.of_class and not isinstance(node, ast.ClassDef):
            outer = outer.outer  # a method does not see the names of its class
        self.outer = outer
        self.of_class = isinstance(node, ast.ClassDef)
        self.paths: dict[str, str] = {}
        self.aliases: dict[str, list[ast.expr]] = {}
        self.bound: set[str] = set()
        self.made: dict[str, ast.AST] = {}
        if isinstance(node, _Function):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            self.bound |= {argument.arg for argument in every if argument is not None}
        outside: set[str] = set()
        if isinstance(node, _Comprehension):
            targets = (inner for part in node.generators for inner in ast.walk(part.target))
            self.bound |= {inner.id for inner in targets if isinstance(inner, ast.Name)}
            return
        body = node.body if isinstance(node.body, list) else [node.body]
        for inner in _inside(body):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                self.paths.update(_imports(ast.Module([inner], []), package))
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del):
                self.bound.add(inner.id)
            elif isinstance(inner, _Named | ast.ExceptHandler) and inner.name:
                self.bound.add(inner.name)
            elif isinstance(inner, ast.Global | ast.Nonlocal):
                outside.update(inner.names)
            if isinstance(inner, _Named):
                self.made[inner.name] = inner
            if isinstance(inner, ast.Assign | ast.AnnAssign | ast.NamedExpr) and inner.value is not None:
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.aliases.setdefault(target.id, []).append(inner.value)
                        self.made[target.id] = inner.value
        self.bound -= outside

    def path(self, name: str, depth: int = 0) -> str | None:
        """The dotted path that a name stands for; ``_LOCAL`` for one of the module's own; None for a builtin."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.paths:
                return scope.paths[name]
            if name in scope.aliases and depth < 4:
                known = (scope.path_of(value, depth + 1) for value in scope.aliases[name])
                if path := next(filter(None, known), None):
                    return path
            if name in scope.bound:
                return _LOCAL
            scope = scope.outer
        return None

    def path_of(self, node: ast.AST, depth: int = 0) -> str | None:
        """The dotted path of an expression that is a name or an attribute of one."""
        parts = _chain(node) if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
        root = self.path(parts[0], depth) if parts else None
        return ".".join([root, *parts[1:]]) if root else root


def _inside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a block, without what functions, lambdas and classes inside it hold."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _Named):
            waiting += [*node.decorator_list, *getattr(node, "bases", ()), *_defaults(node)]
        elif isinstance(node, _Comprehension):  # only `:=` binds a name outside of it
            waiting += [inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
            waiting += [inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
        elif not isinstance(node, ast.Lambda | ast.NamedExpr):
            waiting += ast.iter_child_nodes(node)
        elif isinstance(node, ast.NamedExpr):
            waiting += [node.target, node.value]


def _defaults(node: ast.AST) -> list[ast.expr]:
    given = getattr(node, "args", None)
    return [value for value in (*given.defaults, *given.kw_defaults) if value is not None] if given else []


# ---- the reader ----------------------------------------------------------------------------------------------------


class _Reader:
    """Walks over a module once and collects what is against the rules."""

    def __init__(self, own: _Own, filename: str) -> None:
        self.own = own
        self.paths = _Paths(own, filename)
        self.released = own.statements.get(filename, frozenset())
        self.found: set[Violation] = set()
        self.settled: set[int] = set()  # names that what stands around them makes harmless
        self.memory = tables.BARE_MEMORY - own.attributes

    def read(self, tree: ast.Module) -> None:
        """Judge a whole module."""
        self._visit_children(tree, _Scope(tree, None, self.own.package), "")

    def _refuse(self, node: ast.AST, what: str, why: str) -> None:
        self.found.add(Violation(getattr(node, "lineno", 1), what, why))

    def _visit_children(self, node: ast.AST, scope: _Scope, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, place)

    def _visit(self, node: ast.AST, scope: _Scope, place: str) -> None:
        if isinstance(node, ast.stmt) and self.released and (place, ast.dump(node)) in self.released:
            return
        judge = getattr(self, f"_judge_{type(node).__name__.lower()}", None)
        if judge is not None:
            judge(node, scope)
        if isinstance(node, ast.Attribute) and self._judge_path(node, scope):
            return  # the whole chain is judged, its beginning too
        if isinstance(node, _Named | ast.Lambda):
            outer = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), *_defaults(node)]
            for child in (*outer, *getattr(node, "keywords", ())):
                self._visit(child, scope, place)
            if isinstance(node, _Function):
                self._visit_annotations(node, scope)
            inside = place if isinstance(node, ast.Lambda) else f"{place}.{node.name}"
            inner = _Scope(node, scope, self.own.package)
            for child in node.body if isinstance(node.body, list) else [node.body]:
                self._visit(child, inner, inside)
            return
        if isinstance(node, _Comprehension):
            scope = _Scope(node, scope, self.own.package)
        if isinstance(node, ast.AnnAssign):
            self._visit_annotation(node.annotation, scope)
            for child in (node.target, node.value):
                if child is not None:
                    self._visit(child, scope, place)
            return
        self._visit_children(node, scope, place)

    def _visit_annotations(self, node: ast.AST, scope: _Scope) -> None:
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        notes = [argument.annotation for argument in every if argument is not None]
        for note in [*notes, getattr(node, "returns", None)]:
            if note is not None:
                self._visit_annotation(note, scope)

    def _visit_annotation(self, note: ast.expr, scope: _Scope) -> None:
        """A type: `BaseException` may be named here, and nothing may be called."""
        for node in ast.walk(note):
            if isinstance(node, ast.Call | ast.Lambda | ast.NamedExpr | ast.Await | ast.Yield):
                self._refuse(node, f"`{_text(node)}` in a type", "a type names classes and calls nothing")
            elif isinstance(node, ast.Name) and node.id == "BaseException":
                self.settled.add(id(node))
        self._visit(note, scope, "")

    # -- imports

    def _judge_import(self, node: ast.Import, scope: _Scope) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == self.own.package and not self.paths.allowed(alias.name):
                self._refuse(node, f"`import {alias.name}`", f"the modules of this lab are {self._own_modules()}")
            elif not self.paths.allowed(alias.name):
                why = self.paths.refusal(alias.name) or self.paths._not_allowed(alias.name)
                self._refuse(node, f"`import {alias.name}`", why)

    def _judge_importfrom(self, node: ast.ImportFrom, scope: _Scope) -> None:
        home = _home(node, self.own.package)
        written = f"from {'.' * node.level}{node.module or ''} import {', '.join(alias.name for alias in node.names)}"
        if node.level > 1:
            self._refuse(node, f"`{written}`", "a lab's module imports its neighbours with one dot")
            return
        if not self.paths.allowed(home):
            if home.startswith(self.own.package + "."):
                self._refuse(node, f"`{written}`", f"the modules of this lab are {self._own_modules()}")
            else:
                self._refuse(node, f"`{written}`", self.paths.refusal(home) or self.paths._not_allowed(home))
            return
        for alias in node.names:
            if alias.name == "*":
                self._refuse(node, f"`{written}`", "name what you import")
            elif (why := self.paths.refusal(f"{home}.{alias.name}")) is not None:
                self._refuse(node, f"`{written}`", why)

    def _own_modules(self) -> str:
        return ", ".join(sorted(self.own.modules - {"__init__", "__main__"}))

    # -- names and attributes

    def _judge_name(self, node: ast.Name, scope: _Scope) -> None:
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
        elif path != _LOCAL and self.paths.is_module(path):
            self._refuse(node, f"the module `{name}` as a value", f"name what you need of it, such as `{name}.thing`")

    def _judge_attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        self._judge_attribute_name(node, node.attr)
        if isinstance(node.ctx, ast.Store | ast.Del):
            self._judge_change(node, node.value, scope)
            if _special(node.attr) and node.attr not in ("__name__", "__doc__", "__qualname__"):
                self._refuse(node, f"`{_text(node)} = ...`", "special attributes belong to Python")

    def _judge_attribute_name(self, node: ast.AST, name: str) -> None:
        if name in tables.INTERNALS:
            self._refuse(node, f"`.{name}`", "a lab does without the internals of Python and PyTorch")
        elif name in self.memory and not _is_attribute_of(node, "self"):
            self._refuse(
                node, f"`.{name}`", "work on tensors with their operators or in your kernel, not on bare memory"
            )
        elif name == "__setattr__" and _is_attribute_of(node, "object"):
            pass  # a frozen dataclass sets its own fields so
        elif name == "__dict__" and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pass  # an object's own fields; a module's are out of reach, for no module is ever a value
        elif _special(name) and name not in tables.SPECIAL_ATTRIBUTES:
            self._refuse(node, f"`.{name}`", "special attributes belong to Python: a lab does without it")

    def _judge_path(self, node: ast.Attribute, scope: _Scope) -> bool:
        """Judge an attribute that begins at an imported name; returns whether it does."""
        path = scope.path_of(node)
        if not path:
            return False
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and inner is not node:
                self._judge_attribute_name(inner, inner.attr)
        why = self.paths.refusal(path)
        if why is not None or ".__dict__" in path:
            self._refuse(node, f"`{_text(node)}`", why or "name what you need of it")
        elif self.paths.is_module(path):
            self._refuse(node, f"the module `{_text(node)}` as a value", "name what you need of it")
        return True

    def _judge_subscript(self, node: ast.Subscript, scope: _Scope) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self._judge_change(node, node.value, scope)

    def _judge_change(self, node: ast.AST, owner: ast.expr, scope: _Scope) -> None:
        """Whether an assignment changes what the module does not own."""
        path = scope.path_of(owner)
        if path:
            self._refuse(
                node, f"`{_text(node)} = ...`", f"`{path}` is not yours to change: write a function of your own"
            )
        elif _is_class_of(owner):
            self._refuse(node, f"`{_text(node)} = ...`", "a class is not changed from outside: write one of your own")

    # -- calls

    def _judge_call(self, node: ast.Call, scope: _Scope) -> None:
        if not isinstance(node.func, ast.Name) or scope.path(node.func.id) is not None:
            return
        name = node.func.id
        self.settled.add(id(node.func))
        if name == "type" and (len(node.args) != 1 or node.keywords):
            self._refuse(node, f"`{_text(node)}`", "write a class statement")
        elif name in ("getattr", "setattr"):
            self._judge_access(node, name, scope)

    def _judge_access(self, node: ast.Call, name: str, scope: _Scope) -> None:
        if len(node.args) < 2 or any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            self._refuse(node, f"`{_text(node)}`", f"write `{name}(thing, 'name', ...)`")
            return
        owner, attribute = node.args[:2]
        if not (isinstance(attribute, ast.Constant) and isinstance(attribute.value, str)):
            self._refuse(node, f"`{_text(node)}`", "the name of an attribute stands in the source: write `thing.name`")
            return
        self._judge_attribute_name(node, attribute.value)
        path = scope.path_of(owner)
        if path and (name == "setattr" or self.paths.is_module(path)):
            why = "name what you need" if name == "getattr" else f"`{path}` is not yours to change"
            self._refuse(node, f"`{_text(node)}`", f"{why}: write `{_text(owner)}.{attribute.value}`")

    # -- statements

    def _judge_functiondef(self, node: ast.FunctionDef, scope: _Scope) -> None:
        if _special(node.name) and node.name not in tables.SPECIAL_METHODS:
            self._refuse(node, f"`def {node.name}`", "a lab needs no such special method: choose another name")
        if any(_is_jit(decorator, scope) for decorator in node.decorator_list):
            self._judge_kernel(node, _Scope(node, scope, self.own.package))

    def _judge_kernel(self, kernel: ast.FunctionDef, scope: _Scope) -> None:
        """A kernel computes by itself: on a GPU it could not call PyTorch, in the interpreter nobody would notice."""
        for node in (inner for statement in kernel.body for inner in ast.walk(statement)):
            path = scope.path_of(node) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None
            if path and path.split(".")[0] in ("torch", "numpy", "utils"):
                why = "a kernel is written in triton.language alone: what it needs is passed to it"
                self._refuse(node, f"`{node.id}` in the kernel `{kernel.name}`", why)
            elif path == _LOCAL and self._is_python(node.id, scope):
                why = "a kernel calls kernels (@triton.jit) and triton.language, and uses tl.constexpr from outside"
                self._refuse(node, f"`{node.id}` in the kernel `{kernel.name}`", why)

    def _is_python(self, name: str, scope: _Scope) -> bool:
        """Whether a name that a kernel uses stands for a Python object of the module that is no kernel nor constant."""
        module = scope
        while module.outer is not None:
            if name in module.bound:
                return False
            module = module.outer
        node = module.made.get(name)
        if isinstance(node, ast.FunctionDef):
            return not any(_is_jit(decorator, module) for decorator in node.decorator_list)
        return isinstance(node, ast.List | ast.Dict | ast.Lambda | ast.ClassDef | ast.ListComp | ast.DictComp)

    _judge_asyncfunctiondef = _judge_functiondef

    def _judge_classdef(self, node: ast.ClassDef, scope: _Scope) -> None:
        for keyword in node.keywords:
            if keyword.arg == "metaclass" and _text(keyword.value) not in ("ABCMeta", "abc.ABCMeta"):
                self._refuse(node, f"`class {node.name}(metaclass=...)`", "a lab needs no metaclass")
        bases = {_text(base).rpartition(".")[2] for base in node.bases}
        if "type" in bases:
            self._refuse(node, f"`class {node.name}(type)`", "a lab needs no metaclass")
        plain = bases & tables.PLAIN_TYPES
        own = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef) and _special(inner.name)]
        own = [name for name in own if name not in ("__init__", "__new__", "__post_init__", "__repr__", "__str__")]
        if plain and own:
            self._refuse(
                node, f"`class {node.name}({plain.pop()})` with `{own[0]}`", "return a plain value, not one in disguise"
            )

    def _judge_excepthandler(self, node: ast.ExceptHandler, scope: _Scope) -> None:
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for kind in kinds:
            if kind is None or (isinstance(kind, ast.Name) and kind.id == "BaseException"):
                self.settled.add(id(kind))
                if not any(isinstance(statement, ast.Raise) and statement.exc is None for statement in node.body):
                    what = "`except:`" if kind is None else "`except BaseException:`"
                    why = "it would also swallow the grader's own signals: catch `Exception`, or the error you expect"
                    self._refuse(node, what, why)

    def _judge_constant(self, node: ast.Constant, scope: _Scope) -> None:
        if isinstance(node.value, str) and re.search(r"\{[^{}]*(\.|\[)_[^{}]*\}", node.value):
            self._refuse(node, "a format that reaches for special attributes", "write the attribute out")

    def _judge_try(self, node: ast.Try, scope: _Scope) -> None:
        for inner in _inside(node.finalbody):
            if isinstance(inner, ast.Return):
                self._refuse(inner, "`return` inside `finally`", "it swallows every error: return after the block")
        for statement in node.finalbody:
            if isinstance(statement, ast.Break | ast.Continue):
                self._refuse(statement, "a jump out of `finally`", "it swallows every error: leave after the block")

    def _judge_matchclass(self, node: ast.MatchClass, scope: _Scope) -> None:
        for name in node.kwd_attrs:
            self._judge_attribute_name(node, name)


def _is_jit(decorator: ast.expr, scope: _Scope) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return scope.path_of(called) in ("triton.jit", "triton.runtime.jit")


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_class_of(node: ast.AST) -> bool:
    """Whether an expression is ``type(x)`` or ``x.__class__``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def _is_attribute_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def _text(node: ast.AST) -> str:
    """A piece of source on one short line."""
    written = " ".join(ast.unparse(node).split())
    return written if len(written) <= 60 else written[:57] + "..."
