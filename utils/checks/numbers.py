"""Checks of functions that return numbers: counts of operations and bytes, rates, times.

A :class:`~utils.checks.question.Question` is one function of the student. When the student's values equal a mistake's
in every case, the message names the mistake; otherwise it shows cases and what the wrong ones have in common.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fractions import Fraction

from utils.checks.attempt import attempt, tail
from utils.checks.core import Exercise, draw_seed, fail, generator, passed
from utils.checks.forbidden_modules import Forbidden, imports_of
from utils.checks.forms import AnswerFormat
from utils.checks.question import Answer, Case, Mistake, Question, Raised

SHOWN_CASES = 3


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
        _refuse_forbidden(exercise, question, function, forbidden or {})
        given = _ask(exercise, question, function, seed, forbidden or {})
        if not all(answer.right for answer in given):
            _explain(exercise, question, given, seed)
        if question.together is not None and (complaint := question.together(given)):
            fail(exercise, complaint)
        cases += len(given) + _check_refusals(exercise, question, function, given[0].case, forbidden or {})
    passed(exercise, notice, seed, cases)


def _refuse_forbidden(exercise: Exercise, question: Question, function: Callable, forbidden: Forbidden) -> None:
    if not callable(function):
        fail(
            exercise,
            f"expected the function {question.name}, got {function!r}: pass {question.name}, not {question.name}(...)",
        )
    if found := imports_of(function, forbidden):
        _fail_forbidden(exercise, question, found)


def _fail_forbidden(exercise: Exercise, question: Question, found: Sequence[str]) -> None:
    fail(
        exercise,
        f"{question.name} uses what this lab does not allow: {found[0]}",
        cause='derive it yourself: the rule is under "How a lab works" in the notebook of lab 1',
    )


def _ask(exercise: Exercise, question: Question, function: Callable, seed: int, forbidden: Forbidden) -> list[Answer]:
    """Call the function on every case; the oracle is asked only afterwards."""
    cases = list(question.cases(generator(seed)))
    got = [call(exercise, question, function, case, forbidden) for case in cases]
    problems = [_problem(question, case, value) for case, value in zip(cases, got, strict=True)]
    raised = next((pair for pair in zip(cases, got, strict=True) if isinstance(pair[1], Raised)), None)
    if raised and any(problems):
        _explain_error(exercise, question, *raised, seed)
    for case, problem in zip(cases, problems, strict=True):
        if problem:
            special = f"  ({case.tag})" if case.tag else ""
            fail(exercise, f"{case.call(question.name)} returned {problem}{special}")
    expected = [question.expected(**case.arguments) for case in cases]
    answers = [Answer(c, g, e, _same(question, c, g, e)) for c, g, e in zip(cases, got, expected, strict=True)]
    if raised and not _explained_by_wrong_values(question, answers):
        _explain_error(exercise, question, *raised, seed)
    return answers


def _problem(question: Question, case: Case, value: object) -> str:
    return "" if isinstance(value, Raised) else question.form.problem(value)


def _explained_by_wrong_values(question: Question, answers: Sequence[Answer]) -> bool:
    """Whether one known mistake leads to all of the answers: the wrong values among them, and the errors too."""
    values_are_wrong = any(not (answer.right or isinstance(answer.got, Raised)) for answer in answers)
    return values_are_wrong and known_mistake(question, answers) is not None


def _explain_error(exercise: Exercise, question: Question, case: Case, raised: Raised, seed: int) -> None:
    """Fail with the message for an error: the student's lines that raised it, and the mistake that leads to it."""
    outcomes = ((mistake, mistake.outcome(case)) for mistake in question.mistakes)
    cause = next((str(m) for m, outcome in outcomes if isinstance(outcome, Raised) and outcome.like(raised)), "")
    written = case.call(question.name)
    special = f"  ({case.tag})" if case.tag else ""
    again = f"{exercise.rerun(seed)}, case {written}"
    fail(exercise, f"{written} {raised}{special}", tail(raised.error), cause, again)


def _same(question: Question, case: Case, value: object, expected: object) -> bool:
    if isinstance(value, Raised):
        return False
    if value is None or expected is None:
        return value is expected
    return question.form.same(value, expected)


def _like(form: AnswerFormat, value: object, mistaken: object) -> bool:
    if isinstance(value, Raised) or isinstance(mistaken, Raised):
        return isinstance(value, Raised) and isinstance(mistaken, Raised) and value.like(mistaken)
    if value is None or mistaken is None:
        return value is mistaken
    return form.like(value, mistaken)


