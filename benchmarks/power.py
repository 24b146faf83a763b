"""Clock, power and temperature of a GPU while one function has it for itself, from NVIDIA's management interface."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from utils import runtime

#: What ``nvidia-smi`` is asked for, with the factor that gives SI units (degrees stay Celsius).
FIELDS = {"clock_hz": ("clocks.sm", 1e6), "watts": ("power.draw.instant", 1.0), "celsius": ("temperature.gpu", 1.0)}
#: Seconds a function runs before anything is read, and while readings are taken.
SETTLE = 1.0
SECONDS = 2.0
BATCH = 20

Readings = Callable[[], list[str]]


def meter() -> Readings:
    """Start reading the GPU in use every 50 ms; what is returned stops it and gives the lines that were read.

    Raises:
        RuntimeError: ``nvidia-smi`` cannot be started.
    """
    command = [
        "nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(runtime.DEVICE).uuid}", "--loop-ms=50",
        f"--query-gpu={','.join(field for field, _ in FIELDS.values())}", "--format=csv,noheader,nounits",
    ]  # fmt: skip
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        raise RuntimeError(f"power and clock come from nvidia-smi, which does not start: {error}") from error

    def stop() -> list[str]:
        process.terminate()
        text, _ = process.communicate()
        return text.splitlines()

    return stop


def parse(lines: list[str]) -> dict[str, float]:
    """Medians of the readings in ``lines``; what is no full line of numbers (the last may be cut) is left out.

    Raises:
        RuntimeError: no line can be read.
    """
    rows = []
    for line in lines:
        try:
            row = [float(value) for value in line.split(",")]
        except ValueError:
            continue
        if len(row) == len(FIELDS):
            rows.append(row)
    if not rows:
        raise RuntimeError(f"nvidia-smi gave no reading of clock, power and temperature, only {lines[:2]}")
    columns = zip(*rows, strict=True)
    return {name: statistics.median(column) * factor for (name, (_, factor)), column in zip(FIELDS.items(), columns)}


def alone(
    call: Callable[[], object],
    *,
    settle: float = SETTLE,
    seconds: float = SECONDS,
    start: Callable[[], Readings] = meter,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run ``call`` and nothing else for a while.

    Args:
        settle, seconds: How long before readings begin, and how long they go on.
        start: Starts the meter.
        clock: Seconds.

    Returns:
        ``seconds`` of a call, ``clock_hz``, ``watts`` and ``celsius``, medians over the readings.
    """

    def lap() -> None:
        for _ in range(BATCH):
            call()
        if runtime.HAS_GPU:
            torch.cuda.synchronize(runtime.DEVICE)

    begin = clock()
    while clock() - begin < settle:
        lap()
    stop = start()
    calls, begin = 0, clock()
    try:
        while calls == 0 or clock() - begin < seconds:
            lap()
            calls += BATCH
        passed = clock() - begin
    finally:
        lines = stop()
    return {"seconds": passed / calls, **parse(lines)}
