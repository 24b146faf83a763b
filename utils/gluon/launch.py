"""Launches a Gluon kernel on a GPU, or emulates it where its tensors are on the CPU."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, TracebackType
from typing import Any, ClassVar

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.gluon.emulator import Emulator, Namespace
from utils.gluon.machine import Descriptor, Integer, Pointer

import utils.triton_versions  # noqa: F401  isort: skip  (the names that kernels use, on each version of Triton)
import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia import hopper  # isort: skip


@dataclass
class Launch:
    """One launch: the kernel, what it was given, and of each program that ran what it did.

    Attributes:
        arguments: As they were given, in order.
        constants: Compile-time constants by name.
        options: ``num_warps`` and ``maxnreg``.
        programs: In the order in which they ran, the last one perhaps not to its end.
        before, after: What the memory of each descriptor held before the first program, and after the last one.
    """

    kernel: Any
    arguments: tuple
    constants: dict[str, Any]
    options: dict[str, int]
    programs: list[Emulator] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)


class emulated:
    """A block in which launches are emulated in a given order, and recorded.

    ::

        with emulated(first=-1) as launches:  # the last partition, the producer, goes first
            multiply(a, b)

    Args:
        seed, first: As in :class:`utils.gluon.machine.Machine`.
    """

    active: ClassVar[list[emulated]] = []

    def __init__(self, seed: int = 0, first: int | None = None) -> None:
        self.seed, self.first = seed, first
        self.launches: list[Launch] = []

    def __enter__(self) -> list[Launch]:
        self.active.append(self)
        return self.launches

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.active.pop()


def launch(
    kernel: Any, grid: Sequence[int], *arguments: Any, num_warps: int = 4, maxnreg: int | None = None, **constants: Any
) -> None:
    """Run a kernel on the GPU on which its tensors are, or in the emulator if they are on the CPU.

    Args:
        kernel: A ``@gluon.jit`` function.
        grid: Programs on each axis.
        arguments: Descriptors, tensors and numbers, in the order in which the kernel takes them.
        constants: Its compile-time constants by name.

    Raises:
        Fault: In the emulator: what would be a race, a hang or garbage on a GPU.
    """
    tensors = [getattr(each, "base", each) for each in arguments]
    options = {"num_warps": num_warps, "maxnreg": maxnreg}
    if any(isinstance(each, torch.Tensor) and each.is_cuda for each in tensors):
        kernel[tuple(grid)](*arguments, **constants, **{name: value for name, value in options.items() if value})
        return
    order = emulated.active[-1] if emulated.active else emulated()
    made = Launch(kernel, arguments, constants, options, before=_contents(arguments))
    order.launches.append(made)
    for number, program in enumerate(itertools.product(*map(range, grid))):
        emulator = Emulator(order.seed + number, order.first)
        emulator.program = program
        made.programs.append(emulator)
        body = Binding(emulator).bound(kernel)
        emulator.run(lambda body=body: body(*map(_argument, arguments), **constants))
    made.after = _contents(arguments)


def _contents(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [each.base.detach().clone() for each in arguments if hasattr(each, "block_shape")]


def _argument(given: Any) -> Any:
    """A launch's argument as the emulator takes it."""
    if hasattr(given, "block_shape"):
        return Descriptor(given.base, list(given.block_shape))
    if isinstance(given, torch.Tensor):
        return Pointer(given)
    return Integer(given) if type(given) is int else given


class Binding:
    """Kernels as Python functions whose globals are an emulator's."""

    def __init__(self, emulator: Emulator) -> None:
        names = emulator.names()
        language, functions = names.pop("gl"), dict(names)
        self.range = functions.pop("range")
        of_hopper = {name: getattr(hopper, name) for name in functions}
        module = Namespace(**functions)
        self.instead = {id(gl): language, id(hopper): module}
        self.instead |= {id(real): functions[name] for name, real in of_hopper.items()}
        for real, stand_in in ((gl, language), (hopper.mbarrier, module.mbarrier), (hopper.tma, module.tma)):
            self.instead |= {
                id(getattr(real, name)): made for name, made in vars(stand_in).items() if hasattr(real, name)
            }
        self.made: dict[int, Callable] = {}

    def bound(self, kernel: Any) -> Callable:
        """The function under ``@gluon.jit``, with what it calls."""
        function = kernel.fn
        if id(kernel) not in self.made:
            space = {"__builtins__": function.__globals__["__builtins__"], "range": self.range}
            body = FunctionType(
                function.__code__, space, function.__name__, function.__defaults__, function.__closure__
            )
            self.made[id(kernel)] = body
            space |= {name: self.value(value) for name, value in self.used(function)}
        return self.made[id(kernel)]

    def used(self, function: FunctionType) -> list[tuple[str, Any]]:
        """Globals that a function's code names."""
        codes, names = [function.__code__], set()
        for code in codes:
            names |= set(code.co_names)
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        return [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]

    def value(self, real: Any) -> Any:
        """What stands for a global in the emulator."""
        if id(real) in self.instead:
            return self.instead[id(real)]
        if isinstance(getattr(real, "fn", None), FunctionType) and not isinstance(real, ModuleType):
            return self.bound(real)
        return real.value if isinstance(real, gl.constexpr) else real
