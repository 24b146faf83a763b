"""What the checks of lab 1 share: the exercise that asks questions, what an answer may not lean on, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from random import Random
from typing import Any

from utils.checks.core import Exercise
from utils.checks.forbidden_modules import Forbidden
from utils.checks.hidden import asked
from utils.checks.numbers import check_numbers
from utils.checks.question import Case, Question

FORBIDDEN: Forbidden = {
    "utils.operators": frozenset({"require_sizes"}),
    "utils.roofline": frozenset(),
    "utils.simt": frozenset({"Op", "If"}),
    "utils.kernel_profile": frozenset(),
    "utils.records": frozenset(),
    __package__: frozenset({"__call__"}),  # the conditions of the branches that a check hands over
}


def asking(
    number: str, title: str, points: int, questions: tuple[Question, ...], *, check: str, says: str, notice: str,
    **more: Any,
) -> Exercise:  # fmt: skip
    """An exercise whose check asks these questions, in their order, of the functions that they are named after.

    Args:
        number: as in :class:`Exercise`, and so are ``title``, ``points`` and ``more``; hidden cases ask the same
            questions unless ``observe`` is among the latter.
        questions: one or more for each of the student's functions.
        check: the name of the check.
        says: the first sentence of its documentation.
        notice: what to notice when everything passes.
    """
    exercise = Exercise(number, title, points, **{"observe": asked(number, *questions), **more})
    names = dict.fromkeys(each.name for each in questions)
    taken = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation="Callable") for name in names]
    seed = Parameter("seed", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="int | None")
    signature = Signature([*taken, seed], return_annotation="None")

    def asks(*given: Any, **named: Any) -> None:
        functions = signature.bind(*given, **named).arguments
        drawn = functions.pop("seed", None)
        answers = [(question, functions[question.name]) for question in questions]
        check_numbers(exercise, answers, seed=drawn, forbidden=FORBIDDEN, notice=notice)

    wrong = "Raises:\n    CheckFailed: a function is wrong; the text says where and why."
    asks.__name__ = asks.__qualname__ = check
    asks.__doc__, asks.__signature__ = f"Exercise {number}: {says}\n\n{wrong}", signature
    exercise.checked_by(asks)
    return exercise


ONE = "one element"
LARGE = "a count beyond 2**53, where a float loses ones"
ELEMENT_SIZES = (1, 2, 4, 8)


def size_cases(
    rng: Random,
    names: tuple[str, ...],
    *,
    drawn: int = 6,
    small: tuple[int, int] = (2, 9),
    large: tuple[int, ...] = (),
    **others: Callable[[Random], object],
) -> list[Case]:
    """Cases of positive sizes: drawn small ones first (distinct sizes where possible), one element, then large ones.

    Args:
        rng: draws the cases.
        names: the parameters that are sizes.
        drawn: how many small cases.
        small: the least and the largest small size.
        large: for each size the least value of the large cases; up to 4 more ragged elements are added to it.
        others: draws the value of each further parameter (``element_size``, a method, a flag).
    """
    cases = []
    low, high = small
    for _ in range(drawn):
        pool = rng.sample(range(low, high + 1), len(names)) if high - low + 1 >= len(names) else None
        sizes = dict(zip(names, pool or [rng.randint(low, high) for _ in names]))
        cases.append(Case(sizes | {key: draw(rng) for key, draw in others.items()}))
    cases.append(Case(dict.fromkeys(names, 1) | {key: draw(rng) for key, draw in others.items()}, ONE))
    if large:
        for _ in range(3):
            sizes = {name: least + 2 * rng.randint(1, 9) - 1 for name, least in zip(names, large, strict=True)}
            cases.append(Case(sizes | {key: draw(rng) for key, draw in others.items()}, LARGE))
    return cases


def element_size(rng: Random) -> int:
    """Bytes of an element: fp8, 16 bit, fp32 or fp64."""
    return rng.choice(ELEMENT_SIZES)
