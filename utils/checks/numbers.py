"""Checks of functions that return numbers: counts of operations and bytes, rates, times, tables of them.

A :class:`Question` is one function of the student: how to draw its cases, an oracle, and the known ways to get it
wrong, each as a function that computes what that mistake gives. When the student's values equal a mistake's in every
case, the message names the mistake; otherwise it shows cases and what the wrong ones have in common.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from utils.checks.attempt import attempt, tail
from utils.checks.core import Exercise, draw_seed, fail, generator, passed
from utils.checks.forms import Count, Form, Table
from utils.checks.ready_made import Forbidden, imports_of

SHOWN_CASES = 3


@dataclass(frozen=True)
class Case:
    """The arguments of one call.

    ``tag`` says what is special about it, ``shown`` how to type the arguments where their repr does not do, and
    ``brief`` what a list of failures calls it where typing it takes too much room.
    """

    arguments: Mapping[str, object]
    tag: str = ""
    shown: str = ""
    brief: str = ""

    def call(self, name: str) -> str:
        """The call as one can type it."""
        written = self.shown or ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return f"{name}({written})"


@dataclass(frozen=True)
class Mistake:
    """A known way to get a question wrong.

    ``says`` completes "this is what you get when ..."; ``computes`` takes the question's arguments and gives the value
    that the mistake leads to; ``classic`` is its number in the notebook's classic wrong answers (0: not listed).
    """

    says: str
    computes: Callable[..., object]
    classic: int = 0

    def __str__(self) -> str:
        pointer = f': see "classic wrong answers" {self.classic}' if self.classic else ""
        return f"this is what you get when {self.says}{pointer}"


@dataclass(frozen=True)
class Question:
    """One function to write, and what it is held against.

    Attributes:
        name: the function's name, as in the lab.
        cases: draws the cases from a generator; the smallest first, they are shown first.
        expected: the oracle; takes the arguments of a case.
        mistakes: known misconceptions, most frequent first.
        form: whether answers are counts, rates or tables.
        refused: argument values that must raise a ValueError whose text holds the value, by parameter.
        together: a complaint about answers that are right one by one but not all together; empty when there is none.
        split_by: a parameter whose values are diagnosed apart from each other (``"causal"``).
    """

    name: str
    cases: Callable[[random.Random], Sequence[Case]]
    expected: Callable[..., object]
    mistakes: Sequence[Mistake]
    form: Form = field(default_factory=Count)
    refused: Mapping[str, object] = field(default_factory=dict)
    split_by: str = ""
    together: Callable[[Sequence[Answer]], str] | None = None


@dataclass(frozen=True)
class Answer:
    """What the student's function returned for a case, and what was expected."""

    case: Case
    got: object
    expected: object
    right: bool


def check_numbers(
    exercise: Exercise,
    answers: Sequence[tuple[Question, Callable]],
    *,
    seed: int | None,
    notice: str = "",
    forbidden: Forbidden | None = None,
) -> None:
    """Hold functions against their questions; print the verdict when all are right.

    Args:
        exercise: the exercise that the messages name.
        answers: each question with the student's function.
        seed: draws the cases; None draws a fresh seed.
        notice: what to notice when everything passes.
        forbidden: modules whose functions an answer may not call, with the names in them that it may.

    Raises:
        CheckFailed: a function is wrong; the text says where, and why if the mistake is known.
        NotImplementedError: a stub, untouched: its own message passes through.
    """
    seed = draw_seed(seed)
    cases = 0
    for question, function in answers:
        _refuse_ready_made(exercise, question, function, forbidden or {})
        given = _ask(exercise, question, function, seed, forbidden or {})
        if not all(answer.right for answer in given):
            _explain(exercise, question, given, seed)
        if question.together is not None and (complaint := question.together(given)):
            fail(exercise, complaint)
        cases += len(given) + _check_refusals(exercise, question, function, given[0].case, forbidden or {})
    passed(exercise, notice, seed, cases)


def _refuse_ready_made(exercise: Exercise, question: Question, function: Callable, forbidden: Forbidden) -> None:
    if not callable(function):
        fail(
            exercise,
            f"the check takes the function {question.name} itself, got {function!r}: leave out the parentheses",
        )
    if found := imports_of(function, forbidden):
        _fail_ready_made(exercise, question, found)


def _fail_ready_made(exercise: Exercise, question: Question, found: Sequence[str]) -> None:
    fail(
        exercise,
        f"{question.name} leans on the course's ready-made answer ({found[0]})",
        cause="the point is to derive it once yourself; from the next notebook on, do use the ready-made one",
    )


def _ask(exercise: Exercise, question: Question, function: Callable, seed: int, forbidden: Forbidden) -> list[Answer]:
    """Call the function on every case; the oracle is asked only afterwards."""
    cases = list(question.cases(generator(seed)))
    got = [call(exercise, question, function, case, forbidden) for case in cases]
    for case, value in zip(cases, got, strict=True):
        if problem := question.form.problem(value):
            fail(exercise, f"{case.call(question.name)} returned {problem}")
    expected = [question.expected(**case.arguments) for case in cases]
    return [Answer(c, g, e, _same(question.form, g, e)) for c, g, e in zip(cases, got, expected, strict=True)]


def _same(form: Form, value: object, expected: object) -> bool:
    if value is None or expected is None:
        return value is expected
    return form.same(value, expected)


def _like(form: Form, value: object, mistaken: object) -> bool:
    if value is None or mistaken is None:
        return value is mistaken
    return form.like(value, mistaken)


