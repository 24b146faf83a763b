"""What it costs that dQ has the same bits on every call: atomics against a second pass, and a race for comparison.

The readable backward passes of ``utils.example_kernels`` share every line but those that add up dQ. Lab 3's backward
pass, which is tuned and takes the second pass, is timed beside them. Each is repeated and its results are compared
bit by bit: an atomic addition arrives in any order, and a sum of floats depends on its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import attention_speed, benchmark_cli, blocked_stream
from benchmarks.thermal_warmup import thermal_warmup
from solutions import lab3_flash_attention as lab
from utils import example_kernels, runtime, timing
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each

#: (batch, heads, seq_len, head_dim, causal)
Shape = tuple[int, int, int, int, bool]
SHAPES: tuple[Shape, ...] = (
    (4, 16, 4096, 64, False),
    (4, 16, 4096, 64, True),
    (4, 16, 4096, 128, False),
    (4, 16, 4096, 128, True),
)
WAYS = ("second pass", "atomics", "race")
OURS = "lab 3"
#: Calls whose results are compared bit by bit.
REPEATS = 20
ROUNDS = 25

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def backward_passes(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], Gradients]]:
    """Name -> backward pass that returns dq, dk and dv, all on the same random inputs."""
    batch, heads, seq_len, head_dim, causal = shape
    size = (batch, heads, seq_len, head_dim)
    q, k, v, do = (torch.randn(size, device=runtime.DEVICE).to(dtype) for _ in range(4))
    o, lse = example_kernels.flash_attention_forward(q, k, v, causal=causal)

    def example(way: str) -> Gradients:
        return example_kernels.flash_attention_backward(q, k, v, o, lse, do, causal, way=way)

    asking = [x.detach().requires_grad_() for x in (q, k, v)]
    attended = lab.flash_attention(*asking, causal=causal)

    def tuned() -> Gradients:
        return torch.autograd.grad(attended, asking, do, retain_graph=True)

    return {**{way: lambda way=way: example(way) for way in WAYS}, OURS: tuned}


def repeated(call: Callable[[], Gradients], repeats: int) -> dict[str, Any]:
    """How many bitwise different dQ, and dK with dV, ``repeats`` calls give, and how far dQ's elements stray.

    ``elements_differ`` counts elements of dQ that are not the same in all calls; ``largest_difference`` is the largest
    distance of an element to the first call's, relative to that call's largest element.
    """
    first, *_ = call()
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    differs = torch.zeros_like(first, dtype=torch.bool)
    largest = 0.0
    for _ in range(repeats):
        dq, dk, dv = call()
        for known, new in zip(seen, (bits(dq), torch.stack([bits(dk), bits(dv)])), strict=True):
            if not any(torch.equal(new, one) for one in known):
                known.append(new)
        differs |= bits(dq) != bits(first)
        largest = max(largest, (dq.float() - first.float()).abs().max().item())
    return {
        "repeats": repeats,
        "distinct_dq": len(seen[0]),
        "distinct_dk_dv": len(seen[1]),
        "elements": first.numel(),
        "elements_differ": int(differs.sum().item()),
        "largest_difference": largest / first.float().abs().max().item(),
    }


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory read as integers of the element's size: equal exactly where all bits are."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def relative_distance(dq: torch.Tensor, other: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``other``."""
    difference = (dq.float() - other.float()).norm() / other.float().norm()
    return difference.item()


SCHEMA = {
    "dtype": TEXT,
    "points": [
        {
            **attention_speed.SHAPE_LAYOUT,
            "way": TEXT,
            **TIMING,
            "flops_per_second": POSITIVE,
            **RATIO,
            **each(SIZE, "repeats", "distinct_dq", "distinct_dk_dv", "elements"),
            "elements_differ": COUNT,
            "largest_difference": NOT_NEGATIVE,
            "from_second_pass": NOT_NEGATIVE,
        }
    ],
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    repeats: int = REPEATS,
    rounds: int = ROUNDS,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Time and number of different results of each way; ``quick`` takes one shape and few rounds.

    Raises:
        RuntimeError: there is no GPU here.
    """
    shapes = shapes or (SHAPES[1:2] if quick else SHAPES)
    points = []
    for shape in shapes:
        passes = backward_passes(shape)
        thermal_warmup(passes[OURS], *(() if seconds is None else (seconds,)))
        timed = timing.compare(passes, warmup=3, rounds=8 if quick else rounds, stopwatch=blocked_stream.stopwatch())
        batch, heads, seq_len, head_dim, causal = shape
        flops = 5 * 2 * batch * heads * seq_len**2 * head_dim // (2 if causal else 1)
        exact_order = passes["second pass"]()[0]
        for name, call in passes.items():
            points.append(
                {
                    "batch": batch,
                    "heads": heads,
                    "seq_len": seq_len,
                    "head_dim": head_dim,
                    "causal": causal,
                    "way": name,
                    **timed[name].as_dict(),
                    "flops_per_second": flops / timed[name].median,
                    **timing.ratio(timed[name], timed["second pass"]).as_dict(),
                    **repeated(call, repeats),
                    "from_second_pass": relative_distance(call()[0], exact_order),
                }
            )
    return {"dtype": "bf16", "points": points}


def table(results: dict[str, Any]) -> str:
    """Time, and how many different results."""
    rows = [
        [
            f"{p['way']}, D {p['head_dim']}, {'causal' if p['causal'] else 'full'}",
            f"{p['seconds'] * 1e3:.3f}",
            f"{p['ratio']:.3f}",
            f"{p['distinct_dq']} and {p['distinct_dk_dv']} of {p['repeats']}",
            f"{p['elements_differ'] / p['elements']:.2%}",
            f"{p['largest_difference']:.1e}",
            f"{p['from_second_pass']:.1e}",
        ]
        for p in results["points"]
    ]
    headings = [
        "backward pass",
        "ms",
        "x second pass",
        "different dQ, dK dV",
        "elements",
        "largest",
        "from second pass",
    ]
    return benchmark_cli.text_table(headings, rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_determinism", measure, table, SCHEMA))
