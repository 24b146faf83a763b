"""FlashAttention forward and backward beside PyTorch's three backends: flash (FA2), memory-efficient and cuDNN, bf16.

Eight shapes of 16,384 tokens and a hidden size of 2048, each direction. The card is warmed for 2 s before each shape
and kept busy: a lap repeats its call until the quickest function has worked for 0.2 s, the same number of calls for
all four (``calls_a_lap``), and a time is the lap's divided by it (:mod:`benchmarks.sustained` says why so long). All
four run in every round, each after each of the others equally often, and a ratio is the median of those within rounds.

The forward pass is the one that training runs: inputs ask for gradients, so that everybody writes a logsumexp. The
backward pass is all that autograd does for it: ours computes delta, PyTorch's also zero and convert buffers.

``long`` is one sequence of 16,384 causal tokens with 16 heads, forward and backward in one. ``alone`` is what each
reaches when it has the card for itself, forward, and at which clock and power.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import benchmark_cli, blocked_stream, power, sustained
from benchmarks.thermal_warmup import thermal_warmup
from solutions import lab3_flash_attention as lab
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each

TOKENS = 16384
HIDDEN = 2048
HEAD_DIMS = (64, 128)
SEQ_LENS = (2048, 8192)
#: (batch, heads, seq_len, head_dim, causal)
Shape = tuple[int, int, int, int, bool]
SHAPES: tuple[Shape, ...] = tuple(
    (TOKENS // n, HIDDEN // d, n, d, causal) for d in HEAD_DIMS for n in SEQ_LENS for causal in (False, True)
)
LONG: Shape = (1, 16, 16384, 64, True)
ALONE: Shape = (2, 16, 8192, 128, False)
OURS = "ours"
BASELINES = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
DIRECTIONS = ("forward", "backward")
ROUNDS = 8

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def flops(shape: Shape, direction: str) -> int:
    """FLOPs by the convention of FlashAttention's papers: two products of 2 B H N^2 D each, half of it when causal, and
    two and a half times as much backward (five products). ``both`` is the sum.

    Raises:
        ValueError: another direction.
    """
    batch, heads, seq_len, head_dim, causal = shape
    products = {"forward": 2, "backward": 5, "both": 7}
    if direction not in products:
        raise ValueError(f"direction must be one of {', '.join(products)}, got {direction!r}")
    return products[direction] * 2 * batch * heads * seq_len**2 * head_dim // (2 if causal else 1)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Lab 3's attention."""
    return lab.flash_attention(q, k, v, causal=causal)


