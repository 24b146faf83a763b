"""What a check reads off a kernel's launches: its tile sizes, its traffic, its use of atomics.

Where students name and cut their kernels themselves, launches are told apart by the tensors whose memory they touch:
:func:`halves`, :func:`by_memory`, :func:`outside_limits`, :func:`tile_over` and :func:`tiling_over` need no name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.diagnoses import CaseResult
from utils.checks.problem import Problem
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, over_budget
from utils.kernel_profile import Counters, LaunchProfile, Profile, profile_kernel

#: A budget as a function of the case and of what the kernel was launched with (:func:`sizes`).
BudgetOf = Callable[[Case, Mapping[str, Any]], Budget]


def tile_sizes(student: Callable[..., Any], args: Sequence[Any], kernel: str, **otherwise: int) -> dict[str, Any]:
    """The tile sizes (``BLOCK``, ``ROWS``) with which a function launches one of its kernels.

    A lab's host code chooses them by the shape and the machine, so a check that wants several tiles asks first.
    A function that does not get as far as the launch (a stub, a mistake) gives ``otherwise``, the values by default.
    """
    try:
        with profile_kernel(check_races=False) as profile:
            student(*args)
    except Exception:  # the check itself runs the function again, and says what is wrong
        if not profile.launches:
            return otherwise
    found = next((launch for launch in profile.launches if launch.kernel == kernel), None)
    return {**otherwise, **(sizes(found) if found else {})}


def sizes(launch: LaunchProfile) -> dict[str, Any]:
    """The integers that a launch was given, by name (``BLOCK``, ``num_rows``), and its ``grid``."""
    return {name: value for name, value in launch.scalars.items() if type(value) is int} | {"grid": launch.grid}


def launched(trials: Sequence[CaseResult], kernel: str) -> dict[str, Any] | None:
    """What :func:`sizes` says of the first launch of ``kernel`` in the first trial that has one."""
    for trial in trials:
        for launch in trial.profile.launches if trial.profile is not None else ():
            if launch.kernel == kernel:
                return sizes(launch)
    return None


def never_launched(kernel: str, trial: CaseResult) -> Problem:
    """What to say of a trial that should have launched a kernel and did not."""
    ran = ", ".join(dict.fromkeys(launch.kernel for launch in trial.profile.launches)) or "none"
    return Problem(f"{kernel} is never launched", f"the kernels that are launched: {ran}; keep the stub's names")


class _Kernel:
    """All launches of one kernel, as :func:`utils.checks.traffic.over_budget` looks at a profile."""

    def __init__(self, launches: Sequence[LaunchProfile]) -> None:
        self.launches = launches
        self.by_argument: dict[str, Counters] = {}
        self.flops = 0
        for launch in launches:
            self.flops += launch.counters.flops
            for name, counters in launch.by_argument.items():
                self.by_argument.setdefault(name, Counters()).add(counters)
        self.bytes_loaded = sum(counters.bytes_loaded for counters in self.by_argument.values())
        self.bytes_stored = sum(counters.bytes_stored for counters in self.by_argument.values())


def within(kernel: str, budget: BudgetOf) -> Callable[[CaseResult], Problem | None]:
    """An inspection: the launches of one kernel keep to a budget."""

    def inspect(trial: CaseResult) -> Problem | None:
        launches = [launch for launch in trial.profile.launches if launch.kernel == kernel]
        if not launches:
            return never_launched(kernel, trial) if trial.case.numel(*trial.case.sizes) else None
        return over_budget(budget(trial.case, sizes(launches[0])), _Kernel(launches), trial.case)

    return inspect


def no_atomics(trial: CaseResult) -> Problem | None:
    """An inspection: nothing is added up by atomics."""
    for name, counters in trial.profile.by_argument.items():
        if counters.bytes_atomic:
            return Problem(
                f"{name} is updated by atomic operations ({counters.bytes_atomic:,} bytes)",
                "programs reach an atomic in a different order on each run, and floating-point sums depend on it, so "
                "the gradient differs from run to run; give each row split its own row of partial sums",
            )
    return None


def cdiv(a: int, b: int) -> int:
    """Tiles of ``b`` that cover ``a``."""
    return -(-a // b)


# ---- launches of kernels whose names are the student's


def arguments_in(launch: LaunchProfile, tensor: torch.Tensor) -> list[str]:
    """Names of a launch's arguments that lie in a tensor's memory."""
    home = tensor.untyped_storage().data_ptr()
    given = {name: getattr(value, "base", value) for name, value in launch.given.items()}
    return [
        name
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == home
    ]


def halves(trial: CaseResult, out: torch.Tensor) -> dict[str, list[LaunchProfile]]:
    """The launches of the ``forward`` pass, up to the last one that stores to ``out``, and of the ``backward`` pass."""
    launches = trial.profile.launches
    stored = [
        number
        for number, launch in enumerate(launches, start=1)
        if any(launch.by_argument[name].bytes_stored for name in arguments_in(launch, out))
    ]
    last = max(stored, default=0)
    return {"forward": launches[:last], "backward": launches[last:]}


def by_memory(launches: Sequence[LaunchProfile], tensors: Mapping[str, torch.Tensor]) -> dict[str, Counters]:
    """What launches do to the memory of each named tensor, and to all other memory, under ``""``."""
    found = {name: Counters() for name in (*tensors, "")}
    for launch in launches:
        owner = {argument: name for name, tensor in tensors.items() for argument in arguments_in(launch, tensor)}
        for argument, counters in launch.by_argument.items():
            found[owner.get(argument, "")].add(counters)
    return found


@dataclass(frozen=True)
class Limits:
    """Least and most bytes that launches may load and store, and what to say where they do more or less.

    Attributes:
        loads, stores: (least, most).
        one: Bytes of one pass over the tensor; 0 where bytes are to be named, not passes.
        more: The likely cause of more loads or stores.
        less: The likely cause of fewer.
    """

    loads: tuple[float, float] = (0, 0)
    stores: tuple[float, float] = (0, 0)
    one: int = 0
    more: str = ""
    less: str = ""


def outside_limits(
    half: str, launches: Sequence[LaunchProfile], tensors: Mapping[str, torch.Tensor], limits: Mapping[str, Limits]
) -> Problem | None:
    """The first tensor whose memory the launches of a ``half`` load or store more or less than they may, or None.

    The limits of ``""`` hold for all memory that is no named tensor's.
    """
    found = by_memory(launches, tensors)
    for name, limit in limits.items():
        for verb, (least, most), counted in (
            ("loaded", limit.loads, found[name].bytes_loaded),
            ("stored", limit.stores, found[name].bytes_stored),
        ):
            if least <= counted <= most:
                continue
            wanted = (
                f"{least:,.0f}"
                if least == most
                else f"{least:,.0f} to {most:,.0f}"
                if least
                else f"at most {most:,.0f}"
            )
            headline = f"{name or 'other memory'}: expected {wanted} bytes {verb} in the {half} pass, got {counted:,}"
            if limit.one:
                headline = (
                    f"{name} is {verb} {counted / limit.one:.1f} times in the {half} pass, expected "
                    f"{_times(least, most, limit.one)} ({counted:,} bytes, expected {wanted})"
                )
            return Problem(headline, limit.more if counted > most else limit.less)
    return None


def _times(least: float, most: float, one: int) -> str:
    low, high = f"{least / one:.3g}", f"{most / one:.3g}"
    return low if low == high else f"at most {high}" if least == 0 else f"{low} to {high}"


def tile_over(profile: Profile, tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the largest block of lanes with which a launch loads or stores a tensor; (1, 1) for none."""
    blocks = [
        launch.blocks[name]
        for launch in profile.launches
        for name in arguments_in(launch, tensor)
        if name in launch.blocks
    ]
    *rows, columns = max(blocks, key=math.prod, default=()) or (1,)
    return math.prod(rows), columns


