"""The scenarios that a check runs on the ranks, and what each rank observes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.checks.problem import Problem
from utils.checks.student_files import is_library
from utils.distributed import Entry
from utils.distributed.calls import Call

_LATE = ("Timed out", "timed out", "Connection closed", "Connection reset", "Broken pipe", "preamble", "Socket")


@dataclass(frozen=True)
class RankScenario:
    """One thing to try on several ranks, and what is said of an answer that goes wrong in it.

    Attributes:
        name: as a message gives it.
        play: ``play(answer, **arguments)`` runs on each rank; ``answer`` holds the student's functions by name. With
            ``members`` it also takes their ``group``.
        judge: ``judge(observations, **arguments)`` finds what is wrong in what the ranks saw (``members`` only), or
            None.
        arguments: of both.
        ranks: how many there are.
        members: the ranks that take part, in a group of their own; () for all.
        stuck: the likely cause when ranks wait for one another in vain; or a function that says it, or nothing, from
            the kinds of the calls of each rank, in order.
        raised: words of an exception, and perhaps of the student's lines that led to it, that must all be there -> its
            likely cause.
        sizes: the likely cause if an exception names two sizes that differ by fewer elements than there are ranks, as
            shares that are not of equal size do.
        same_calls: the ranks that take part must call the same collectives in the same order (not so for send and
            recv).
        apart: says the likely cause from the differing collectives that the ranks called, or nothing.
        to_itself: the likely cause when a rank that is alone sends a message, which only it could receive.
        values: keys of what ``play`` returns that any right answer agrees in, but for rounding.
    """

    name: str
    play: Callable[..., Any]
    judge: Callable[..., Problem | None] = lambda observations: None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 3
    members: tuple[int, ...] = ()
    stuck: str | Callable[[Sequence[Sequence[str]]], str] = ""
    raised: Mapping[str | tuple[str, ...], str] = field(default_factory=dict)
    sizes: str = ""
    same_calls: bool = True
    apart: Callable[[Sequence[Sequence[Entry | Call]]], str] | None = None
    to_itself: str = ""
    values: tuple[str, ...] = ()

    def taking_part(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.members or tuple(range(self.ranks))


@dataclass(frozen=True)
class Fault:
    """An exception on a rank.

    ``late`` says that the rank waited for others in vain; ``where`` are the student's own lines, the innermost last.
    """

    type: str
    text: str
    where: tuple[str, ...]
    late: bool


@dataclass
class RankObservation:
    """What one rank saw of a scenario: what ``play`` returned, every collective, and an exception if there was one."""

    value: Any = None
    entries: list[Entry] = field(default_factory=list)
    fault: Fault | None = None

    def count(self, *kinds: str) -> int:
        """How many collectives of these kinds this rank called (of all kinds if none is named)."""
        return sum(entry.kind in kinds for entry in self.entries) if kinds else len(self.entries)

    def elements(self, *kinds: str) -> int:
        """Elements of the full tensors of these kinds of collectives."""
        return sum(entry.elements for entry in self.entries if entry.kind in kinds)

    def kinds(self) -> list[str]:
        """The kinds that were called, most elements first."""
        return sorted({entry.kind for entry in self.entries}, key=lambda kind: -self.elements(kind))


@dataclass
class ScenarioRun:
    """All scenarios of one answer: by name, what each rank saw.

    ``end`` is what ended the job before its time, if so, ``where`` the student's lines that it was at, ``scenario`` the
    one that was played, and ``called`` the collectives that each rank had called in it.
    """

    observations: dict[str, list[RankObservation]]
    end: str = ""
    where: tuple[str, ...] = ()
    scenario: str = ""
    called: list[list[Call]] = field(default_factory=list)

    def met_a_fault(self) -> bool:
        """Whether there was an exception on any rank."""
        return any(
            observed.fault is not None for observations in self.observations.values() for observed in observations
        )

    def then(self, more: ScenarioRun) -> ScenarioRun:
        """What was seen of the same answer in further scenarios, after this."""
        return ScenarioRun(self.observations | more.observations, more.end, more.where, more.scenario, more.called)


def fault_of(error: BaseException) -> Fault:
    """An exception as it is told: its kind, the student's lines that led to it, and whether others came too late."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    lines = tuple(f"{short_name(f.filename)}, line {f.lineno}, in {f.name}: {f.line}" for f in frames[-3:])
    text = str(error).split("\n")[0][:300]
    late = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LATE)
    return Fault(type(error).__name__, text, lines, late)


def short_name(name: str) -> str:
    """A source file's name as a student knows it."""
    return "a cell" if name.startswith("<") or "ipykernel" in name else Path(name).name
