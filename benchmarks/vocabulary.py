"""Padding a vocabulary from 50257 to 50304: the time of the output projection, forward and with its backward pass.

The projection multiplies the hidden states (tokens, hidden) by the transposed embedding (vocabulary, hidden) in bf16.
Its output's rows are as long as the vocabulary: 50257 is odd, 50304 is 393 x 128. The two are timed in turn, in
changing order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import benchmark_cli, trace
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

SIZES = (50257, 50304)
#: (tokens, hidden): GPT-2's smallest and largest hidden size, and one of a larger model.
SHAPES = [(8 * 1024, 768), (16 * 1024, 768), (32 * 1024, 768), (8 * 1024, 1600), (8 * 1024, 4096)]
QUICK_SHAPES = [(8 * 1024, 768)]


def _calls(tokens: int, hidden: int, sizes: Sequence[int], backward: bool) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    x = torch.randn(tokens, hidden, device=runtime.DEVICE).to(torch.bfloat16).requires_grad_(backward)
    for size in sizes:
        weight = torch.randn(size, hidden, device=runtime.DEVICE).to(torch.bfloat16).requires_grad_(backward)
        if not backward:
            calls[str(size)] = lambda weight=weight: F.linear(x, weight)
            continue
        gradient = torch.randn(tokens, size, device=runtime.DEVICE, dtype=torch.bfloat16)
        calls[str(size)] = lambda weight=weight, gradient=gradient: torch.autograd.grad(
            F.linear(x, weight), (x, weight), gradient
        )
    return calls


SCHEMA = {
    "dtype": TEXT,
    "sizes": [SIZE],
    "points": [
        {
            "tokens": SIZE,
            "hidden": SIZE,
            "pass": TEXT,
            "times": [{"vocabulary": SIZE, **TIMING, "flops_per_second": POSITIVE, "kernels": [TEXT]}],
            **RATIO,
        }
    ],
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False, shapes: Sequence[tuple[int, int]] | None = None, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Times of both sizes and their ratio, by tokens and hidden size; ``quick`` takes one shape.

    Raises:
        RuntimeError: there is no GPU here.
    """
    points = []
    for tokens, hidden in shapes or (QUICK_SHAPES if quick else SHAPES):
        for backward in (False, True):
            calls = _calls(tokens, hidden, sizes, backward)
            timed = timing.compare(calls, warmup=5, rounds=10 if quick else 25)
            kernels = trace.kernels_of(list(calls.values()))
            points.append(
                {
                    "tokens": tokens,
                    "hidden": hidden,
                    "pass": "forward and backward" if backward else "forward",
                    "times": [
                        {
                            "vocabulary": size,
                            **timed[str(size)].as_dict(),
                            "flops_per_second": (6 if backward else 2)
                            * tokens
                            * hidden
                            * size
                            / timed[str(size)].median,
                            "kernels": [trace.short_name(kernel.name) for kernel in launched],
                        }
                        for size, launched in zip(sizes, kernels, strict=True)
                    ],
                    **timing.ratio(timed[str(sizes[0])], timed[str(sizes[1])]).as_dict(),
                }
            )
    return {"dtype": "bf16", "sizes": list(sizes), "points": points}


def table(results: dict[str, Any]) -> str:
    """One line a shape: both times, and how many times longer the first takes."""
    rows = [
        [
            f"{p['tokens']} x {p['hidden']}, {p['pass']}",
            *(f"{t['seconds'] * 1e6:,.1f}" for t in p["times"]),
            f"{p['ratio']:.3f}",
            f"{p['ratio_low']:.3f}-{p['ratio_high']:.3f}",
        ]
        for p in results["points"]
    ]
    small, large = results["sizes"]
    return benchmark_cli.text_table(["tokens x hidden", f"{small}, us", f"{large}, us", "ratio", "p20-p80"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("vocabulary", measure, table, SCHEMA))
