"""Plays a scenario of lab 4 on several ranks and brings back what each of them saw.

Each exercise has a launch of its own: one that fails, or whose ranks wait for one another in vain, costs no other one.
The ranks import the student's package; the process that starts them reads what they return.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch.distributed as dist
from torch.distributed import ProcessGroup

from utils.checks.hidden import Observation
from utils.distributed import CollectiveLog, DistributedError, launch, record_collectives, warm

RANKS = 3
#: Seconds that an exercise's ranks may take in all, fewer than a scenario may, and that one may wait for another.
#: Ranks on a busy machine are slow to come, and only those that never come cost this much.
SECONDS, PATIENCE = 55.0, 20.0
#: What one rank observes, by name.
RankResult = dict[str, Observation]
#: Plays a scenario on a rank: the student's package and a seed to what the rank sees.
Play = Callable[[ModuleType, int], RankResult]

_warm = ExitStack()


class RanksFailed(RuntimeError):
    """The ranks did not come to the end of the scenario; the text says which one is at fault."""


def on_ranks(parts: Sequence[Play], ranks: int = RANKS) -> Callable[[ModuleType, int], RankResult]:
    """A scenario's ``run`` that plays its parts on so many ranks; each observation is the list of what the ranks saw.

    A rank that takes no part in something sees None of it.
    """
    places = [(play.__module__, play.__name__) for play in parts]

    def run(package: ModuleType, seed: int) -> RankResult:
        _stay_warm()
        try:
            seen = launch(
                _on_rank, places, package.__name__, seed, world_size=ranks, backend="gloo",
                timeout=SECONDS, collective_timeout=PATIENCE,
            )  # fmt: skip
        except DistributedError as error:
            if isinstance(error.exception, NotImplementedError):
                raise error.exception from None
            raise RanksFailed(str(error).strip().split("\n")[0]) from None
        return together(seen)

    return run


def together(seen: Sequence[RankResult]) -> RankResult:
    """What several ranks saw, as lists over the ranks."""
    names = dict.fromkeys(name for of in seen for name in of)
    return {name: [of.get(name) for of in seen] for name in names}


@functools.cache
def _stay_warm() -> None:
    """Let the launcher's processes outlive a job that fails; they end with this process."""
    _warm.enter_context(warm())


def _on_rank(places: Sequence[tuple[str, str]], package: str, seed: int) -> RankResult:
    seen: RankResult = {}
    for module, name in places:
        seen |= getattr(importlib.import_module(module), name)(importlib.import_module(package), seed)
    return seen


def named(name: str, seen: RankResult) -> RankResult:
    """The observations, each with ``name`` before it."""
    return {f"{name}: {what}": value for what, value in seen.items()}


@contextmanager
def of_some(members: Sequence[int]) -> Iterator[ProcessGroup | None]:
    """A group of some of the ranks; None on a rank that is not in it. Every rank enters."""
    group = dist.new_group(list(members))
    yield group if dist.get_rank() in members else None


def elements(ledger: CollectiveLog, kind: str) -> int:
    """Elements of floating-point tensors that went through collectives of a kind; notes in integers do not count."""
    return sum(entry.elements for entry in ledger.of(kind) if "float" in entry.dtype)


__all__ = [
    "RANKS",
    "Play",
    "RankResult",
    "RanksFailed",
    "elements",
    "named",
    "of_some",
    "on_ranks",
    "record_collectives",
    "together",
]
