"""Turns failed trials into the one message that the student reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.checks import core, diagnoses, tensors
from utils.checks.cases import Case
from utils.checks.core import Exercise
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.problem import Problem
from utils.checks.stage import Stage
from utils.checks.tiling import Tiling
from utils.checks.trials import students_frame

#: How a kernel covers an output, or a function of the trials (the failed one first) that says so.
TilingOf = Tiling | Callable[[Sequence[CaseResult]], Tiling | None]

_MOST_CASES_NAMED = 6
_MOST_LINES = 6  # of an exception's text after its first line

_COMPILED_ONLY = (
    "a compiled kernel runs programs, and the threads of a program, at the same time; tl.dot rounds float32 to TF32 "
    "unless it has input_precision='ieee'; torch.empty holds old data: which of these matters here?"
)


def stop_at(exercise: Exercise, problem: Problem | None, case: Case, seed: int, more: Sequence[str] = ()) -> None:
    """Raise the message of a problem that a case has, if there is one, with ``more`` lines of detail."""
    if problem is not None:
        core.fail(exercise, problem.headline, [*problem.details, *more], problem.cause, reproduce(exercise, case, seed))


#: What a student reads who has met an exception, or what says it from the results of all cases.
Advice = str | Callable[[Sequence[CaseResult]], str]


def reproduce(exercise: Exercise, case: Case, seed: int) -> str:
    """How to reproduce a failure: ``check_gelu(gelu, seed=7), case row=5 col=33 float32 (ragged)``."""
    return f"{exercise.rerun(seed)}, case {case} ({case.kind})"


def explain(
    exercise: Exercise,
    trial: CaseResult,
    trials: Sequence[CaseResult],
    reference: Callable[..., Any],
    outputs: Sequence[str],
    tilings: Mapping[str, TilingOf | None],
    names: Sequence[str],
    rules: Sequence[Diagnosis | tuple],
    seed: int,
    stage: Stage,
    raised: Mapping[str, Advice],
) -> None:
    """Raise the message of a failed case; ``raised`` says what to do about exceptions that hold certain words.

    It does so in words, or by a function of all results, which may know nothing.
    """
    others = [_which_cases(trials)] if len(trials) > 1 else []
    others += stage.said(trial)
    if trial.error is not None:
        error = trial.error
        while error.__cause__ is not None:  # the interpreter and autograd wrap what happened
            error = error.__cause__
        frame = students_frame(error) or students_frame(trial.error)
        lines = [f"in {frame.name}, line {frame.lineno}: {frame.line}"] if frame else []
        said = getattr(error, "error_message", None) or str(error)  # Triton's compiler puts the source first
        known = (advice for words, advice in raised.items() if words in said)
        advice = [words for each in known if (words := each(trials) if callable(each) else each)][:1]
        headline, *more = [*advice, *f"{type(error).__name__}: {said}".splitlines()]
        details = [*more[:_MOST_LINES], *lines, *others]
        text = core.message(exercise, headline, details, reproduce=reproduce(exercise, trial.case, seed))
        raise core.CheckFailed(text) from trial.error
    if trial.form is not None:
        core.fail(
            exercise,
            trial.form.headline,
            [*trial.form.details, *others],
            trial.form.cause,
            reproduce(exercise, trial.case, seed),
        )
    wrong = trial.wrong[0]
    position = trial.differences.index(wrong)
    tiling = tilings.get(outputs[position])
    if callable(tiling):
        tiling = tiling([trial, *trials])
    headline, lines = tensors.describe(wrong, tiling)
    evidence = Evidence(trial, wrong, position, trials, reference, tiling, names)
    if cause := diagnoses.diagnose(evidence, rules):
        cause = f"likely cause: {cause}"
    elif stage.compiled:
        cause = _COMPILED_ONLY
    core.fail(exercise, f"{wrong.name}: {headline}", [*lines, *others], cause, reproduce(exercise, trial.case, seed))


def _which_cases(trials: Sequence[CaseResult]) -> str:
    """``wrong in 3 of 12 cases: ragged, ragged float16; right in: one tile, short``."""

    def labels(failed: bool) -> str:
        found = Counter(trial.case.label for trial in trials if trial.failed == failed)
        named = [f"{label} ({n} cases)" if n > 1 else label for label, n in [*found.items()][:_MOST_CASES_NAMED]]
        more = sum([*found.values()][_MOST_CASES_NAMED:])
        return ", ".join(named + ([f"{more} more"] if more else []))

    count = sum(trial.failed for trial in trials)
    if count == len(trials):
        return f"all {count} cases fail: {labels(True)}"
    return f"{count} of {len(trials)} cases fail{'' if count > 1 else 's'}: {labels(True)}; these pass: {labels(False)}"