def call(exercise: Exercise, question: Question, function: Callable, case: Case, forbidden: Forbidden) -> object:
    """The value of a student's function in one case; an error in it is handed back as :class:`Raised`.

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
        _fail_forbidden(exercise, question, made.called)
    if made.late:
        hint = "use a closed formula: a loop over every operation takes too long at this size"
        fail(exercise, f"{written} did not return in time", cause=hint)
    return made.value if made.error is None else Raised(made.error)


def _explain(exercise: Exercise, question: Question, answers: Sequence[Answer], seed: int) -> None:
    """Fail with the message for wrong answers: what differs, and why if it can be told."""
    wrong = [answer for answer in answers if not answer.right]
    details = [
        f"{a.case.brief or a.case.call(question.name)}: {_compared(question.form, a)}"
        + (f"  ({a.case.tag})" if a.case.tag else "")
        for a in wrong[:SHOWN_CASES]
    ]
    if len(wrong) > SHOWN_CASES:
        details.append(f"... and {len(wrong) - SHOWN_CASES} more")
    fail(
        exercise,
        f"{question.name}: {len(wrong)} of {len(answers)} cases fail{'' if len(wrong) > 1 else 's'}",
        details,
        diagnose(question, answers),
        f"{exercise.rerun(seed)}, case {wrong[0].case.call(question.name)}",
    )


def _compared(form: AnswerFormat, answer: Answer) -> str:
    """What came and what was expected."""
    if isinstance(answer.got, Raised):
        return f"{answer.got}, expected {form.show(answer.expected)}"
    got, expected = form.show_both(answer.got, answer.expected)
    return f"got {got}, expected {expected}"


def known_mistake(question: Question, answers: Sequence[Answer]) -> Mistake | None:
    """The first known mistake that leads to every one of these answers."""
    for mistake in question.mistakes:
        if all(_like(question.form, a.got, mistake.outcome(a.case)) for a in answers):
            return mistake
    return None


def diagnose(question: Question, answers: Sequence[Answer]) -> str:
    """The likely cause of wrong answers in a sentence; empty when nothing is known about them.

    With ``split_by``, only the cases that share the first wrong case's value of that parameter are looked at. Where
    others fail too, and not by the same mistake, the sentence says so.
    """
    first = next(answer for answer in answers if not answer.right)
    if not question.split_by:
        return _cause(question, answers)
    if mistake := known_mistake(question, answers):
        return str(mistake)
    value = first.case.arguments[question.split_by]
    alike = [answer for answer in answers if answer.case.arguments[question.split_by] == value]
    others_fail = any(not answer.right and answer.case.arguments[question.split_by] != value for answer in answers)
    cause = _cause(question, alike)
    if cause and others_fail:
        return f"{cause} (so with {question.split_by}={value!r}; other cases fail too)"
    if cause == _common_tag(alike) != _common_tag(answers):
        return f"{cause} (so with {question.split_by}={value!r}; all other cases pass)"
    return cause


def _cause(question: Question, answers: Sequence[Answer]) -> str:
    if mistake := known_mistake(question, answers):
        return str(mistake)
    return _common_tag(answers) or _constant_ratio(question.form, answers)


def _common_tag(answers: Sequence[Answer]) -> str:
    """Whether one tag tells the wrong cases from the right ones."""
    for tag in {answer.case.tag for answer in answers if not answer.right} - {""}:
        if all((answer.case.tag == tag) != answer.right for answer in answers):
            return f"every case with {tag} fails, and every other case passes"
    return ""


def _constant_ratio(form: AnswerFormat, answers: Sequence[Answer]) -> str:
    """Whether every answer is the same multiple of what is expected."""
    pairs = [(form.scalar(a.got), form.scalar(a.expected)) for a in answers]
    if len(pairs) < 3 or any(None in pair or not pair[1] for pair in pairs):
        return ""
    ratios = [got / expected for got, expected in pairs]
    ratio = Fraction(ratios[0]).limit_denominator(64)
    if not ratio or any(abs(r / float(ratio) - 1) > 1e-6 for r in ratios):
        return ""
    asked = "which factor or term is missing, wrong or counted twice?"
    return f"every wrong result is {ratio} times what is expected: {asked}"


def _check_refusals(
    exercise: Exercise, question: Question, function: Callable, case: Case, forbidden: Forbidden
) -> int:
    """Each refused value must raise a ValueError that holds it; returns how many were tried."""
    refusals = [({parameter: value}, value) for parameter, value in question.refused.items()]
    refusals += question.also_refused
    for changed, value in refusals:
        bad = Case({**case.arguments, **changed})
        written = (Case(changed) if case.brief else bad).call(question.name)
        named = min(value) if isinstance(value, list) and value else value
        expected = f"expected a ValueError whose message contains {named!r}"
        made = attempt(function, bad.arguments, forbidden)
        if made.late:
            fail(exercise, f"{written} did not return in time", [expected])
        if made.error is None:
            reason = (
                "validate arguments on entry: a bad value that gets past here shows up much later as a wrong number"
            )
            fail(exercise, f"{written} returned {made.value!r} for an invalid argument", [expected], reason)
        if not isinstance(made.error, ValueError) or str(named) not in str(made.error):
            error = f"{type(made.error).__name__}: {made.error}"
            fail(exercise, f"{written} raised {error}", [expected, *tail(made.error)])
    return len(refusals)
