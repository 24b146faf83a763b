"""What a check reads off a kernel's launches: its tile sizes, its traffic, its use of atomics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from utils.checks.cases import Case
from utils.checks.diagnoses import CaseResult
from utils.checks.problem import Problem
from utils.checks.traffic import Budget, over_budget
from utils.kernel_profile import Counters, LaunchProfile, profile_kernel

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
