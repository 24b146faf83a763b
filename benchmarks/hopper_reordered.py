"""Times the capstone's reordered backward kernel, step by step, beside the present one and cuDNN. Makes no record.

``python -m benchmarks.hopper_reordered`` first holds each step against float64 on ragged shapes, in a process of its
own that is ended after ``--seconds``: a kernel that waits for ever, or breaks its process's GPU context, takes no other
with it. Those processes run side by side and leave the compiled kernels in Triton's cache. What was right is then
timed, all in turn in each round, as :mod:`benchmarks.attention_speed` does it: the backward pass with all that comes
before and after the kernel. Behind each shape stands how the time of one pass is shared out among the kernels.

``--fa4`` times FlashAttention-4 too (``flash_attn.cute``), if Python finds it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks import attention_errors, attention_speed, benchmark_cli, hopper_implementations, sustained
from benchmarks.attention_speed import SHAPES, Shape
from benchmarks.hopper_implementations import DTYPES
from benchmarks.thermal_warmup import thermal_warmup
from utils import runtime, timing

PRESENT, CUDNN, FA4 = "present", "cudnn", "fa4"
#: (batch, query heads, key heads, queries, keys): ragged on either side, queries that see no key, groups of heads, more
#: programs than multiprocessors.
SIZES = ((1, 1, 1, 1, 1), (1, 4, 2, 129, 257), (2, 3, 1, 203, 113), (1, 2, 2, 300, 391), (2, 16, 16, 1024, 1024))
#: Error in units of plain PyTorch's in the same dtype, and what is allowed beyond, as a share of the largest value.
FACTOR, MORE = 2.0, 2e-4
ROUNDS = 14

Backward = Callable[..., tuple[torch.Tensor, ...]]


def backwards() -> dict[str, Backward]:
    """The present backward pass and each step's, under one interface: q, k, v, o, lse, do, dlse, causal, scale."""
    from solutions.capstone_hopper import launch, launch_reordered  # Gluon's kernels exist only where Triton compiles

    def of(step: launch_reordered.Reordering) -> Backward:
        return lambda *given: launch_reordered.hopper_backward_reordered(*given, step)

    steps = {name: of(step) for name, step in launch_reordered.STEPS.items()}
    return {PRESENT: lambda *given: launch.hopper_backward(*given, True), **steps}


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


@benchmark_cli.quiet()
def check(name: str, dtypes: Sequence[str]) -> int:
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


def checked(name: str, dtypes: Sequence[str], seconds: float) -> str:
    """What is wrong with one step, found in a process of its own; nothing if it is right."""
    command = [sys.executable, "-m", "benchmarks.hopper_reordered", "--only-check", name, "--dtypes", *dtypes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{name} was not done after {seconds:.0f} s: it waits for ever, or its kernels compile slowly"
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"{name}: {done.stderr.strip()[-1500:]}"


def those_right(names: Sequence[str], dtypes: Sequence[str], seconds: float) -> list[str]:
    """The steps that are right; what is wrong with the others is printed."""
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        said = dict(zip(names, pool.map(lambda name: checked(name, dtypes, seconds), names), strict=True))
    for name in names:
        print(said[name] or f"{name}: right", flush=True)
    return [name for name in names if not said[name]]


# ---- time ------------------------------------------------------------------------------------------------------------


def fa4_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool) -> Callable[[], object]:
    """FlashAttention-4's backward pass."""
    from flash_attn.cute import flash_attn_func

    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    o = flash_attn_func(*leaves, causal=causal)
    o = o[0] if isinstance(o, tuple) else o
    gradient = do.transpose(1, 2).contiguous()
    return lambda: torch.autograd.grad(o, leaves, gradient, retain_graph=True)


def calls(shape: Shape, dtype: torch.dtype, names: Sequence[str], fa4: bool) -> dict[str, Callable[[], object]]:
    """What is timed on one shape, by name."""
    q, k, v, do = hopper_implementations.inputs(shape, dtype)
    causal, scale = shape[4], shape[3] ** -0.5
    o, lse = forward(q.detach(), k.detach(), v.detach(), causal)
    given = (*(x.detach() for x in (q, k, v)), o, lse, do, None, causal, scale)
    every = backwards()
    found = {name: lambda backward=every[name]: backward(*given) for name in names}
    by_cudnn = attention_speed.baseline(attention_speed.BASELINES[CUDNN])(q, k, v, causal)
    found[CUDNN] = lambda: torch.autograd.grad(by_cudnn, (q, k, v), do, retain_graph=True)
    if fa4:
        found[FA4] = fa4_call(q, k, v, do, causal)
    return found


def shares(call: Callable[[], object]) -> str:
    """Microseconds of each kernel of one call, by the profiler, the longest first."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return ", ".join(f"{event.key[:40]} {event.self_device_time_total:.0f}" for event in kernels)


def time_shape(
    shape: Shape, dtype: str, names: Sequence[str], fa4: bool, rounds: int, lap_seconds: float
) -> Mapping[str, timing.Timing]:
    """Time one shape and print a line of rates, one of ratios and, of each, the kernels' shares."""
    found = calls(shape, DTYPES[dtype], names, fa4)
    thermal_warmup(found[CUDNN])
    timed, _ = sustained.compare(found, rounds=rounds, lap_seconds=lap_seconds)
    work = attention_speed.flops(shape, "backward")
    _, _, length, head_dim, causal = shape
    print(f"\n{dtype}, D {head_dim}, N {length:,}, {'causal' if causal else 'full'}")
    rows = []
    for name, each in timed.items():
        over = [timing.ratio(timed[base], each) for base in (PRESENT, CUDNN) if base in timed]
        ratios = [f"{one.median:.3f} ({one.low:.3f} to {one.high:.3f})" for one in over]
        rows.append([name, f"{each.median * 1e6:.0f}", f"{work / each.median / 1e12:.0f}", *ratios])
    headings = ["", "us", "TFLOP/s", *(f"x {base}" for base in (PRESENT, CUDNN) if base in timed)]
    print(benchmark_cli.text_table(headings, rows))
    for name, call in found.items():
        print(f"  {name}, us: {shares(call)}", flush=True)
    return timed


@benchmark_cli.quiet()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if every step that was asked for is right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper_reordered", description=__doc__.splitlines()[0])
    parser.add_argument("--only-check", metavar="STEP", help="hold one step against float64 in this process")
    parser.add_argument("--steps", nargs="+", help="steps to measure, by default all and the present kernel")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--seconds", type=float, default=400.0, help="how long a step's check may take")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lap-seconds", type=float, default=sustained.LAP_SECONDS)
    parser.add_argument("--quick", action="store_true", help="check only bf16 and time three shapes of the eight")
    parser.add_argument("--fa4", action="store_true", help="FlashAttention-4 too")
    options = parser.parse_args(arguments)
    hopper_implementations.need_hopper()
    if options.only_check:
        return check(options.only_check, options.dtypes)
    start = time.monotonic()
    names = options.steps or list(backwards())
    right = those_right(names, ["bf16"] if options.quick else list(DTYPES), options.seconds)
    print(f"checked in {time.monotonic() - start:.0f} s")
    for dtype in options.dtypes:
        for shape in SHAPES[::3] if options.quick else SHAPES:
            time_shape(shape, dtype, right, options.fa4, options.rounds, options.lap_seconds)
    return int(right != names)


if __name__ == "__main__":
    raise SystemExit(main())
