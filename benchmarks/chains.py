"""What fusion is worth: chains of element-wise operations as one kernel and as many, and ReLU(X + B) both ways.

``fused`` is a chain of multiply-adds in one kernel: its traffic is one read and one write however long it is, so its
time stays the same until the arithmetic takes longer than the traffic. ``eager`` is PyTorch, a kernel an operation:
its time grows with each. Both work on fp32. ``relu_of_sum`` is ReLU(X + B) of two tensors of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import family, trace
from utils import example_kernels, runtime, timing
from utils.example_kernels.fusion import SCALE, SHIFT

SOURCES = [
    "benchmarks/chains.py",
    "utils/example_kernels/fusion.py::add_kernel",
    "utils/example_kernels/fusion.py::relu_kernel",
    "utils/example_kernels/fusion.py::add_relu_kernel",
    "utils/example_kernels/fusion.py::chain_kernel",
]

ELEMENTS = 1 << 26
#: Multiply-adds in the fused kernel; each is two operations an element.
LINKS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512]
QUICK_LINKS = [1, 16, 64, 256]
#: Operations, each a kernel.
EAGER_OPERATIONS = [1, 2, 4, 8, 16, 32]
QUICK_EAGER_OPERATIONS = [1, 4, 16]
VARIANTS = ("two kernels", "one kernel", "PyTorch, eager", "torch.compile")


def eager_chain(x: torch.Tensor, operations: int) -> torch.Tensor:
    """Multiply, add, multiply... in turn, ``operations`` PyTorch calls: the chain of multiply-adds, unfused."""
    for i in range(operations):
        x = x + SHIFT if i % 2 else x * SCALE
    return x


def relu_of_sum(variant: str, x: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """A function that computes ReLU(x + b) of two vectors.

    Raises:
        ValueError: the variant is unknown.
    """
    if variant == "two kernels":
        return lambda: example_kernels.relu(example_kernels.add(x, b))
    if variant == "one kernel":
        return lambda: example_kernels.add_relu(x, b)
    if variant == "PyTorch, eager":
        return lambda: torch.relu(x + b)
    if variant == "torch.compile":
        compiled = torch.compile(lambda x, b: torch.relu(x + b))
        return lambda: compiled(x, b)
    raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")


def measure(
    quick: bool = False,
    elements: int = ELEMENTS,
    links: Sequence[int] | None = None,
    operations: Sequence[int] | None = None,
    variants: Sequence[str] = VARIANTS,
) -> dict[str, Any]:
    """Times of all chains, and of ReLU(X + B) with its kernels; ``quick`` takes a few lengths.

    Raises:
        RuntimeError: there is no GPU here.
    """
    rounds = 10 if quick else 25
    links = links or (QUICK_LINKS if quick else LINKS)
    operations = operations or (QUICK_EAGER_OPERATIONS if quick else EAGER_OPERATIONS)
    x, b = (torch.randn(elements, device=runtime.DEVICE) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {}
    calls |= {f"fused {n}": lambda n=n: example_kernels.chain(x, n) for n in links}
    calls |= {f"eager {n}": lambda n=n: eager_chain(x, n) for n in operations}
    timed = timing.compare(calls, warmup=3, rounds=rounds)
    sums = {variant: relu_of_sum(variant, x, b) for variant in variants}
    timed_sums = timing.compare(sums, warmup=5, rounds=rounds)
    kernels = trace.kernels_of(list(sums.values()))
    return {
        "dtype": "fp32",
        "elements": elements,
        "fused": [{"operations": 2 * n, **timed[f"fused {n}"].as_dict()} for n in links],
        "eager": [{"operations": n, **timed[f"eager {n}"].as_dict()} for n in operations],
        "relu_of_sum": [
            {
                "name": variant,
                "kernels": len(launched),
                **timed_sums[variant].as_dict(),
                **timing.ratio(timed_sums[variants[0]], timed_sums[variant]).as_dict(),
            }
            for variant, launched in zip(variants, kernels, strict=True)
        ],
    }


def table(results: dict[str, Any]) -> str:
    """Time of each chain, then of ReLU(X + B) and how many times faster than two kernels it is."""
    chains = [
        [f"{kind}, {p['operations']} operations", f"{p['seconds'] * 1e6:,.1f}"]
        for kind in ("fused", "eager")
        for p in results[kind]
    ]
    sums = [
        [p["name"], p["kernels"], f"{p['seconds'] * 1e6:,.1f}", f"{p['ratio']:.3f}"] for p in results["relu_of_sum"]
    ]
    return "\n".join(
        [family.text_table(["chain", "us"], chains), family.text_table(["ReLU(X + B)", "kernels", "us", "x"], sums)]
    )


if __name__ == "__main__":
    raise SystemExit(family.run("chains", measure, table, SOURCES))
