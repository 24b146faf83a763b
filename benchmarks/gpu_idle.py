"""How long the GPU has nothing to do while an engine decodes, read from the PyTorch profiler's trace.

Each step begins with one copy of its inputs to the GPU. So the time without any work is told apart by where it lies:
before and behind that copy the GPU waits for the host (``between`` steps); elsewhere one kernel has ended and the next,
which is launched already, has not begun (``within`` a step).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from utils.record_schemas import NOT_NEGATIVE, POSITIVE, SIZE

#: What :func:`of` returns, for a benchmark's schema.
IDLE = {"steps": SIZE, "seconds": POSITIVE, "busy": POSITIVE, "between": NOT_NEGATIVE, "within": NOT_NEGATIVE}
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_INPUTS = "HtoD"


def measure(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """:func:`of` some calls of ``step`` under the profiler."""
    return of(profiled(step, steps))


def profiled(step: Callable[[], object], steps: int) -> list[dict[str, Any]]:
    """The GPU's work in some calls of ``step``, in order: events of a Chrome trace, times in microseconds."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return sorted((e for e in events if e.get("cat") in _WORK), key=lambda event: float(event["ts"]))


def of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whole steps, their seconds, and how many of these the GPU works, waits between steps, and within them.

    Args:
        events: the GPU's work in order, ``name``, ``ts`` and ``dur`` each, in microseconds.

    Raises:
        ValueError: fewer than two steps begin in it.
    """
    firsts = [place for place, event in enumerate(events) if _INPUTS in event["name"]]
    if len(firsts) < 2:
        raise ValueError(f"a trace must hold the beginnings of two steps at least, got {len(firsts)}")
    begin, end = (float(events[place]["ts"]) for place in (firsts[0], firsts[-1]))
    reached, between, within = begin, 0.0, 0.0
    for place in range(firsts[0], firsts[-1] + 1):
        start = float(events[place]["ts"])
        gap = max(0.0, start - reached)
        if _INPUTS in events[place]["name"] or _INPUTS in events[max(0, place - 1)]["name"]:
            between += gap
        else:
            within += gap
        reached = max(reached, start + float(events[place]["dur"]))
    seconds = end - begin
    return {
        "steps": len(firsts) - 1,
        "seconds": seconds * 1e-6,
        "busy": (seconds - between - within) * 1e-6,
        "between": between * 1e-6,
        "within": within * 1e-6,
    }
