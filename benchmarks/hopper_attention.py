"""The capstone's attention beside cuDNN, FlashAttention-2 (PyTorch's flash backend) and lab 3's, on a Hopper GPU.

Lab 3's eight shapes and four more of a head_dim of 256, each direction, in bf16 and fp16; and one long sequence,
forward and backward in one. Backward, the capstone has two rows: ``ours`` gives the same bits on every call,
``ours, fast`` sums dQ in the order in which its parts arrive. What is measured and how is lab 3's
(:mod:`benchmarks.attention_speed`): inputs ask for gradients, laps keep the card busy, rounds are interleaved, and a
ratio is the median of those within rounds.

A pool of processes compiles all kernels first (:mod:`benchmarks.hopper_implementations`).
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import attention_speed, benchmark_cli, blocked_stream, hopper_implementations, sustained
from benchmarks.attention_speed import Shape
from benchmarks.hopper_implementations import BASELINES, DTYPES, FAST, LAB, OURS, WORKERS
from benchmarks.thermal_warmup import thermal_warmup
from utils import timing
from utils.record_schemas import NOT_NEGATIVE, RATIO, TEXT

SHAPES: tuple[Shape, ...] = (
    *attention_speed.SHAPES,
    *((16384 // n, 8, n, 256, causal) for n in attention_speed.SEQ_LENS for causal in (False, True)),
)
LONG = attention_speed.LONG


class Effort(NamedTuple):
    """How long one dtype is measured: rounds at least, seconds of work in a lap, seconds of warming before a shape."""

    rounds: int
    lap_seconds: float
    warm_seconds: float


#: bf16 is what the course speaks of; fp16 runs the same instructions and is there to be seen.
EFFORT = {"bf16": Effort(8, 0.1, 1.0), "fp16": Effort(4, 0.05, 0.5)}


def whole_rounds(names: Sequence[str], rounds: int) -> int:
    """At least ``rounds``, and as many as it takes for everybody to follow everybody equally often."""
    period = len(timing.balanced_orders(list(names)))
    return -(-rounds // period) * period


def point(
    shape: Shape, dtype: str, direction: str, timed_calls: Mapping[tuple[str, str], Callable[[], object]],
    effort: Effort,
) -> dict[str, Any]:  # fmt: skip
    """Measure one direction of one shape.

    ``ours_over`` says how many times as fast as each of the others ``ours`` is; ``fast_over`` the same of
    ``ours, fast``, and is empty forward.
    """
    chosen = {name: call for (which, name), call in timed_calls.items() if which == direction}
    timed, calls_a_lap = sustained.compare(
        chosen, rounds=whole_rounds(list(chosen), effort.rounds), stopwatch=blocked_stream.stopwatch(),
        lap_seconds=effort.lap_seconds,
    )  # fmt: skip
    amount = attention_speed.flops(shape, direction)
    batch, heads, seq_len, head_dim, causal = shape

    def over(mine: str) -> dict[str, Any]:
        others = [name for name in chosen if name != mine] if mine in chosen else []
        return {name: timing.ratio(timed[name], timed[mine]).as_dict() for name in others}

    return {
        "dtype": dtype,
        "direction": direction,
        "batch": batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": head_dim,
        "causal": causal,
        "flops": amount,
        "calls_a_lap": calls_a_lap,
        "timed": {name: {**t.as_dict(), "flops_per_second": amount / t.median} for name, t in timed.items()},
        "ours_over": over(OURS),
        "fast_over": over(FAST),
    }


# ---- the benchmark ---------------------------------------------------------------------------------------------------


#: A point: its dtype, and how the second mode compares.
_POINT = {"dtype": TEXT, **attention_speed.POINT_LAYOUT, "fast_over": {str: RATIO}}
SCHEMA = {"points": [_POINT], "long": [_POINT], "lap_seconds": {str: NOT_NEGATIVE}, "unavailable": {str: TEXT}}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    long: Shape = LONG,
    dtypes: Sequence[str] = tuple(DTYPES),
    effort: Mapping[str, Effort] = EFFORT,
    workers: int = WORKERS,
) -> dict[str, Any]:
    """Every shape in both directions and the long sequence, bf16 first; ``quick`` takes three shapes of bf16.

    Args:
        effort: How long each dtype is measured.
        workers: Processes that compile; 0 to compile while measuring.

    Raises:
        RuntimeError: there is no GPU here, it is not one of Hopper's, or a kernel does not compile.
    """
    hopper_implementations.need_hopper()
    shapes = shapes or (SHAPES[1::4] if quick else SHAPES)
    dtypes = dtypes[:1] if quick else dtypes
    start = time.monotonic()
    if workers:
        hopper_implementations.compile_first([*shapes, long], dtypes, workers)
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    points, longs, unavailable = [], [], {}
    for dtype in dtypes:
        for shape in (*shapes, long):
            found, missing = hopper_implementations.calls(shape, DTYPES[dtype], hopper_implementations.functions())
            unavailable |= missing
            thermal_warmup(found["both", OURS], effort[dtype].warm_seconds)
            directions = ("both",) if shape is long else attention_speed.DIRECTIONS
            measured = [point(shape, dtype, direction, found, effort[dtype]) for direction in directions]
            (longs if shape is long else points).extend(measured)
            for item in measured:
                print(f"{time.monotonic() - start:4.0f} s  {name_of(item)}: {short(item)}", flush=True)
    return {
        "points": points,
        "long": longs,
        "lap_seconds": {dtype: effort[dtype].lap_seconds for dtype in dtypes},
        "unavailable": unavailable,
    }


def name_of(item: Mapping[str, Any]) -> str:
    """A point's dtype, direction and shape in words."""
    return f"{item['dtype']} {attention_speed.name_of(item)}"