def call(exercise: Exercise, question: Question, function: Callable, case: Case, forbidden: Forbidden) -> object:
    """The value of a student's function in one case; an error in it becomes a message with the lines that failed.

    A NotImplementedError passes through: a stub has a message of its own.
    """
    written = case.call(question.name)
    try:
        inspect.signature(function).bind(**case.arguments)
    except TypeError as error:
        names = ", ".join(case.arguments)
        fail(exercise, f"{question.name} cannot be called as {written}: {error}", [f"its parameters are ({names})"])
    made = attempt(function, case.arguments, forbidden)
    if made.called:
        _fail_ready_made(exercise, question, made.called)
    if made.late:
        hint = "find the formula: a loop over every operation cannot finish at this size"
        fail(exercise, f"{written} did not return in time", cause=hint)
    if made.error is not None:
        raised = f"raised {type(made.error).__name__}: {made.error}" + (f"  ({case.tag})" if case.tag else "")
        brief = f"{question.name} {case.brief}" if case.brief else written
        reproduce = written if case.brief else ""
        fail(exercise, f"{brief} {raised}", tail(made.error), reproduce=reproduce)
    return made.value


def _explain(exercise: Exercise, question: Question, answers: Sequence[Answer], seed: int) -> None:
    """Fail with the message for wrong answers: what differs, and why if it can be told."""
    entry = ""
    if isinstance(question.form, Table):
        question, answers, entry = _one_entry(question, answers)
    wrong = [answer for answer in answers if not answer.right]
    show = question.form.show
    details = [
        f"{a.case.brief or a.case.call(question.name)}: got {show(a.got)}, expected {show(a.expected)}"
        + (f"  ({a.case.tag})" if a.case.tag else "")
        for a in wrong[:SHOWN_CASES]
    ]
    if len(wrong) > SHOWN_CASES:
        details.append(f"... and {len(wrong) - SHOWN_CASES} more")
    fail(
        exercise,
        f"{question.name} is wrong{entry} in {len(wrong)} of {len(answers)} cases",
        details,
        diagnose(question, answers),
        f"seed {seed}, {wrong[0].case.call(question.name)}",
    )


def _one_entry(question: Question, answers: Sequence[Answer]) -> tuple[Question, list[Answer], str]:
    """Of answers that are tables: the question and the answers for the first key under which one is wrong."""
    form = question.form
    key = next(k for a in answers for k in form.keys if not form.entry.same(a.got[k], a.expected[k]))
    mistakes = [Mistake(m.says, lambda m=m, **case: m.computes(**case)[key], m.classic) for m in question.mistakes]
    narrowed = [
        Answer(a.case, a.got[key], a.expected[key], form.entry.same(a.got[key], a.expected[key])) for a in answers
    ]
    return replace(question, form=form.entry, mistakes=mistakes), narrowed, f" under {key!r}"


def diagnose(question: Question, answers: Sequence[Answer]) -> str:
    """The likely cause of wrong answers in a sentence; empty when nothing is known about them.

    With ``split_by``, only the cases that share the first wrong case's value of that parameter are looked at.
    """
    first = next(answer for answer in answers if not answer.right)
    if question.split_by:
        value = first.case.arguments[question.split_by]
        answers = [answer for answer in answers if answer.case.arguments[question.split_by] == value]
    for mistake in question.mistakes:
        if all(_like(question.form, a.got, mistake.computes(**a.case.arguments)) for a in answers):
            return str(mistake)
    return _common_tag(answers) or _constant_ratio(question.form, answers)


def _common_tag(answers: Sequence[Answer]) -> str:
    """Whether one tag tells the wrong cases from the right ones."""
    for tag in {answer.case.tag for answer in answers if not answer.right} - {""}:
        if all((answer.case.tag == tag) != answer.right for answer in answers):
            return f"every other case is right: it goes wrong with {tag}"
    return ""


def _constant_ratio(form: Form, answers: Sequence[Answer]) -> str:
    """Whether every answer is the same multiple of what is expected."""
    pairs = [(form.scalar(a.got), form.scalar(a.expected)) for a in answers]
    if len(pairs) < 3 or any(None in pair or not pair[1] for pair in pairs):
        return ""
    ratios = [got / expected for got, expected in pairs]
    ratio = Fraction(ratios[0]).limit_denominator(64)
    if not ratio or any(abs(r / float(ratio) - 1) > 1e-6 for r in ratios):
        return ""
    return f"in every case your answer is {ratio} of what is expected: which factor is missing or counted twice?"


def _check_refusals(
    exercise: Exercise, question: Question, function: Callable, case: Case, forbidden: Forbidden
) -> int:
    """Each refused value must raise a ValueError that holds it; returns how many were tried."""
    for parameter, value in question.refused.items():
        bad = Case({**case.arguments, parameter: value})
        written = bad.call(question.name)
        named = min(value) if isinstance(value, list) and value else value
        wanted = f"it must raise a ValueError that names the value {named!r}"
        made = attempt(function, bad.arguments, forbidden)
        if made.late:
            fail(exercise, f"{written} did not return in time", [wanted])
        if made.error is None:
            reason = "a wrong size that is let in turns up much later as a wrong number: refuse it at the door"
            fail(exercise, f"{written} returned {made.value!r} instead of refusing the value", [wanted], reason)
        if not isinstance(made.error, ValueError) or str(named) not in str(made.error):
            error = f"{type(made.error).__name__}: {made.error}"
            fail(exercise, f"{written} raised {error}", [wanted, *tail(made.error)])
    return len(question.refused)
