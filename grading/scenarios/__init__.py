"""Hidden scenarios: what a student's functions do with inputs that no release holds.

A scenario calls the public functions of a lab's package on inputs drawn from a seed and returns **observations**:
numbers, texts and tensors. It holds no reference and no expected value. The same scenario on the solution gives what is
expected, and :mod:`grading.scenarios.compare` holds the two against each other, outside of the process that ran the
student's code. Whoever reads a scenario thus learns which cases are tried, and nothing else.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import utils.runtime  # noqa: F401  (first: PyTorch takes less time through it)

import torch  # isort: skip

#: What a scenario returns under each name: a tensor, a number, a text, a truth value, None, or lists of them.
Observation = Any


class Observed(dict[str, Observation]):
    """Observations by name, each name once, in the order in which they are made."""

    def __setitem__(self, name: str, value: Observation) -> None:
        if name in self:
            raise ValueError(f"there are two observations of the name {name!r}")
        super().__setitem__(name, value)

    def __ior__(self, more: Mapping[str, Observation]) -> Observed:
        for name, value in more.items():
            self[name] = value
        return self


#: Allowed relative error of a floating-point tensor, by dtype: two units in the last place of the 16-bit dtypes, and
#: room for float32 sums in another order. An integer or a truth value must be equal.
BY_DTYPE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
#: Allowed relative error of a Python float.
FLOAT = 1e-9
#: What a relative error is relative to.
MAGNITUDES = ("tensor", "row", "element")


@dataclass(frozen=True)
class Tolerance:
    """How far an observation may be from the expected one; compared in float64.

    An element may be off by ``relative * magnitude + absolute``. The magnitude is the largest finite absolute value
    that is expected in the whole ``"tensor"``, in the element's ``"row"`` (along the last axis), or of the
    ``"element"`` itself. ``relative`` None takes :data:`BY_DTYPE` for a tensor and :data:`FLOAT` for a number,
    ``times`` over.
    """

    relative: float | None = None
    absolute: float = 0.0
    of: str = "row"
    times: float = 1.0

    def __post_init__(self) -> None:
        if self.of not in MAGNITUDES:
            raise ValueError(f"of must be one of {', '.join(MAGNITUDES)}, got {self.of!r}")
        for name, value in (("relative", self.relative), ("absolute", self.absolute)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")


@dataclass(frozen=True)
class Scenario:
    """One exercise on hidden inputs.

    ``run(package, seed)`` returns the observations by name. A name begins with the function that it is about and says
    in the student's words what was special: ``"gelu of a strided view"``. A student reads it; no input is in it.
    ``tolerances`` maps the beginning of a name to what holds for it (the longest beginning counts), ``tolerance``
    holds for the rest.
    """

    exercise: str
    run: Callable[[ModuleType, int], Mapping[str, Observation]]
    tolerance: Tolerance = field(default_factory=Tolerance)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)

    def tolerance_of(self, name: str) -> Tolerance:
        """What holds for the observation of that name."""
        fitting = [beginning for beginning in self.tolerances if name.startswith(beginning)]
        return self.tolerances[max(fitting, key=len)] if fitting else self.tolerance


class Draw:
    """What a seed draws for one exercise: ``random`` for sizes, :meth:`normal` for tensors."""

    def __init__(self, seed: int, exercise: str) -> None:
        self.random = random.Random(f"{seed}/{exercise}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", scale: float = 1.0
    ) -> torch.Tensor:
        """Normal numbers of that shape and dtype on ``device``."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype).to(device)

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.random.randint(low, high)


def scenarios(lab_name: str) -> tuple[Scenario, ...]:
    """The scenarios of a lab (``"lab2"`` or ``"lab2_triton_kernels"``), in the order of its exercises.

    Raises:
        ValueError: the name is no lab's, or the lab has no scenarios.
    """
    found = re.match(r"(lab\d+)(_|$)", lab_name)
    if found is None:
        raise ValueError(f"a lab is named like lab2 or lab2_triton_kernels, got {lab_name!r}")
    name = f"{__name__}.{found[1]}"
    try:
        return importlib.import_module(name).SCENARIOS
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"there are no scenarios of {lab_name}") from error


def chosen(lab_name: str, only: Sequence[str] | None = None) -> tuple[Scenario, ...]:
    """The scenarios of a lab, or those of the exercises in ``only``.

    Raises:
        ValueError: as :func:`scenarios`, or the lab has no exercise of such a number.
    """
    every = scenarios(lab_name)
    if only is None:
        return every
    if unknown := set(only) - {scenario.exercise for scenario in every}:
        raise ValueError(f"{lab_name} has no scenario of exercise {', '.join(sorted(unknown))}")
    return tuple(scenario for scenario in every if scenario.exercise in only)
