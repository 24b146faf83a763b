"""How lab 6's kernels are timed beside their baselines: right first, then in CUDA graphs or as plain calls in a row.

Many of these kernels take less time than the host needs to launch them. A CUDA graph holds several calls, so that none
waits for the host; as plain calls in a row each pays for its launch. A lap repeats either until the function has
worked for so long. Slow and quick functions get laps of about the same length, so they call different numbers of
times. Rounds are interleaved, and a ratio is the median of those within rounds.
"""

from __future__ import annotations

import functools
import gc
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks import blocked_stream, sustained
from benchmarks.thermal_warmup import thermal_warmup
from utils import runtime, timing

GRAPH, CALLS = "graph", "calls"
#: Largest error of a result that is timed: the norm of the difference over the norm of what is right. Rounding a result
#: to bf16 costs 0.002; tensor cores of Hopper add e4m3 products with some 14 bits.
TOLERANCE = 0.03
#: Calls in a CUDA graph.
SEVERAL = 4

Call = Callable[[], Any]


class Effort(NamedTuple):
    """Rounds at least, seconds of work in a lap, seconds of warming before a part."""

    rounds: int
    lap_seconds: float
    warm_seconds: float


class Contender(NamedTuple):
    """Calls that do the same work on different memory, or the same one several times; and what one call does."""

    calls: Sequence[Call]
    amount: float
    unit: str


class Comparison(NamedTuple):
    """``mine`` over ``other``: the ratio of their speeds, times ``factor`` (amounts of work, where they differ)."""

    mine: str
    other: str
    factor: float = 1.0


def said(error: BaseException) -> str:
    """An error's type and the first and last line of its message, without paths."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    shown = " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
    shown = re.sub(r"(?:\w:)?(?:[/\\][\w.+@~-]+){2,}", "(a path)", shown)
    return f"{type(error).__name__}: {shown}"[:400] if shown else type(error).__name__


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``right``; infinite where a number is not finite."""
    got, right = got.detach().double(), right.detach().double()
    error = float((got - right).norm() / right.norm())
    return error if math.isfinite(error) else math.inf


@dataclass
class Case:
    """Functions that do the same work, which of them are compared, and who cannot take part.

    Attributes:
        only: the one function to run, once, so that its kernels are compiled; the others are left out.
        computed: FLOPs on all tiles that are visited, where those differ from what the mask shows.
        bounds: of ``over``, ratios of which the largest says how near the nearest bound is.
    """

    part: str
    name: str
    direction: str
    how: str
    only: str | None = None
    contenders: dict[str, Contender] = field(default_factory=dict)
    over: dict[str, Comparison] = field(default_factory=dict)
    computed: dict[str, float] = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.part}, {self.name}, {self.direction}, {self.how}"

    def add(
        self,
        name: str,
        make: Callable[[], Sequence[Call]],
        amount: float,
        unit: str = "FLOP",
        error: Callable[[Any], float] | None = None,
    ) -> None:
        """Take part, if the first call works and its result is right.

        Args:
            make: returns the calls.
            amount: of work in one call.
            error: how far a result is from what is right, as :func:`relative_error`.
        """
        if self.only not in (None, name):
            return
        try:
            calls = make()
            result = calls[0]()
            if self.only is None and error is not None:
                self.errors[name] = off = error(result)
                if not off <= TOLERANCE:
                    raise RuntimeError(f"wrong by {off:.3g}, allowed {TOLERANCE}")
        except Exception as problem:  # whatever it is, the others are measured
            self.errors.pop(name, None)
            self.unavailable[f"{self.label}: {name}"] = said(problem)
            return
        self.contenders[name] = Contender(calls, amount, unit)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def beside(compute: Call) -> Any:
    """``compute`` on the stream on which graphs are recorded: a backward pass runs where its forward pass did."""
    if not runtime.HAS_GPU:
        return compute()
    stream, current = _stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = compute()
    current.wait_stream(stream)
    return result


def in_a_row(calls: Sequence[Call]) -> Call:
    """All of ``calls``, one after another."""

    def run() -> None:
        for call in calls:
            call()

    return run


def recorded(calls: Sequence[Call]) -> Call:
    """All of ``calls`` as one CUDA graph; without a GPU, one after another."""
    run = in_a_row(calls)
    if not runtime.HAS_GPU:
        return run
    beside(run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # nothing of CUDA's may be freed meanwhile
    try:
        with torch.cuda.stream(_stream()):
            graph.capture_begin()  # torch.cuda.graph would give all cached memory back first, each time
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        gc.enable()

    def replay(kept: Call = run) -> None:  # what the graph reads stays in memory as long as it does
        graph.replay()

    return replay


# ---- timing ----------------------------------------------------------------------------------------------------------


def whole_rounds(names: Sequence[str], rounds: int) -> int:
    """At least ``rounds``, and as many as it takes for everybody to follow everybody equally often."""
    period = len(timing.balanced_orders(list(names)))
    return -(-rounds // period) * period


def point(case: Case, effort: Effort, warm_seconds: float = 0.0) -> dict[str, Any] | None:
    """What is recorded of one case; None if no function of it can be timed. Adds to ``case.unavailable``."""
    runs: dict[str, Call] = {}
    for name, contender in case.contenders.items():
        try:
            runs[name] = (recorded if case.how == GRAPH else in_a_row)(contender.calls)
        except Exception as problem:
            case.unavailable[f"{case.label}: {name}"] = said(problem)
    if not runs:
        return None
    thermal_warmup(next(iter(runs.values())), warm_seconds)
    watch = blocked_stream.stopwatch()
    single = timing.compare(runs, warmup=1, rounds=2, stopwatch=watch)
    repeats = {name: max(1, math.ceil(effort.lap_seconds / single[name].median)) for name in runs}
    laps = {name: sustained.repeated(run, repeats[name]) for name, run in runs.items()}
    timed = timing.compare(laps, warmup=1, rounds=whole_rounds(list(runs), effort.rounds), stopwatch=watch)
    number = {name: repeats[name] * len(case.contenders[name].calls) for name in runs}
    each = {name: timing.summarize([s / number[name] for s in t.samples]) for name, t in timed.items()}
    return {
        "part": case.part,
        "case": case.name,
        "direction": case.direction,
        "how": case.how,
        "timed": {name: _rated(t, case.contenders[name], number[name]) for name, t in each.items()},
        "ratios": ratios(case, each),
        "computed": case.computed,
        "errors": case.errors,
    }


def _rated(timed: timing.Timing, contender: Contender, calls: int) -> dict[str, Any]:
    rate = contender.amount / timed.median
    return {**timed.as_dict(), "calls_a_lap": calls, "amount": contender.amount, "unit": contender.unit, "rate": rate}


def ratios(case: Case, timed: Mapping[str, timing.Timing]) -> dict[str, dict[str, float]]:
    """Of all comparisons whose both sides were timed, and the largest of those that are bounds."""
    found = {}
    for label, (mine, other, factor) in case.over.items():
        if mine in timed and other in timed:
            ratio = timing.ratio(timed[other], timed[mine]).as_dict()
            found[label] = {name: value * factor for name, value in ratio.items()}
    if case.bounds and all(label in found for label in case.bounds):
        found["of the larger bound"] = max((found[label] for label in case.bounds), key=lambda r: r["ratio"])
    return found
