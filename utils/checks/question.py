"""A question to a student's function that returns numbers: how to draw its cases, an oracle, and the known mistakes.

Each known way to get it wrong is a function that computes what that mistake gives: see :mod:`utils.checks.numbers`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from utils.checks.forms import AnswerFormat, Count


@dataclass(frozen=True)
class Case:
    """The arguments of one call.

    ``tag`` says what is special about it, ``shown`` how to type the arguments where their repr does not do, and
    ``brief`` what a message calls it where typing it takes too much room.
    """

    arguments: Mapping[str, object]
    tag: str = ""
    shown: str = ""
    brief: str = ""

    def call(self, name: str) -> str:
        """The call as one can type it; what the function is asked about where that takes too much room."""
        if self.brief:
            return f"{name} of {self.brief}"
        written = self.shown or ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"{name}({written})"


@dataclass(frozen=True)
class Raised:
    """An error in place of a value."""

    error: Exception

    def like(self, other: Raised) -> bool:
        """Whether two errors have one cause: the same class, or both arithmetic (1 / 0, or int(inf) where numpy
        divided)."""
        both_arithmetic = isinstance(self.error, ArithmeticError) and isinstance(other.error, ArithmeticError)
        return both_arithmetic or type(self.error) is type(other.error)

    def __str__(self) -> str:
        return f"raised {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Mistake:
    """A known way to get a question wrong.

    ``says`` completes "likely cause: ..."; ``computes`` takes the question's arguments and gives the value
    that the mistake leads to, or raises what it makes a student's function raise (a division by zero, a missing key);
    ``classic`` is its number in the notebook's classic wrong answers (0: not listed).
    """

    says: str
    computes: Callable[..., object]
    classic: int = 0

    def outcome(self, case: Case) -> object:
        """What the mistake leads to in a case: a value, or the error as :class:`Raised`."""
        try:
            return self.computes(**case.arguments)
        except (ArithmeticError, LookupError) as error:
            return Raised(error)

    def __str__(self) -> str:
        pointer = f': see "classic wrong answers" {self.classic}' if self.classic else ""
        return f"likely cause: {self.says}{pointer}"


@dataclass(frozen=True)
class Question:
    """One function to write, and its oracle.

    Attributes:
        name: the function's name, as in the lab.
        cases: draws the cases from a generator; the smallest first, they are shown first.
        expected: the oracle; takes the arguments of a case.
        mistakes: known misconceptions, most frequent first.
        form: whether answers are counts or rates.
        refused: argument values that must raise a ValueError whose text holds the value, by parameter.
        also_refused: the same for several arguments together, or for a second value of one: the arguments that differ
            from a good call's, and the value that the text must hold.
        together: a complaint about answers that are right one by one but not all together; empty when there is none.
        split_by: a parameter whose values are diagnosed apart from each other (``"causal"``).
    """

    name: str
    cases: Callable[[random.Random], Sequence[Case]]
    expected: Callable[..., object]
    mistakes: Sequence[Mistake]
    form: AnswerFormat = field(default_factory=Count)
    refused: Mapping[str, object] = field(default_factory=dict)
    also_refused: Sequence[tuple[Mapping[str, object], object]] = ()
    split_by: str = ""
    together: Callable[[Sequence[Answer]], str] | None = None


@dataclass(frozen=True)
class Answer:
    """What the student's function returned for a case (:class:`Raised` if it did not), and what was expected."""

    case: Case
    got: object
    expected: object
    right: bool
