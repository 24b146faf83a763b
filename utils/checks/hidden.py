"""What a hidden case is made of: numbers drawn from a seed, tensors in any memory layout, observations, tolerances.

``observe(package, seed)`` of an exercise calls the public functions of a lab's package on drawn inputs and returns
**observations**: numbers, texts and tensors by name. It holds no reference and no expected value. The same function on
the solution gives what is expected, and :mod:`grading.scenarios.compare` holds the two against each other, outside of
the process that ran the student's code. Whoever reads it learns which cases are tried, and nothing else.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from utils import runtime
from utils.checks.question import Question

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


# ---- tensors ----
#: Layout -> how the student reads of it.
LAYOUTS = {
    "whole": "a contiguous tensor",
    "padded": "a slice",
    "strided": "every second column",
    "transposed": "a transposed tensor",
    "turned": "a tensor with its first axes swapped",
}
_MARGIN = 8192  # elements on each side; it keeps a start at a multiple of 16 bytes


def placed(values: torch.Tensor, layout: str = "whole") -> torch.Tensor:
    """``values`` in another layout, on the device of the kernels, inside of a larger tensor of NaN.

    ``padded``: rows further apart than they are long; ``strided``: elements of a row two apart; ``transposed``: the
    last two axes stored in the other order; ``turned``: the first two axes swapped, so that no single stride leads
    from row to row.

    Raises:
        ValueError: the layout is unknown, or has more axes than the values.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    shape = tuple(values.shape)
    if len(shape) < {"whole": 0, "turned": 3, "transposed": 2}.get(layout, 1):
        raise ValueError(f"a tensor of shape {shape} cannot be {layout}")
    if layout == "whole":
        view = _home(shape, values.dtype)
    elif layout == "padded":
        view = _home((*shape[:-1], shape[-1] + 9), values.dtype)[..., 5 : 5 + shape[-1]]
    elif layout == "strided":
        view = _home((*shape[:-1], 2 * shape[-1]), values.dtype)[..., ::2]
    elif layout == "transposed":
        view = _home((*shape[:-2], shape[-1], shape[-2] + 3), values.dtype)[..., : shape[-2]].transpose(-1, -2)
    else:
        home = _home((shape[1], shape[0] + 1, *shape[2:-1], shape[-1] + 3), values.dtype)
        view = home[:, 1:, ..., : shape[-1]].transpose(0, 1)
    return view.copy_(values)


def _home(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    flat = torch.full((count + 2 * _MARGIN,), math.nan, dtype=dtype, device=runtime.DEVICE)
    return flat[_MARGIN : _MARGIN + count].view(shape)


def normal(
    draw: Draw, *shape: int, dtype: torch.dtype = torch.float32, layout: str = "whole", scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers of that shape, dtype and layout."""
    return placed(draw.normal(*shape, dtype=dtype, scale=scale), layout)


def words(*parts: str, dtype: torch.dtype = torch.float32, layout: str = "whole") -> str:
    """What a case is, for the name of an observation: ``"a slice, float16"``."""
    name = str(dtype).removeprefix("torch.")
    return ", ".join([*parts, LAYOUTS[layout], name])


def leaves_alone(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> tuple[Any, bool]:
    """What a function returns, and whether the tensors that it was given hold afterwards what they held before."""
    before = [tensor.detach().clone() for tensor in tensors]
    result = function(*tensors, **options)
    after = [tensor.detach() for tensor in tensors]
    same = [bool(((now == old) | ((now != now) & (old != old))).all()) for now, old in zip(after, before)]
    return result, all(same)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the same strides inside of a larger tensor of NaN, or of -77: a read past its edges shows."""
    once = x[tuple(slice(None, 1 if stride == 0 else None) for stride in x.stride())]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    gap = math.nan if x.dtype.is_floating_point else -77
    home = torch.full((extent + 2 * _MARGIN,), gap, dtype=x.dtype, device=x.device)
    home.as_strided(once.shape, once.stride(), _MARGIN).copy_(once)
    return home.as_strided(x.shape, x.stride(), _MARGIN)


# ---- observations one after the other ----
#: Gives the names and the observations of a scenario, in their order.
Observe = Callable[[ModuleType, int], Iterator[tuple[str, Observation]]]


def collected(observe: Observe) -> Callable[[ModuleType, int], dict[str, Observation]]:
    """The ``run`` of a scenario; whoever wants to stop at the first difference takes its ``__wrapped__``."""

    @functools.wraps(observe)
    def run(package: ModuleType, seed: int) -> dict[str, Observation]:
        return dict(observe(package, seed))

    return run


def tried(
    exercise: str,
    function: str,
    outputs: Sequence[str],
    cases: Callable[[int], Sequence[Any]],
    inputs: Callable[[Any], Sequence[torch.Tensor]],
    run: Callable[[ModuleType], Callable[..., Any]] | None = None,
) -> Callable[[ModuleType, int], Observed]:
    """The ``observe`` of an exercise whose function is tried on the cases of its check, drawn from another seed.

    Args:
        exercise: its number.
        function: the student's function, as its observations name it.
        outputs: the names of what it returns; one that is empty is not named.
        cases: seed -> :class:`utils.checks.cases.Case` list. Each that is tried has a kind, layout, dtype or magnitude
            that those before it lack; those whose rows lie gigabytes apart are left out.
        inputs: case -> what the function is called with, besides the case's options.
        run: package -> what is called; by default the function of that name.
    """

    def observe(package: ModuleType, seed: int) -> Observed:
        called = run(package) if run else getattr(package, function)
        observed, met = Observed(), set()
        for case in cases(random.Random(f"{seed}/{exercise}/{function}").getrandbits(30)):
            edges = {case.kind, case.layout, case.dtype, case.magnitude}
            if case.layout == "far" or edges <= met:
                continue
            met |= edges
            results, kept = leaves_alone(called, *map(guarded, inputs(case)), **case.options)
            for output, value in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
                observed[f"{output} of {function}, {case.label}" if output else f"{function}, {case.label}"] = value
            observed[f"{function} leaves its inputs as they are, {case.label}"] = kept
        return observed

    return observe


def asked(exercise: str, *questions: Question) -> Callable[[ModuleType, int], Observed]:
    """The ``run`` of a scenario that asks an exercise's own questions, with cases of its seed.

    An observation holds the answers to all cases of a question, or of one value of what it is split by.
    """

    def run(package: ModuleType, seed: int) -> Observed:
        answers: dict[str, list[Observation]] = {}
        for question in questions:
            for case in question.cases(random.Random(f"{seed}/{exercise}/{question.name}")):
                split = f" with {question.split_by}={case.arguments[question.split_by]}" if question.split_by else ""
                answer = getattr(package, question.name)(**case.arguments)
                answers.setdefault(question.name + split, []).append(answer)
        return Observed(answers)

    return run
