"""A check on ranks: scenarios on several ranks, the validator of each, and the messages of failures.

The order of judgement is the order in which a student would look: does it lean on PyTorch's own solution, does it run
on one rank, on all ranks, do the ranks call the same collectives, and is what they see right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from utils.checks.core import Exercise, classic, draw_seed, fail, passed
from utils.checks.hidden import Draw, Observation, Observed
from utils.checks.library_use import find_library_use
from utils.checks.problem import Problem
from utils.distributed import Entry
from utils.distributed.calls import Call

from .forbid_library_calls import ReadyMade
from .scenario_runs import get_ready, run_on_ranks, run_single_rank
from .scenarios import RankObservation, RankScenario, ScenarioRun

_TOGETHER = "a collective is one call that all ranks make together: same kind, same size, same order on each"
#: Seconds that ranks wait for one another in a hidden scenario: on a busy grader they are slow to come.
HIDDEN_PATIENCE = 15.0
#: Exceptions that name two sizes which do not fit.
_SIZES = (
    re.compile(r"size of tensor a \((\d+)\).* tensor b \((\d+)\)"),
    re.compile(r"expected \((\d+)\), got \((\d+)\)"),
)
_GROUP = (
    "only a group of some ranks goes wrong: each collective, get_rank and get_world_size must be given the group, and "
    "a peer is numbered in the whole job unless it is given as group_peer, group_dst or group_src"
)


class RanksFailed(RuntimeError):
    """The ranks did not come to the end of a hidden scenario; the text says which one is at fault."""


def in_group(scenario: RankScenario, number: int) -> RankScenario:
    """A scenario that two of the ranks play, the group's first not the job's: an answer must count in the group.

    ``number`` is that of "ranks of the whole job" in the exercise's classic wrong answers.
    """
    name, cause = f"{scenario.name}, in a group of two of the ranks", {"": classic(_GROUP, number)}
    return replace(scenario, name=name, members=(1, 2), raised=cause, apart=None)


@dataclass(frozen=True)
class DistributedCheck:
    """The check of one exercise.

    Attributes:
        exercise: its number, title and functions.
        scenarios: of a seed; given a :class:`Draw` too, the exercise's hidden ones, whose sizes it draws. The first is
            also played on a single rank before processes are started.
        notice: what to notice when it passes.
    """

    exercise: Exercise
    scenarios: Callable[..., Sequence[RankScenario]]
    notice: str

    def check(self, *functions: Callable, seed: int | None = None) -> None:
        """Hold an answer against the exercise and print the verdict.

        Raises:
            CheckFailed: the answer is wrong; the text says where and why.
            NotImplementedError: a place is not filled; its own message.
        """
        seed = draw_seed(seed)
        scenarios, answer = self.scenarios(seed), dict(zip(self.exercise.functions, functions, strict=True))
        for name, function in answer.items():
            if not callable(function):
                fail(self.exercise, f"the check takes {name} itself, got {function!r}: leave out the parentheses")
        if found := find_library_use(functions):
            self._fail(_leaning(found[0]))
        self.alone(answer, scenarios[0], seed)
        get_ready()
        (run,) = run_on_ranks([answer], scenarios)
        self.judge(run, scenarios, seed)
        passed(self.exercise, self.notice, seed, len(scenarios))

    def hidden(self, seed: int) -> Sequence[RankScenario]:
        """The exercise's hidden scenarios: the check's with another seed and sizes, and further ones."""
        draw = Draw(seed, self.exercise.number)
        return self.scenarios(draw.between(10**6, 10**9), draw)

    def observe(self, package: ModuleType, seed: int) -> Observed:
        """What the ranks see in the hidden scenarios (``Exercise.observe``).

        Raises:
            RanksFailed: a rank raised, died, or waited in vain.
            NotImplementedError: a place is not filled; its own message.
        """
        scenarios, answer = self.hidden(seed), {name: getattr(package, name) for name in self.exercise.functions}
        get_ready()
        (run,) = run_on_ranks([answer], scenarios, HIDDEN_PATIENCE)
        return self.observations(run, scenarios)

    def observations(self, run: ScenarioRun, scenarios: Sequence[RankScenario]) -> Observed:
        """What a run of scenarios says of an answer: of each its values on the ranks, and whether the check passes it.

        Raises:
            RanksFailed, NotImplementedError: as :meth:`observe`.
        """
        seen, names = Observed(), self.exercise.functions
        for scenario in scenarios:
            observations = run.observations.get(scenario.name)
            if observations is None:
                raise RanksFailed(run.end)
            problem = _problem(scenario, observations)
            if problem is not None and any(observed.fault for observed in observations):
                raise RanksFailed(problem.headline)
            name = ", ".join([*(names if len(names) == 1 else ()), scenario.name])
            values = [observed.value or {} for observed in observations]
            seen |= {f"{name}: {key}": [_listed(value.get(key)) for value in values] for key in scenario.values}
            seen[f"{name}: what the check asks for"] = problem is None
        return seen

    def alone(self, answer: Mapping[str, Callable], scenario: RankScenario, seed: int) -> None:
        """Fail if the first scenario raises on a single rank already."""
        observed = run_single_rank(answer, scenario)
        fault = observed.fault
        if fault is None:
            return
        reproduce = f"seed {seed}, {scenario.name}, 1 rank"
        if fault.type == ReadyMade.__name__:
            self._fail(_leaning(fault.text, fault.where), reproduce)
        said = f"{fault.type}: {fault.text}"
        headline = f"a group of one rank already fails: {said}"
        cause = _cause(said, fault.where, scenario, alone=True)
        if scenario.to_itself and observed.count("send", "recv"):
            headline = f"in a group of one rank, rank 0 exchanges a message with itself: {said}"
            cause = scenario.to_itself
        cause = cause or "no other process is needed to see this: step through it here in a debugger"
        self._fail(Problem(headline, cause, fault.where), reproduce)

    def judge(self, run: ScenarioRun, scenarios: Sequence[RankScenario], seed: int) -> None:
        """Fail with the first thing that went wrong on the ranks.

        Raises:
            CheckFailed, NotImplementedError: as :meth:`check`.
        """
        for scenario in scenarios:
            observations = run.observations.get(scenario.name)
            if observations is None:
                break
            if problem := _problem(scenario, observations):
                self._fail(problem, f"seed {seed}, {scenario.name}, {scenario.ranks} ranks")
        if run.end:
            scenario = next((scenario for scenario in scenarios if scenario.name == run.scenario), None)
            ranks = scenario.ranks if scenario else len(run.called)
            self._fail(_ended(run, scenario), f"seed {seed}, {run.scenario}, {ranks} ranks")

    def _fail(self, problem: Problem, reproduce: str = "") -> None:
        fail(self.exercise, problem.headline, problem.details, problem.cause, reproduce)


def _leaning(on: str, where: tuple[str, ...] = ()) -> Problem:
    cause = "implement it from collectives; compare with PyTorch's afterwards"
    return Problem(f"the answer uses a built-in, {on}", cause, where)


def _listed(value: Any) -> Observation:
    """The values of a dictionary; anything else as it is."""
    return list(value.values()) if isinstance(value, Mapping) else value


def _cause(said: str, where: Sequence[str], scenario: RankScenario, alone: bool = False) -> str:
    """The likely cause of an exception, or of a process's end, by words of it and of the student's lines."""
    text = "\n".join((said, *where))
    for words, cause in scenario.raised.items():
        if all(word in text for word in ((words,) if isinstance(words, str) else words)):
            return cause
    sizes = [(int(a), int(b)) for pattern in _SIZES for a, b in pattern.findall(said)]
    return scenario.sizes if not alone and any(0 < abs(a - b) < scenario.ranks for a, b in sizes) else ""


def _cause_apart(scenario: RankScenario, called: Sequence[Sequence[Entry | Call]]) -> str:
    """The likely cause when the ranks call different collectives."""
    of_members = [called[rank] for rank in scenario.taking_part()]
    stuck = "" if callable(scenario.stuck) else scenario.stuck
    return (scenario.apart(of_members) if scenario.apart else "") or stuck or _TOGETHER


def _problem(scenario: RankScenario, observations: list[RankObservation]) -> Problem | None:
    """What went wrong in a scenario, or None.

    Raises:
        NotImplementedError: a place is not filled; its own message.
    """
    for observed in observations:
        if observed.fault is not None and observed.fault.type == "NotImplementedError":
            raise NotImplementedError(observed.fault.text)
    if problem := _trouble(scenario, observations):
        return problem
    problem = scenario.judge([observations[rank] for rank in scenario.taking_part()], **scenario.arguments)
    if problem is not None and scenario.members:
        return Problem(f"counted in the group, {problem.headline}", scenario.raised[""], problem.details)
    return problem


def _trouble(scenario: RankScenario, observations: list[RankObservation]) -> Problem | None:
    """An exception on a rank, ranks that wait in vain, or ranks that call different collectives."""
    own = [
        (rank, observed.fault)
        for rank, observed in enumerate(observations)
        if observed.fault and not observed.fault.late
    ]
    if own:
        rank, fault = own[0]
        if fault.type == ReadyMade.__name__:
            return _leaning(fault.text, fault.where)
        ranks = "every rank" if len(own) == len(scenario.taking_part()) else f"rank {rank}"
        said = f"{fault.type}: {fault.text}"
        return Problem(f"{ranks} raised {said}", _cause(said, fault.where, scenario), fault.where)
    called = [observed.entries for observed in observations]
    apart = parted(called, scenario.taking_part()) if scenario.same_calls else ""
    waiting = [rank for rank, observed in enumerate(observations) if observed.fault]
    if waiting:
        return _stuck(scenario, observations, waiting, apart)
    if apart:
        return Problem("the ranks call different collectives", _cause_apart(scenario, called), (apart,))
    return None


def _stuck(scenario: RankScenario, observations: list[RankObservation], waiting: list[int], apart: str) -> Problem:
    done = [rank for rank in scenario.taking_part() if rank not in waiting]
    who = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} wait"
    ends = f"rank {done[0]} is done" if len(done) == 1 else f"ranks {', '.join(map(str, done))} are done"
    headline = f"{who} in vain: {ends}" if done else "deadlock: every rank is blocked in a receive or collective"
    details = []
    for rank in scenario.taking_part():
        observed = observations[rank]
        last = f"last {_call(observed.entries[-1])}" if observed.entries else "none"
        line = f", at {observed.fault.where[-1]}" if observed.fault and observed.fault.where else ""
        details.append(
            f"rank {rank}: {'waits' if observed.fault else 'done'} after {len(observed.entries)} calls, {last}{line}"
        )
    cause = scenario.stuck
    if apart:
        cause = _cause_apart(scenario, [observed.entries for observed in observations])
    elif callable(cause):
        entries = [observations[rank].entries for rank in scenario.taking_part()]
        cause = cause([[entry.kind for entry in of_one] for of_one in entries])
    return Problem(headline, cause, (*details, *([apart] if apart else [])))


def _ended(run: ScenarioRun, scenario: RankScenario | None) -> Problem:
    """A process that died, or that did not come back."""
    if scenario is not None and scenario.same_calls and (apart := parted(run.called, scenario.taking_part(), True)):
        details = (apart, run.end, *run.where)
        return Problem("the ranks call different collectives", _cause_apart(scenario, run.called), details)
    cause = _cause(run.end, run.where, scenario) if scenario else ""
    if not cause and "SIGABRT" in run.end and any(call.kind == "recv" for of_one in run.called for call in of_one):
        cause = "compiled code ends the process: a message came that is larger than the tensor that waits for it?"
    return Problem(run.end, cause, run.where)


def _call(entry: Entry) -> str:
    return f"{entry.kind} of {entry.elements:,} elements"


def parted(called: Sequence[Sequence[Entry | Call]], members: Sequence[int], cut_short: bool = False) -> str:
    """The first collective at which ``members`` of the ranks differ, in a sentence; empty if they agree.

    In an all-to-all each rank sends as many elements as it has. Of a run that was ``cut_short`` only what all of them
    have called is compared.
    """
    calls = [
        [(entry.kind, _size(entry), entry.dtype) for entry in called[rank] if entry.kind not in ("send", "recv")]
        for rank in members
    ]
    for k in range((min if cut_short else max)(map(len, calls), default=0)):
        here = [of_rank[k] if k < len(of_rank) else None for of_rank in calls]
        if len(set(here)) > 1:
            other = next(rank for rank, call in enumerate(here) if call != here[0])
            names = [f"{c[0]} of {c[1]}{c[2]}" if c else "no further collective" for c in (here[0], here[other])]
            return f"collective {k + 1}: rank {members[0]} calls {names[0]}, rank {members[other]} {names[1]}"
    return ""


def _size(entry: Entry | Call) -> str:
    return "" if entry.kind == "all_to_all" else f"{entry.elements:,} "
