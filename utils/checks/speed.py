"""Whether a student's function is fast enough, on a GPU: timed against PyTorch in the same rounds.

Without a GPU nothing is timed (the interpreter's time says nothing about a GPU), nor in CI (a shared machine's time
says nothing about the code); one line says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils import runtime, timing
from utils.checks.problem import Problem


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


def run_speed(speed: Speed, student: Callable[..., Any]) -> tuple[str, Problem | None]:
    """Time a function against its peer.

    Returns:
        A line for the verdict (what was measured, or why nothing was), and the problem when it is too slow.
    """
    reason = why_not()
    if reason:
        return reason, None
    args = tuple(speed.inputs())
    times = timing.compare(
        {"yours": lambda: student(*args, **speed.options), speed.peer_name: lambda: speed.peer(*args)},
        rounds=speed.rounds,
    )
    yours, peer = times["yours"], times[speed.peer_name]
    reached = timing.ratio(peer, yours).median
    rate = f" ({speed.bytes_moved / yours.median / 1e12:.2f} TB/s)" if speed.bytes_moved else ""
    line = (
        f"{reached:.2f} times the speed of {speed.peer_name}: {yours.median * 1e6:,.1f} µs{rate} against "
        f"{peer.median * 1e6:,.1f} µs on {runtime.gpu_name()}"
    )
    if reached >= speed.at_least:
        return line, None
    cause = (
        "the traffic is within budget, so look at how memory is accessed: tile sizes, num_warps, "
        "and coalescing (neighbouring lanes on neighbouring addresses)"
    )
    return line, Problem(
        f"expected at least {speed.at_least:g} times the speed of {speed.peer_name}, got {line}", cause
    )
