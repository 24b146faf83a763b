"""The capstone's backward kernel step by step, beside cuDNN and FlashAttention-4, on a Hopper GPU in bf16.

Each step (:class:`solutions.capstone_hopper.launch_reordered.Step`) is first held against float64 on ragged
shapes, in a process of its own: a kernel that waits for ever, or breaks its process's GPU context, takes no other with
it. Those processes run side by side and leave the compiled kernels in Triton's cache. What was right is then timed, all
in turn in each round, as :mod:`benchmarks.attention_speed` does it: the backward pass with all that comes before and
after the kernel. ``start`` is the kernel before the first step; ``two kernels`` fixes the order of dQ's sums without
turns: dK and dV by that kernel, dQ by lab 3's. Attention takes ``ordered``, and ``balanced`` where it need not be
deterministic. How many of a thousand runs give the first one's gradients is counted, too.

``kernels`` are the parts of one call alone, by the profiler. The card is cool then and clocks higher than in laps: they
say how a call's time is shared out, and are no rates.

FlashAttention-4 (``flash_attn.cute`` of the package ``flash-attn-4``) takes part where Python finds it and its
gradients are right.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import attention_errors, attention_speed, benchmark_cli, hopper_implementations, hopper_peers, sustained
from benchmarks.attention_speed import SHAPES, Shape
from benchmarks.hopper_implementations import DTYPES
from benchmarks.thermal_warmup import thermal_warmup
from solutions import lab3_flash_attention as lab
from utils import runtime, timing
from utils.record_schemas import COUNT, POSITIVE, RATIO, SIZE, TEXT, TIMING

START, TWO_KERNELS, CUDNN, FA4 = "start", "two kernels", "cudnn", "fa4"
DTYPE = "bf16"
#: (batch, query heads, key heads, queries, keys): ragged on either side, queries that see no key, groups of heads, more
#: programs than multiprocessors.
SIZES = ((1, 1, 1, 1, 1), (1, 4, 2, 129, 257), (2, 3, 1, 203, 113), (1, 2, 2, 300, 391), (2, 16, 16, 1024, 1024))
#: Error in units of plain PyTorch's in the same dtype, and what is allowed beyond, as a share of the largest value.
FACTOR, MORE = 2.0, 2e-4
ROUNDS, QUICK_ROUNDS = 12, 6
#: What is run again and again on the same numbers, and on which shapes how many times each.
REPEATED = ("balanced", "ordered", TWO_KERNELS)
REPEATED_SHAPES: tuple[Shape, ...] = tuple((2, 16, 4096, d, causal) for d in (64, 128) for causal in (False, True))
REPEATED_RUNS = 250
#: How long a step's check may take, in seconds.
PATIENCE = 400.0

Backward = Callable[..., tuple[torch.Tensor, ...]]


def backwards() -> dict[str, Backward]:
    """Each step's backward pass and those beside them: functions of q, k, v, o, lse, do, dlse, causal, scale."""
    from solutions.capstone_hopper import launch, launch_reordered  # Gluon's kernels exist only where Triton compiles

    def of(step: launch_reordered.Step) -> Backward:
        return lambda *given: launch_reordered.hopper_backward_reordered(*given, step)

    steps = {step.name.lower(): of(step) for step in launch_reordered.Step}
    return {START: lambda *given: launch.hopper_backward(*given, True), TWO_KERNELS: two_kernels, **steps}


