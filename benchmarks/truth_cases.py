"""The kernels that the course's profiler is compared on, in the interpreter and on a GPU, with the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from utils import example_kernels as ek
from utils import runtime

#: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages) and (BLOCK_M, BLOCK_N, warps, stages), the same on both machines.
MATMUL_TILE = (64, 64, 32, 4, 4, 2)
ATTENTION_TILE = (64, 64, 4, 2)

_HALF = torch.float16


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    Attributes:
        name: What the table calls it.
        size: Its size, in words.
        kernels: Names of the Triton kernels that one call launches, in order.
        build: Draws the inputs and returns the call.
    """

    name: str
    size: str
    kernels: tuple[str, ...]
    build: Callable[[], Callable[[], object]]


class _Chance:
    """Random inputs on this machine's device, drawn on the CPU so that both machines get the same ones."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(20070601)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype).to(runtime.DEVICE)

    def integers(self, below: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, below, (count,), generator=self.generator).to(dtype).to(runtime.DEVICE)


def _call(function: Callable[..., object], *arguments: object, **options: object) -> Callable[[], object]:
    return lambda: function(*arguments, **options)


def cases() -> list[Case]:
    """The kernels, small enough to interpret and of ragged size where that adds something.

    Build them all, in order: they draw from one seeded generator.
    """
    c = _Chance()
    n, ragged = 1 << 20, 1_000_003

    def copy_from(first: int, count: int = n) -> Callable[[], object]:
        return _call(ek.copy, c.normal(count + first)[first:])

    def strided(count: int, stride: int) -> Callable[[], object]:
        return _call(ek.strided_copy, c.normal(count), stride)

    def product(function: Callable[..., object]) -> Callable[[], object]:
        return _call(function, c.normal(512, 384, dtype=_HALF), c.normal(384, 448, dtype=_HALF), MATMUL_TILE)

    def attention() -> Callable[[], object]:
        q, k, v = (c.normal(1, 4, 500, 64, dtype=_HALF) for _ in range(3))
        return _call(ek.flash_attention_forward, q, k, v, causal=True, tile=ATTENTION_TILE)

    return [
        Case("copy", f"{n:,} fp32", ("copy_kernel",), lambda: copy_from(0)),
        Case("misaligned copy", f"{n:,} fp32, from element 1", ("copy_kernel",), lambda: copy_from(1)),
        Case("ragged copy", f"{ragged:,} fp32", ("copy_kernel",), lambda: copy_from(0, ragged)),
        Case("strided copy, 4", "1,048,576 fp32", ("strided_copy_kernel",), lambda: strided(1 << 20, 4)),
        Case("strided copy, 16", "4,194,304 fp32", ("strided_copy_kernel",), lambda: strided(1 << 22, 16)),
        Case(
            "naive transpose",
            "1024 x 768 fp32",
            ("naive_transpose_kernel",),
            lambda: _call(ek.naive_transpose, c.normal(1024, 768)),
        ),
        Case(
            "tiled transpose",
            "1024 x 768 fp32",
            ("tiled_transpose_kernel",),
            lambda: _call(ek.tiled_transpose, c.normal(1024, 768)),
        ),
        Case("GeLU", f"{n:,} fp16", ("gelu_kernel",), lambda: _call(ek.gelu, c.normal(n, dtype=_HALF))),
        Case("softmax", "1024 x 1000 fp32", ("softmax_kernel",), lambda: _call(ek.softmax, c.normal(1024, 1000))),
        Case(
            "dot product",
            f"{n:,} fp32",
            ("dot_partial_kernel", "sum_kernel"),
            lambda: _call(ek.dot_product, c.normal(n), c.normal(n)),
        ),
        Case(
            "histogram",
            "262,144 int32 in 4,096 bins",
            ("histogram_kernel",),
            lambda: _call(ek.histogram, c.integers(4096, 1 << 18, torch.int32), 4096),
        ),
        Case(
            "gather",
            "600 of 5,000 rows of 768 fp32",
            ("gather_kernel",),
            lambda: _call(ek.gather, c.normal(5000, 768), c.integers(5000, 600, torch.int64)),
        ),
        Case(
            "naive matmul",
            "192 x 96 x 160 fp32",
            ("naive_matmul_kernel",),
            lambda: _call(ek.naive_matmul, c.normal(192, 96), c.normal(96, 160)),
        ),
        Case("tiled matmul", "512 x 384 x 448 fp16", ("tiled_matmul_kernel",), lambda: product(ek.tiled_matmul)),
        Case(
            "descriptor matmul",
            "512 x 384 x 448 fp16",
            ("descriptor_matmul_kernel",),
            lambda: product(ek.descriptor_matmul),
        ),
        Case(
            "flash attention forward",
            "4 heads x 500 x 64 fp16, causal",
            ("flash_attention_forward_kernel",),
            attention,
        ),
    ]
