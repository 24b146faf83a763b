"""Many answers to an exercise of lab 4, right and wrong, played together on the ranks of few launches."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lab_answers import notebook, right_for, wrong_answers
from lab_places import write_lab

from solutions import lab4_zero as solution
from solutions.lab4_zero.exercises import (
    data_parallel,
    gradient_shards,
    optimizer_states,
    parameter_shards,
    ring,
    schedule,
    tensor_parallel,
)
from solutions.lab4_zero.exercises.observations import ScenarioRun
from solutions.lab4_zero.exercises.scenario_runs import run_on_ranks
from utils.checks.core import CheckFailed

LAB = "lab4_zero"
#: Exercises whose scenarios run on ranks.
CHECKS = {
    "4.1": ring.CHECK,
    "4.3": data_parallel.CHECK,
    "4.4": optimizer_states.CHECK,
    "4.5": gradient_shards.CHECK,
    "4.6": parameter_shards.CHECK,
    "4.7": tensor_parallel.CHECK,
    "4.8": schedule.CHECK,
}
#: Where an exercise's functions are.
MODULE = {
    "4.1": "collectives",
    "4.3": "distributed_data_parallel",
    "4.4": "zero1",
    "4.5": "zero2",
    "4.6": "zero3",
    "4.7": "tensor_parallel",
}
#: Exercises whose wrong answers need no rank.
ALONE = ("4.2", "4.8")
SEED = 14
#: How many scenarios all answers play: most wrong ones are caught in them. Only those that pass them play the rest.
FIRST_SCENES = 2


def _variants(number: str) -> dict[str, dict[str, str]]:
    """Name -> the places as filled: the plain answer, each wrong answer, each place left out."""
    plain = right_for(number)
    wrong = {str(wrong): wrong.filled(plain) for wrong in wrong_answers(LAB, number) if not wrong.functions}
    places = [label for label in plain if label.split(":")[0] == number]
    without = {f"without {place}": {k: v for k, v in plain.items() if k != place} for place in places}
    return {"plain": plain, **wrong, **without}


def _answers(exercise: str, folder: str) -> dict[str, dict[str, object]]:
    """Name -> the functions that the exercise's check takes; their packages are written into ``folder``."""
    check = CHECKS[exercise]
    answers = {"solution": {name: getattr(solution, name) for name in check.names}}
    for number, (name, filled) in enumerate(_variants(exercise).items()):
        package = f"lab4_{exercise.replace('.', '_')}_{number}_{Path(folder).name}"
        write_lab(LAB, Path(folder, package), filled)
        Path(folder, package, "__init__.py").write_text("")  # each rank imports what the exercise needs, and no more
        lab = importlib.import_module(f"{package}.{MODULE[exercise]}")
        answers[name] = {function: getattr(lab, function) for function in check.names}
    return answers | {str(wrong): wrong.functions for wrong in wrong_answers(LAB, exercise) if wrong.functions}


@cache
def played(exercise: str) -> dict[str, ScenarioRun]:
    """What was seen of all answers to an exercise: of each up to the scenario that ends its check."""
    parts = CHECKS[exercise].parts(SEED)
    seen: dict[str, ScenarioRun] = {}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        answers = _answers(exercise, folder)
        first, rest = parts[:FIRST_SCENES], parts[FIRST_SCENES:]
        ranks = sorted({part.scenario.ranks for part in rest})
        for some in (first, *([part for part in rest if part.scenario.ranks == n] for n in ranks)):
            left = [name for name in answers if name not in seen or _passes(exercise, seen[name])]
            found = run_on_ranks([answers[name] for name in left], [part.scenario for part in some])
            for name, more in zip(left, found, strict=True):
                seen[name] = seen[name].then(more) if name in seen else more
    return seen


def _passes(exercise: str, so_far: ScenarioRun) -> bool:
    try:
        CHECKS[exercise].judge(so_far, CHECKS[exercise].parts(SEED), SEED)
    except (CheckFailed, NotImplementedError):
        return False
    return True


def judge(exercise: str, name: str) -> None:
    """Let an exercise's check judge what was seen of an answer.

    Raises:
        CheckFailed, NotImplementedError: as the exercise's check.
    """
    check = CHECKS[exercise]
    check.judge(played(exercise)[name], check.parts(SEED), SEED)


@cache
def alone(exercise: str) -> dict[str, str]:
    """What an exercise's check says of each answer that a single rank is enough to refuse, by name."""
    check, said = CHECKS[exercise], {}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, answer in _answers(exercise, folder).items():
            try:
                check.alone(answer, check.parts(SEED), SEED)
            except NotImplementedError:
                continue
            except CheckFailed as error:
                said[name] = str(error)
    return said


def check_message(text: str, exercise: str, says: tuple[str, ...]) -> None:
    """Hold the message of a failed check against what it must say."""
    print(text)
    assert text.startswith(f"exercise {exercise} (")
    for words in says:
        assert words in text
    for number in re.findall(r'"classic wrong answers" (\d+)', text):
        assert int(number) in notebook(LAB).classic_numbers(exercise), "the message points to a line the notebook lacks"
