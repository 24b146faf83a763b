"""What a laptop cannot see of a kernel by running it: whether it compiles, and how its products are rounded.

Triton's interpreter runs what no compiler takes (a Python global inside a kernel), and multiplies float32 as it is. So
after the cases the launches that ran are handed to Triton's compiler for a GPU that is not there
(:func:`utils.compile_only.begin_reading`), which stops before it makes code, beside the cases that follow.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checks.core import classic
from utils.checks.problem import Problem
from utils.compile_only import CompileError, Product, Reading, Request, begin_reading
from utils.kernel_profile import LaunchProfile

import triton  # isort: skip
from triton.runtime.jit import KernelInterface  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

#: A launch, and the dtype of the case that it belongs to.
Launched = tuple[torch.dtype, LaunchProfile]

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What must hold of a kernel when it is compiled, besides that it can be.

    Args:
        tf32: Place in the list of classic wrong answers of a float32 product that a GPU rounds to TF32; 0 for none.
            Such a product is a mistake in every exercise.
        wide: Place of a product whose operands have more bits than the case's dtype has. None: that is allowed.
        further: Launches that the cases do not make: those of a GPU's tiles.
        further_cause: Why one of these may not compile where those of the cases do.
    """

    tf32: int = 0
    wide: int | None = None
    further: Callable[[], Sequence[Launched]] = tuple
    further_cause: str = ""


class Reader:
    """Lets a compiler read launches that were right in the interpreter, while further cases run there."""

    def __init__(self, asked: Compiled) -> None:
        self.asked = asked
        self._met: set[Any] = set()
        self._odd: Problem | None = None
        self._begun: list[tuple[torch.dtype, bool, Callable[[], Reading]]] = []

    def look_at(self, launches: Iterable[Launched], further: bool = False) -> None:
        """Begin to read them. Of launches that differ in sizes alone one is read; what cannot be sent is left out."""
        launches = list(launches)
        self._odd = self._odd or next(filter(None, (_odd_argument(launch) for _, launch in launches)), None)
        for dtype, request in _chosen(launches, self._met):
            with contextlib.suppress(CompileError, OSError):  # the compiler does not work here
                self._begun.append((dtype, further, begin_reading(request)))

    def problem(self) -> Problem | None:
        """The first thing that the compiler found in launches which the interpreter ran right, or None."""
        self.look_at(self.asked.further(), further=True)
        if self._odd is not None:
            return self._odd
        try:
            problems = (_problem(self.asked, dtype, reading(), further) for dtype, further, reading in self._begun)
            return next((problem for problem in problems if problem), None)
        except CompileError:  # the compiler itself does not work here: nothing is said about the kernel
            return None


def _problem(asked: Compiled, dtype: torch.dtype, reading: Reading, further: bool) -> Problem | None:
    at = (f"at: {reading.line}",) if reading.line else ()
    if reading.error:
        headline = f"{reading.name} runs in the interpreter, and compiles on no GPU"
        if outside := re.search(r"Cannot access global variable (\w+)", reading.error):
            cause = (
                f"a compiled kernel cannot read the Python global {outside[1]}: write its value out, hand it over as "
                "an argument, or make it tl.constexpr(...)"
            )
            return Problem(headline, cause, at)
        said = (*at, *reading.error.strip().splitlines()[:4])
        if further:
            some = f"{reading.name} runs in the interpreter, and does not compile for every GPU"
            return Problem(some, asked.further_cause, said)
        return Problem(headline, "", said)
    for product in reading.products:
        where = (f"at: {product.line}",) if product.line else ()
        if asked.wide is not None and (got := _wider(product, dtype)):
            name = str(dtype).removeprefix("torch.")
            faster = "many times as fast" if got == "float32" else "faster"
            cause = f"tensor cores multiply {name} {faster}: convert what is multiplied to the inputs' dtype"
            headline = f"{reading.name}: expected products of {name}, as the inputs are, got a product of {got}"
            return Problem(headline, _numbered(cause, asked.wide), where)
        if product.dtype == "f32" and product.precision == "tf32":
            cause = 'without input_precision="ieee" tl.dot keeps ten bits of each float32 factor'
            return Problem(
                f"{reading.name}: a GPU rounds a float32 product to TF32", _numbered(cause, asked.tf32), where
            )
    return None


def _wider(product: Product, dtype: torch.dtype) -> str:
    """The dtype of a product that has more bits than that of the case; empty where it has not, or it has 32 bits."""
    wide = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(product.dtype, "")
    bits = 4 if wide == "float32" else 2
    return wide if dtype.itemsize < min(bits, 4) else ""


def _numbered(cause: str, place: int) -> str:
    return classic(cause, place) if place else cause


def _chosen(launches: Iterable[Launched], met: set[Any]) -> Iterator[tuple[torch.dtype, Request]]:
    """A request for each launch that brings a kernel, a dtype, a kind of argument or a flag that was not met before."""
    for dtype, launch in launches:
        request = _request(launch)
        if request is None:
            continue
        what = {(launch.function, *item) for item in (("dtype", dtype), *request.signature.items())}
        what |= {(launch.function, name, flag) for name, flag in _flags(request.constexprs)}
        if not what <= met:
            met |= what
            yield dtype, request


def _odd_argument(launch: LaunchProfile) -> Problem | None:
    """What a launch was given that no compiled kernel takes: the interpreter passes on whatever Python has."""
    if launch.function is None:
        return None
    constant = _kernel(launch.function)[1]
    for name, value in launch.given.items():
        if value is not None and not (_is_constant(value) if name in constant else _type(value)):
            what = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            return Problem(
                f"the kernel {launch.kernel} is given {what} as {name}",
                "no compiled kernel takes that: pass tensors, numbers, and constants as tl.constexpr",
            )
    return None


def _is_constant(value: Any) -> bool:
    """Whether a compile-time constant is one that Triton's compiler knows."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    kinds = (bool, int, float, str, torch.dtype, triton.language.dtype, triton.language.constexpr, KernelInterface)
    return value is None or isinstance(value, kinds)


def _flags(constants: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Constants that choose what is compiled, those inside of named tuples among them; no sizes."""
    inner = [item for value in constants.values() if hasattr(value, "_asdict") for item in _flags(value._asdict())]
    return [*((name, value) for name, value in constants.items() if isinstance(value, (bool, str))), *inner]


def _request(launch: LaunchProfile) -> Request | None:
    """What the compiler is asked about a launch; None where something in it has no type that it knows."""
    if launch.function is None:
        return None
    kernel, constant = _kernel(launch.function)
    constants = {name: value for name, value in launch.given.items() if name in constant or value is None}
    types = {name: _type(value) for name, value in launch.given.items() if name not in constants}
    if None in types.values():
        return None
    request = Request(kernel, types, constants, divisible_by_16=())
    try:
        request.checked()
    except (TypeError, ValueError):
        return None
    return request


@functools.lru_cache(maxsize=64)
def _kernel(function: Callable[..., Any]) -> tuple[triton.JITFunction, frozenset[str]]:
    """A kernel's function as Triton compiles it, and which of its arguments are constants."""
    arguments = inspect.signature(function).parameters.values()
    return triton.JITFunction(function), frozenset(a.name for a in arguments if "constexpr" in str(a.annotation))


def _type(value: Any) -> str | tuple[str, ...] | None:
    """How a signature writes the type of an argument."""
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}" if value.dtype in _TYPES else None
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}[{', '.join(map(str, value.block_shape))}]>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, tuple):
        items = tuple(map(_type, value))
        return items if all(isinstance(item, str) for item in items) else None
    return None
