"""What an anchor is worth: lab 3's forward pass with its anchored loop, beside the inner loop with a running maximum.

Eight shapes of 16,384 tokens and a hidden size of 2048, bf16, measured as :mod:`benchmarks.attention_speed` measures.
Each loop has the tile that the lab's table gives it. ``outgrown`` is the anchored loop's worst case: the same inputs,
but all keys past the first 128 have a score that is higher by 120, so that every tile of queries that sees one of them
is computed a second time, with a running maximum.

``alone`` is what three of them reach when they have the card for themselves, and at which clock and power.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import attention_speed, benchmark_cli, blocked_stream, power, sustained
from benchmarks.attention_speed import Shape
from benchmarks.thermal_warmup import thermal_warmup
from utils import timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

ANCHORED, INNER, OUTGROWN, CUDNN = "anchored", "inner loop", "outgrown", "cudnn"
#: Keys at the start of a row whose scores lie below the others', and by how much.
FIRST_KEYS, GROWTH = 128, 120.0
ROUNDS = 8

_tuning = importlib.import_module("solutions.lab3_flash_attention.tuning")


@contextlib.contextmanager
def with_a_running_maximum() -> Iterator[None]:
    """Inside, lab 3's forward kernel has no anchored loop, and the tile of a kernel that has none."""
    chosen = _tuning.forward
    _tuning.forward = lambda *args: chosen(*args[:5], anchored=False)
    try:
        yield
    finally:
        _tuning.forward = chosen


def outgrowing(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (B, H, N, D), one column of them changed: scores are higher by ``GROWTH`` from key ``FIRST_KEYS`` on."""
    q, k = q.detach().clone(), k.detach().clone()
    q[..., 0] = q.shape[-1] ** 0.5
    k[:, :, :FIRST_KEYS, 0] = 0.0
    k[:, :, FIRST_KEYS:, 0] = GROWTH
    return q, k


def calls(shape: Shape) -> tuple[dict[str, Callable[[], object]], str]:
    """What to time, by name; and why cuDNN is not among it, or nothing."""
    q, k, v, _ = attention_speed.inputs(shape)
    far_q, far_k = (x.requires_grad_() for x in outgrowing(q, k))
    causal = shape[4]

    def inner() -> torch.Tensor:
        with with_a_running_maximum():
            return attention_speed.ours(q, k, v, causal)

    cudnn = functools.partial(attention_speed.baseline(attention_speed.BASELINES[CUDNN]), q, k, v, causal)
    found: dict[str, Callable[[], object]] = {
        ANCHORED: functools.partial(attention_speed.ours, q, k, v, causal),
        INNER: inner,
        OUTGROWN: functools.partial(attention_speed.ours, far_q, far_k, v, causal),
    }
    for call in found.values():
        call()
    try:
        cudnn()
    except RuntimeError as error:
        return found, str(error).strip().splitlines()[0]
    return {**found, CUDNN: cudnn}, ""


def point(shape: Shape, rounds: int = ROUNDS, lap_seconds: float = sustained.LAP_SECONDS / 2) -> dict[str, Any]:
    """Measure one shape."""
    chosen, missing = calls(shape)
    timed, calls_a_lap = sustained.compare(
        chosen, rounds=rounds, stopwatch=blocked_stream.stopwatch(), lap_seconds=lap_seconds
    )
    amount = attention_speed.flops(shape, "forward")
    return {
        **_sizes(shape),
        "flops": amount,
        "calls_a_lap": calls_a_lap,
        "timed": {name: {**t.as_dict(), "flops_per_second": amount / t.median} for name, t in timed.items()},
        "anchored_over": {
            name: timing.ratio(timed[name], timed[ANCHORED]).as_dict() for name in chosen if name != ANCHORED
        },
        "missing": missing,
    }


SCHEMA = {
    "dtype": TEXT,
    "first_keys": SIZE,
    "growth": POSITIVE,
    "points": [
        {
            **attention_speed.SHAPE_LAYOUT,
            "flops": SIZE,
            "calls_a_lap": SIZE,
            "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
            "anchored_over": {str: RATIO},
        }
    ],
    "alone": [attention_speed.ALONE_LAYOUT],
    "unavailable": {str: TEXT},
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    rounds: int = ROUNDS,
    seconds: float | None = None,
    lap_seconds: float = sustained.LAP_SECONDS / 2,
    alone: Shape = attention_speed.ALONE,
) -> dict[str, Any]:
    """Every shape, and power; ``quick`` takes two shapes.

    Args:
        seconds: How long the card is warmed before each shape.
        lap_seconds: Work of the quickest function in one lap; 0 for single calls.
        alone: The shape at which power is read.

    Raises:
        RuntimeError: there is no GPU here.
    """
    points, missing = [], {}
    for shape in shapes or (attention_speed.SHAPES[1::4] if quick else attention_speed.SHAPES):
        thermal_warmup(calls(shape)[0][INNER], *(() if seconds is None else (seconds,)))
        item = point(shape, rounds, lap_seconds)
        if why := item.pop("missing"):
            missing[CUDNN] = why
        points.append(item)
    return {
        "dtype": "bf16",
        "first_keys": FIRST_KEYS,
        "growth": GROWTH,
        "points": points,
        "alone": powers(alone),
        "unavailable": missing,
    }


def powers(shape: Shape) -> list[dict[str, Any]]:
    """Rate, clock and power of each with the card for itself; the worst case is left out."""
    amount = attention_speed.flops(shape, "forward")
    readings = {name: power.alone(call) for name, call in calls(shape)[0].items() if name != OUTGROWN}
    return [
        {"name": name, **_sizes(shape), **reading, "flops_per_second": amount / reading["seconds"]}
        for name, reading in readings.items()
    ]


def _sizes(shape: Shape) -> dict[str, Any]:
    return dict(zip(("batch", "heads", "seq_len", "head_dim", "causal"), shape, strict=True))


def table(results: Mapping[str, Any]) -> str:
    """One line a shape: TFLOP/s of each, and how the anchored loop compares."""
    rows = []
    for item in results["points"]:
        rates = [f"{t['flops_per_second'] / 1e12:.0f}" for t in item["timed"].values()]
        ratios = [f"{r['ratio']:.3f}" for r in item["anchored_over"].values()]
        shape = f"D {item['head_dim']}, N {item['seq_len']}, {'causal' if item['causal'] else 'full'}"
        rows.append([shape, *rates, *ratios])
    first = results["points"][0]
    heads = ["TFLOP/s", *first["timed"], *(f"x {name}" for name in first["anchored_over"])]
    why = "".join(f"\n{name}: {reason}" for name, reason in results["unavailable"].items())
    alone = "".join(
        f"\nalone, {item['name']}: {item['flops_per_second'] / 1e12:.0f} TFLOP/s at {item['clock_hz'] / 1e9:.2f} GHz, "
        f"{item['watts']:.0f} W"
        for item in results["alone"]
    )
    return benchmark_cli.text_table(heads, rows) + alone + why


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_anchor", measure, table, SCHEMA))
