"""One launch of a kernel and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.kernel_profile.counters import Counters, total
from utils.kernel_profile.findings import Program


@dataclass
class LaunchProfile:
    """One launch: its grid, its arguments that are no tensors, and the error it ended with, if any.

    ``function`` is the kernel's, ``given`` all its arguments by name, as the launch was given them.
    ``cells`` and ``flops`` count by program and argument; ``written`` holds the first and the last element (counted in
    memory from the argument's pointer) that a program wrote, where races are looked for. ``blocks`` holds the shape of
    the largest block of lanes that one load or store of an argument had.
    """

    kernel: str
    grid: tuple[int, int, int] = (0, 0, 0)
    error: BaseException | None = None
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    function: Callable | None = None
    given: dict[str, Any] = field(default_factory=dict)
    cells: dict[tuple[Program, str], Counters] = field(default_factory=dict)
    flops: dict[Program, int] = field(default_factory=dict)
    written: dict[tuple[Program, str], tuple[int, int]] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    programs: int = 0
    done: bool = False
    _whole: Counters | None = None

    @property
    def counters(self) -> Counters:
        """Counts of the whole launch; up to where it is, while it runs."""
        if self._whole is None or not self.done:
            self._whole = total(self.cells.values())
            self._whole.flops = sum(self.flops.values())
        return self._whole

    @property
    def by_argument(self) -> dict[str, Counters]:
        """Counts of each tensor argument, in the order of the signature; dots belong to none."""
        result = {name: Counters() for name, _, _ in self.tensors}
        for (_, argument), counters in self.cells.items():
            result.setdefault(argument, Counters()).add(counters)
        return result

    @property
    def by_program(self) -> dict[Program, Counters]:
        """Counts of each program that moved or multiplied something."""
        result: dict[Program, Counters] = {}
        for (program, _), counters in self.cells.items():
            result.setdefault(program, Counters()).add(counters)
        for program, flops in self.flops.items():
            result.setdefault(program, Counters()).flops += flops
        return result
