"""Many answers to an exercise on ranks, right and wrong, played together on the ranks of few launches."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lab_answers import is_left_to_thorough, lab_of, right_for, solution, wrong_answers
from lab_places import write_lab

from solutions.lab4_zero.exercises import (
    data_parallel,
    gradient_shards,
    optimizer_states,
    parameter_shards,
    pipeline_engine,
    prefetch,
    ring,
    tensor_parallel,
)
from solutions.lab6_frontiers.exercises import expert_dispatch, ring_attention
from utils.checks.core import CheckFailed
from utils.checks.ranks.scenario_runs import run_on_ranks
from utils.checks.ranks.scenarios import ScenarioRun

#: The checks of exercises whose scenarios run on ranks; the wrong answers to 4.2 and 4.8 need none.
CHECKS = {
    module.CHECK.exercise.number: module.CHECK
    for module in (
        *(ring, data_parallel, optimizer_states, gradient_shards, parameter_shards, tensor_parallel),
        *(pipeline_engine, prefetch, ring_attention, expert_dispatch),
    )
}
SEED = 14
#: How many scenarios all answers play: most wrong ones are caught in them. Only those that pass them play the rest.
FIRST_SCENARIOS = 2


@contextmanager
def functions_of(exercise: str, filled: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, dict[str, object]]]:
    """Name -> the functions that the exercise's check takes, of the lab filled in these ways."""
    answers: dict[str, dict[str, object]] = {}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        modules = {name: found.__module__.rpartition(".")[2] for name, found in solved(exercise).items()}
        for number, (name, places) in enumerate(filled.items()):
            package = f"answer_{exercise.replace('.', '_')}_{number}_{Path(folder).name}"
            write_lab(lab_of(exercise), Path(folder, package), places)
            Path(folder, package, "__init__.py").write_text("")  # a rank imports what the exercise needs, and no more
            answers[name] = {
                function: getattr(importlib.import_module(f"{package}.{module}"), function)
                for function, module in modules.items()
            }
        yield answers


def solved(exercise: str) -> dict[str, object]:
    """The functions that the exercise's check takes, of the solution."""
    return {name: getattr(solution(lab_of(exercise)), name) for name in CHECKS[exercise].exercise.functions}


def _right_and_unfilled(number: str) -> dict[str, dict[str, str]]:
    """Name -> the places as filled: the plain answer, and the plain one with each of the exercise's places left out."""
    plain = right_for(number)
    places = [label for label in plain if label.split(":")[0] == number]
    without = {f"without {place}": {k: v for k, v in plain.items() if k != place} for place in places}
    return {"plain": plain, **without}


@cache
def played(exercise: str, thorough: bool = False) -> tuple[dict[str, ScenarioRun], dict[str, str]]:
    """What was seen of answers to an exercise, of each up to the scenario that ends its check; and what the check says
    of each answer that a single rank is enough to refuse. They are the wrong answers that `make test` tries;
    ``thorough``: those that `make test-thorough` adds, the right ones, and those with a place left out."""
    check, seen, alone = CHECKS[exercise], {}, {}
    scenarios = check.scenarios(SEED)
    every = wrong_answers(lab_of(exercise), exercise)
    wrong_ones = [wrong for wrong in every if is_left_to_thorough(wrong) == thorough]
    filled = {str(wrong): wrong.filled(right_for(exercise)) for wrong in wrong_ones if not wrong.functions}
    with functions_of(exercise, filled | (_right_and_unfilled(exercise) if thorough else {})) as answers:
        answers |= {"solution": solved(exercise)} if thorough else {}
        answers |= {str(wrong): wrong.functions for wrong in wrong_ones if wrong.functions}
        for name, answer in answers.items():
            try:
                check.alone(answer, scenarios[0], SEED)
            except NotImplementedError:
                continue
            except CheckFailed as error:
                alone[name] = str(error)
        rest = scenarios[FIRST_SCENARIOS:]
        ranks = sorted({scenario.ranks for scenario in rest})
        for some in (scenarios[:FIRST_SCENARIOS], *([each for each in rest if each.ranks == n] for n in ranks)):
            left = [name for name in answers if name not in seen or _passes(exercise, seen[name])]
            found = run_on_ranks([answers[name] for name in left], some)
            for name, more in zip(left, found, strict=True):
                seen[name] = seen[name].then(more) if name in seen else more
    return seen, alone


def _passes(exercise: str, so_far: ScenarioRun) -> bool:
    try:
        CHECKS[exercise].judge(so_far, CHECKS[exercise].scenarios(SEED), SEED)
    except (CheckFailed, NotImplementedError):
        return False
    return True


def judge(exercise: str, name: str, thorough: bool = False) -> None:
    """Let an exercise's check judge what was seen of an answer.

    Raises:
        CheckFailed, NotImplementedError: as the exercise's check.
    """
    check = CHECKS[exercise]
    check.judge(played(exercise, thorough)[0][name], check.scenarios(SEED), SEED)
