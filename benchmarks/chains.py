"""What fusion is worth: chains of element-wise operations as one kernel and as many, and ReLU(X + B) both ways.

``fused`` is a chain of multiply-adds in one kernel: its traffic is one read and one write however long it is, so its
time stays the same until the arithmetic takes longer than the traffic. ``eager`` is PyTorch, a kernel an operation:
its time grows with each. Both work on fp32. ``relu_of_sum`` is ReLU(X + B) of two tensors of one size, ``sin2_cos2``
is sin(x)^2 + cos(x)^2 as five operators and as what ``torch.compile`` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, blocked_stream, trace
from utils import example_kernels, runtime, timing
from utils.example_kernels.fusion import SCALE, SHIFT
from utils.record_schemas import RATIO, SIZE, TEXT, TIMING

ELEMENTS = 1 << 26
#: Multiply-adds in the fused kernel; each is two operations an element.
LINKS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512]
QUICK_LINKS = [1, 16, 64, 256]
#: Operations, each a kernel.
EAGER_OPERATIONS = [1, 2, 4, 8, 16, 32]
QUICK_EAGER_OPERATIONS = [1, 4, 16]
SINES = ("PyTorch, eager", "torch.compile")
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


def sin2_cos2(x: torch.Tensor) -> torch.Tensor:
    """sin(x)^2 + cos(x)^2: five operators."""
    return torch.sin(x) ** 2 + torch.cos(x) ** 2


def sines(variant: str, x: torch.Tensor) -> Callable[[], object]:
    """A function that computes :func:`sin2_cos2` of x.

    Raises:
        ValueError: the variant is unknown.
    """
    if variant not in SINES:
        raise ValueError(f"variant must be one of {', '.join(SINES)}, got {variant!r}")
    run = sin2_cos2 if variant == SINES[0] else torch.compile(sin2_cos2)
    return lambda: run(x)


def side_by_side(calls: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, Any]]:
    """Kernels and time of each call, and how many times faster than the first it is.

    Raises:
        RuntimeError: there is no GPU here.
    """
    timed = timing.compare(calls, warmup=5, rounds=rounds, stopwatch=blocked_stream.stopwatch())
    first = timed[next(iter(calls))]
    return [
        {"name": name, "kernels": len(launched), **here.as_dict(), **timing.ratio(first, here).as_dict()}
        for (name, here), launched in zip(timed.items(), trace.kernels_of(list(calls.values())), strict=True)
    ]


SCHEMA = {
    "dtype": TEXT,
    "elements": SIZE,
    "fused": [{"operations": SIZE, **TIMING}],
    "eager": [{"operations": SIZE, **TIMING}],
    "relu_of_sum": [{"name": TEXT, "kernels": SIZE, **TIMING, **RATIO}],
    "sin2_cos2": [{"name": TEXT, "kernels": SIZE, **TIMING, **RATIO}],
}


def measure(
    quick: bool = False,
    elements: int = ELEMENTS,
    links: Sequence[int] | None = None,
    operations: Sequence[int] | None = None,
    variants: Sequence[str] = VARIANTS,
    sine_variants: Sequence[str] = SINES,
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
    return {
        "dtype": "fp32",
        "elements": elements,
        "fused": [{"operations": 2 * n, **timed[f"fused {n}"].as_dict()} for n in links],
        "eager": [{"operations": n, **timed[f"eager {n}"].as_dict()} for n in operations],
        "relu_of_sum": side_by_side({name: relu_of_sum(name, x, b) for name in variants}, rounds),
        "sin2_cos2": side_by_side({name: sines(name, x) for name in sine_variants}, rounds),
    }


def table(results: dict[str, Any]) -> str:
    """Time of each chain, then of ReLU(X + B) and how many times faster than two kernels it is."""
    chains = [
        [f"{kind}, {p['operations']} operations", f"{p['seconds'] * 1e6:,.1f}"]
        for kind in ("fused", "eager")
        for p in results[kind]
    ]
    tables = [benchmark_cli.text_table(["chain", "us"], chains)]
    for key, heading in (("relu_of_sum", "ReLU(X + B)"), ("sin2_cos2", "sin^2 + cos^2")):
        rows = [[p["name"], p["kernels"], f"{p['seconds'] * 1e6:,.1f}", f"{p['ratio']:.3f}"] for p in results[key]]
        tables.append(benchmark_cli.text_table([heading, "kernels", "us", "x"], rows))
    return "\n".join(tables)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("chains", measure, table, SCHEMA))
