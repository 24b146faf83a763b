"""When each action of a schedule starts and ends: a simulation of stages that wait for one another."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from utils.schedules.schedule import Action, Schedule


class Deadlock(RuntimeError):
    """Stages wait for one another for ever; ``waiting`` says who for what: stage -> (action, stage, action)."""

    def __init__(self, schedule: str, waiting: dict[int, tuple[Action, int, Action]]) -> None:
        self.waiting = waiting
        who = "; ".join(f"stage {s} at {a} waits for {b} of stage {t}" for s, (a, t, b) in waiting.items())
        super().__init__(f"{schedule} deadlocks: {who}")


@dataclass(frozen=True)
class Work:
    """An action as it happened: on ``stage`` from ``start`` to ``end``."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each stage of a schedule did when. Times are in units of the durations that were simulated."""

    schedule: Schedule
    work: tuple[Work, ...]
    """in order of start, then stage"""

    def of(self, stage: int) -> list[Work]:
        """The work of one stage, in order."""
        return [w for w in self.work if w.stage == stage]

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(w.end for w in self.work)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each stage works."""
        return tuple(math.fsum(w.end - w.start for w in self.of(s)) for s in range(self.schedule.stages))

    @property
    def idle_fraction(self) -> float:
        """Idle time over all time, of all stages together."""
        return 1 - math.fsum(self.busy) / (self.schedule.stages * self.makespan)

    @property
    def bubble(self) -> float:
        """Idle time over ideal time: (p - 1)/m for GPipe and 1F1B. Ideal is what a stage works, on average."""
        return self.schedule.stages * self.makespan / math.fsum(self.busy) - 1

    @property
    def own_bubble(self) -> float:
        """As ``bubble``, but each stage counts from its own first action to its own last; the worst stage.

        This is what counts when a stage may go on with the next batch without waiting for the others, as zero-bubble
        schedules do.
        """
        spans = (self.of(s)[-1].end - self.of(s)[0].start for s in range(self.schedule.stages))
        return max(span / busy for span, busy in zip(spans, self.busy, strict=True)) - 1

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each stage the most (micro-batch, chunk) pairs in flight."""
        return self.schedule.peak_in_flight

    def in_flight(self, stage: int) -> tuple[list[float], list[int]]:
        """How many are in flight on a stage over time, as steps: times at which the number changes, and the new number.

        A forward pass counts from its start, a backward pass until its end.
        """
        end = "W" if self.schedule.split_backward else "B"
        changes: dict[float, int] = defaultdict(int)
        for w in self.of(stage):
            if w.action.kind == "F":
                changes[w.start] += 1
            elif w.action.kind == end:
                changes[w.end] -= 1
        times, counts = [0.0], [0]
        for time in sorted(changes):
            if time > times[-1]:
                times.append(time)
                counts.append(counts[-1])
            counts[-1] += changes[time]
        return times, counts


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    *,
    weight: float | None = None,
) -> Timeline:
    """Run a schedule: each stage takes its actions in order, each as soon as what it needs has arrived.

    Args:
        forward, backward: time of one micro-batch on a whole stage, one number or one for each stage; a chunk takes
            1/v of it. The backward pass is twice the forward pass, as its FLOPs are.
        weight: the part of ``backward`` that computes gradients of weights, where a schedule has them apart; by default
            half of it.

    Raises:
        Deadlock: some stages wait for one another for ever.
        ValueError: durations that are negative or as many as there are not stages.
    """
    p = schedule.stages
    times = _durations(schedule, forward, backward, weight)
    done: dict[tuple[int, Action], float] = {}
    free, place, work = [0.0] * p, [0] * p, []
    awaited: dict[tuple[int, Action], list[int]] = defaultdict(list)
    ready = list(range(p))
    while ready:
        stage = ready.pop()
        while place[stage] < len(schedule.orders[stage]):
            action = schedule.orders[stage][place[stage]]
            needs = list(schedule.needs(stage, action))
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                awaited[missing].append(stage)
                break
            start = max(free[stage], *(done[need] for need in needs), 0.0)
            free[stage] = done[stage, action] = start + times[action.kind][stage]
            work.append(Work(stage, action, start, free[stage]))
            place[stage] += 1
            ready += awaited.pop((stage, action), [])
    stuck = {s: schedule.orders[s][place[s]] for s in range(p) if place[s] < len(schedule.orders[s])}
    if stuck:
        waits = {s: (a, *next(n for n in schedule.needs(s, a) if n not in done)) for s, a in stuck.items()}
        raise Deadlock(schedule.name, waits)
    return Timeline(schedule, tuple(sorted(work, key=lambda w: (w.start, w.stage, w.end))))


def _durations(
    schedule: Schedule, forward: float | Sequence[float], backward: float | Sequence[float], weight: float | None
) -> dict[str, list[float]]:
    """Kind -> time of one action on each stage."""
    p, v = schedule.stages, schedule.chunks
    each = {}
    for name, given in (("forward", forward), ("backward", backward)):
        values = list(given) if isinstance(given, Sequence) else [given] * p
        if len(values) != p or not all(math.isfinite(t) and t >= 0 for t in values):
            raise ValueError(f"{name} must be a time, or one for each of the {p} stages, not negative; got {given}")
        each[name] = [t / v for t in values]
    parts = [t / 2 if weight is None else weight / v for t in each["backward"]]
    for whole, part in zip(each["backward"], parts, strict=True):
        if not 0 <= part <= whole:
            raise ValueError(f"weight must be between 0 and the backward pass, {whole * v:g}, got {weight}")
    rest = [whole - part for whole, part in zip(each["backward"], parts, strict=True)]
    return {"F": each["forward"], "B": rest if schedule.split_backward else each["backward"], "W": parts}
