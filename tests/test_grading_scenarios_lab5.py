"""The hidden scenarios of lab 5: right answers agree with the solution, wrong ones are told apart.

Of the wrong answers a quarter is played, and all of them where the environment has ``GRADING_IN_FULL``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab5_plain_answers import ANSWERS
from lab5_registry import modules_with
from lab5_wrong_answers import WRONG_ANSWERS
from lab_places import WrongAnswer

from grading.scenarios import Scenario, scenarios
from grading.scenarios.compare import difference

SEED = 2026
#: Where the scenarios find what they call.
MODULES = {
    "5.1": {"kv_cache": ("CachedAttention", "decode")},
    "5.2": {"block_manager": ("BlockManager", "OutOfBlocks")},
    "5.3": {"scheduler": ("Scheduler", "StaticScheduler"), "request": ("Request",)},
    "5.4": {"paged_decode": ("paged_attention_decode", "paged_attention_parts")},
    "5.5": {"merge": ("merge_parts",)},
    "5.6": {"speculative": ("speculative_sample", "residual"), "speculative_decoding": ("speculative_generate",)},
}
SCENARIOS = {scenario.exercise: scenario for scenario in scenarios("lab5_serving")}
#: Wrong answers whose values are right.
RIGHT_VALUES: dict[str, str] = {}
SAMPLE = WRONG_ANSWERS if os.environ.get("GRADING_IN_FULL") else WRONG_ANSWERS[::4]
#: What `make check` looks at; `make test` looks at the whole sample.
QUICK = {next(str(wrong) for wrong in SAMPLE if wrong.exercise == exercise) for exercise in ("5.1", "5.3", "5.5")}


@cache
def expected(exercise: str, seed: int = SEED) -> Mapping[str, object]:
    """What the scenario of an exercise observes of the solution."""
    return SCENARIOS[exercise].run(importlib.import_module("solutions.lab5_serving"), seed)


def verdict(exercise: str, folder: Path, answers: Mapping[str, str], seed: int = SEED) -> str | None:
    """What the scenario of an exercise says of answers: None if they agree with the solution, else a reason."""
    name = f"lab5_{folder.name}".replace("-", "_")
    with modules_with(folder, name, answers) as module:
        names = {key: getattr(module(file), key) for file, keys in MODULES[exercise].items() for key in keys}
        return first_difference(exercise, SimpleNamespace(**names), seed)


def first_difference(exercise: str, package: object, seed: int) -> str | None:
    """What :func:`difference` says of the first observation that differs, or the error that came first."""
    scenario, right, got = SCENARIOS[exercise], expected(exercise, seed), {}
    try:
        for name, value in scenario.run.__wrapped__(package, seed):
            got[name] = value
            if reason := difference(scenario, {name: right[name]}, {name: value}):
                return reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return difference(scenario, right, got)


def test_every_exercise_has_its_scenario():
    assert list(SCENARIOS) == list(MODULES) and all(isinstance(each, Scenario) for each in SCENARIOS.values())


@pytest.mark.parametrize("exercise", MODULES)
def test_another_seed_gives_other_observations(exercise):
    assert difference(SCENARIOS[exercise], expected(exercise), expected(exercise, 1)) is not None


@pytest.mark.parametrize("seed", [1, pytest.param(22, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exercise", MODULES)
def test_a_plain_answer_agrees_with_the_solution(exercise, seed, tmp_path):
    assert verdict(exercise, tmp_path, ANSWERS, seed) is None


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(w, id=str(w), marks=() if str(w) in QUICK else pytest.mark.slow) for w in SAMPLE],
)
def test_a_wrong_answer_is_told_apart_unless_its_values_are_right(wrong: WrongAnswer, tmp_path):
    reason = verdict(wrong.exercise, tmp_path, wrong.answers(ANSWERS))
    assert (reason is None) == (str(wrong) in RIGHT_VALUES), reason


def test_the_answers_with_right_values_are_wrong_answers():
    assert set(RIGHT_VALUES) <= {str(wrong) for wrong in WRONG_ANSWERS}
