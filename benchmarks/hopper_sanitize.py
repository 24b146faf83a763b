"""Runs each of the capstone's kernels once on ragged shapes, for NVIDIA's compute-sanitizer to watch.

``python -m benchmarks.hopper_sanitize`` calls forward and backward passes in both modes and holds the results against
float64, loosely: it is there to be run inside a tool. ``--tool memcheck racecheck`` runs it inside each tool named and
prints what the tool found. By hand that is::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m benchmarks.hopper_sanitize

PyTorch keeps freed memory and cuts tensors from large pieces of it, inside which no tool sees an access beyond a
tensor's end: the variable gives every tensor an allocation of its own. Inputs are drawn, and results compared, on the
CPU, so that nearly all that the tool watches is ours. Run it once without a tool first, so that Triton has compiled its
kernels (``--workers 14`` does that in as many processes, and ``--tool`` before it starts the tool).

racecheck does not follow how Triton starts partitions, and reports it in every kernel that has any. It is given
kernels that start them by atomics (``--atomic-starts``, :mod:`benchmarks.hopper_races`), and beside them the kernels as
they are and controls, small kernels of which the answer is known.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import attention_errors, benchmark_cli, hopper_races
from benchmarks.hopper_implementations import WORKERS, need_hopper
from solutions import capstone_hopper
from utils import runtime
from utils.fingerprint import ROOT

MODES = ("deterministic", "fast")
#: (batch, query heads, key heads, queries, keys, head_dim, causal)
Shape = tuple[int, int, int, int, int, int, bool]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
HEAD_DIMS = (64, 128, 256)
#: (batch, query heads, key heads, queries, keys, causal): one query; tiles that end early on either side; queries that
#: see no key; groups of heads; several tiles each way.
SIZES = (
    (1, 1, 1, 1, 1, False),
    (1, 4, 2, 129, 257, True),
    (2, 3, 1, 203, 113, True),
    (1, 2, 2, 300, 391, False),
)
#: Errors allowed, as a share of the largest right value.
TOLERANCE = 0.03
#: What compute-sanitizer's process ends with when the tool found something, whatever became of the program inside.
FOUND = 99
#: Reports that compute-sanitizer prints at most, and which are counted.
PRINTED = 200


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None,
    causal: bool = False, scale: float | None = None, mode: str = "deterministic",
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(o, lse, dq, dk, dv) by the capstone; arguments as :func:`benchmarks.attention_errors.our_attention`'s.

    Raises:
        ValueError: another mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o, lse = capstone_hopper.flash_attention_with_lse(*leaves, causal, scale, mode == "deterministic")
        if dlse is None:
            return o, lse, *torch.autograd.grad(o, leaves, do)
        return o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse))


def tensors(shape: Shape, dtype: torch.dtype, seed: int = 9) -> list[torch.Tensor]:
    """q, k, v and do of a shape."""
    B, Hq, Hkv, Nq, Nk, D, _ = shape
    source = torch.Generator().manual_seed(seed)
    sizes = ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, Hq, Nq, D))
    return [torch.randn(size, generator=source).to(dtype).to(runtime.DEVICE) for size in sizes]


def described(shape: Shape, dtype: torch.dtype, mode: str) -> dict[str, Any]:
    """The part of a result that says what was tried."""
    B, Hq, Hkv, Nq, Nk, D, causal = shape
    words = f"B={B} Hq={Hq} Hkv={Hkv} Nq={Nq} Nk={Nk} D={D}"
    return {"mode": mode, "dtype": str(dtype).removeprefix("torch."), "shape": words, "head_dim": D, "causal": causal}


def words(item: Mapping[str, Any]) -> str:
    """What was tried."""
    return f"{item['mode']}, {item['dtype']}, {item['shape']}, {'causal' if item['causal'] else 'full'}"


def cases(head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[tuple[Shape, torch.dtype, str]]:
    """(shape, dtype, mode) of every run; a head_dim has one dtype, which halves the kernels to compile."""
    for head_dim in head_dims:
        for *sizes, causal in SIZES:
            for mode in MODES:
                yield (*sizes, head_dim, causal), torch.float16 if head_dim == 64 else torch.bfloat16, mode


def wrong(shape: Shape, dtype: torch.dtype, mode: str) -> list[str]:
    """Run one case; the outputs that are wrong, in words. The logsumexp has a gradient where query heads are even."""
    inputs = [x.cpu() for x in tensors(shape, dtype)]
    B, Hq, _, Nq, _, _, causal = shape
    dlse = torch.randn((B, Hq, Nq), generator=torch.Generator().manual_seed(1))
    with_dlse = Hq % 2 == 0
    exact = attention_errors.plain_attention(
        *(x.double() for x in inputs), dlse=dlse.double() * with_dlse, causal=causal
    )
    found = attention(
        *(x.to(runtime.DEVICE) for x in inputs), dlse.to(runtime.DEVICE) if with_dlse else None, causal, None, mode
    )
    problems = []
    for name, mine, right in zip(attention_errors.OUTPUTS, found, exact, strict=True):
        error = attention_errors.largest_error(mine, right)
        finite = right[right.isfinite()]
        allowed = TOLERANCE * max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
        if not error <= allowed:
            problems.append(f"{name} is off by {error:.2g}, allowed {allowed:.2g}")
    return problems


def attempt(case: tuple[Shape, torch.dtype, str]) -> list[str]:
    """:func:`wrong` of a case, or the error that it ended with."""
    try:
        return wrong(*case)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).strip()[-300:]}"]


@benchmark_cli.quiet()
def run_cases(head_dims: Sequence[int] = HEAD_DIMS, workers: int = 1, atomic_starts: bool = False) -> int:
    """Run every case, in so many processes, and say how it went; 1 when any result is wrong, else 0.

    ``atomic_starts``: with kernels compiled as :func:`benchmarks.hopper_races.install` has them, here from then on.
    """
    tried = list(cases(head_dims))
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        prepare = hopper_races.install if atomic_starts else None
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=prepare) as pool:
            outcomes: Iterable[list[str]] = list(pool.map(attempt, tried))
    else:
        if atomic_starts:
            hopper_races.install()
        outcomes = map(attempt, tried)
    status = 0
    for (shape, dtype, mode), problems in zip(tried, outcomes, strict=True):
        status |= bool(problems)
        print(f"{'WRONG' if problems else 'ok   '} {words(described(shape, dtype, mode))}", *problems, flush=True)
    return status


def inside(
    tool: str, head_dims: Sequence[int] = HEAD_DIMS, timeout: float = 540, atomic_starts: bool | None = None
) -> dict[str, Any]:
    """Run the cases inside a tool of compute-sanitizer and print what it says.

    Each head_dim has a process of its own, all at once.

    Args:
        tool: One of :data:`TOOLS`.
        head_dims: Some of :data:`HEAD_DIMS`.
        timeout: Seconds for each process.
        atomic_starts: Whether partitions start by atomics; for racecheck alone by default.

    Returns:
        ``status`` (0: all right and nothing found), the tool's ``summary`` of each process, right ``cases``, counted,
        and ``races`` reported, counted.

    Raises:
        RuntimeError: compute-sanitizer is not installed, or not done in ``timeout`` seconds.
    """
    program = installed()
    atomic_starts = tool == "racecheck" if atomic_starts is None else atomic_starts
    how = ["--atomic-starts"] * atomic_starts
    with concurrent.futures.ThreadPoolExecutor(len(head_dims)) as pool:
        found = list(
            pool.map(lambda head_dim: watched(program, tool, ["--head-dims", str(head_dim), *how], timeout), head_dims)
        )
    result = {
        "status": max(each["status"] for each in found),
        "summary": "; ".join(dict.fromkeys(each["summary"] for each in found)),
        "cases": sum(each["cases"] for each in found),
        "races": sum(each["races"] for each in found),
    }
    print(" ".join([tool, *how]) + ": " + ", ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    return result


def watched(program: str, tool: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run this module with these arguments inside a tool; what it found, as :func:`inside` gives it."""
    status, said = finished(
        [
            program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", str(PRINTED),
            sys.executable, "-m", "benchmarks.hopper_sanitize", *arguments,
        ],
        {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        timeout,
    )  # fmt: skip
    summary = [line.strip("= ") for line in said if line.startswith("=====") and "SUMMARY" in line]
    if not summary:
        status = max(status, 1)
    if status:
        print("\n".join(line for line in said if not line.startswith("ok ")))
    return {
        "status": status, "summary": "; ".join(summary) or "none",
        "cases": sum(line.startswith("ok ") for line in said),
        "races": sum("Race reported between" in line for line in said),
    }  # fmt: skip


def beside(timeout: float = 540) -> dict[str, int]:
    """Races that racecheck reports of other kernels, counted: of the package's ``as compiled``, whose partitions start
    as Triton has them start, and of each control of :mod:`benchmarks.hopper_races`, whose do by atomics.

    Raises:
        RuntimeError: compute-sanitizer is not installed, or one is not done in ``timeout`` seconds.
    """
    program = installed()
    found = {"as compiled": inside("racecheck", timeout=timeout, atomic_starts=False)["races"]}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        names = list(hopper_races.CONTROLS)
        results = pool.map(lambda name: watched(program, "racecheck", ["--control", name], timeout), names)
        found |= {name: each["races"] for name, each in zip(names, results, strict=True)}
    print(f"racecheck, beside: {found}", flush=True)
    return found


def installed() -> str:
    """compute-sanitizer's path.

    Raises:
        RuntimeError: it is not installed.
    """
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise RuntimeError("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    return program


def finished(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[int, list[str]]:
    """Exit status and lines of a command, which is stopped with all that it started if it takes too long."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(f"{' '.join(command[:3])} was not done after {timeout:g} s") from None
        raise
    return process.returncode, said.splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when results are right and no tool found anything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hopper_sanitize", description=__doc__.split("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=[], help="run inside these tools")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--workers", type=int, help=f"processes outside a tool; 1, and {WORKERS} with --tool")
    parser.add_argument("--control", choices=hopper_races.CONTROLS, help="run a control of racecheck instead")
    parser.add_argument("--atomic-starts", action="store_true", help="partitions start in a way that racecheck follows")
    options = parser.parse_args(arguments)
    if not runtime.HAS_GPU:
        print("hopper_sanitize: needs a CUDA GPU and none is in use here (python -m utils.runtime says why)")
        return 1
    need_hopper()
    if options.control:
        from benchmarks.hopper_control import control  # a kernel, which needs a GPU to be there

        control(options.control)
        return 0
    workers = options.workers or (WORKERS if options.tool else 1)
    ways = sorted({options.atomic_starts or tool == "racecheck" for tool in options.tool} or {options.atomic_starts})
    status = max(run_cases(options.head_dims, workers, atomic_starts) for atomic_starts in ways)
    for tool in options.tool:
        status |= inside(tool, options.head_dims, atomic_starts=options.atomic_starts or None)["status"] != 0
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
