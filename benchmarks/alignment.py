"""What alignment costs: bf16 products whose M, N or K is odd, or divisible by a power of two, at nearly constant size.

Sizes run from 4097 to 4224. They take the same number of 128 or 256 wide tiles, so neither waves nor intensity change:
what changes is whether a row starts at an address that wide loads can use. Rows of A are K elements long, rows of B and
of the output N elements; M is no row's length. The variants are timed in turn, in changing order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, trace
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each

BASE = 4096
AXES = ("k", "n", "m", "all")
#: 4096 + 1 is odd, 4096 + 2 is divisible by 2 and no more, ...
DIVISORS = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK_DIVISORS = (1, 2, 8, 64)


SCHEMA = {
    "dtype": TEXT,
    "base": SIZE,
    "points": [
        {
            "axis": TEXT,
            **each(SIZE, "divisor", "m", "k", "n"),
            **TIMING,
            "flops_per_second": POSITIVE,
            **RATIO,
            "kernel": TEXT,
        }
    ],
}


def measure(
    quick: bool = False, base: int = BASE, divisors: Sequence[int] | None = None, axes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Rates by axis and by the largest power of two that divides it; ``quick`` takes four of them along K and N.

    Raises:
        RuntimeError: there is no GPU here.
    """
    divisors = divisors or (QUICK_DIVISORS if quick else DIVISORS)
    axes = axes or (("k", "n") if quick else AXES)
    points = []
    for axis in axes:
        shapes, calls = {}, {}
        for divisor in divisors:
            m, k, n = (base + divisor if axis in (name, "all") else base + max(DIVISORS) for name in ("m", "k", "n"))
            a, b = (torch.randn(*shape, device=runtime.DEVICE).to(torch.bfloat16) for shape in ((m, k), (k, n)))
            out = torch.empty(m, n, dtype=torch.bfloat16, device=runtime.DEVICE)
            shapes[str(divisor)] = (m, k, n)
            calls[str(divisor)] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
        timed = timing.compare(calls, warmup=5, rounds=10 if quick else 25)
        reference = timed[str(max(divisors))]
        kernels = trace.kernels_of(list(calls.values()))
        for (divisor, (m, k, n)), launched in zip(shapes.items(), kernels, strict=True):
            timing_here = timed[divisor]
            rate = 2 * m * k * n / timing_here.median
            points.append(
                {
                    "axis": axis,
                    "divisor": int(divisor),
                    "m": m,
                    "k": k,
                    "n": n,
                    **timing_here.as_dict(),
                    "flops_per_second": rate,
                    **timing.ratio(timing_here, reference).as_dict(),
                    "kernel": trace.short_name(max(launched, key=lambda kernel: kernel.seconds).name),
                }
            )
    return {"dtype": "bf16", "base": base, "points": points}


def table(results: dict[str, Any]) -> str:
    """One line a variant: rate, and time relative to the most aligned one."""
    rows = [
        [
            f"{p['axis']} = {results['base']} + {p['divisor']}",
            f"{p['seconds'] * 1e6:,.1f}",
            f"{p['flops_per_second'] / 1e12:.1f}",
            f"{p['ratio']:.3f}",
            p["kernel"][:60],
        ]
        for p in results["points"]
    ]
    return benchmark_cli.text_table(["size", "us", "TFLOP/s", "of aligned time", "kernel"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("alignment", measure, table, SCHEMA))
