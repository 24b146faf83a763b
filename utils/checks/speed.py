"""Whether a student's function is fast enough, on a GPU: timed against PyTorch in the same rounds.

Without a GPU nothing is timed (the interpreter's time says nothing about a GPU), nor in CI (a shared machine's time
says nothing about the code); one line says so. No point is lost to a clock: a slow reading is repeated before it
counts, and where the peer shows that the GPU is shared or throttled, none counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from utils import hardware, runtime, timing
from utils.checks.problem import Problem

#: A function that is too slow is timed so often before it counts.
READINGS = 3
#: The peer's 80th percentile over its 20th: beyond it, something else runs on the GPU.
STEADY = 1.25
#: Least share of the memory bandwidth that a peer reaches on a GPU of its own.
EXPECTED = 0.35
#: The GPU waits before each call: twice as long as the CPU takes to enqueue it, and between these seconds.
LEAST_WAIT, MOST_WAIT = 300e-6, 20e-3
#: Cycles in a second of a GPU that runs at its highest clock; at a lower one it waits longer.
CYCLES_PER_SECOND = 2e9


@dataclass(frozen=True)
class Speed:
    """What a function is timed against, and how fast it must be.

    Args:
        inputs: Makes the arguments, on the GPU; sizes large enough that a launch does not dominate.
        peer: What it is compared with, such as PyTorch's own operator.
        at_least: Least speed relative to the peer: 0.9 allows a time of 1 / 0.9 of the peer's.
        peer_name: How messages call the peer.
        rounds: Rounds of the comparison.
        bytes_moved: Bytes that one call must move; when given, messages state the bandwidth reached.
        peer_bytes: Bytes that the peer moves at least; when given, a peer far below the GPU's bandwidth shows that the
            GPU is shared or throttled.
        options: Keyword arguments of the function that is timed; the peer gets none.

    Raises:
        ValueError: ``at_least`` is not positive.
    """

    inputs: Callable[[], Sequence[Any]]
    peer: Callable[..., Any]
    at_least: float
    peer_name: str = "PyTorch"
    rounds: int = 25
    bytes_moved: int | None = None
    peer_bytes: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.at_least > 0:
            raise ValueError(f"at_least must be positive, got {self.at_least}")


def why_not() -> str:
    """Why nothing is timed here; the empty string where timing makes sense."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return "speed is not checked in CI, where a machine is shared and its times say nothing about the code"
    if not runtime.HAS_GPU:
        return (
            "speed is not checked here: without a GPU kernels run in the interpreter, whose time says nothing about one"
        )
    return ""


class WaitingStopwatch(timing.CudaStopwatch):
    """A stopwatch whose GPU waits until a call is enqueued: what is timed is the GPU's work, without the CPU's.

    An autograd function in Python, or a kernel with many arguments, keeps the CPU busy for hundreds of microseconds.
    """

    def __init__(self, wait: float) -> None:
        super().__init__()
        self.cycles = int(wait * CYCLES_PER_SECOND)

    def lap(self, fn: Callable[[], object], flush_l2: bool) -> None:
        torch.cuda._sleep(self.cycles)
        super().lap(fn, flush_l2)


def stopwatch_for(functions: Mapping[str, Callable[[], object]]) -> timing.Stopwatch:
    """A stopwatch that waits twice as long as the slowest of these functions takes to be enqueued."""
    longest = 0.0
    for function in functions.values():
        for _ in range(3):  # the first calls compile, and allocate
            torch.cuda.synchronize(runtime.DEVICE)
            began = time.perf_counter()
            function()
            taken = time.perf_counter() - began
        longest = max(longest, taken)
    return WaitingStopwatch(min(max(LEAST_WAIT, 2 * longest), MOST_WAIT))


@dataclass(frozen=True)
class Reading:
    """One comparison: how many times the peer's speed, what to say of it, and why it does not count ('' if it does)."""

    reached: float
    line: str
    doubt: str


def run_speed(speed: Speed, student: Callable[..., Any]) -> tuple[str, Problem | None]:
    """Time a function against its peer.

    Returns:
        A line for the verdict (what was measured, or why nothing was), and the problem when it is too slow.
    """
    reason = why_not()
    if reason:
        return reason, None
    try:
        args = tuple(speed.inputs())
        functions = {"yours": lambda: student(*args, **speed.options), speed.peer_name: lambda: speed.peer(*args)}
        watch = stopwatch_for(functions)
    except torch.OutOfMemoryError:
        return "speed is not checked here: the GPU has too little free memory for inputs that are worth timing", None
    slow: list[Reading] = []
    while len(slow) < READINGS:
        reading = _read(speed, timing.compare(functions, rounds=speed.rounds, stopwatch=watch))
        if reading.reached >= speed.at_least:
            before = f"; before that {_listed(slow)}" if slow else ""
            return reading.line + before, None
        slow.append(reading)
        if len(slow) < READINGS:
            print(f"timed again, since {speed.at_least:g} times {speed.peer_name} was expected: {reading.line}")
    if doubt := next((reading.doubt for reading in slow if reading.doubt), ""):
        return f"speed is not judged, {doubt}: {_listed(slow)} times the speed of {speed.peer_name}", None
    line = slow[-1].line
    cause = (
        "the traffic is within budget, so look at how memory is accessed (tile sizes, num_warps, coalescing: "
        "neighbouring lanes on neighbouring addresses) and at what moves on the chip (a transposed result of tl.dot)"
    )
    details = (f"timed {READINGS} times: {_listed(slow)}",)
    headline = f"expected at least {speed.at_least:g} times the speed of {speed.peer_name}, got {line}"
    return line, Problem(headline, cause, details)


def _listed(readings: Sequence[Reading]) -> str:
    return ", ".join(f"{reading.reached:.2f}" for reading in readings)


def _read(speed: Speed, times: Mapping[str, timing.Timing]) -> Reading:
    yours, peer = times["yours"], times[speed.peer_name]
    reached = timing.ratio(peer, yours).median
    rate = f" ({speed.bytes_moved / yours.median / 1e12:.2f} TB/s)" if speed.bytes_moved else ""
    line = (
        f"{reached:.2f} times the speed of {speed.peer_name}: {yours.median * 1e6:,.1f} µs{rate} against "
        f"{peer.median * 1e6:,.1f} µs on {runtime.gpu_name()}"
    )
    return Reading(reached, line, _doubt(speed, peer))


def _doubt(speed: Speed, peer: timing.Timing) -> str:
    """Why a reading says nothing about the student's code: what the peer shows of the GPU; '' if it shows nothing."""
    if peer.high > STEADY * peer.low:
        spread = f"from {peer.low * 1e6:,.0f} to {peer.high * 1e6:,.0f} µs"
        return f"since {speed.peer_name} itself took {spread}, as on a GPU that is shared or throttled"
    known = hardware.this_gpu() if speed.peer_bytes else None
    if known and speed.peer_bytes / peer.median < EXPECTED * known.memory_bandwidth:
        rate = f"{speed.peer_bytes / peer.median / 1e12:.2f} of {known.memory_bandwidth / 1e12:.2f} TB/s"
        return f"since {speed.peer_name} itself reaches {rate}, as on a GPU that is shared or throttled"
    return ""
