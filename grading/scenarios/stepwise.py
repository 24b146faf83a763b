"""A scenario written as a generator: one observation after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType

from grading.scenarios import Observation

#: Gives the names and the observations of a scenario, in their order.
Observe = Callable[[ModuleType, int], Iterator[tuple[str, Observation]]]


def collected(observe: Observe) -> Callable[[ModuleType, int], dict[str, Observation]]:
    """The ``run`` of a scenario; whoever wants to stop at the first difference takes its ``__wrapped__``."""

    @functools.wraps(observe)
    def run(package: ModuleType, seed: int) -> dict[str, Observation]:
        return dict(observe(package, seed))

    return run
