"""Student functions are sent to the ranks by reference, so that the ranks import the saved module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FunctionRef:
    """A function or class of a module, looked up where it is needed."""

    module: str
    name: str

    def find(self) -> Any:
        """The object itself."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


def to_reference(value: Any) -> Any:
    """``value`` as it travels to the ranks: its name if it belongs to a file, itself if it was typed into a notebook.

    A notebook that reloads its modules may hold a class whose module has a newer one of that name: the ranks take the
    newer one, which is what the file says.
    """
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name or getattr(sys.modules.get(module), "__file__", None) is None:
        return value
    return FunctionRef(module, name)


def answer_to_references(answer: Mapping[str, Callable]) -> dict[str, Any]:
    """Every function of a student's answer as it travels."""
    return {name: to_reference(value) for name, value in answer.items()}


def from_references(answer: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: the functions of a student's answer."""
    return {name: value.find() if isinstance(value, FunctionRef) else value for name, value in answer.items()}
