"""A check of this lab: scenarios on several ranks, the validator of each, and the messages of failures.

The order of judgement is the order in which a student would look: does it lean on PyTorch's own solution, does it run
on one rank, on all ranks, do the ranks call the same collectives, and is what they see right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from utils.checks.core import Exercise, draw_seed, fail, passed
from utils.checks.library_use import find_library_use
from utils.checks.problem import Problem
from utils.distributed import Entry
from utils.distributed.calls import Call

from .forbid_library_calls import ReadyMade
from .observations import RankObservation, RankScenario, ScenarioRun
from .scenario_runs import run_on_ranks, run_single_rank

_TOGETHER = "a collective is one call that all ranks make together: same kind, same size, same order on each"
#: Finds what is wrong in what the ranks saw of a scenario, or None.
Judge = Callable[[list[RankObservation]], Problem | None]


@dataclass(frozen=True)
class Part:
    """A scenario and its judge.

    Attributes:
        scenario: what is played.
        judge: what its outcome is held against.
        stuck: the likely cause when ranks wait for one another in vain.
        raised: words of an exception -> its likely cause.
        same_calls: the ranks that take part must call the same collectives in the same order (not so for send and
            recv).
        apart: says the likely cause from the differing collectives that the ranks called, or nothing.
        members: the ranks that take part, () for all.
        to_itself: the likely cause when a rank that is alone sends a message, which only it could receive.
    """

    scenario: RankScenario
    judge: Judge
    stuck: str = ""
    raised: Mapping[str, str] = field(default_factory=dict)
    same_calls: bool = True
    apart: Callable[[Sequence[Sequence[Entry | Call]]], str] | None = None
    members: tuple[int, ...] = ()
    to_itself: str = ""

    def cause_apart(self, called: Sequence[Sequence[Entry | Call]]) -> str:
        """The likely cause when the ranks call different collectives."""
        return (self.apart(self.of_members(called)) if self.apart else "") or self.stuck or _TOGETHER

    def of_members(self, of_ranks: Sequence) -> list:
        """The items of the ranks that take part."""
        return [item for rank, item in enumerate(of_ranks) if not self.members or rank in self.members]


@dataclass(frozen=True)
class DistributedCheck:
    """The check of one exercise.

    Attributes:
        exercise: its number and title.
        names: the functions of an answer, in the order in which the check takes them.
        parts: the scenarios of a seed; the first is also played on a single rank before processes are started.
        notice: what to notice when it passes.
    """

    exercise: Exercise
    names: tuple[str, ...]
    parts: Callable[[int], Sequence[Part]]
    notice: str

    def check(self, *functions: Callable, seed: int | None = None) -> None:
        """Hold an answer against the exercise and print the verdict.

        Raises:
            CheckFailed: the answer is wrong; the text says where and why.
            NotImplementedError: a place is not filled; its own message.
        """
        seed = draw_seed(seed)
        parts, answer = self.parts(seed), dict(zip(self.names, functions, strict=True))
        for name, function in answer.items():
            if not callable(function):
                fail(self.exercise, f"the check takes {name} itself, got {function!r}: leave out the parentheses")
        self.refuse(answer)
        self.alone(answer, parts, seed)
        (played,) = run_on_ranks([answer], [part.scenario for part in parts])
        self.judge(played, parts, seed)
        passed(self.exercise, self.notice, seed, len(parts))

    def refuse(self, answer: Mapping[str, Callable]) -> None:
        """Fail if the answer's source leans on a ready-made solution."""
        if found := find_library_use(list(answer.values())):
            self._fail(_leaning(found[0]))

    def alone(self, answer: Mapping[str, Callable], parts: Sequence[Part], seed: int) -> None:
        """Fail if the first scenario raises on a single rank already."""
        observed = run_single_rank(answer, parts[0].scenario)
        fault = observed.fault
        if fault is None:
            return
        reproduce = f"seed {seed}, {parts[0].scenario.name}, 1 rank"
        if fault.type == ReadyMade.__name__:
            self._fail(_leaning(fault.text, fault.where), reproduce)
        if parts[0].to_itself and observed.count("send", "recv"):
            headline = f"in a group of one rank, rank 0 exchanges a message with itself: {fault.type}: {fault.text}"
            self._fail(Problem(headline, parts[0].to_itself, fault.where), reproduce)
        headline = f"a group of one rank already fails: {fault.type}: {fault.text}"
        cause = _cause(f"{fault.type}: {fault.text}", parts[0])
        cause = cause or "no other process is needed to see this: step through it here in a debugger"
        self._fail(Problem(headline, cause, fault.where), reproduce)

    def judge(self, played: ScenarioRun, parts: Sequence[Part], seed: int) -> None:
        """Fail with the first thing that went wrong on the ranks.

        Raises:
            CheckFailed, NotImplementedError: as :meth:`check`.
        """
        for part in parts:
            observations = played.observations.get(part.scenario.name)
            if observations is None:
                break
            for observed in observations:
                if observed.fault is not None and observed.fault.type == "NotImplementedError":
                    raise NotImplementedError(observed.fault.text)
            problem = _trouble(part, observations) or part.judge(observations)
            if problem:
                self._fail(problem, f"seed {seed}, {part.scenario.name}, {part.scenario.ranks} ranks")
        if played.end:
            ranks = next(
                (part.scenario.ranks for part in parts if part.scenario.name == played.scenario), len(played.called)
            )
            self._fail(_ended(played, parts), f"seed {seed}, {played.scenario}, {ranks} ranks")

    def _fail(self, problem: Problem, reproduce: str = "") -> None:
        fail(self.exercise, problem.headline, problem.details, problem.cause, reproduce)


