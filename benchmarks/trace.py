"""Which GPU kernels a call launches, how long each runs, on what grid: read from the PyTorch profiler's trace."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MARKER = "spin_kernel"  # what torch.cuda._sleep launches; no operator uses it
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """One launch on the GPU: its name, time in seconds, and grid in blocks (a copy or fill has grid (1, 1, 1))."""

    name: str
    seconds: float
    grid: tuple[int, int, int]


def kernels_of(calls: Sequence[Callable[[], object]]) -> list[list[Kernel]]:
    """Run each call once under the profiler; return the kernels that each one launched, in order.

    Raises:
        RuntimeError: the profiler saw no kernels, or not one group for each call.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in calls:
            torch.cuda._sleep(1)
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return split(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], len(calls))


def split(events: Sequence[dict[str, Any]], groups: int) -> list[list[Kernel]]:
    """Cut a trace's GPU work into ``groups`` at the marker kernels that begin each.

    Args:
        events: ``traceEvents`` of a Chrome trace as PyTorch writes it; ``ts`` and ``dur`` in microseconds.
        groups: How many are expected.

    Raises:
        RuntimeError: the trace holds another number of groups, or no work at all.
    """
    work = sorted((e for e in events if e.get("cat") in _WORK), key=lambda e: float(e["ts"]))
    found: list[list[Kernel]] = []
    for event in work:
        if _MARKER in event["name"]:
            found.append([])
        elif found:
            grid = event.get("args", {}).get("grid", [1, 1, 1])
            found[-1].append(Kernel(event["name"], float(event["dur"]) * 1e-6, tuple(int(side) for side in grid)))
    if len(found) != groups:
        raise RuntimeError(f"the profiler's trace should hold {groups} groups of kernels, it holds {len(found)}")
    return found


def short_name(name: str, most: int = 110) -> str:
    """A kernel's name without return type, template arguments and parameters, cut at ``most`` characters.

    Element-wise kernels of PyTorch share one name; what they compute follows in brackets.
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    configured = re.match(r"cutlass::\w+<(cutlass\w+)", plain)
    if configured:  # the first template argument holds tile, instruction and alignment
        return configured.group(1)[:most]
    operation = re.search(
        r"\w*Functor\w*|\w+KernelImpl\b|\w+_kernel_cuda\b|\w+_kernel_impl\w*", plain[plain.find("<") + 1 :]
    )
    kept = []
    depth = 0
    for character in plain:
        depth += character in "<("
        if depth == 0:
            kept.append(character)
        depth -= character in ">)" and depth > 0
    short = "".join(kept).strip() or plain
    if operation and "<" in plain and operation.group() not in short:
        short += f" [{operation.group()}]"
    return short[:most]
