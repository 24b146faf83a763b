"""Holds a tensor that a student computed against a float64 reference, and explains how it differs.

The error allowed follows flash-attention's rule: at most ``factor`` times what plain PyTorch errs in the same dtype
on the same inputs, both against a reference in float64. A dtype's own rounding is thus never a student's fault, and
accumulating in float16 where PyTorch uses float32 is.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from utils.checks.problem import Problem
from utils.checks.tiling import Tiling
from utils.checks.uninitialized import uninitialized

#: A function's outputs, by position.
Outputs = tuple[torch.Tensor, ...]

_ENOUGH_SAMPLES = 512  # elements of an output from which its largest rounding error is a fair sample
_MOST_NEIGHBOURS = 16
_MOST_KEPT = 2**14  # elements of an input whose changes are kept for the next one of its shape


def as_outputs(result: Any) -> tuple[Any, ...]:
    """A function's result as a tuple of outputs."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def plain_outputs(result: Any) -> tuple[Any, ...]:
    """A function's result as outputs whose tensors are PyTorch's own kind and hold what they hold now.

    A subclass, or a method put onto a tensor, could compute when somebody looks at it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(torch.Tensor.detach(v) if isinstance(v, torch.Tensor) else v for v in as_outputs(result))


def upcast(value: Any) -> Any:
    """A floating-point tensor in float64 without its graph; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.detach().to(torch.float64)
    return value.detach() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Target:
    """What one output should be.

    ``right`` is the reference (float64, on the CPU); ``allowed`` the largest absolute error; ``dtype`` and ``shape``
    are those that the plain computation gives.
    """

    right: torch.Tensor
    allowed: float
    dtype: torch.dtype
    shape: tuple[int, ...]


def targets(
    reference: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    *,
    baseline: Callable[..., Any] | None = None,
    factor: float = 2.0,
    atol: float = 0.0,
) -> tuple[Target, ...]:
    """What each output of an answer should be, and how far it may be off.

    Args:
        reference: Plain PyTorch; called with float64 inputs it gives the right values.
        args, options: The inputs, in the dtype of the case, and keyword arguments.
        baseline: Plain PyTorch called with the inputs as they are; ``reference`` by default. Its error is the
            yardstick, and its dtypes and shapes are what an answer must have.
        factor: How many times the baseline's error is allowed.
        atol: Added to what is allowed.

    Returns:
        One target an output. Integer outputs must be equal. Where an output has few elements, the baseline's error is
        the largest over inputs that differ by a few units in the last place, since a single element may round luckily.

    Raises:
        ValueError: ``factor`` is less than 1 or ``atol`` negative.
    """
    if not factor >= 1 or not atol >= 0:
        raise ValueError(f"factor must be at least 1 and atol not negative, got {factor} and {atol}")
    with one_thread():
        return _targets(reference, args, dict(options or {}), baseline or reference, factor, atol)


