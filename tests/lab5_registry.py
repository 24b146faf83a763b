"""Where the wrong answers to lab 5 are registered, and how answers are put into the lab's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lab5_plain_answers import ANSWERS, LAB
from lab_places import WrongAnswer, forget, write_lab

WRONG_ANSWERS: list[WrongAnswer] = []

Edits = Mapping[str, str]


def register(place: str) -> Callable[..., None]:
    """A function that registers wrong answers to a place: a name, words of the message, and edits of the plain answer.

    ``instead`` replaces the whole answer; ``also`` are edits of other places.
    """

    def wrong(
        name: str, *says: str, edits: Edits | None = None, instead: str = "", also: Mapping[str, Edits] | None = None
    ) -> None:
        own = {ANSWERS[place]: instead} if instead else (edits or {})
        WRONG_ANSWERS.append(WrongAnswer(place.split(":")[0], name, {place: own, **(also or {})}, says))

    return wrong


@contextmanager
def modules_with(folder: Path, name: str, answers: Mapping[str, str]) -> Iterator[Callable[[str], ModuleType]]:
    """The lab as a package called ``name`` with its places filled; gives a function that imports one of its modules."""
    write_lab(LAB, folder / name, answers)
    (folder / name / "__init__.py").write_text("")  # an exercise imports what it needs, and no more
    sys.path.insert(0, str(folder))
    try:
        yield lambda module: importlib.import_module(f"{name}.{module}")
    finally:
        sys.path.remove(str(folder))
        forget(name)
