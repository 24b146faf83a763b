"""The capstone's ladder: each step's forward pass beside cuDNN and FA2, bf16, and what one multiprocessor did in it.

First every step is compiled and checked against float64, each in a process of its own
(:mod:`benchmarks.attention_step_checks`), so that one that fails takes no other with it. It is then left out by name,
with the reason, and nothing is recorded. What remains is timed on the eight shapes of lab 3's table as
:mod:`benchmarks.attention_speed` does it, in shorter laps. PyTorch's functions write a logsumexp, as the steps do.

``traces`` are clock reads inside the kernels of steps 8, 9 and 10 (:mod:`solutions.capstone_hopper.steps.trace`), and
what those reads cost.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import attention_speed, benchmark_cli, blocked_stream, sustained
from benchmarks.attention_speed import SHAPES, Shape
from benchmarks.thermal_warmup import thermal_warmup
from solutions.capstone_hopper import steps
from solutions.capstone_hopper.steps import trace
from utils import timing
from utils.fingerprint import ROOT
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each

_STEPS = "solutions/capstone_hopper/steps"
SOURCES = [
    "benchmarks/attention_step_checks.py",
    f"{_STEPS}/compiler.py",
    *(f"{_STEPS}/{each.path.name}" for each in steps.EVERYONE),
]

BASELINES = ("cudnn", "flash")
ROUNDS = 6
LAP_SECONDS = 0.06
PREHEAT_SECONDS = 1.0
#: What the check of the traced kernels is called.
TRACES = "traces"
#: A process that compiles and checks a step has this long.
CHECK_SECONDS = 120.0
TRACED: Shape = (8, 16, 2048, 128, False)

Verdict = dict[str, Any]


def verdict(name: str, seconds: float = CHECK_SECONDS) -> Verdict:
    """Compile and check one step or the traced kernels in a process: {"checks", "kernels"}, or {"failed": why}."""
    command = [sys.executable, "-m", "benchmarks.attention_step_checks", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {seconds:.0f} s (a kernel that waits for ever?)"}
    if done.returncode:
        return {"failed": "\n".join(done.stderr.strip().splitlines()[-8:]) or f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def verdicts(names: Sequence[str], check: Callable[[str], Verdict] = verdict) -> dict[str, Verdict]:
    """:func:`verdict` of each, as many at a time as there are processors."""
    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(names), os.cpu_count() or 1))) as pool:
        return dict(zip(names, pool.map(check, names)))


def calls(shape: Shape, names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """What to time on one shape: the steps of these names, and PyTorch's attention by cuDNN and by FA2."""
    q, k, v, _ = attention_speed.inputs(shape)
    plain = [x.detach() for x in (q, k, v)]
    found: dict[str, Callable[[], object]] = {
        name: functools.partial(steps.step(name).load().forward, *plain, shape[4]) for name in names
    }
    for name in BASELINES:
        attention = attention_speed.baseline(attention_speed.BASELINES[name])
        try:
            attention(q, k, v, shape[4])
        except RuntimeError:
            continue  # this build of PyTorch has no such backend
        found[name] = functools.partial(attention, q, k, v, shape[4])
    return found


def point(shape: Shape, timed_calls: Mapping[str, Callable[[], object]], rounds: int, lap_seconds: float) -> dict:
    """Everybody's time on one shape, and how it compares with cuDNN's."""
    timed, calls_a_lap = sustained.compare(
        timed_calls, rounds=rounds, stopwatch=blocked_stream.stopwatch(), lap_seconds=lap_seconds
    )
    amount = attention_speed.flops(shape, "forward")
    batch, heads, seq_len, head_dim, causal = shape
    return {
        "batch": batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": head_dim,
        "causal": causal,
        "flops": amount,
        "calls_a_lap": calls_a_lap,
        "timed": {name: {**t.as_dict(), "flops_per_second": amount / t.median} for name, t in timed.items()},
        "over_cudnn": {
            name: timing.ratio(timed["cudnn"], t).as_dict() for name, t in timed.items() if "cudnn" in timed
        },
    }


def traces(shape: Shape, names: Sequence[str], rounds: int, lap_seconds: float) -> list[dict[str, Any]]:
    """A trace of each of these steps on one shape, and what the clock reads cost."""
    q, k, v, _ = attention_speed.inputs(shape)
    plain = [x.detach() for x in (q, k, v)]
    found = []
    for name in names:
        item = trace.record(name, *plain, shape[4])
        times = trace.launch(name, *plain, shape[4])[2]
        both = {
            "plain": functools.partial(steps.step(name).load().forward, *plain, shape[4]),
            "traced": functools.partial(trace.launch, name, *plain, shape[4], times),
        }
        timed, _ = sustained.compare(both, rounds=rounds, stopwatch=blocked_stream.stopwatch(), lap_seconds=lap_seconds)
        found.append({**item, "cost": timing.ratio(timed["traced"], timed["plain"]).median})
    return found


