"""What all rules share: the lab that a module belongs to, and the violations that are found in it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from grading.policy import tables
from grading.policy.own import Own
from grading.policy.paths import Paths
from grading.policy.syntax import is_attribute_of, is_special


@dataclass(frozen=True, order=True)
class Violation:
    """One thing that a module may not do: ``what`` stands in ``line`` (1 is the first), ``why`` says what to do."""

    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}: {self.why}"


class Judge:
    """Collects what is against the rules in one module."""

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
        elif name == "__setattr__" and is_attribute_of(node, "object"):
            pass  # a frozen dataclass sets its own fields so
        elif name == "__dict__" and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pass  # an object's own fields; a module's are out of reach, for no module is ever a value
        elif is_special(name) and name not in tables.SPECIAL_ATTRIBUTES:
            self._refuse(node, f"`.{name}`", "special attributes belong to Python: a lab does without it")
