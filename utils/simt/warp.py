"""A warp that executes a small program in lockstep: where control flow diverges, lanes wait.

The model is the classic one of SIMT hardware. All lanes of a warp share one instruction stream and an active mask. At
an ``If`` whose condition differs between lanes the warp first walks the ``then`` side with the other lanes masked off,
then the ``otherwise`` side with the mask inverted, and **reconverges** right after: the next operation runs with the
mask that held before the ``If``. A side that no lane takes is skipped. A ``Loop`` repeats while any lane still has
trips left; lanes that are done wait for the longest. GPUs since Volta may schedule the sides in another order, or
interleave them; the lane-cycles lost are the same as long as the sides reconverge, since at any moment one instruction
issues for one mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Op:
    """One operation that every active lane executes; the warp is busy with it for ``cycles`` cycles."""

    name: str
    cycles: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.cycles, bool) or not isinstance(self.cycles, int):
            raise TypeError(f"cycles of operation {self.name!r} must be an integer, got {self.cycles!r}")
        if self.cycles < 1:
            raise ValueError(f"cycles of operation {self.name!r} must be at least 1, got {self.cycles}")


@dataclass(frozen=True)
class If:
    """A branch: lanes for which ``condition(lane)`` is true take ``then``, the others ``otherwise``."""

    condition: Callable[[int], bool]
    then: Sequence[Node]
    otherwise: Sequence[Node] = ()

    def __post_init__(self) -> None:
        _check_function("condition of an If", self.condition)
        _check_nodes("then", self.then)
        _check_nodes("otherwise", self.otherwise)


@dataclass(frozen=True)
class Loop:
    """A loop whose ``body`` runs ``trips(lane)`` times in each lane; the warp goes round until every lane is done."""

    trips: Callable[[int], int]
    body: Sequence[Node]

    def __post_init__(self) -> None:
        _check_function("trips of a Loop", self.trips)
        _check_nodes("body", self.body)


Node = Op | If | Loop


def _check_function(what: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"the {what} is a function of the lane, such as lambda lane: lane < 16, got {value!r}")


def _check_nodes(what: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{what} must be a list of Op, If and Loop, got {value!r}")


@dataclass(frozen=True)
class Step:
    """One issued operation: its name, which lanes were active, how long the warp was busy; unpacks as that triple.

    ``path`` tells how control flow led here: ``("then",)``, ``("otherwise", "trip 0")``, empty for straight-line code.
    """

    name: str
    mask: tuple[bool, ...]
    cycles: int
    path: tuple[str, ...] = field(default=(), compare=False)

    def __iter__(self):
        return iter((self.name, self.mask, self.cycles))

    @property
    def active(self) -> int:
        """Lanes that did useful work."""
        return sum(self.mask)


@dataclass(frozen=True)
class WarpTrace:
    """What a warp issued, in order, and what of it was useful. Lane-cycles are lanes times cycles."""

    steps: tuple[Step, ...]
    warp_size: int

    @cached_property
    def cycles(self) -> int:
        """Cycles from the first operation to the last."""
        return sum(step.cycles for step in self.steps)

    @property
    def total_lane_cycles(self) -> int:
        """Lane-cycles the warp occupied: all its lanes, whether active or masked off."""
        return self.cycles * self.warp_size

    @cached_property
    def useful_lane_cycles(self) -> int:
        """Lane-cycles of active lanes."""
        return sum(step.active * step.cycles for step in self.steps)

    @property
    def wasted_lane_cycles(self) -> int:
        """Lane-cycles of lanes that were masked off and waited."""
        return self.total_lane_cycles - self.useful_lane_cycles

    @property
    def efficiency(self) -> float:
        """Useful over total lane-cycles; 1 for an empty trace, which wastes nothing."""
        return self.useful_lane_cycles / self.total_lane_cycles if self.steps else 1.0


def run_warp(program: Sequence[Node], warp_size: int = 32, active_lanes: int | None = None) -> WarpTrace:
    """Execute ``program`` on one warp and return what it issued.

    Args:
        program: operations, branches and loops, in order.
        warp_size: lanes of the warp.
        active_lanes: how many lanes hold a thread; fewer than ``warp_size`` in the last warp of a block whose size is
            not a multiple of it. The empty lanes are wasted throughout.

    Raises:
        TypeError: something in the program is no Op, If or Loop, or a trip count is no integer.
        ValueError: a warp without lanes, more active lanes than lanes, a negative trip count.
    """
    if isinstance(warp_size, bool) or not isinstance(warp_size, int):
        raise TypeError(f"warp_size must be an integer, got {warp_size!r}")
    if warp_size < 1:
        raise ValueError(f"warp_size must be at least 1, got {warp_size}")
    active_lanes = warp_size if active_lanes is None else active_lanes
    if isinstance(active_lanes, bool) or not isinstance(active_lanes, int):
        raise TypeError(f"active_lanes must be an integer, got {active_lanes!r}")
    if not 1 <= active_lanes <= warp_size:
        raise ValueError(f"active_lanes must be between 1 and {warp_size}, got {active_lanes}")
    _check_nodes("program", program)
    steps: list[Step] = []
    _run(program, tuple(lane < active_lanes for lane in range(warp_size)), (), steps)
    return WarpTrace(tuple(steps), warp_size)


def _run(program: Sequence[Node], mask: tuple[bool, ...], path: tuple[str, ...], steps: list[Step]) -> None:
    for node in program:
        match node:
            case Op(name, cycles):
                steps.append(Step(name, mask, cycles, path))
            case If(condition, then, otherwise):
                taken = [bool(active and condition(lane)) for lane, active in enumerate(mask)]
                passed = [active and not take for active, take in zip(mask, taken, strict=True)]
                for side, lanes, label in ((then, taken, "then"), (otherwise, passed, "otherwise")):
                    if any(lanes):
                        _run(side, tuple(lanes), (*path, label), steps)
            case Loop(trips, body):
                counts = [_trips(trips, lane) if active else 0 for lane, active in enumerate(mask)]
                for trip in range(max(counts)):
                    _run(body, tuple(count > trip for count in counts), (*path, f"trip {trip}"), steps)
            case _:
                raise TypeError(f"a program is made of Op, If and Loop, got {node!r}")


def _trips(trips: Callable[[int], int], lane: int) -> int:
    count = trips(lane)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"trips must give an integer, got {count!r} for lane {lane}")
    if count < 0:
        raise ValueError(f"trips must not be negative, got {count} for lane {lane}")
    return count
