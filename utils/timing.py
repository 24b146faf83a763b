"""How long GPU work takes: CUDA events, warm-up, a flushed L2 cache, medians with spread, interleaved comparisons.

Kernels run asynchronously, so a host clock around a call measures the launch, not the work. Here events are recorded on
the GPU's own stream before and after each call. Before each call the L2 cache is filled with other, clean data:
otherwise a repeated call finds its inputs in the cache and reports a bandwidth that memory does not have. The flush
*reads* its buffer. A flush that writes would leave the cache full of modified lines, and the timed call would pay for
writing them back. While the flush runs, the host enqueues the call, so a launch's own delay stays out of the time.

A GPU's clock depends on heat and power, so two functions timed one after the other are not compared under the same
conditions. :func:`compare` times them in turn within each round, changes the order from round to round, and
:func:`ratio` takes the median of the ratios within rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from utils import runtime

#: The flush reads this many bytes at least, and at least four times the L2 cache.
FLUSH_BYTES = 256 * 2**20

#: Without a flush the GPU idles this many cycles (some 50 microseconds) before each call, so that the host is ahead
#: of it.
HEAD_START_CYCLES = 100_000


class Stopwatch(Protocol):
    """What times calls: :class:`CudaStopwatch` on a GPU, a fake with known times in tests."""

    def lap(self, fn: Callable[[], object], flush_l2: bool) -> None:
        """Run ``fn`` once and time it, after flushing the L2 cache if asked."""

    def seconds(self) -> list[float]:
        """Wait for all laps and return their times in order, in seconds; the stopwatch is then empty."""


class CudaStopwatch:
    """Times calls with CUDA events on the current stream of the GPU in use.

    Raises:
        RuntimeError: kernels do not run on a GPU here.
    """

    def __init__(self) -> None:
        if not runtime.HAS_GPU:
            raise RuntimeError(
                "timing needs a CUDA GPU and none is in use (python -m utils.runtime says why): "
                "show the recorded measurement instead, utils.records.load(benchmark)"
            )
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        l2_bytes = torch.cuda.get_device_properties(runtime.DEVICE).L2_cache_size
        self._flush = torch.ones(max(FLUSH_BYTES, 4 * l2_bytes) // 4, dtype=torch.float32, device=runtime.DEVICE)
        self._sink = torch.empty((), dtype=torch.float32, device=runtime.DEVICE)

    def lap(self, fn: Callable[[], object], flush_l2: bool) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flush_l2:
            torch.sum(self._flush, dim=0, out=self._sink)
        else:
            torch.cuda._sleep(HEAD_START_CYCLES)  # idles the GPU without touching the cache while the host enqueues fn
        start.record()
        fn()
        end.record()
        self._laps.append((start, end))

    def seconds(self) -> list[float]:
        torch.cuda.synchronize(runtime.DEVICE)
        laps, self._laps = self._laps, []
        return [start.elapsed_time(end) * 1e-3 for start, end in laps]


@functools.cache
def cuda_stopwatch() -> CudaStopwatch:
    """The one stopwatch of this process: its flush buffer is made once.

    Raises:
        RuntimeError: kernels do not run on a GPU here.
    """
    return CudaStopwatch()


@dataclass(frozen=True)
class Timing:
    """Time of one call in seconds: the median over rounds, with the 20th and 80th percentile as ``low`` and ``high``.

    ``samples`` holds the time of each round, in order: :func:`ratio` pairs the rounds of two timings made by one
    :func:`compare`.
    """

    median: float
    low: float
    high: float
    rounds: int
    samples: tuple[float, ...]

    def as_dict(self) -> dict[str, float | int]:
        """What a record keeps: ``seconds`` (the median), ``low``, ``high`` and ``rounds``."""
        return {"seconds": self.median, "low": self.low, "high": self.high, "rounds": self.rounds}


@dataclass(frozen=True)
class Ratio:
    """How many times longer one call takes than another: median, 20th and 80th percentile of the per-round ratios."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """What a record keeps: ``ratio`` (the median), ``ratio_low`` and ``ratio_high``."""
        return {"ratio": self.median, "ratio_low": self.low, "ratio_high": self.high}


def _middle(samples: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, by linear interpolation between the two nearest order statistics."""
    return dict(zip(("low", "median", "high"), np.quantile(samples, (0.2, 0.5, 0.8)).tolist(), strict=True))


