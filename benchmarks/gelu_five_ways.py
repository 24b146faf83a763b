"""GeLU in its tanh form, five ways: kernels launched, bytes moved and time of each, in fp32.

The formula in eager PyTorch, PyTorch's own operator, CUDA C++, Triton, and the formula under ``torch.compile``. Kernels
and ``kernel_seconds`` are the PyTorch profiler's; ``bytes`` is what the kernels must move, each reading its tensors
and writing its result once; ``seconds`` is one call between two CUDA events, amid other work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, blocked_stream, cuda_gelu, trace
from utils import example_kernels, runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

SOURCES = ["benchmarks/cuda/gelu.cu"]

ELEMENTS = 1 << 27
WAYS = ("formula", "PyTorch's operator", "CUDA C++", "Triton", "torch.compile")
#: Reads and writes of whole tensors: nine operators in eager mode, five with one input and four with two.
EAGER_ACCESSES = 5 * 2 + 4 * 3


def formula(x: torch.Tensor) -> torch.Tensor:
    """GeLU as Hendrycks and Gimpel (2016) approximate it, operator by operator."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def function(way: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """GeLU in one of the five ways.

    Raises:
        ValueError: the way is unknown.
        RuntimeError: CUDA C++ without a GPU or without nvcc.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
    if way == "CUDA C++":
        return cuda_gelu.compiled()
    return {
        "formula": formula,
        "PyTorch's operator": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "Triton": example_kernels.gelu_tanh,
        "torch.compile": torch.compile(formula),
    }[way]


SCHEMA = {
    "dtype": TEXT,
    "elements": SIZE,
    "ways": [
        {
            "name": TEXT,
            "kernels": SIZE,
            "longest": TEXT,
            "kernel_seconds": POSITIVE,
            "bytes": SIZE,
            **TIMING,
            "bytes_per_second": POSITIVE,
            **RATIO,
        }
    ],
    "unavailable": {str: TEXT},
}


def measure(quick: bool = False, elements: int | None = None, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """Kernels, bytes and time of each way; ``quick`` takes an eighth of the elements.

    Raises:
        RuntimeError: there is no GPU here.
    """
    elements = elements or (ELEMENTS // 8 if quick else ELEMENTS)
    x = torch.randn(elements, device=runtime.DEVICE)
    calls, unavailable = {}, {}
    for way in ways:
        try:
            run = function(way)
        except RuntimeError as error:
            unavailable[way] = str(error).splitlines()[0]
            continue
        torch.testing.assert_close(run(x)[:1000], formula(x[:1000]), rtol=1e-4, atol=1e-5)  # compiled for x's size
        calls[way] = lambda run=run: run(x)
    timed = timing.compare(calls, warmup=5, rounds=10 if quick else 25, stopwatch=blocked_stream.stopwatch())
    kernels = trace.kernels_of(list(calls.values()))
    found = []
    for way, launched in zip(calls, kernels, strict=True):
        nbytes = 4 * elements * (EAGER_ACCESSES if way == "formula" else 2)
        found.append(
            {
                "name": way,
                "kernels": len(launched),
                "longest": trace.short_name(max(launched, key=lambda kernel: kernel.seconds).name),
                "kernel_seconds": sum(kernel.seconds for kernel in launched),
                "bytes": nbytes,
                **timed[way].as_dict(),
                "bytes_per_second": nbytes / timed[way].median,
                **timing.ratio(timed[ways[0]], timed[way]).as_dict(),
            }
        )
    return {"dtype": "fp32", "elements": elements, "ways": found, "unavailable": unavailable}


def table(results: dict[str, Any]) -> str:
    """One line a way."""
    rows = [
        [
            way["name"],
            way["kernels"],
            f"{way['kernel_seconds'] * 1e6:,.1f}",
            f"{way['bytes'] / 1e9:.2f}",
            f"{way['seconds'] * 1e6:,.1f}",
            f"{way['bytes_per_second'] / 1e12:.3f}",
            f"{way['ratio']:.2f}",
            way["longest"][:50],
        ]
        for way in results["ways"]
    ]
    rows += [[name, "not measured", why, "", "", "", "", ""] for name, why in results["unavailable"].items()]
    return benchmark_cli.text_table(["GeLU", "kernels", "in kernels, us", "GB", "us", "TB/s", "x", "longest"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("gelu_five_ways", measure, table, SCHEMA))
