"""Three stacked sigmoids, forward and backward: the inner values kept in memory, computed again, or left to PyTorch.

``accesses`` counts reads and writes of whole vectors. Eager PyTorch runs a kernel for each sigmoid and for each of its
gradients (2 and 3 accesses). For ``torch.compile`` it follows from which vectors the compiled forward pass saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, blocked_stream, trace
from utils import example_kernels, runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

ELEMENTS = 1 << 27
VARIANTS = ("eager", "kept", "recomputed", "compiled")


def stacked(x: torch.Tensor) -> torch.Tensor:
    """Three sigmoids on top of each other."""
    return torch.sigmoid(torch.sigmoid(torch.sigmoid(x)))


def eager(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """What autograd runs for :func:`stacked`, without its bookkeeping: three kernels forward, three backward."""
    s1 = torch.sigmoid(x)
    s2 = torch.sigmoid(s1)
    y = torch.sigmoid(s2)
    gradient = torch.ops.aten.sigmoid_backward
    return gradient(gradient(gradient(dy, y), s2), s1)


def saved_accesses(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Accesses of a forward and a backward pass of one kernel each, from the vectors that autograd saves between them.

    The forward pass reads x and writes y and what it saves of its own; the backward pass reads dy and everything that
    was saved, and writes dx.
    """
    saved: dict[int, torch.Tensor] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        saved[value.data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        y = run(x)
    own = [value for key, value in saved.items() if key not in (x.data_ptr(), y.data_ptr())]
    return 2 + len(own) + 1 + len(saved) + 1


def call(variant: str, x: torch.Tensor, dy: torch.Tensor) -> tuple[Callable[[], object], int]:
    """A function that runs both passes, and the vectors that it reads and writes.

    Raises:
        ValueError: the variant is unknown.
    """
    if variant == "eager":
        return lambda: eager(x, dy), 3 * 2 + 3 * 3
    if variant == "kept":

        def kept() -> torch.Tensor:
            _, s1, s2 = example_kernels.sigmoids_forward_kept(x)
            return example_kernels.sigmoids_backward_kept(dy, s1, s2)

        return kept, 8
    if variant == "recomputed":

        def recomputed() -> torch.Tensor:
            example_kernels.sigmoids_forward(x)
            return example_kernels.sigmoids_backward(dy, x)

        return recomputed, 5
    if variant == "compiled":
        compiled, leaf = torch.compile(stacked), x.detach().requires_grad_()
        return lambda: torch.autograd.grad(compiled(leaf), leaf, dy), saved_accesses(compiled, leaf)
    raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")


SCHEMA = {
    "dtype": TEXT,
    "elements": SIZE,
    "variants": [{"name": TEXT, "accesses": SIZE, "kernels": SIZE, **TIMING, "bytes_per_second": POSITIVE, **RATIO}],
}


@benchmark_cli.quiet()
def measure(quick: bool = False, elements: int | None = None, variants: Sequence[str] = VARIANTS) -> dict[str, Any]:
    """Time, kernels and bandwidth of each variant; ``quick`` takes an eighth of the elements.

    Raises:
        RuntimeError: there is no GPU here.
    """
    elements = elements or (ELEMENTS // 8 if quick else ELEMENTS)
    x, dy = (torch.randn(elements, device=runtime.DEVICE) for _ in range(2))
    calls, accesses = {}, {}
    for variant in variants:
        calls[variant], accesses[variant] = call(variant, x, dy)
    timed = timing.compare(calls, warmup=5, rounds=10 if quick else 25, stopwatch=blocked_stream.stopwatch())
    kernels = trace.kernels_of(list(calls.values()))
    return {
        "dtype": "fp32",
        "elements": elements,
        "variants": [
            {
                "name": variant,
                "accesses": accesses[variant],
                "kernels": len(launched),
                **timed[variant].as_dict(),
                "bytes_per_second": accesses[variant] * 4 * elements / timed[variant].median,
                **timing.ratio(timed[variants[0]], timed[variant]).as_dict(),
            }
            for variant, launched in zip(variants, kernels, strict=True)
        ],
    }


def table(results: dict[str, Any]) -> str:
    """One line a variant: accesses, kernels, time, bandwidth, and how many times faster than the first it is."""
    rows = [
        [
            v["name"],
            v["accesses"],
            v["kernels"],
            f"{v['seconds'] * 1e6:,.1f}",
            f"{v['bytes_per_second'] / 1e12:.3f}",
            f"{v['ratio']:.3f}",
        ]
        for v in results["variants"]
    ]
    return benchmark_cli.text_table(["three sigmoids", "accesses", "kernels", "us", "TB/s", "x"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("recomputation", measure, table, SCHEMA))
