"""Warms a GPU before a comparison: a card that was idle clocks high for a while, and every rate falls as it heats."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from utils import runtime

#: Enough for an H100 to reach the clock that it keeps under load.
SECONDS = 2.0


def thermal_warmup(work: Callable[[], object], seconds: float = SECONDS) -> int:
    """Repeat ``work`` until ``seconds`` have passed, waiting for the GPU each time; return the number of calls.

    Raises:
        ValueError: ``seconds`` is negative.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds must not be negative, got {seconds!r}")
    calls, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        work()
        if runtime.HAS_GPU:
            torch.cuda.synchronize(runtime.DEVICE)
        calls += 1
    return calls
