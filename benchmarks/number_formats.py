"""What a number format is worth: element-wise traffic, matrix products with their errors, and a whole training step.

``element_wise`` runs GeLU, which computes in fp32 whatever the format in memory: only the bytes change. ``products``
are timed in turn, and each is held against float64: ``error`` is the Frobenius norm of the difference over that of
the exact product. ``step`` is one encoder layer, forward and backward: in fp32, in fp32 with TF32 products, under
autocast to bf16 with fp32 parameters, and in bf16 throughout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from benchmarks.operator_classes import EncoderLayer
from utils import example_kernels, runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each

ELEMENTS = 1 << 27
PRODUCT_SIZE = 8192
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRODUCTS = ("fp32", "tf32", "fp16", "bf16", "fp16, sums in fp16")
STEPS = ("fp32", "tf32", "autocast bf16", "bf16")
SHAPE = {"batch": 8, "seq_len": 1024, "hidden": 2048, "heads": 16}
QUICK_SHAPE = {"batch": 2, "seq_len": 1024, "hidden": 1024, "heads": 16}


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """How fp32 matrix products run inside: ``"ieee"``, or ``"tf32"`` on tensor cores."""
    former = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = former


@contextlib.contextmanager
def sums_in_fp16() -> Iterator[None]:
    """Lets fp16 products add up in fp16 inside.

    Raises:
        RuntimeError: this PyTorch has no such setting.
    """
    settings = torch.backends.cuda.matmul
    try:
        former = settings.allow_fp16_accumulation
        settings.allow_fp16_accumulation = True
    except (AttributeError, AssertionError) as error:
        raise RuntimeError("this PyTorch cannot add fp16 products up in fp16") from error
    try:
        yield
    finally:
        settings.allow_fp16_accumulation = former


def product(name: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that multiplies two fp32 matrices, rounded to the format first.

    Raises:
        ValueError: the format is unknown.
    """
    if name not in PRODUCTS:
        raise ValueError(f"format must be one of {'; '.join(PRODUCTS)}, got {name!r}")
    dtype = DTYPES.get(name.split(",")[0], torch.float32)
    left, right = a.to(dtype), b.to(dtype)
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)

    def call() -> torch.Tensor:
        around = sums_in_fp16() if "sums" in name else products_in("tf32" if name == "tf32" else "ieee")
        with around:
            return torch.mm(left, right, out=out)

    return call


def step(name: str, shape: Mapping[str, int]) -> Callable[[], object]:
    """A function that runs one forward and backward pass of the encoder layer, without dropout.

    Raises:
        ValueError: the format is unknown.
    """
    if name not in STEPS:
        raise ValueError(f"format must be one of {', '.join(STEPS)}, got {name!r}")
    torch.manual_seed(20261121)
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    layer = EncoderLayer(shape["hidden"], shape["heads"], fused_attention=True, dropout=0.0)
    layer.to(runtime.DEVICE, dtype)
    x = torch.randn(shape["batch"], shape["seq_len"], shape["hidden"], device=runtime.DEVICE).to(dtype)
    x.requires_grad_()
    gradient = torch.randn_like(x)
    wanted = [x, *layer.parameters()]

    def call() -> object:
        with products_in("tf32" if name == "tf32" else "ieee"):
            with torch.autocast(runtime.DEVICE.type, torch.bfloat16, enabled=name.startswith("autocast")):
                y = layer(x)
            return torch.autograd.grad(y, wanted, gradient.to(y.dtype))

    return call


def element_wise(elements: int, rounds: int) -> list[dict[str, Any]]:
    """Time and bandwidth of GeLU in each format.

    Raises:
        RuntimeError: there is no GPU here.
    """
    x = torch.randn(elements, device=runtime.DEVICE)
    inputs = {name: x.to(dtype) for name, dtype in DTYPES.items()}
    timed = timing.compare(
        {name: lambda value=value: example_kernels.gelu(value) for name, value in inputs.items()}, rounds=rounds
    )
    return [
        {
            "dtype": name,
            "bytes": 2 * elements * value.element_size(),
            **timed[name].as_dict(),
            "bytes_per_second": 2 * elements * value.element_size() / timed[name].median,
            **timing.ratio(timed["fp32"], timed[name]).as_dict(),
        }
        for name, value in inputs.items()
    ]


