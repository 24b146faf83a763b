"""When the kernels of one training step ran, arithmetic and collectives each in a lane, from PyTorch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.trace import short_name

#: The parts of a step that :class:`benchmarks.data_parallel_methods.Method` names for the profiler.
PHASES = ("forward", "backward", "optimizer")
#: Kernels of one lane and one phase that follow each other this closely, in seconds, are one span.
GAP = 5e-6
_STEP = "measured step"
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def timeline(step: Callable[[], object], settle: int = 2) -> list[dict[str, Any]]:
    """Run ``step`` under the profiler and return the spans of its GPU work; see :func:`spans`.

    Args:
        settle: steps before the one that is kept: the profiler starts up in the first.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(settle):
            step()
        torch.cuda.synchronize()
        with torch.profiler.record_function(_STEP):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return spans(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def spans(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The GPU work of the measured step as spans of time, in order of their start.

    Collectives are spans of their own; other kernels of a phase that leave no gap between them are one.

    Args:
        events: ``traceEvents`` of a Chrome trace as PyTorch writes it; ``ts`` and ``dur`` in microseconds.

    Returns:
        For each span ``lane`` ("compute" or "communication"), ``phase`` (in which the host launched it), ``name`` (of
        its first kernel), ``start`` and ``end`` in seconds from the step's first kernel on, ``kernels`` (how many it
        holds).

    Raises:
        RuntimeError: the trace holds no kernel of the step.
    """
    marks = [
        (e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"] in (*PHASES, _STEP)
    ]
    within = next(((start, end) for name, start, end in marks if name == _STEP), None)
    if within is None:
        raise RuntimeError(f"the profiler's trace has no mark {_STEP!r}")
    phases = [mark for mark in marks if mark[0] != _STEP and within[0] <= mark[1] <= within[1]]
    launched = {e.get("args", {}).get("correlation"): float(e["ts"]) for e in events if e.get("cat") in _LAUNCHES}
    found: list[dict[str, Any]] = []
    for event in sorted((e for e in events if e.get("cat") in _WORK), key=lambda e: float(e["ts"])):
        correlation = event.get("args", {}).get("correlation")
        at = None if correlation is None else launched.get(correlation)
        if at is None or not within[0] <= at <= within[1]:
            continue
        phase = next((name for name, start, end in phases if start <= at <= end), None)
        phase = phase or ("optimizer" if found else PHASES[0])  # what clears the gradients
        start = float(event["ts"]) * 1e-6
        span = {
            "lane": "communication" if "nccl" in event["name"].lower() else "compute",
            "phase": phase,
            "name": short_name(event["name"]),
            "start": start,
            "end": start + float(event["dur"]) * 1e-6,
            "kernels": 1,
        }
        _add(found, span)
    if not found:
        raise RuntimeError(f"the profiler saw no kernel of {_STEP!r}")
    first = min(span["start"] for span in found)
    for span in found:
        span["start"], span["end"] = round(span["start"] - first, 8), round(span["end"] - first, 8)
    return found


def _add(found: list[dict[str, Any]], span: dict[str, Any]) -> None:
    """Append a span, or lengthen the last one of arithmetic by it."""
    if span["lane"] == "compute":
        last = next((other for other in reversed(found) if other["lane"] == "compute"), None)
        if last and last["phase"] == span["phase"] and span["start"] - last["end"] <= GAP:
            last["end"] = max(last["end"], span["end"])
            last["kernels"] += 1
            return
    found.append(span)


def covered(of: Sequence[dict[str, Any]], by: Sequence[dict[str, Any]]) -> float:
    """Seconds of the spans ``of`` during which one of the spans ``by`` runs too; spans of ``by`` may overlap."""
    edges = sorted((span["start"], span["end"]) for span in by)
    merged: list[list[float]] = []
    for start, end in edges:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(max(0.0, min(span["end"], end) - max(span["start"], start)) for span in of for start, end in merged)
