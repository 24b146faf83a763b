"""The hidden scenarios of lab 5: right answers agree with the solution, wrong ones are told apart.

Of the wrong answers a quarter is played, and all of them where the environment has ``GRADING_IN_FULL``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from lab_answers import answers, exercises, lab_filled, solution, wrong_answers

from grading.scenarios.compare import difference

SEED = 2026
LAB = "lab5_serving"
EXERCISES = exercises(LAB)
#: Wrong answers whose values are right.
RIGHT_VALUES: dict[str, str] = {}
SAMPLE = wrong_answers(LAB) if os.environ.get("GRADING_IN_FULL") else wrong_answers(LAB)[::4]
#: What `make check` looks at; `make test` looks at the whole sample.
QUICK = {next(str(wrong) for wrong in SAMPLE if wrong.exercise == exercise) for exercise in ("5.1", "5.3", "5.5")}


@cache
def expected(exercise: str, seed: int = SEED) -> Mapping[str, object]:
    """What the scenario of an exercise observes of the solution."""
    return EXERCISES[exercise].observe(solution(LAB), seed)


def verdict(exercise: str, folder: Path, places: Mapping[str, str], seed: int = SEED) -> str | None:
    """What the hidden cases of an exercise say of answers: None if they agree with the solution, else a reason."""
    with lab_filled(LAB, folder, places) as lab:
        return first_difference(exercise, lab, seed)


def first_difference(exercise: str, package: object, seed: int) -> str | None:
    """What :func:`difference` says of the first observation that differs, or the error that came first."""
    declared, right, got = EXERCISES[exercise], expected(exercise, seed), {}
    try:
        for name, value in declared.observe.__wrapped__(package, seed):
            got[name] = value
            if reason := difference(declared, {name: right[name]}, {name: value}):
                return reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return difference(declared, right, got)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_another_seed_gives_other_observations(exercise):
    assert difference(EXERCISES[exercise], expected(exercise), expected(exercise, 1)) is not None


@pytest.mark.parametrize("seed", [1, pytest.param(22, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_plain_answer_agrees_with_the_solution(exercise, seed, tmp_path):
    assert verdict(exercise, tmp_path, answers(LAB).right, seed) is None


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(w, id=str(w), marks=() if str(w) in QUICK else pytest.mark.slow) for w in SAMPLE],
)
def test_a_wrong_answer_is_told_apart_unless_its_values_are_right(wrong, tmp_path):
    reason = verdict(wrong.exercise, tmp_path, wrong.filled(answers(LAB).right))
    assert (reason is None) == (str(wrong) in RIGHT_VALUES), reason


def test_the_answers_with_right_values_are_wrong_answers():
    assert set(RIGHT_VALUES) <= {str(wrong) for wrong in wrong_answers(LAB)}
