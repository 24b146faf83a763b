"""Checks of exercises with a state: random calls, invariants after each, and the shortest run of calls that fails.

A **rule-based state machine**, as in Hypothesis' stateful testing (MacIver et al. 2019): each rule is a method that
makes a call of the student's object and checks what it gives. Calls are drawn by a generator of the course, so that a
seed gives the same run in every process. A run that fails is made shorter by delta debugging (Zeller and Hildebrandt
2002): calls are left out as long as the same failure stays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils.checks.attempt import TooLong, deadline
from utils.checks.core import Exercise, draw_seed, fail, passed
from utils.checks.hidden import Observation
from utils.checks.problem import Problem

from .scenarios import Answer, check_written_here, problem_of

#: Calls that a message shows: the last ones of a run.
SHOWN = 16
#: Runs that are played to make a failing one shorter.
REPLAYS = 250

#: A rule's name and its arguments.
Call = tuple[Any, ...]


class Machine:
    """A run of calls of a student's object.

    Args:
        answer: the student's functions and classes, by name.
        key: draws the run.

    Attributes:
        made: the calls of rules so far.
        shown: the calls of the student's object, as a message shows them, with what they gave.
        error: what ended the run, if anything did.
        seconds: that a call may take.
    """

    seconds = 5.0

    def __init__(self, answer: Answer, key: str) -> None:
        self.answer, self.random = answer, random.Random(key)
        self.made: list[Call] = []
        self.shown: list[str] = []
        self.error: BaseException | None = None

    def draw(self) -> Call | None:
        """The next call, or None at the end of the run."""
        raise NotImplementedError

    def is_possible(self, rule: str, *arguments: Any) -> bool:
        """Whether a rule's precondition holds; while a run is made shorter, what a call needs may be left out."""
        raise NotImplementedError

    def observation(self) -> Observation:
        """What there is to see after a call; None, or without what depends on choices that are left to the student."""
        raise NotImplementedError

    def play(self, calls: Iterable[Call] | None = None) -> Iterator[Call]:
        """Make the possible ones of these calls, or draw calls if None is given; ``error`` is what ended the run."""
        try:
            for call in iter(self.draw, None) if calls is None else calls:
                if self.is_possible(*call):
                    self.made.append(call)
                    with deadline(self.seconds):
                        getattr(self, call[0])(*call[1:])
                    yield call
        except (NotImplementedError, KeyboardInterrupt):
            raise
        except (TooLong, Exception) as error:
            self.error = error

    def call(
        self, method: Callable, *arguments: object, expected: type[Exception] | tuple = (), shown: Callable = repr
    ) -> Any:
        """What a method of the student's returns, or the exception that it raises if that is ``expected``."""
        self.shown.append(f"{method.__name__}({', '.join(map(repr, arguments))})")
        try:
            result = method(*arguments)
        except expected as error:
            self.shown[-1] += f" raises {type(error).__name__}"
            return error
        if result is not None:
            self.shown[-1] += f" -> {shown(result)}"
        return result


@dataclass(frozen=True)
class Workload:
    """Runs of one kind.

    Attributes:
        name: what the class grader calls it.
        machine: makes the calls, given the answer, a key and ``options``.
        options: of the machine.
        times: how many runs of a check.
        hidden: options of the hidden cases that differ, and how many hidden runs; none by default.
    """

    name: str
    machine: type[Machine]
    options: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1
    hidden: tuple[Mapping[str, Any], int] = field(default_factory=lambda: ({}, 0))

    def observe(self, answer: Answer, key: str) -> Iterator[tuple[str, Observation]]:
        """What is seen after each call of the hidden runs, and what ended them."""
        options, times = self.hidden
        for number in range(times):
            machine = self.machine(answer, f"{key}/{self.name}/{number}", **{**self.options, **options})
            seen = [machine.observation() for _ in machine.play()]
            yield f"{self.name}, run {number + 1}: after each call", [each for each in seen if each is not None]
            yield f"{self.name}, run {number + 1}: error", str(machine.error or "")


def check_workloads(
    exercise: Exercise,
    answer: Answer,
    workloads: Sequence[Workload],
    seed: int | None,
    notice: str,
    raised: Mapping[str, str],
) -> None:
    """Hold an answer against runs of state machines and print the verdict.

    Args:
        exercise: its number and title.
        answer: the student's functions and classes, by name.
        workloads: in the order in which a student should meet them.
        seed: draws the runs; a fresh one by default.
        notice: what to notice when it passes.
        raised: words of an exception -> its likely cause, the first that fits.

    Raises:
        CheckFailed: the answer is wrong; the text shows the calls of a short run, and says where and why.
        NotImplementedError: a place is not filled; its own message.
    """
    seed = draw_seed(seed)
    check_written_here(exercise, answer)
    for workload in workloads:
        for number in range(workload.times):

            def played(
                calls: Iterable[Call] | None = None, workload: Workload = workload, number: int = number
            ) -> Machine:
                machine = workload.machine(answer, f"{seed}/{workload.name}/{number}", **workload.options)
                for _ in machine.play(calls):
                    pass
                return machine

            run = played()
            if run.error:
                run = _shortest(run, played, lambda run: _problem(run, raised).cause)
                problem = _problem(run, raised)
                calls = [f"{count}. {call}" for count, call in enumerate(run.shown, 1)]
                left_out = ["..."] if len(calls) > SHOWN else []
                details = [*left_out, *calls[-SHOWN:], *problem.details]
                fail(exercise, problem.headline, details, problem.cause, f"seed {seed}, the calls above")
    passed(exercise, notice, seed, sum(workload.times for workload in workloads))


def _problem(run: Machine, raised: Mapping[str, str]) -> Problem:
    return problem_of(run.error, raised, f"the last call did not end in {run.seconds:.0f} s")


def _shortest(run: Machine, played: Callable[[list[Call]], Machine], cause: Callable[[Machine], str]) -> Machine:
    """The run without the calls that its failure does not need: half of them are left out first, then ever fewer."""
    replays, size = 0, len(run.made)
    while size and not isinstance(run.error, TooLong):
        start, before = 0, len(run.made)
        while start < len(run.made) and replays < REPLAYS:
            shorter, replays = played(run.made[:start] + run.made[start + size :]), replays + 1
            same = shorter.error is not None and (type(shorter.error), cause(shorter)) == (type(run.error), cause(run))
            run, start = (shorter, start) if same else (run, start + size)
        size = size // 2 or (len(run.made) < before and replays < REPLAYS)
    return run