def probed_tile(student: Callable[..., Any], args: Sequence[Any], tensor: torch.Tensor) -> tuple[int, int]:
    """What :func:`tile_over` says of an argument of a function, which is run; (1, 1) if it does not get so far."""
    try:
        with profile_kernel(check_races=False) as profile:
            student(*args)
    except Exception:  # the check itself runs the function again, and says what is wrong
        pass
    return tile_over(profile, tensor)


def tiling_over(trials: Sequence[CaseResult], position: int) -> Tiling | None:
    """Which program wrote which rows of an output (..., col), the one at ``position``, read off what they wrote.

    None where programs do not take whole rows, as many each, one after the other, and where a single one wrote: it may
    be meant to write more.
    """
    trial = trials[0]
    if trial.profile is None or len(trial.outputs) <= position:
        return None
    out, axes = trial.outputs[position], list(trial.case.sizes)
    width = out.shape[-1] if out.dim() == len(axes) and out.dim() else 1
    axes = axes[: out.dim()]
    for launch in trial.profile.launches:
        for name in arguments_in(launch, out):
            wrote = {program: span for (program, written), span in launch.written.items() if written == name}
            rows = [(program[0], first // width, last // width) for program, (first, last) in wrote.items()]
            if len(rows) < 2 or tuple(launch.grid[1:]) != (1, 1):
                continue
            height = max(last - first + 1 for _, first, last in rows)
            if all(first == program * height for program, first, _ in rows):
                leading = axes[:-1] if len(axes) == len(trial.case.sizes) else axes
                key = "*".join(leading)
                return Tiling(axes, tiles={key: height}, grid=key) if leading else None
    return None
