"""The errors of the capstone's attention on lab 3's random suite, and whether its bits and its memory are its own.

Three questions, each of both modes (``deterministic`` and ``fast``):

* ``points``: is the error allowed? The cases, the reference and the rule are those of
  :mod:`benchmarks.attention_errors`, with the dtypes and head_dims of Hopper's kernels.
* ``repeats``: does the same call give the same bits 1,000 times, while other processes use the same GPU?
* ``poisoned``: is all of every result written? Whatever the call allocates holds NaN before it starts.

``--tools memcheck racecheck`` also runs ragged cases inside NVIDIA's compute-sanitizer (:mod:`.hopper_sanitize`) and
records what it says, as ``sanitizer``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import attention_errors, benchmark_cli, hopper_sanitize
from benchmarks.attention_determinism import bits
from benchmarks.hopper_implementations import need_hopper
from benchmarks.hopper_sanitize import MODES, Shape, attention, described, tensors, words
from utils.record_schemas import COUNT, ERROR, POSITIVE, SIZE, TEXT, each

# Processes of their own.
SOURCES = ["benchmarks/hopper_sanitize.py", "benchmarks/hopper_control.py"]

#: Cases of each mode: every dtype, head_dim and pair of fixed lengths occurs.
CASES = 180
WORKERS = 15
RUNS = 1000
# Lab 3's suite takes them in turns, and half of its lengths too: these orders meet every length.
DTYPES = (torch.float16, torch.bfloat16, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256, 128, 256, 64, 256, 64, 128)

REPEATED: tuple[Shape, ...] = tuple(
    (*sizes, head_dim, causal)
    for head_dim in (64, 128, 256)
    for *sizes, causal in ((2, 8, 2, 1000, 1111, True), (4, 16, 4, 2048, 2048, True), (1, 6, 6, 1023, 777, False))
)
POISONED: tuple[Shape, ...] = tuple(
    (*sizes, head_dim, causal)
    for head_dim in (64, 128, 256)
    for *sizes, causal in (
        (1, 1, 1, 1, 1, False), (2, 4, 2, 129, 257, True), (1, 3, 1, 300, 64, True), (1, 2, 2, 1023, 1025, False),
        (2, 6, 2, 640, 512, False),
    )
)  # fmt: skip


@contextlib.contextmanager
def in_lab_3s_suite(mode: str) -> Iterator[None]:
    """Inside, :func:`benchmarks.attention_errors.case` tries the capstone, with its dtypes and head_dims."""
    ours = {"our_attention": functools.partial(attention, mode=mode), "DTYPES": DTYPES, "HEAD_DIMS": HEAD_DIMS}
    theirs = {name: getattr(attention_errors, name) for name in ours}
    vars(attention_errors).update(ours)
    try:
        yield
    finally:
        vars(attention_errors).update(theirs)


def case(number: int, mode: str, longest: int = 1024) -> dict[str, Any]:
    """One random case in one mode: as :func:`benchmarks.attention_errors.case`, and ``mode``."""
    with in_lab_3s_suite(mode):
        return {"mode": mode, **attention_errors.case(number, longest)}


def repeated(shape: Shape, dtype: torch.dtype, mode: str, runs: int = RUNS) -> dict[str, Any]:
    """Call ``runs`` times and compare with one call more; ``differ`` counts, for each output, runs with other bits."""
    q, k, v, do = tensors(shape, dtype)
    call = functools.partial(attention, q, k, v, do, None, shape[6], None, mode)
    first = [bits(x) for x in call()]
    differ = torch.zeros(len(first), dtype=torch.int64, device=q.device)
    for _ in range(runs):
        differ += torch.stack([(bits(x) != one).any() for x, one in zip(call(), first, strict=True)])
    counts = dict(zip(attention_errors.OUTPUTS, differ.tolist(), strict=True))
    return {**described(shape, dtype, mode), "runs": runs, "differ": counts}


@contextlib.contextmanager
def memory_full_of_nan(like: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, a tensor of floats that nobody has written to holds NaN.

    Tensors of NaN as large as ``like`` are made and freed, for whoever takes memory from PyTorch's allocator by another
    way; and what ``torch.empty`` hands out is filled with NaN, as PyTorch does in its deterministic mode.

    Raises:
        RuntimeError: a fresh tensor is not NaN all the same.
    """
    filled = [torch.full_like(x, math.nan) for x in like for _ in range(4)]
    del filled
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        if not all(torch.empty_like(x).isnan().all() for x in like):
            raise RuntimeError("PyTorch does not fill fresh memory with NaN here, so nothing can be told from it")
        yield
    finally:
        torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


def poisoned(shape: Shape, dtype: torch.dtype, mode: str) -> dict[str, Any]:
    """Call with memory full of NaN; ``bad`` counts elements that are NaN or infinite, of ``elements``.

    The logsumexp of a query that sees no key must be -inf.
    """
    q, k, v, do = tensors(shape, dtype)
    _, _, _, queries, keys, _, causal = shape
    call = functools.partial(attention, q, k, v, do, None, causal, None, mode)
    with memory_full_of_nan(call()):
        found = call()
    blind = max(0, queries - keys) if causal else 0
    right = [x.isfinite() for x in found]
    right[1][:, :, :blind] = found[1][:, :, :blind] == -math.inf
    bad = sum(int((~each).sum()) for each in right)
    return {**described(shape, dtype, mode), "elements": sum(x.numel() for x in found), "bad": bad}


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def tasks(count: int, longest: int, repeat: Sequence[Shape], poison: Sequence[Shape], runs: int) -> list[tuple]:
    """(name of the result, function, arguments), those that compile most first."""

    def turns(shapes: Sequence[Shape]) -> list[tuple[Shape, torch.dtype, str]]:
        dtypes = (torch.bfloat16, torch.float16)
        return [(shape, dtypes[i % 2], mode) for i, shape in enumerate(shapes) for mode in MODES]

    return [
        *(("points", case, (number, mode, longest)) for number in range(count) for mode in MODES),
        *(("poisoned", poisoned, each) for each in turns(poison)),
        *(("repeats", repeated, (*each, runs)) for each in turns(repeat)),
    ]