def kind_of(each: steps.Step) -> str:
    """ "step", "try" or "package"."""
    return "package" if each is steps.PACKAGE else "try" if each in steps.TRIES else "step"


SCHEMA = {
    "dtype": TEXT,
    "steps": [
        {
            "number": SIZE,
            **each(TEXT, "name", "kind", "changes"),
            "kernels": [
                {"head_dim": SIZE, "causal": bool, "registers": SIZE, "spilled_bytes": COUNT, "shared_bytes": SIZE}
            ],
        }
    ],
    "checks": [
        {
            "name": TEXT,
            "head_dim": SIZE,
            "causal": bool,
            **each(NOT_NEGATIVE, "largest_error", "allowed", "largest_lse_error"),
        }
    ],
    "points": [
        {
            **attention_speed.SHAPE_LAYOUT,
            "flops": SIZE,
            "calls_a_lap": SIZE,
            "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
            "over_cudnn": {str: RATIO},
        }
    ],
    "traces": [
        {
            "name": TEXT,
            **attention_speed.SHAPE_LAYOUT,
            "program": COUNT,
            "cost": POSITIVE,
            "events": {str: {str: [NOT_NEGATIVE]}},
        }
    ],
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    rounds: int = ROUNDS,
    lap_seconds: float = LAP_SECONDS,
    seconds: float = PREHEAT_SECONDS,
    traced: Shape = TRACED,
    check: Callable[[str], Verdict] = verdict,
) -> dict[str, Any]:
    """Check, time and trace every step; ``quick`` takes two shapes and few rounds.

    Args:
        lap_seconds: Work of the quickest function in one lap; 0 for single calls.
        seconds: How long the card is warmed before each shape.
        traced: The shape that is traced.
        check: What compiles and checks one step by name.

    Raises:
        RuntimeError: there is no GPU here.
    """
    shapes = shapes or (SHAPES[4:6] if quick else SHAPES)
    rounds = min(rounds, 3) if quick else rounds
    found = verdicts([*(each.name for each in steps.EVERYONE), TRACES], check)
    good = [each.name for each in steps.EVERYONE if "failed" not in found[each.name]]
    points = []
    for shape in shapes:
        timed_calls = calls(shape, good)
        thermal_warmup(timed_calls[next(iter(timed_calls))], seconds)
        points.append(point(shape, timed_calls, rounds, lap_seconds))
    failures = {name: each["failed"] for name, each in found.items() if "failed" in each}
    names = [name for name in trace.STEPS if name in good and TRACES not in failures]
    return {
        "dtype": "bf16",
        "steps": [
            {
                "number": each.number,
                "name": each.name,
                "kind": kind_of(each),
                "changes": each.changes,
                "kernels": found[each.name]["kernels"],
            }
            for each in steps.EVERYONE
            if each.name in good
        ],
        "checks": [item for name in good for item in found[name]["checks"]],
        "points": points,
        "traces": traces(traced, names, rounds, lap_seconds),
        **({"failed": failures} if failures else {}),
    }


def table(results: Mapping[str, Any]) -> str:
    """Rate of each step on each shape and its ratio to cuDNN; what each kernel spends; what failed."""

    def label(item: Mapping[str, Any]) -> str:
        return f"D{item['head_dim']} N{item['seq_len']} {'causal' if item['causal'] else 'full'}"

    names = list(dict.fromkeys(name for item in results["points"] for name in item["timed"]))
    rows = []
    for name in names:
        cells = []
        for item in results["points"]:
            rate, over = item["timed"].get(name), item["over_cudnn"].get(name)
            cells.append(f"{rate['flops_per_second'] / 1e12:.0f} {over['ratio']:.3f}" if rate and over else "")
        rows.append([name, *cells])
    text = benchmark_cli.text_table(["TFLOP/s, x cuDNN", *map(label, results["points"])], rows)
    spent = [
        f"{each['name']}: "
        + "; ".join(
            f"D{k['head_dim']} {'causal' if k['causal'] else 'full'} {k['registers']} registers, "
            f"{k['spilled_bytes']} B spilled, {k['shared_bytes'] / 1024:.0f} KiB"
            for k in each["kernels"]
        )
        for each in results["steps"]
    ]
    shares = [
        f"trace of {item['name']}: x {item['cost']:.3f} with clock reads, "
        + ", ".join(f"{what} {share:.0%}" for what, share in trace.busy(item).items())
        for item in results["traces"]
    ]
    failed = [f"FAILED {name}: {why}" for name, why in results.get("failed", {}).items()]
    return "\n".join([text, *spent, *shares, *failed])


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_steps", measure, table, SCHEMA))
