"""Names in the released starter code of a lab: they are always allowed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grading.lab import Lab
from grading.policy.syntax import Named, chain_of, imports_of


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
    solved = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(solution.glob("*.py"))]
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