def baseline(backend: SDPBackend) -> Attention:
    """PyTorch's attention by one backend and no other: it raises where that backend cannot."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def functions() -> dict[str, Attention]:
    """What is compared, by name; ours first."""
    return {OURS: ours, **{name: baseline(backend) for name, backend in BASELINES.items()}}


def inputs(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Random q, k, v that ask for gradients, and a gradient of the output: bf16 (batch, heads, seq_len, head_dim)."""
    batch, heads, seq_len, head_dim, _ = shape
    size = (batch, heads, seq_len, head_dim)
    q, k, v, do = (torch.randn(size, device=runtime.DEVICE).to(torch.bfloat16) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def calls(shape: Shape, attentions: Mapping[str, Attention]) -> tuple[dict[tuple[str, str], Callable], dict[str, str]]:
    """(direction, name) -> what to time, for those that can; and why the others cannot."""
    q, k, v, do = inputs(shape)
    found: dict[tuple[str, str], Callable[[], object]] = {}
    unavailable = {}

    def forward(attention: Attention) -> torch.Tensor:
        return attention(q, k, v, shape[4])

    def backward(o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    for name, attention in attentions.items():
        try:
            o = forward(attention)
            backward(o)
        except RuntimeError as error:
            if name == OURS:
                raise
            unavailable[name] = str(error).strip().splitlines()[0]
            continue
        found["forward", name] = lambda attention=attention: forward(attention)
        found["backward", name] = lambda o=o: backward(o)
        found["both", name] = lambda attention=attention: backward(forward(attention))
    return found, unavailable


def point(
    shape: Shape,
    direction: str,
    timed_calls: Mapping[tuple[str, str], Callable],
    rounds: int,
    lap_seconds: float = sustained.LAP_SECONDS,
) -> dict[str, Any]:
    """Measure one direction of one shape."""
    chosen = {name: call for (which, name), call in timed_calls.items() if which == direction}
    timed, calls_a_lap = sustained.compare(
        chosen, rounds=rounds, stopwatch=blocked_stream.stopwatch(), lap_seconds=lap_seconds
    )
    amount = flops(shape, direction)
    batch, heads, seq_len, head_dim, causal = shape
    return {
        "direction": direction,
        "batch": batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": head_dim,
        "causal": causal,
        "flops": amount,
        "calls_a_lap": calls_a_lap,
        "timed": {name: {**t.as_dict(), "flops_per_second": amount / t.median} for name, t in timed.items()},
        "ours_over": {name: timing.ratio(timed[name], timed[OURS]).as_dict() for name in chosen if name != OURS},
    }


SHAPE_LAYOUT = {**each(SIZE, "batch", "heads", "seq_len", "head_dim"), "causal": bool}
POINT_LAYOUT = {
    "direction": TEXT,
    **SHAPE_LAYOUT,
    "flops": SIZE,
    "calls_a_lap": SIZE,
    "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
    "ours_over": {str: RATIO},
}
#: An attention function with the card for itself.
ALONE_LAYOUT = {
    "name": TEXT,
    **SHAPE_LAYOUT,
    **each(POSITIVE, "seconds", "flops_per_second", "clock_hz", "watts", "celsius"),
}
SCHEMA = {
    "dtype": TEXT,
    "points": [POINT_LAYOUT],
    "long": POINT_LAYOUT,
    "alone": [ALONE_LAYOUT],
    "unavailable": {str: TEXT},
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    long: Shape = LONG,
    rounds: int = ROUNDS,
    seconds: float | None = None,
    lap_seconds: float = sustained.LAP_SECONDS,
    alone: Shape | None = ALONE,
) -> dict[str, Any]:
    """Every shape in both directions, the long sequence, and power; ``quick`` takes two shapes and few rounds.

    Args:
        seconds: How long the card is warmed before each shape.
        alone: The shape at which everybody's power is read; None for no such reading.
        lap_seconds: Work of the quickest function in one lap; 0 for single calls.

    Raises:
        RuntimeError: there is no GPU here.
    """
    shapes = shapes or (SHAPES[1::4] if quick else SHAPES)
    rounds = min(rounds, 10) if quick else rounds
    points, unavailable = [], {}
    for shape in shapes:
        found, missing = calls(shape, functions())
        unavailable |= missing
        thermal_warmup(found["both", OURS], *(() if seconds is None else (seconds,)))
        points += [point(shape, direction, found, rounds, lap_seconds) for direction in DIRECTIONS]
    found, missing = calls(long, functions())
    thermal_warmup(found["both", OURS], *(() if seconds is None else (seconds,)))
    return {
        "dtype": "bf16",
        "points": points,
        "long": point(long, "both", found, rounds, lap_seconds),
        "alone": [] if alone is None else powers(alone),
        "unavailable": unavailable | missing,
    }


def powers(shape: Shape) -> list[dict[str, Any]]:
    """Rate, clock and power of everybody's forward pass with the card for itself."""
    found, _ = calls(shape, functions())
    batch, heads, seq_len, head_dim, causal = shape
    readings = {name: power.alone(call) for (direction, name), call in found.items() if direction == "forward"}
    return [
        {
            "name": name,
            "batch": batch,
            "heads": heads,
            "seq_len": seq_len,
            "head_dim": head_dim,
            "causal": causal,
            **reading,
            "flops_per_second": flops(shape, "forward") / reading["seconds"],
        }
        for name, reading in readings.items()
    ]


def name_of(item: Mapping[str, Any]) -> str:
    """A point's shape in words."""
    causal = "causal" if item["causal"] else "full"
    return f"{item['direction']}, D {item['head_dim']}, N {item['seq_len']}, {causal}"


def table(results: Mapping[str, Any]) -> str:
    """One line a shape and direction: TFLOP/s of each, and how our rate compares."""
    names = list(dict.fromkeys(name for item in results["points"] for name in item["timed"]))
    baselines = [name for name in names if name != OURS]
    rows = []
    for item in (*results["points"], results["long"]):
        rates = [f"{t['flops_per_second'] / 1e12:.0f}" if t else "" for t in map(item["timed"].get, names)]
        ratios = [f"{r['ratio']:.3f}" if r else "" for r in map(item["ours_over"].get, baselines)]
        rows.append([name_of(item), *rates, *ratios])
    text = benchmark_cli.text_table(["TFLOP/s", *names, *(f"x {name}" for name in baselines)], rows)
    long = ", ".join(f"{name} {t['seconds'] * 1e3:.3f}" for name, t in results["long"]["timed"].items())
    why = "".join(f"\n{name}: {reason}" for name, reason in results["unavailable"].items())
    alone = "".join(
        f"\nalone, {item['name']}: {item['flops_per_second'] / 1e12:.0f} TFLOP/s at {item['clock_hz'] / 1e9:.2f} GHz, "
        f"{item['watts']:.0f} W, {item['celsius']:.0f} C"
        for item in results["alone"]
    )
    return f"{text}\nlong sequence, forward and backward, ms: {long}{alone}{why}"


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_speed", measure, table, SCHEMA))