def _leaning(on: str, where: tuple[str, ...] = ()) -> Problem:
    cause = "implement it from collectives; compare with PyTorch's afterwards"
    return Problem(f"the answer uses a built-in, {on}", cause, where)


def _cause(said: str, part: Part) -> str:
    """The likely cause of an exception, or of a process's end, by the words in what is said of it."""
    return next((cause for words, cause in part.raised.items() if words in said), "")


def _trouble(part: Part, observations: list[RankObservation]) -> Problem | None:
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
        ranks = "every rank" if len(own) == len(part.members or observations) else f"rank {rank}"
        said = f"{fault.type}: {fault.text}"
        return Problem(f"{ranks} raised {said}", _cause(said, part), fault.where)
    called = [observed.entries for observed in observations]
    apart = parted(called, part.members) if part.same_calls else ""
    waiting = [rank for rank, observed in enumerate(observations) if observed.fault]
    if waiting:
        return _stuck(part, observations, waiting, apart)
    if apart:
        return Problem("the ranks call different collectives", part.cause_apart(called), (apart,))
    return None


def _stuck(part: Part, observations: list[RankObservation], waiting: list[int], apart: str) -> Problem:
    done = [rank for rank in part.members or range(len(observations)) if rank not in waiting]
    who = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} wait"
    ends = f"rank {done[0]} is done" if len(done) == 1 else f"ranks {', '.join(map(str, done))} are done"
    headline = f"{who} in vain: {ends}" if done else "deadlock: every rank is blocked in a receive or collective"
    details = []
    for rank in part.members or range(len(observations)):
        observed = observations[rank]
        last = f"last {_call(observed.entries[-1])}" if observed.entries else "none"
        line = f", at {observed.fault.where[-1]}" if observed.fault and observed.fault.where else ""
        details.append(
            f"rank {rank}: {'waits' if observed.fault else 'done'} after {len(observed.entries)} calls, {last}{line}"
        )
    cause = part.cause_apart([observed.entries for observed in observations]) if apart else part.stuck
    return Problem(headline, cause, (*details, *([apart] if apart else [])))


def _ended(played: ScenarioRun, parts: Sequence[Part]) -> Problem:
    """A process that died, or that did not come back."""
    part = next((part for part in parts if part.scenario.name == played.scenario), None)
    if part is not None and part.same_calls and (apart := parted(played.called, part.members)):
        details = (apart, played.end, *played.where)
        return Problem("the ranks call different collectives", part.cause_apart(played.called), details)
    cause = (_cause(played.end, part) if part else "") or (
        "one rank never leaves local computation; its peers time out"
        if "did not end" in played.end
        else "a process that dies ends all others: it left, or a message came that is larger than the tensor "
        "that waits for it"
    )
    return Problem(played.end, cause, played.where)


def _call(entry) -> str:
    return f"{entry.kind} of {entry.elements:,} elements"


def parted(called: Sequence[Sequence[Entry | Call]], members: Sequence[int] = ()) -> str:
    """The first collective at which the ranks (``members``, or all) differ, in a sentence; empty if they agree."""
    members = members or range(len(called))
    calls = [
        [(entry.kind, entry.elements, entry.dtype) for entry in called[rank] if entry.kind not in ("send", "recv")]
        for rank in members
    ]
    for k in range(max(map(len, calls), default=0)):
        here = [of_rank[k] if k < len(of_rank) else None for of_rank in calls]
        if len(set(here)) > 1:
            other = next(rank for rank, call in enumerate(here) if call != here[0])
            names = [f"{c[0]} of {c[1]:,} {c[2]}" if c else "no further collective" for c in (here[0], here[other])]
            return f"collective {k + 1}: rank {members[0]} calls {names[0]}, rank {members[other]} {names[1]}"
    return ""
