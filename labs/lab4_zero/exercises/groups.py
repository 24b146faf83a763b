"""Scenarios in a group of some of the ranks: an answer must count in it, and call nothing outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from utils.checks.core import classic
from utils.checks.problem import Problem
from utils.distributed import calls

from .distributed_check import Judge, Part
from .observations import RankObservation, RankScenario

#: The ranks that take part: the group's first is not the job's.
MEMBERS = (1, 2)
_CAUSE = "only a group of some ranks goes wrong: each collective, get_rank and get_world_size must be given the group"


class OutsideGroup(RuntimeError):
    """A collective of other ranks than the group's."""


@contextmanager
def _within(members: tuple[int, ...]) -> Iterator[None]:
    """In the block no collective reaches other ranks: these would be waited for in vain."""

    def look(call: calls.Call) -> None:
        if call.members != members:
            ranks = ", ".join(map(str, call.members))
            raise OutsideGroup(f"{call.kind.replace('_', '-')} of {call.elements:,} elements by the ranks {ranks}")

    with calls.listen(look):
        yield


def _play(answer: Mapping[str, Callable], play: Callable, **arguments: Any) -> Any:
    group = dist.new_group(list(MEMBERS))
    if dist.get_rank() not in MEMBERS:
        return None
    with _within(MEMBERS):
        return play(answer, group=group, **arguments)


def group_part(play: Callable, judge: Judge, number: int, stuck: str, **arguments: Any) -> Part:
    """A scenario that :data:`MEMBERS` play; ``play`` takes their group, ``judge`` sees what they saw.

    Args:
        number: of "ranks of the whole job" in the exercise's classic wrong answers.
        stuck: as of a :class:`Part`.
        arguments: of ``play``.
    """
    cause = classic(_CAUSE, number)

    def of_members(observations: Sequence[RankObservation]) -> Problem | None:
        problem = judge([observations[rank] for rank in MEMBERS])
        if problem is None:
            return None
        return Problem(f"counted in the group, {problem.headline}", cause, problem.details)

    scenario = RankScenario("a group of two of the ranks", _play, {"play": play, **arguments})
    return Part(scenario, of_members, stuck, {"": cause}, members=MEMBERS)