def short(item: Mapping[str, Any]) -> str:
    """How many times as fast as cuDNN, in both modes."""
    found = [(mine, item[over]["cudnn"]["ratio"]) for mine, over in MODES if "cudnn" in item[over]]
    return ", ".join(f"{mine} {ratio:.3f} x cudnn" for mine, ratio in found) or "no cudnn"


#: The capstone's two modes, and where a point holds what each is over the others.
MODES = ((OURS, "ours_over"), (FAST, "fast_over"))


def table(results: Mapping[str, Any]) -> str:
    """One line a dtype, shape and direction: TFLOP/s of each, and how our rates compare."""
    items = [*results["points"], *results["long"]]
    names = list(dict.fromkeys(name for item in items for name in item["timed"]))
    names.sort(key=[OURS, FAST, LAB, *BASELINES].index)
    peers = [name for name in names if name not in (OURS, FAST)]
    compared = [(over, peer) for _, over in MODES for peer in peers]
    rows = []
    for item in items:
        rates = [f"{t['flops_per_second'] / 1e12:.0f}" if t else "" for t in map(item["timed"].get, names)]
        ratios = [f"{item[over][peer]['ratio']:.3f}" if peer in item[over] else "" for over, peer in compared]
        rows.append([name_of(item), *rates, *ratios])
    headings = [*(f"x {peer}" for peer in peers), *(f"fast x {peer}" for peer in peers)]
    lines = [benchmark_cli.text_table(["TFLOP/s", *names, *headings], rows)]
    for dtype in results["lap_seconds"]:
        for mine, over in MODES:
            ranked = [item for item in items if item["dtype"] == dtype and "cudnn" in item[over]]
            ranked.sort(key=lambda item, over=over: item[over]["cudnn"]["ratio"])
            if ranked:
                ratios = [item[over]["cudnn"]["ratio"] for item in ranked]
                lines.append(
                    f"{dtype}, {mine}: as fast as cuDNN or faster on {sum(ratio >= 1 for ratio in ratios)} of "
                    f"{len(ratios)} rows, {ratios[0]:.3f} at the lowest ({attention_speed.name_of(ranked[0])})"
                )
    for item in results["long"]:
        times = ", ".join(f"{name} {t['seconds'] * 1e3:.3f}" for name, t in item["timed"].items())
        lines.append(f"long sequence, {item['dtype']}, forward and backward, ms: {times}")
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in results["unavailable"].items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: :func:`benchmarks.benchmark_cli.run`'s, and how long to measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hopper_attention", description="Measure hopper_attention and record it."
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, bf16 only, nothing recorded")
    parser.add_argument("--rounds", type=int, help="rounds of bf16 at least; half of them for fp16")
    parser.add_argument("--lap-seconds", type=float, help="work in a lap of bf16; half of it for fp16")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that compile")
    options = parser.parse_args(arguments)
    effort = dict(EFFORT)
    for share, (dtype, usual) in zip((1, 2), EFFORT.items(), strict=True):
        rounds = usual.rounds if options.rounds is None else max(1, options.rounds // share)
        lap_seconds = usual.lap_seconds if options.lap_seconds is None else options.lap_seconds / share
        effort[dtype] = Effort(rounds, lap_seconds, usual.warm_seconds)
    measured = functools.partial(measure, effort=effort, workers=options.workers)
    return benchmark_cli.run("hopper_attention", measured, table, SCHEMA, ["--quick"] if options.quick else [])


if __name__ == "__main__":
    raise SystemExit(main())
