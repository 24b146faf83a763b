"""Answers that a lab's checks are held to: right ones written otherwise than the solution, and wrong ones.

A lab keeps them in its folder ``answers``, which is never released. A **place** is what a student fills, named by its
label in the solution (``"3.1: merge"``); an answer is the text that stands there.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: What a text says -> what stands there instead; or another text instead of the whole.
Edits = Mapping[str, str] | str


@dataclass(frozen=True)
class EditedAnswer:
    """A right answer with edits.

    Attributes:
        exercise: whose check it is for (``"3.1"``).
        name: what is special about it, in a few words.
        edits: by place, words of the right answer and what stands there instead.
    """

    exercise: str
    name: str
    edits: Mapping[str, Edits]

    def __str__(self) -> str:
        return f"{self.exercise}-{self.name.replace(' ', '-')}"

    def filled(self, right: Mapping[str, str]) -> dict[str, str]:
        """The right answers by place, with the edits.

        Raises:
            ValueError: the right answer does not hold the words that are replaced.
        """
        places = dict(right)
        for place, edits in self.edits.items():
            for words, instead in ({places[place]: edits} if isinstance(edits, str) else edits).items():
                if words not in places[place]:
                    raise ValueError(f"{self}: the answer to {place} does not say {words!r}")
                places[place] = places[place].replace(words, instead)
        return places


@dataclass(frozen=True)
class WrongAnswer(EditedAnswer):
    """A right answer with one mistake in it, made as the mistake is made. The check must refuse it.

    Attributes:
        says: what the check's message must hold.
        functions: by name, functions or classes that stand in place of the right ones, for what fills no place.
    """

    says: tuple[str, ...] = ()
    functions: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Answers:
    """Answers to a lab's exercises: ``right`` by place, further right ones, and wrong ones, in the order of adding."""

    right: dict[str, str] = field(default_factory=dict)
    unusual: list[EditedAnswer] = field(default_factory=list)
    wrong_answers: list[WrongAnswer] = field(default_factory=list)

    def also_right(self, name: str, edits: Mapping[str, Edits]) -> None:
        """Add a right answer that few would write: by place, edits of the plain answer or another text."""
        self.unusual.append(EditedAnswer(next(iter(edits)).split(":")[0], name, edits))

    def wrong(
        self,
        place: str,
        name: str,
        *says: str,
        edits: Edits | None = None,
        instead: str = "",
        also: Mapping[str, Edits] | None = None,
        exercise: str = "",
    ) -> None:
        """Add a wrong answer: ``edits`` of one place, or another text ``instead`` of it, and ``also`` edits of others.

        It belongs to the exercise of its place unless ``exercise`` names another one.
        """
        number = exercise or place.split(":")[0]
        self.wrong_answers.append(WrongAnswer(number, name, {place: instead or edits or {}, **(also or {})}, says))

    def wrong_function(self, exercise: str, replaces: str, *says: str) -> Callable[[Callable], Callable]:
        """Decorate a function or class that stands in place of the one that ``replaces`` names."""

        def add(function: Callable) -> Callable:
            name = function.__name__.replace("_", " ")
            self.wrong_answers.append(WrongAnswer(exercise, name, {}, says, {replaces: function}))
            return function

        return add


def answers_of(package: str) -> Answers:
    """All answers in the modules of a package (``"solutions.lab3_flash_attention.answers"``)."""
    home = importlib.import_module(package)
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(home.__path__)]
    found = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Answers)}
    every = Answers()
    for answers in found.values():
        every.right |= answers.right
        every.unusual += answers.unusual
        every.wrong_answers += answers.wrong_answers
    return every