def summarize(samples: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile of times in seconds.

    Raises:
        ValueError: there are no samples, or one of them is not a positive finite number.
    """
    if not samples:
        raise ValueError("samples must hold at least one time, got none")
    for sample in samples:
        if not (math.isfinite(sample) and sample > 0):
            raise ValueError(f"a time must be positive and finite, got {sample!r} seconds (is the timed work empty?)")
    return Timing(**_middle(samples), rounds=len(samples), samples=tuple(samples))


def measure(
    fn: Callable[[], object],
    *,
    warmup: int = 5,
    rounds: int = 25,
    flush_l2: bool = True,
    stopwatch: Stopwatch | None = None,
) -> Timing:
    """Time one call of ``fn`` on the GPU.

    Args:
        fn: What to time. It takes no argument and must not wait for the GPU.
        warmup: Untimed calls before the first round: they compile, choose algorithms and raise the clock.
        rounds: Timed calls.
        flush_l2: Whether each call starts with its data out of the L2 cache, as it would amid other work.
        stopwatch: What times; the GPU's events by default.

    Raises:
        TypeError: ``fn`` cannot be called.
        ValueError: ``rounds`` is less than 1 or ``warmup`` negative.
        RuntimeError: there is no CUDA GPU.
    """
    return compare({"fn": fn}, warmup=warmup, rounds=rounds, flush_l2=flush_l2, stopwatch=stopwatch)["fn"]


def balanced_orders(names: Sequence[str]) -> list[list[str]]:
    """Orders in which every name stands at every place, and follows every other name, equally often.

    Williams 1949, "Experimental designs balanced for the estimation of residual effects of treatments": n orders of an
    even number n of names, 2n of an odd one. The first is not the order given.
    """
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]  # 0, 1, n - 1, 2, n - 2, ...
    orders = [[names[(place + shift) % n] for place in zigzag] for shift in range(n)]
    return orders + [order[::-1] for order in orders] if n % 2 and n > 1 else orders


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    warmup: int = 5,
    rounds: int = 25,
    flush_l2: bool = True,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Timing]:
    """Time several functions under the same conditions: each round runs every one, in an order that changes.

    Over the rounds every function follows every other one as often (:func:`balanced_orders`), since a function inherits
    the temperature, the clock and the spent power budget of the one before it.

    Returns a :class:`Timing` per name, in the order given; round ``i`` of each belongs together, so that
    ``ratio(timings["a"], timings["b"])`` cancels what heat and power do to both.

    Args:
        functions: What to time, by name.
        warmup: Untimed rounds before the first: every function runs once in each.
        rounds: Timed rounds.
        flush_l2: Whether each call starts with its data out of the L2 cache.
        stopwatch: What times; the GPU's events by default.

    Raises:
        TypeError: one of ``functions`` cannot be called.
        ValueError: there are no functions, ``rounds`` is less than 1 or ``warmup`` negative.
        RuntimeError: there is no CUDA GPU.
    """
    if not functions:
        raise ValueError("functions must name at least one function to time, got none")
    for name, fn in functions.items():
        if not callable(fn):
            raise TypeError(f"{name} must be a function without arguments, got {fn!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    watch = cuda_stopwatch() if stopwatch is None else stopwatch
    names = list(functions)
    for _ in range(warmup):
        for name in names:
            functions[name]()
    balanced = balanced_orders(names)
    orders = [balanced[i % len(balanced)] for i in range(rounds)]
    for order in orders:
        for name in order:
            watch.lap(functions[name], flush_l2)
    laps = iter(watch.seconds())
    samples: dict[str, list[float]] = {name: [] for name in names}
    for order in orders:
        for name in order:
            samples[name].append(next(laps))
    return {name: summarize(samples[name]) for name in names}


def ratio(a: Timing, b: Timing) -> Ratio:
    """How many times longer ``a`` took than ``b``: the median of the ratios within rounds of one :func:`compare`.

    Raises:
        ValueError: the two have different numbers of rounds, so they were not measured together.
    """
    if a.rounds != b.rounds:
        raise ValueError(f"a and b must come from one compare() with the same rounds, got {a.rounds} and {b.rounds}")
    ratios = [x / y for x, y in zip(a.samples, b.samples, strict=True)]
    return Ratio(**_middle(ratios))