def _targets(
    reference: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    plain_function: Callable[..., Any],
    factor: float,
    atol: float,
) -> tuple[Target, ...]:
    right = [value.detach().cpu() for value in as_outputs(reference(*map(upcast, args), **options))]
    plain = [value.detach() for value in as_outputs(plain_function(*args, **options))]
    errors = [_largest_difference(p, r) for p, r in zip(plain, right)]
    smallest = min((value.numel() for value in plain), default=0)
    for turn in range(0 if smallest == 0 else min(_MOST_NEIGHBOURS, _ENOUGH_SAMPLES // smallest)):
        near = [_neighbour(value, turn) for value in args]
        again = as_outputs(plain_function(*near, **options))
        exact = as_outputs(reference(*map(upcast, near), **options))
        errors = [max(e, _largest_difference(a, x)) for e, a, x in zip(errors, again, exact)]
    return tuple(
        Target(r.double(), _allowed(e, p.dtype, r, factor, atol), p.dtype, tuple(p.shape))
        for r, p, e in zip(right, plain, errors)
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Many operators on small tensors: waiting for other threads would cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _allowed(error: float, dtype: torch.dtype, right: torch.Tensor, factor: float, atol: float) -> float:
    if not dtype.is_floating_point:
        return 0.0
    finite = right[torch.isfinite(right)].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    # half a unit in the last place of the output, and a few of the float32 arithmetic before it
    rounding = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32 if dtype.itemsize < 8 else dtype).eps
    if dtype == torch.float32:  # powers of two that a GPU approximates err more than PyTorch's
        factor *= 1.5
    return factor * error + rounding * largest + atol


def _neighbour(value: Any, turn: int) -> Any:
    """Inputs a few units in the last place away, the same ones on each call."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return value
    few = value.numel() <= _MOST_KEPT
    factor = (_factors if few else _factors.__wrapped__)(value.shape, torch.finfo(value.dtype).eps, turn)
    return (value.detach().cpu().double() * factor).to(value.device, value.dtype)


@functools.lru_cache(maxsize=256)
def _factors(shape: torch.Size, eps: float, turn: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(turn)
    return (1 + 8 * eps * (torch.rand(shape, generator=source, device="cpu") - 0.5)).double()


def _largest_difference(value: torch.Tensor, right: torch.Tensor) -> float:
    """Among the elements that are finite in both."""
    if not value.numel():
        return 0.0
    difference = (value.detach().double().cpu() - right.detach().double().cpu()).abs()
    largest = difference.max().item()  # NaN where there is one
    if math.isfinite(largest):
        return largest
    difference = difference[torch.isfinite(difference)]
    return difference.max().item() if difference.numel() else 0.0


@dataclass(frozen=True)
class Difference:
    """How one output differs from its target; every tensor on the CPU.

    ``got`` and ``right`` are float64, ``bad`` marks the wrong elements, ``never_written`` those that hold what
    ``torch.empty`` left.
    """

    name: str
    got: torch.Tensor
    right: torch.Tensor
    allowed: float
    bad: torch.Tensor
    never_written: torch.Tensor
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return int(self.bad.sum())

    @property
    def largest_error(self) -> float:
        """The largest absolute error; NaN when a wrong element is NaN."""
        return (self.got - self.right).abs()[self.bad].max().item() if self.count else 0.0

    @property
    def first(self) -> tuple[int, ...]:
        """Index of the first wrong element, row-major."""
        return tuple(int(i) for i in np.unravel_index(int(self.bad.flatten().int().argmax()), self.bad.shape))


def agrees(got: torch.Tensor, right: torch.Tensor, allowed: float, dtype: torch.dtype) -> torch.Tensor:
    """Where ``got`` is within ``allowed`` of ``right`` (both float64, same shape): bool.

    A right value beyond the dtype's range is infinite there; infinities agree with themselves, and NaN with NaN.
    """
    if dtype.is_floating_point and right.numel():
        limit = torch.finfo(dtype).max
        low, high = right.aminmax()
        if not (-limit <= low and high <= limit):
            right = torch.where(right.abs() > limit * (1 + torch.finfo(dtype).eps), right.sign() * math.inf, right)
    near = (got - right).abs_() <= allowed
    if near.all():
        return near
    return (got == right) | near | (got.isnan() & right.isnan())


def difference(name: str, got: torch.Tensor, target: Target) -> Difference:
    """Compare one output, whose shape is the target's, with its target."""
    values = got.detach().double().cpu()
    bad = ~agrees(values, target.right, target.allowed, target.dtype)
    return Difference(name, values, target.right, target.allowed, bad, uninitialized(got).cpu(), got.dtype)


def wrong_form(name: str, got: Any, target: Target, inputs: Mapping[str, torch.Tensor]) -> Problem | None:
    """What is wrong with an output before its numbers are looked at: None when nothing is.

    Args:
        name: The output's name.
        got: What the student returned for it.
        target: What it should be.
        inputs: Input tensors by name: none may share memory with the output.
    """
    if not isinstance(got, torch.Tensor):
        cause = "the function ends without a return statement" if got is None else ""
        return Problem(f"expected {name} to be a tensor, got {got!r:.80}", cause)
    shape = tuple(got.shape)
    if shape != target.shape:
        return Problem(
            f"expected {name}.shape {_shape(target.shape)}, got {_shape(shape)}", _shape_cause(shape, target.shape)
        )
    if got.dtype != target.dtype:
        narrow = target.dtype.is_floating_point and target.dtype.itemsize < 4
        later = "; compute in float32 and convert when storing" if narrow else ""
        cause = f"allocate it with dtype=torch.{_dtype(target.dtype)}{later}"
        return Problem(f"expected {name}.dtype {_dtype(target.dtype)}, got {_dtype(got.dtype)}", cause)
    device = next((value.device for value in inputs.values()), got.device)
    if got.device != device:
        return Problem(
            f"expected {name} on {device}, as the inputs, got {got.device}", "allocate it with device=x.device"
        )
    for input_name, value in inputs.items():
        if got.numel() and got.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            cause = "a result is computed into a tensor of its own: an input, or a view of one, is none"
            return Problem(f"{name} shares memory with the input {input_name}", cause)
    return None


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_cause(got: tuple[int, ...], right: tuple[int, ...]) -> str:
    if sorted(got) == sorted(right):
        return "two axes are swapped"
    if math.prod(got) == math.prod(right):
        return "the number of elements is right: reshape the result to the shape of the input before returning it"
    if len(got) == len(right) and all(g >= r for g, r in zip(got, right)):
        return "the output is padded to whole tiles: allocate the exact size and mask the store"
    return ""


def changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether an input was modified in place: True when any element differs (NaN equals NaN)."""
    same = (before == after) | ((before != before) & (after != after))
    return not bool(same.all())


def number(value: float) -> str:
    """A value or an error as messages print it: ``0.81``, ``2.1e-03``, ``NaN``."""
    if math.isnan(value):
        return "NaN"
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"
    return f"{value:.1e}"


def _told_apart(got: float, right: float) -> tuple[str, str]:
    """Two different values with as many digits as it takes to see that they differ."""
    if number(got) != number(right):
        return number(got), number(right)
    digits = next((n for n in range(3, 17) if f"{got:.{n}g}" != f"{right:.{n}g}"), 17)
    return f"{got:.{digits}g}", f"{right:.{digits}g}"


def describe(difference: Difference, tiling: Tiling | None) -> tuple[str, list[str]]:
    """Headline and detail lines of a difference: how much, where first, who computed it, a map of the wrong tiles."""
    total = difference.bad.numel()
    headline = (
        f"{difference.count:,} of {total:,} elements differ "
        f"(max abs error {number(difference.largest_error)}, tolerance {number(difference.allowed)})"
    )
    first, shape = difference.first, tuple(difference.bad.shape)
    axes = tiling.axes if tiling else [f"axis{i}" for i in range(len(shape))]
    index = ", ".join(f"{axis}={i}" for axis, i in zip(axes, first))
    where = f"{difference.name}[{index}]" if shape else difference.name
    owner = f", computed by {tiling.describe(first, shape)}" if tiling and shape else ""
    got, right = _told_apart(difference.got[first].item(), difference.right[first].item())
    got = "never written" if difference.never_written[first] else got
    lines = [f"first mismatch: {where}{owner}", f"expected {right}, got {got}"]
    if tiling and shape:
        lines += tiling.map(difference.bad.numpy(), first)
    return headline, lines