def two_kernels(q, k, v, o, lse, do, dlse, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """dK and dV by the kernel before the first step, dQ by lab 3's."""
    from solutions.capstone_hopper import launch

    _, dk, dv = launch.hopper_backward(q, k, v, o, lse, do, dlse, causal, scale, False)
    delta = lab.attention_delta(o, do, dlse, max(0, q.shape[2] - k.shape[2]) if causal else 0)
    return lab.flash_dq(q, k, v, do, lse, delta, causal, scale), dk, dv


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp by the capstone's forward kernel."""
    from solutions.capstone_hopper import launch

    return launch.hopper_forward(q, k, v, causal, q.shape[3] ** -0.5)


# ---- correctness -----------------------------------------------------------------------------------------------------


def wrong(name: str, sizes: tuple[int, ...], head_dim: int, dtype: torch.dtype, causal: bool) -> list[str]:
    """The gradients that are further from float64's than is allowed, in words."""
    batch, heads, kv_heads, queries, keys = sizes
    generator = torch.Generator().manual_seed(queries)
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    drawn = [torch.randn((batch, *shape, head_dim), generator=generator) for shape in shapes]
    q, k, v, do = (x.to(runtime.DEVICE, dtype) for x in drawn)
    dlse = torch.randn((batch, heads, queries), generator=generator).to(runtime.DEVICE)
    exact = attention_errors.plain_attention(*(x.double() for x in (q, k, v, do)), dlse.double(), causal)[2:]
    exact = [x.cpu() for x in exact]
    plain = attention_errors.plain_attention(q, k, v, do, dlse, causal)[2:]
    o, lse = forward(q, k, v, causal)
    found = backwards()[name](q, k, v, o, lse, do, dlse, causal, head_dim**-0.5)
    problems = []
    for output, mine, near, right in zip(("dq", "dk", "dv"), found, plain, exact, strict=True):
        try:
            error = attention_errors.largest_error(mine, right)
        except AssertionError as not_finite:
            problems.append(f"{output}: {not_finite}")
            continue
        allowed = FACTOR * attention_errors.largest_error(near, right) + MORE * right.abs().max().item()
        if not error <= allowed:
            problems.append(f"{output} is off by {error:.2e}, allowed {allowed:.2e}")
    return problems


#: The cases of one check: each head_dim, dtype, mask and shape, twice.
CASES = 2 * len(DTYPES) * 2 * len(SIZES) * 2


@benchmark_cli.quiet()
def check(name: str, dtypes: Sequence[str] = tuple(DTYPES)) -> int:
    """Hold one step against float64, twice on each shape; print what is wrong, and return 1 if anything is."""
    bad = 0
    for head_dim in (64, 128):
        for dtype in dtypes:
            for causal in (False, True):
                for sizes in (*SIZES, *SIZES):
                    for problem in wrong(name, sizes, head_dim, DTYPES[dtype], causal):
                        bad += 1
                        mask = "causal" if causal else "full"
                        print(f"{name}, {dtype}, D {head_dim}, {mask}, {sizes}: {problem}", flush=True)
    return int(bad > 0)


def checked(name: str, seconds: float = PATIENCE) -> str:
    """What is wrong with one step, found in a process of its own; nothing if it is right."""
    command = [sys.executable, "-m", "benchmarks.hopper_backward", "--only-check", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{name} was not done after {seconds:.0f} s: it waits for ever, or its kernels compile slowly"
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"{name}: {done.stderr.strip()[-1500:]}"


def repeated(names: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many runs of each gave the same gradients as the first on its shape, to the bit."""
    found = {name: {"runs": 0, "equal": 0} for name in names}
    for shape in REPEATED_SHAPES:
        q, k, v, do = (x.detach() for x in hopper_implementations.inputs(shape, DTYPES[DTYPE]))
        o, lse = forward(q, k, v, shape[4])
        for name in names:
            run = functools.partial(backwards()[name], q, k, v, o, lse, do, None, shape[4], shape[3] ** -0.5)
            first = run()
            equal = [torch.stack([(a == b).all() for a, b in zip(first, run(), strict=True)]).all()
                     for _ in range(REPEATED_RUNS)]  # fmt: skip
            found[name]["runs"] += REPEATED_RUNS
            found[name]["equal"] += int(torch.stack(equal).sum())
    return found


# ---- time ------------------------------------------------------------------------------------------------------------


def fa4_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool) -> Callable[[], object]:
    """FlashAttention-4's backward pass."""
    function = importlib.import_module(hopper_peers.PACKAGES[FA4][1]).flash_attn_func
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    o = function(*leaves, causal=causal)
    o = o[0] if isinstance(o, tuple) else o
    gradient = do.transpose(1, 2).contiguous()
    return lambda: torch.autograd.grad(o, leaves, gradient, retain_graph=True)


def calls(shape: Shape, names: Sequence[str], fa4: bool) -> dict[str, Callable[[], object]]:
    """What is timed on one shape, by name."""
    q, k, v, do = hopper_implementations.inputs(shape, DTYPES[DTYPE])
    causal, scale = shape[4], shape[3] ** -0.5
    o, lse = forward(q.detach(), k.detach(), v.detach(), causal)
    given = (*(x.detach() for x in (q, k, v)), o, lse, do, None, causal, scale)
    every = backwards()
    found = {name: functools.partial(every[name], *given) for name in names}
    by_cudnn = attention_speed.baseline(attention_speed.BASELINES[CUDNN])(q, k, v, causal)
    found[CUDNN] = lambda: torch.autograd.grad(by_cudnn, (q, k, v), do, retain_graph=True)
    if fa4:
        found[FA4] = fa4_call(q, k, v, do, causal)
    return found


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of one call's longest kernel and of all, by the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    times = [event.self_device_time_total / 1e6 for event in profile.key_averages()]
    return {"longest": max(times), "all": sum(times)}


def point(shape: Shape, names: Sequence[str], fa4: bool, rounds: int, lap_seconds: float) -> dict[str, Any]:
    """One shape: times, how many times as fast each is as each of the three that it is compared with, and kernels."""
    found = calls(shape, names, fa4)
    thermal_warmup(found[CUDNN])
    timed, calls_a_lap = sustained.compare(found, rounds=rounds, lap_seconds=lap_seconds)
    batch, heads, length, head_dim, causal = shape
    work = attention_speed.flops(shape, "backward")
    return {
        "batch": batch,
        "heads": heads,
        "seq_len": length,
        "head_dim": head_dim,
        "causal": causal,
        "flops": work,
        "calls_a_lap": calls_a_lap,
        "timed": {name: {**each.as_dict(), "flops_per_second": work / each.median} for name, each in timed.items()},
        "over": {
            base: {name: timing.ratio(timed[base], each).as_dict() for name, each in timed.items() if name != base}
            for base in (START, CUDNN, FA4)
            if base in timed
        },
        "kernels": {name: kernels(call) for name, call in found.items()},
    }


SCHEMA = {
    "dtype": TEXT,
    "packages": {str: TEXT},
    "cases": {str: SIZE},
    "repeated": {str: {"runs": SIZE, "equal": COUNT}},
    "points": [
        {
            **attention_speed.SHAPE_LAYOUT,
            "flops": SIZE,
            "calls_a_lap": SIZE,
            "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
            "over": {str: {str: RATIO}},
            "kernels": {str: {"longest": POSITIVE, "all": POSITIVE}},
        }
    ],
    "unavailable": {str: TEXT},
}


def those_right(names: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """How many cases each step had right, of those that had all; and what is wrong with the others."""
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        said = dict(zip(names, pool.map(checked, names), strict=True))
    for name in names:
        print(said[name] or f"{name}: right", flush=True)
    return {name: CASES for name in names if not said[name]}, {name: why for name, why in said.items() if why}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    rounds: int | None = None,
    lap_seconds: float = sustained.LAP_SECONDS,
) -> dict[str, Any]:
    """Every shape of a head_dim of 64 and 128; ``quick`` takes three of them.

    Raises:
        RuntimeError: there is no GPU here, or it is not one of Hopper's.
    """
    hopper_implementations.need_hopper()
    shapes = shapes or (SHAPES[::3] if quick else SHAPES)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    start = time.monotonic()
    cases, unavailable = those_right(list(backwards()))
    steps = list(cases)
    packages, broken = hopper_peers.installed()
    unavailable |= broken
    if FA4 in packages:
        cases[FA4] = hopper_peers.check(FA4, packages[FA4], (64, 128))
    print(f"checked in {time.monotonic() - start:.0f} s", flush=True)
    same = repeated([name for name in REPEATED if name in steps])
    print(f"repeated by {time.monotonic() - start:.0f} s: {same}", flush=True)
    points = []
    for shape in shapes:
        points.append(point(shape, steps, FA4 in packages, rounds, lap_seconds))
        print(f"{time.monotonic() - start:4.0f} s  {name_of(points[-1])}", flush=True)
    return {
        "dtype": DTYPE,
        "packages": {FA4: hopper_peers.version(hopper_peers.PACKAGES[FA4][0])} if FA4 in packages else {},
        "cases": cases,
        "repeated": same,
        "points": points,
        "unavailable": unavailable,
    }


def name_of(item: Mapping[str, Any]) -> str:
    """A point's shape in words."""
    return f"D {item['head_dim']}, N {item['seq_len']:,}, {'causal' if item['causal'] else 'full'}"


def table(results: Mapping[str, Any]) -> str:
    """Of each shape one line for everybody who was timed: its time and rate, ratios, and its longest kernel alone."""
    parts = []
    for item in results["points"]:
        rows = []
        for name, each in item["timed"].items():
            ratios = [f"{over[name]['ratio']:.3f}" if name in over else "" for over in item["over"].values()]
            alone = item["kernels"][name]
            rates = [f"{each['seconds'] * 1e6:.0f}", f"{each['flops_per_second'] / 1e12:.0f}"]
            rows.append([name, *rates, *ratios, f"{alone['longest'] * 1e6:.0f} of {alone['all'] * 1e6:.0f}"])
        headings = [name_of(item), "us", "TFLOP/s", *(f"x {base}" for base in item["over"]), "kernel alone, us"]
        parts.append(benchmark_cli.text_table(headings, rows))
    parts += [f"{name} is {hopper_peers.PACKAGES[name][0]} {said}" for name, said in results["packages"].items()]
    parts += [f"{name}: {n['equal']} of {n['runs']} runs equal" for name, n in results["repeated"].items()]
    return "\n\n".join([*parts, *(f"{name}: {reason}" for name, reason in results["unavailable"].items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: :func:`benchmarks.benchmark_cli.run`'s, and one step's check."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hopper_backward", description="Measure hopper_backward and record it."
    )
    parser.add_argument("--only-check", metavar="STEP", help="hold one step against float64 in this process")
    parser.add_argument("--quick", action="store_true", help="three shapes, few rounds, nothing recorded")
    options = parser.parse_args(arguments)
    if options.only_check:
        hopper_implementations.need_hopper()
        return check(options.only_check)
    return benchmark_cli.run("hopper_backward", measure, table, SCHEMA, ["--quick"] if options.quick else [])


if __name__ == "__main__":
    raise SystemExit(main())
