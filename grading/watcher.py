"""Holds a tree of processes to its limits, and ends it whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
FEW = 24  # processes whose shared memory is told apart exactly; with more, looking takes longer than they need to fork


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. ``seconds`` is wall time; the rest are bytes, and processes of the whole tree."""

    seconds: float = 900.0
    memory: int = 4096 * MIB
    processes: int = 128
    file: int = 256 * MIB
    scratch: int = 512 * MIB
    work: int = 128 * MIB
    output: int = 512 * MIB


class Watcher(threading.Thread):
    """Looks at a tree of processes ten times a second and ends it when it is over a limit."""

    def __init__(self, process: subprocess.Popen, limits: Limits, folder: Path) -> None:
        super().__init__(daemon=True)
        self.process, self.limits, self.folder, self.reason = process, limits, folder, None
        self._over = threading.Event()

    def run(self) -> None:
        started = time.monotonic()
        while not self._over.wait(0.1) and self.process.poll() is None:
            broken = self._broken(time.monotonic() - started)
            if broken:
                self.reason = self.reason or broken
                kill_tree(self.process.pid)
                return

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()

    def _broken(self, seconds: float) -> str | None:
        limits, tree = self.limits, list(_tree(self.process.pid))
        if seconds > limits.seconds:
            return f"it ran longer than {limits.seconds:g} seconds"
        if len(tree) > limits.processes:
            return f"it started more than {limits.processes} processes"
        memory = sum(map(_own_memory, tree))
        if memory > limits.memory and len(tree) < FEW:
            memory = sum(map(_fair_memory, tree))
        if memory > limits.memory:
            return f"it used more than {limits.memory // MIB:,} MiB of memory"
        if _size(self.folder) > limits.output:
            return f"it wrote more than {limits.output // MIB:,} MiB"
        return None


def _tree(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)


def _own_memory(process: psutil.Process) -> int:
    """Bytes that this process holds for itself; pages of libraries that it shares with others count for nobody."""
    with contextlib.suppress(psutil.Error):
        memory = process.memory_info()
        return max(memory.rss - memory.shared, 0)
    return 0


def _fair_memory(process: psutil.Process) -> int:
    """The same, where a page that a parent and its forks share counts once in all; slow to find out."""
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def kill_tree(pid: int) -> None:
    """Kill a process and all below it.

    In a sandbox the kernel ends everything at once when the first process inside is gone, which is a child of ours; so
    the first two generations go first. A fork bomb is faster than a walk through its tree.
    """
    with contextlib.suppress(OSError):
        for task in Path("/proc", str(pid), "task").iterdir():
            for child in (task / "children").read_text().split():
                _kill(int(child))
    _kill(pid)
    for process in [*_tree(pid)]:
        _kill(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