def run_task(function: Callable[..., dict[str, Any]], arguments: tuple) -> dict[str, Any] | str:
    """A task's result, or what went wrong: an error of the compiler does not survive the way between processes."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{function.__name__}{arguments}: {type(error).__name__}: {str(error).strip()[-300:]}"


#: What a check was tried on.
_TRIED = {**each(TEXT, "mode", "dtype", "shape"), "head_dim": SIZE, "causal": bool}
SCHEMA = {
    "factor": POSITIVE,
    "points": [{**_TRIED, "layout": TEXT, "scale": TEXT, "outputs": each(ERROR, "o", "lse", "dq", "dk", "dv")}],
    "poisoned": [{**_TRIED, "elements": SIZE, "bad": COUNT}],
    "repeats": [{**_TRIED, "runs": SIZE, "differ": each(COUNT, "o", "lse", "dq", "dk", "dv")}],
    "sanitizer": {str: {"status": COUNT, "summary": TEXT, "cases": COUNT, "races": COUNT}},
    "beside": {str: COUNT},
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    count: int | None = None,
    longest: int = 1024,
    repeat: Sequence[Shape] = REPEATED,
    poison: Sequence[Shape] = POISONED,
    runs: int = RUNS,
    workers: int = WORKERS,
    tools: Sequence[str] = (),
) -> dict[str, Any]:
    """All cases in both modes, repeated runs and poisoned memory; ``quick`` takes a few.

    Args:
        count: Cases of each mode.
        longest: Longer lengths are cut to it.
        repeat, poison: Shapes.
        runs: Calls that are compared.
        workers: Processes.
        tools: Of compute-sanitizer.

    Raises:
        RuntimeError: the GPU here is not one of Hopper's, or a call fails.
    """
    need_hopper()
    if quick:
        count, repeat, poison, runs = count or 12, repeat[:1], poison[:2], min(runs, 20)
    names, functions, arguments = zip(*tasks(count or CASES, longest, repeat, poison, runs), strict=True)
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            found = list(pool.map(run_task, functions, arguments))
    else:
        found = list(map(run_task, functions, arguments))
    failed = [each for each in found if isinstance(each, str)]
    if failed:
        raise RuntimeError("\n".join([f"{len(failed)} of {len(found)} checks failed:", *failed[:20]]))
    kinds = {name: [each for which, each in zip(names, found) if which == name] for name in dict.fromkeys(names)}
    return {"factor": attention_errors.FACTOR, **kinds, **watched(tools, workers)}


def watched(tools: Sequence[str], workers: int) -> dict[str, Any]:
    """``sanitizer``: what each tool of compute-sanitizer says of its cases, which are compiled first; ``beside``: what
    racecheck, if it is among them, says of other kernels.

    Raises:
        RuntimeError: a case is wrong outside the tools.
    """
    races = "racecheck" in tools
    for atomic_starts in [False] * bool(tools) + [True] * races:
        if hopper_sanitize.run_cases(workers=workers, atomic_starts=atomic_starts):
            raise RuntimeError("the sanitizer's cases are not right, see above")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        beside = pool.submit(hopper_sanitize.beside) if races else None
        said = dict(zip(tools, pool.map(hopper_sanitize.inside, tools)))
    return {"sanitizer": said, "beside": beside.result() if beside else {}}


def table(results: Mapping[str, Any]) -> str:
    """Errors by mode, dtype and head_dim as lab 3 prints them; then bits and memory."""
    lines = []
    for mode in MODES:
        points = [
            {**point, "dtype": f"{point['dtype']}, D {point['head_dim']},"}
            for point in sorted(results["points"], key=lambda point: (point["dtype"], point["head_dim"]))
            if point["mode"] == mode
        ]
        good = sum(map(attention_errors.within, points))
        lines += [f"{mode}: {good} of {len(points)} cases within what is allowed"]
        lines += [attention_errors.table({"points": points}), ""]
    for item in results["repeats"]:
        differ = ", ".join(f"{name} {count}" for name, count in item["differ"].items() if count) or "none"
        lines.append(f"{words(item)}: runs of {item['runs']} with other bits: {differ}")
    for item in results["poisoned"]:
        lines.append(f"{words(item)}: {item['bad']} of {item['elements']:,} elements bad in poisoned memory")
    for tool, item in results["sanitizer"].items():
        lines.append(f"{tool}: status {item['status']}, {item['cases']} cases, {item['summary']}")
    lines += [f"racecheck, beside, {name}: {races} reports" for name, races in results["beside"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: :func:`benchmarks.benchmark_cli.run`'s, and compute-sanitizer's tools."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hopper_errors", description="Measure hopper_errors and record it."
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, nothing recorded")
    parser.add_argument("--tools", nargs="+", default=(), help="of compute-sanitizer: memcheck, racecheck...")
    options = parser.parse_args(arguments)
    measured = functools.partial(measure, tools=options.tools)
    return benchmark_cli.run("hopper_errors", measured, table, SCHEMA, ["--quick"] if options.quick else [])


if __name__ == "__main__":
    raise SystemExit(main())