def products(n: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rate and error of (n, n) products in each format, and why a format is missing.

    Raises:
        RuntimeError: there is no GPU here.
    """
    a, b = (torch.randn(n, n, device=runtime.DEVICE) for _ in range(2))
    exact = a.double() @ b.double()
    calls, errors, unavailable = {}, {}, {}
    for name in PRODUCTS:
        run = product(name, a, b)
        try:
            errors[name] = float((run().double() - exact).norm() / exact.norm())
        except RuntimeError as error:
            unavailable[name] = str(error).splitlines()[0]
            continue
        calls[name] = run
    timed = timing.compare(calls, rounds=rounds)
    found = [
        {
            "format": name,
            **timed[name].as_dict(),
            "flops_per_second": 2 * n**3 / timed[name].median,
            **timing.ratio(timed["fp32"], timed[name]).as_dict(),
            "error": errors[name],
        }
        for name in calls
    ]
    return found, unavailable


SCHEMA = {
    "element_wise": [{"dtype": TEXT, "bytes": SIZE, **TIMING, "bytes_per_second": POSITIVE, **RATIO}],
    "n": SIZE,
    "products": [{"format": TEXT, **TIMING, "flops_per_second": POSITIVE, **RATIO, "error": POSITIVE}],
    "unavailable": {str: TEXT},
    "shape": each(SIZE, "batch", "seq_len", "hidden", "heads"),
    "step": [{"format": TEXT, **TIMING, **RATIO}],
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False, elements: int | None = None, n: int | None = None, shape: Mapping[str, int] | None = None,
    steps: Sequence[str] = STEPS,
) -> dict[str, Any]:  # fmt: skip
    """All three; ``quick`` takes smaller sizes.

    Raises:
        RuntimeError: there is no GPU here.
    """
    rounds = 8 if quick else 20
    shape = dict(shape or (QUICK_SHAPE if quick else SHAPE))
    elements = elements or (ELEMENTS // 4 if quick else ELEMENTS)
    n = n or (2048 if quick else PRODUCT_SIZE)
    found, unavailable = products(n, rounds)
    timed = timing.compare({name: step(name, shape) for name in steps}, warmup=3, rounds=rounds)
    return {
        "element_wise": element_wise(elements, rounds),
        "n": n,
        "products": found,
        "unavailable": unavailable,
        "shape": shape,
        "step": [
            {
                "format": name,
                **timed[name].as_dict(),
                **timing.ratio(timed[steps[0]], timed[name]).as_dict(),
            }
            for name in steps
        ],
    }


def table(results: dict[str, Any]) -> str:
    """Time, rate, and how many times faster than fp32."""

    def row(what: str, entry: dict[str, Any], rate: str = "", error: str = "") -> list[str]:
        return [what, f"{entry['seconds'] * 1e6:,.1f}", rate, f"{entry['ratio']:.2f}", error]

    rows = [row(f"GeLU {p['dtype']}", p, f"{p['bytes_per_second'] / 1e12:.3f} TB/s") for p in results["element_wise"]]
    rows += [
        row(f"product {p['format']}", p, f"{p['flops_per_second'] / 1e12:.1f} TFLOP/s", f"{p['error']:.1e}")
        for p in results["products"]
    ]
    rows += [row(f"step {p['format']}", p) for p in results["step"]]
    rows += [[f"product {name}", "not measured", why, "", ""] for name, why in results["unavailable"].items()]
    return benchmark_cli.text_table(["what", "us", "rate", "x", "error"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("number_formats", measure, table, SCHEMA))
