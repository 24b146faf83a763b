"""Compares calls as a training run makes them, back to back, on a card that is at its power limit.

A GPU that idles between single calls stays cool and clocks high. Under load an H100 reaches its 700 W within a few
calls and then lowers its clock until the power fits; how far depends on who is running. Where functions take turns
after a few milliseconds, they share one clock and one budget, and whoever draws most lives on the others' part. So each
lap repeats its call until the quickest of all functions has worked for ``LAP_SECONDS`` without a pause, long enough for
the clock to become its own. The number of calls is the same for all of them, and a call's time is the lap's divided by
it. Only the first call of a lap finds the L2 cache flushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from utils import timing

LAP_SECONDS = 0.2


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """``call``, ``times`` times in a row."""

    def lap() -> None:
        for _ in range(times):
            call()

    return lap


def compare(
    calls: Mapping[str, Callable[[], object]],
    *,
    warmup: int = 3,
    rounds: int = 25,
    stopwatch: timing.Stopwatch | None = None,
    lap_seconds: float = LAP_SECONDS,
) -> tuple[dict[str, timing.Timing], int]:
    """Time one call of each in laps of many, by interleaved rounds as :func:`utils.timing.compare`.

    Args:
        calls, warmup, rounds, stopwatch: As for :func:`utils.timing.compare`.
        lap_seconds: Work of the quickest in one lap; 0 for single calls.

    Returns:
        The timings of one call, and how many calls a lap held.
    """
    single = timing.compare(calls, warmup=warmup, rounds=3, stopwatch=stopwatch)
    times = max(1, math.ceil(lap_seconds / min(t.median for t in single.values())))
    laps = {name: repeated(call, times) for name, call in calls.items()}
    timed = timing.compare(laps, warmup=1, rounds=rounds, stopwatch=stopwatch)
    return {name: timing.summarize([s / times for s in t.samples]) for name, t in timed.items()}, times
