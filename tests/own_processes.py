"""Counts the processes that a test starts, and not those that other files' tests have left in the same worker.

Python itself leaves one: multiprocessing's resource tracker stays until its process ends.
"""

from __future__ import annotations

import psutil


class OwnProcesses:
    """The children of this process that were started after this object was made, or after ``reset``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self._before = set(psutil.Process().children(recursive=True))

    def __call__(self, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive) if child not in self._before]
