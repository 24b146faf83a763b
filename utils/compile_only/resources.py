"""What a kernel is compiled for and what it then occupies: requests are checked here and sent to the child process."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.compile_only.process import CompileError, ask, begin
from utils.compile_only.source import is_gluon, standalone_source

import triton.language as tl  # isort: skip

#: What Triton compiles for here; 75 (T4) and older are out.
CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
_SCALAR = r"(i1|[iu](8|16|32|64)|fp(16|32|64)|bf16|fp8e(4nv|5|4b15))"
_TYPE = re.compile(rf"\*?{_SCALAR}|tensordesc<{_SCALAR}\[\d+(, \d+)*\](,NVMMASharedLayout\(.*\))?>")
_ITEM = re.compile(rf"{_SCALAR}|i32:16|i64:16")


@dataclass(frozen=True)
class ResourceUsage:
    """What one program of a compiled kernel occupies.

    Attributes:
        registers: 32-bit registers per thread.
        stack_bytes: Bytes of local memory per thread; registers spill here.
        shared_bytes: Bytes of shared memory per program, static and dynamic.
        threads: Threads per program, warps x 32 (more than asked for where the compiler adds warps of its own).
        capability: What it was compiled for: 90 is sm_90.
        name: Name of the kernel.
        warnings: What ``ptxas`` warns of, such as products that it serialises; empty if it was not asked.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    capability: int
    name: str
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> bool:
        """Whether registers did not suffice."""
        return self.stack_bytes > 0


@dataclass(frozen=True)
class Product:
    """One ``tl.dot`` of a kernel: dtype of its operands (``f32``, ``bf16``), precision (``ieee``, ``tf32``), line."""

    dtype: str
    precision: str
    line: str


@dataclass(frozen=True)
class Reading:
    """What the compiler reads in a kernel before it makes code of it.

    Attributes:
        name: Name of the kernel.
        error: What it says of a kernel that is no Triton; empty where it has understood it.
        line: The line that the error is about.
        products: The kernel's matrix products, in order, those of the functions that it calls among them.
    """

    name: str
    error: str
    line: str
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Request:
    """One kernel to compile; see :func:`resource_usage` for the fields."""

    kernel: Any
    signature: Mapping[str, str | tuple[str | int, ...]]
    constexprs: Mapping[str, Any]
    capability: int = 90
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: Sequence[str] | None = None
    maxnreg: int | None = None
    warnings: bool = False

    def checked(self) -> None:
        """Raise TypeError or ValueError where :func:`resource_usage` would, before anything is compiled."""
        _order(self)


def resource_usage(
    kernel: Any,
    signature: Mapping[str, str | tuple[str | int, ...]],
    constexprs: Mapping[str, Any] | None = None,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible_by_16: Sequence[str] | None = None,
    maxnreg: int | None = None,
    warnings: bool = False,
) -> ResourceUsage:
    """Registers, stack and shared memory of ``kernel`` compiled for one GPU architecture.

    Args:
        kernel: A ``@triton.jit`` function, interpreted or compiled, autotuned or not, or a ``@gluon.jit`` one.
        signature: Type of each argument that is no constexpr: ``*fp16`` (a pointer), ``i32``, ``fp32``,
            ``tensordesc<bf16[128, 64]>`` (a host's tensor descriptor, in Gluon with a comma and its layout's repr
            behind the block)... Of a tuple those of its items: ``i32:16`` is
            a multiple of 16, and a number is a value that is compiled in, as a launch does with 1.
        constexprs: Value of each constexpr argument. Anything that JSON holds, a ``tl`` dtype, or a named tuple of
            these.
        capability: Compute capability times ten: 80, 86, 89, 90, 100...
        num_warps: Warps per program, a power of two.
        num_stages: Stages of software pipelining.
        divisible_by_16: Arguments that a launch would find to be multiples of 16; by default all pointers, as
            PyTorch aligns its memory.
        maxnreg: Registers that a thread may take, from 24 to 255; by default the compiler's choice.
        warnings: Whether to ask ``ptxas`` for its warnings. The kernel is compiled anew then, whatever is cached.

    Raises:
        TypeError, ValueError: An argument is missing, unknown, or not what it should be.
        CompileError: The kernel does not compile.
    """
    constexprs = constexprs or {}
    request = Request(
        kernel, signature, constexprs, capability, num_warps, num_stages, divisible_by_16, maxnreg, warnings
    )
    return resource_usages([request])[0]


def resource_usages(requests: Sequence[Request]) -> list[ResourceUsage]:
    """:func:`resource_usage` of several kernels at once; the child process starts only once.

    Raises:
        TypeError, ValueError, CompileError: As :func:`resource_usage`, for the first request that fails.
    """
    results = []
    for request, answer in zip(requests, ask([_order(request) for request in requests])):
        if "error" in answer:
            name = _function(request.kernel).__name__
            raise CompileError(f"{name} does not compile for sm_{request.capability}: {answer['error']}")
        results.append(ResourceUsage(**{**answer, "warnings": tuple(answer["warnings"])}))
    return results


