"""Checks of this lab that play scenarios with an answer: what one is, and what is said where it goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from utils.checks.attempt import TooLong, deadline
from utils.checks.core import Exercise, draw_seed, fail, passed
from utils.checks.library_use import find_library_use
from utils.checks.problem import Problem
from utils.checks.trials import students_frame

SCENARIO_SECONDS = 20.0
#: The course's own answers, which no answer may call.
OURS = ("solutions", "utils.checks")

Answer = Mapping[str, Callable]


class CheckMismatch(Exception):
    """What a check has found wrong in the middle of a scenario: its headline, the likely cause, and details."""

    def __init__(self, headline: str, cause: str = "", *details: str) -> None:
        super().__init__(headline)
        self.problem = Problem(headline, cause, details)


@dataclass(frozen=True)
class CheckScenario:
    """Something that is played with an answer, several times with other numbers.

    Attributes:
        name: what a message calls it.
        play: given the answer's functions by name and a generator; raises :class:`CheckMismatch` if something is wrong.
        raised: words of an exception -> its likely cause, the first that fits.
        times: how often it is played.
    """

    name: str
    play: Callable[[Answer, random.Random], None]
    raised: Mapping[str, str] = field(default_factory=dict)
    times: int = 1


def check_scenarios(
    exercise: Exercise,
    answer: Answer,
    scenarios: Sequence[CheckScenario],
    seed: int | None,
    notice: str,
    ready_made: Sequence[str] = (),
) -> None:
    """Hold an answer against all scenarios and print the verdict.

    Args:
        exercise: its number and title.
        answer: the student's functions and classes, by name.
        scenarios: in the order in which a student should meet them.
        seed: draws the scenarios' numbers; a fresh one by default.
        notice: what to notice when it passes.
        ready_made: modules and functions that the answer's source may not name, besides :data:`OURS`.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
        NotImplementedError: a place is not filled; its own message.
    """
    seed = draw_seed(seed)
    check_written_here(exercise, answer, ready_made)
    for scenario in scenarios:
        for turn in range(scenario.times):
            _play(exercise, answer, scenario, turn, seed)
    passed(exercise, notice, seed, sum(scenario.times for scenario in scenarios))


def check_written_here(exercise: Exercise, answer: Answer, ready_made: Sequence[str] = ()) -> None:
    """CheckFailed unless the answer's functions can be called and their source names no ready-made solution."""
    for name, function in answer.items():
        if not callable(function):
            fail(exercise, f"the check takes {name} itself, got {function!r}: leave out the parentheses")
    if found := find_library_use(list(answer.values()), (*OURS, *ready_made)):
        fail(exercise, f"the answer uses a ready-made solution ({found[0]})", cause="the exercise is to write it")


def _play(exercise: Exercise, answer: Answer, scenario: CheckScenario, turn: int, seed: int) -> None:
    try:
        with deadline(SCENARIO_SECONDS):
            scenario.play(answer, random.Random(f"{seed}/{scenario.name}/{turn}"))
    except (NotImplementedError, KeyboardInterrupt):
        raise
    except (TooLong, Exception) as error:
        problem = problem_of(error, scenario.raised, f"the scenario did not end in {SCENARIO_SECONDS:.0f} s")
        reproduce = f'seed {seed}, scenario "{scenario.name}"'
        reproduce += f", turn {turn + 1} of {scenario.times}" if turn else ""
        fail(exercise, problem.headline, problem.details, problem.cause, reproduce)


def problem_of(error: BaseException, raised: Mapping[str, str], late: str) -> Problem:
    """What is said of an exception that ended a check: what a check has found, or what the answer raised, and where.

    Args:
        error: the exception.
        raised: words of an exception -> its likely cause, the first that fits.
        late: the headline for an answer that did not end in time.
    """
    if isinstance(error, CheckMismatch):
        return error.problem
    if isinstance(error, TooLong):
        return Problem(late, "a loop does not end, or far more is computed than the exercise needs")
    frame = students_frame(error)
    lines = [f"in {frame.name}, line {frame.lineno}: {frame.line}"] if frame else []
    said = f"{type(error).__name__}: {error}"
    headline, *more = said.splitlines() or [said]
    cause = next((cause for words, cause in raised.items() if words in said), "")
    return Problem(headline, cause, (*more[:4], *lines))
