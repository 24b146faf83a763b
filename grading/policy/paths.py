"""What a dotted path such as ``torch.nn.Linear`` may be; names in a lab's released starter code are always allowed."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from grading.handed_out import modules_of
from grading.lab import ROOT, Lab
from grading.policy import tables
from grading.policy.syntax import LOCAL, Named, chain_of, imports_of


@dataclass(frozen=True)
class Own:
    """What the released modules of a lab hold and use."""

    package: str
    modules: frozenset[str]
    statements: dict[str, frozenset[tuple[str, str]]]  # module -> (function it stands in, the statement)
    imports: dict[str, frozenset[str]]  # file -> modules that it imports
    utils: frozenset[str]  # dotted names: modules, and what is used of them
    attributes: frozenset[str]


def own_of(lab: Lab) -> Own:
    return _read_own(lab.name, lab.released, lab.solution)


@functools.lru_cache(maxsize=16)
def _read_own(package: str, released: Path, solution: Path) -> Own:
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(released.glob("*.py"))}
    solved = [ast.parse(path.read_text(encoding="utf-8")) for path in modules_of(solution)]
    used: set[str] = set()
    attributes: set[str] = set()
    for tree in [*trees.values(), *solved]:
        names = dict(imports_of(tree, package))
        used.update(path for path in names.values() if path.startswith("utils."))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr)
                parts = chain_of(node)
                if parts and names.get(parts[0], "").startswith("utils."):
                    used.add(f"{names[parts[0]]}.{parts[1]}")
    used |= {path.rpartition(".")[0] for path in used}
    statements = {name: frozenset(_placed(tree)) for name, tree in trees.items()}
    imports = {
        name: frozenset(_module_part(path) for _, path in imports_of(tree, package)) for name, tree in trees.items()
    }
    modules = frozenset(Path(name).stem for name in trees)
    return Own(package, modules, statements, imports, frozenset(used), frozenset(attributes))


def _module_part(path: str) -> str:
    return path.split(".")[0]


def _placed(tree: ast.AST, place: str = "") -> Iterator[tuple[str, str]]:
    """Every statement with the function or class it stands in, as text that ignores where it stands in the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield place, ast.dump(node)
        inside = f"{place}.{node.name}" if isinstance(node, Named) else place
        yield from _placed(node, inside)


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


#: The packages whose names are looked up in them as they are installed. (Triton must not be imported before the
#: course's runtime, and its modules lie in its folder.)
_LOOKED_UP = ("torch", "numpy")
_NOTHING = object()


def _leads_to_a_module(home: str, name: str) -> bool:
    """Whether a name of an allowed package is a module: what it holds decides, or its files where it holds nothing.

    So nobody lists what each version of PyTorch has in it, and a function named like a module of Python is a function.
    """
    looked_up = home.split(".")[0] in _LOOKED_UP
    held = vars(importlib.import_module(home)).get(name, _NOTHING) if looked_up else _NOTHING
    if held is _NOTHING:
        return name in sys.stdlib_module_names or name in _submodules(home)
    return issubclass(type(held), types.ModuleType)


_EVERYWHERE = frozenset(
    ["F", "dist", "exercises", "grading", "labs", "nn", "np", "numpy", "solutions", "tl", "torch", "triton", "utils"]
)


@functools.cache
def _is_utils_module(path: str) -> bool:
    place = ROOT.joinpath(*path.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


class Paths:
    """Judges dotted paths such as ``torch.nn.Linear`` for one file of one lab."""

    def __init__(self, own: Own, filename: str) -> None:
        self.own = own
        self.extra = {
            module
            for module in own.imports.get(filename, ())
            if module in sys.stdlib_module_names and module not in tables.NEVER
        }

    def is_module(self, path: str) -> bool:
        """Whether a path is a module, allowed or not, as far as its name tells."""
        if path == LOCAL:
            return False
        if path.startswith("utils."):
            return _is_utils_module(path)
        if path.split(".")[0] == self.own.package:
            return path == self.own.package  # a function may be named like its module
        if self.allowed(path) or path in sys.stdlib_module_names or path.split(".")[0] == path:
            return True
        home, _, name = path.rpartition(".")
        return home in tables.PACKAGES and _leads_to_a_module(home, name)

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
            return self.not_allowed(parts[0])
        home = parts[0]
        for name in parts[1:]:
            here = f"{home}.{name}"
            if home.split(".")[0] == "utils":
                if here in self.own.utils:
                    home = here
                    continue
                listed = sorted(path for path in self.own.utils if path.startswith(home + "."))
                return (
                    f"this lab's modules may use {', '.join(listed) or 'nothing'} of `{home}`, as they do when released"
                )
            if self.allowed(here):
                home = here
                continue
            return self._member_refusal(home, name)
        return None

    def not_allowed(self, module: str) -> str:
        return (
            f"a lab's module may not use `{module}`: it does its work with torch, triton, math and the like, "
            "the names from utils that the lab imports already, and the lab's own modules (the list: "
            "grading/policy/tables.py)"
        )

    def _member_refusal(self, home: str, name: str) -> str | None:
        path = f"{home}.{name}"
        if path in tables.UNDERSCORED:
            return None
        if path in tables.INSTEAD:
            return tables.INSTEAD[path]
        if home in tables.ONLY and name not in tables.ONLY[home]:
            listed = ", ".join(sorted(tables.ONLY[home]))
            return f"of `{home}` a lab's module may use {listed}" if listed else f"import what you need of `{home}`"
        if name in tables.EXCEPT.get(home, ()) or (home == "torch" and tables.TORCH_MACHINERY.match(name)):
            return f"`{path}` is not needed in a lab: use the ordinary functions of `{home}`"
        if name.startswith("_"):
            return f"names of `{home}` with a leading underscore are its own: use its public functions"
        if home == self.own.package or home.startswith(self.own.package + "."):
            if name in sys.stdlib_module_names and name not in tables.STANDARD and name not in self.own.modules:
                return self.not_allowed(name)
            if name in _EVERYWHERE:
                return f"import `{name}` itself, not through another module"
            return None
        if home in tables.STANDARD or home in self.extra:
            return None if name in _public_of_standard(home) else f"`{home}` gives no public `{name}` to a lab"
        if _leads_to_a_module(home, name):
            return f"the module `{path}` is not needed in a lab: use the ordinary functions of `{home}`"
        return None