def readings(requests: Sequence[Request]) -> list[Reading]:
    """What the compiler reads in several kernels; it stops before it makes code, so that this takes a moment.

    Raises:
        TypeError, ValueError: A request is not what it should be.
        CompileError: The compiler fails otherwise than by not understanding a kernel.
    """
    found = ask([{**_order(request), "read": True} for request in requests])
    return [_reading(request, answer) for request, answer in zip(requests, found)]


def begin_reading(request: Request) -> Callable[[], Reading]:
    """Let the compiler read a kernel meanwhile; what is returned waits for it.

    Readings are fetched in the order in which they were begun.

    Raises:
        TypeError, ValueError: The request is not what it should be.
        CompileError: The compiler fails otherwise than by not understanding the kernel, now or when it is waited for.
        OSError: The compiler's process cannot be started.
    """
    answer = begin([{**_order(request), "read": True}])
    return lambda: _reading(request, answer()[0])


def _reading(request: Request, answer: dict[str, Any]) -> Reading:
    if "products" not in answer:
        raise CompileError(f"{_function(request.kernel).__name__} cannot be read: {answer['error']}")
    return Reading(**{**answer, "products": tuple(Product(*found) for found in answer["products"])})


def _function(kernel: Any) -> Any:
    """The Python function under ``@triton.jit``, ``@triton.autotune`` and the like."""
    function = kernel
    while not inspect.isfunction(function):
        if not hasattr(function, "fn"):
            raise TypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")
        function = function.fn
    if function is kernel:
        raise TypeError(f"kernel must be a @triton.jit function, got the plain function {kernel.__name__}")
    return function


def _order(request: Request) -> dict[str, Any]:
    """A request as JSON, checked."""
    function = _function(request.kernel)
    arguments = list(inspect.signature(function).parameters)
    given = [*request.signature, *request.constexprs]
    for name in given:
        if name not in arguments:
            raise ValueError(f"{function.__name__} has no argument {name!r}, only {', '.join(arguments)}")
    for name in arguments:
        if name not in given:
            raise ValueError(f"{function.__name__} needs a type or a constexpr value for its argument {name!r}")
    for name, kind in request.signature.items():
        if name in request.constexprs:
            raise ValueError(f"{name} is given both a type ({kind!r}) and a constexpr value")
        if isinstance(kind, tuple):
            if all(isinstance(item, int) or _ITEM.fullmatch(item) for item in kind):
                continue
            raise ValueError(f"items of {name} must be like 'i32', 'i32:16' or a number, got {kind!r}")
        if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
            known = "'*fp16', 'i32', 'fp32' or 'tensordesc<bf16[128, 64]>'"
            raise ValueError(f"type of {name} must be like {known}, got {kind!r}")
    if request.capability not in CAPABILITIES:
        raise ValueError(f"capability must be one of {', '.join(map(str, CAPABILITIES))}, got {request.capability!r}")
    if request.num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps must be a power of two from 1 to 32, got {request.num_warps!r}")
    if not isinstance(request.num_stages, int) or request.num_stages < 1:
        raise ValueError(f"num_stages must be a positive integer, got {request.num_stages!r}")
    if request.maxnreg is not None and not (isinstance(request.maxnreg, int) and 24 <= request.maxnreg <= 255):
        raise ValueError(f"maxnreg must be between 24 and 255 registers a thread, got {request.maxnreg!r}")
    aligned = request.divisible_by_16
    if aligned is None:
        aligned = [name for name, kind in request.signature.items() if str(kind).startswith("*")]
    for name in aligned:
        if not isinstance(request.signature.get(name), str):
            raise ValueError(f"divisible_by_16 names {name!r}, which is not in the signature or a tuple")
    return {
        "name": function.__name__,
        "source": standalone_source(function, is_gluon(request.kernel)),
        "signature": {name: request.signature.get(name, "constexpr") for name in arguments},
        "constexprs": {name: _as_json(name, value) for name, value in request.constexprs.items()},
        "divisible": [arguments.index(name) for name in aligned],
        "capability": request.capability,
        "options": {"num_warps": request.num_warps, "num_stages": request.num_stages, "maxnreg": request.maxnreg},
        "warnings": bool(request.warnings),
        "read": False,
    }


def _as_json(name: str, value: Any) -> Any:
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "_asdict"):
        return {"fields": {field: _as_json(name, item) for field, item in value._asdict().items()}}
    raise TypeError(
        f"constexpr {name} must be a number, a string, a bool, None, a tl dtype or a named tuple, got {value!r}"
    )
