"""Lab 6's kernels beside their baselines on one Hopper GPU: ratios of one run, on random data, each result checked.

* ``fp8 products``: e4m3 with scales of rows, of squares and of blocks of 128, beside ``torch._scaled_mm`` with scales
  of rows (its fast accumulation on and off) and bf16; in CUDA graphs, and as plain calls in a row
* ``int4 weights``: the matrices of an 8B model at each batch, beside bf16 and beside copies; ``int4_wins_to`` is the
  batch up to which 4 bits are faster
* ``fp8 cache``: paged decode attention beside a copy of as many bytes
* ``latents``: decode attention over latents beside its two bounds, by a copy and by a bf16 product
* ``grouped products``: 64 experts with uneven counts, beside one dense product of the same FLOPs, the loop over experts
  and ``torch._grouped_mm``
* ``attention``: windows and documents beside lab 3's causal attention, per tile that is computed, and FlexAttention

A pool of processes compiles first. How a time is measured: :mod:`benchmarks.frontier_timing`; who computes what:
:mod:`benchmarks.frontier_cases` and :mod:`benchmarks.frontier_attention`. What raises an error, or is wrong, is named
under ``unavailable`` and not timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import benchmark_cli, frontier_attention, frontier_cases
from benchmarks.frontier_attention import ATTENTION, FLEX, LAB3, MASKS, Masked
from benchmarks.frontier_cases import (
    BF16,
    BLOCKS,
    CACHE,
    FP8,
    GROUPED,
    INT4,
    LATENTS,
    OURS,
    ROWS,
    SQUARES,
    CacheShape,
    LatentShape,
)
from benchmarks.frontier_timing import Case, Effort, point, said
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each

#: Processes that compile.
WORKERS = 15
EFFORT = Effort(rounds=6, lap_seconds=0.02, warm_seconds=0.3)
PARTS = (FP8, INT4, CACHE, LATENTS, GROUPED, ATTENTION)


class Sizes(NamedTuple):
    """What is measured, all of it; ``rotated_bytes``: of 4-bit weights that a graph reads one after another."""

    squares: tuple[int, ...] = (4096, 8192)
    weights: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096))
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    rotated_bytes: int = 2**28
    large_copy: int = 2**30
    cache: CacheShape = CacheShape(64, 8192, 32, 8, 128, 16)
    latents: LatentShape = LatentShape(64, 8192, 128, 512, 64, 64)
    matrix: int = 8192
    groups: tuple[tuple[int, int, int], ...] = ((65536, 2048, 2048), (65536, 1024, 2048))
    experts: int = 64
    masks: tuple[Masked, ...] = MASKS
    tokens: int = 16384
    heads: int = 16
    head_dims: tuple[int, ...] = (64, 128)

    def quick(self) -> Sizes:
        """One of each."""
        first = {name: getattr(self, name)[:1] for name in ("squares", "weights", "groups", "head_dims")}
        return self._replace(**first, batches=self.batches[::3], masks=self.masks[::3])


def cases(sizes: Sizes, part: str, index: int | None = None, only: str | None = None) -> Iterator[Case]:
    """The cases of a part, of all its shapes or of the ``index``-th."""
    heads = sizes.tokens, sizes.heads
    builders: dict[str, list[Callable[..., Iterator[Case]]]] = {
        FP8: [functools.partial(frontier_cases.products, n) for n in sizes.squares],
        INT4: [
            functools.partial(
                frontier_cases.small_batches, weight, sizes.batches, sizes.rotated_bytes, sizes.large_copy
            )
            for weight in sizes.weights
        ],
        CACHE: [functools.partial(frontier_cases.cached_decode, sizes.cache)],
        LATENTS: [functools.partial(frontier_cases.latent_decode, sizes.latents, sizes.matrix)],
        GROUPED: [functools.partial(frontier_cases.grouped, shape, sizes.experts) for shape in sizes.groups],
        ATTENTION: [
            functools.partial(frontier_attention.attention, mask, *heads, head_dim)
            for head_dim in sizes.head_dims
            for mask in sizes.masks
        ],
    }
    for builder in builders[part] if index is None else builders[part][index : index + 1]:
        yield from builder(only=only)


# ---- compiling -------------------------------------------------------------------------------------------------------

#: Part, which of its shapes, and the function.
Job = tuple[str, int, str]


def jobs(sizes: Sizes, parts: Sequence[str]) -> list[Job]:
    """What to compile, FlexAttention first and then what takes longest; shapes for which the same kernels run once.

    FlexAttention compiles a window's length into its kernel, and reads where documents begin. Our kernels get both as
    numbers, and are compiled anew where a number of tiles is a multiple of 16.
    """
    shapes = list(enumerate((d, mask) for d in sizes.head_dims for mask in sizes.masks))
    flex = {(d, mask.window): i for i, (d, mask) in reversed(shapes)}
    windows = {d: i for i, (d, mask) in reversed(shapes) if mask.window}
    documents = [i for i, (_, mask) in shapes if mask.documents]
    found = [
        *((ATTENTION, i, FLEX) for i in sorted(flex.values())),
        *((ATTENTION, i, LAB3) for i in range(0, len(shapes), len(sizes.masks))),
        *((ATTENTION, i, OURS) for i in sorted((*windows.values(), *documents))),
        (GROUPED, 0, OURS), (LATENTS, 0, OURS),
        *((FP8, 0, name) for name in (SQUARES, BLOCKS, ROWS)),
        *((INT4, i, OURS) for i in range(len(sizes.weights))),
        (CACHE, 0, OURS), (CACHE, 0, BF16),
    ]  # fmt: skip
    return [job for job in found if job[0] in parts]


def compile_job(sizes: Sizes, job: Job) -> None:
    """Run one function once, so that its kernels are in the caches on disk; errors come again when it is timed."""
    part, index, name = job
    for _ in cases(sizes, part, index, name):
        pass


def compile_first(sizes: Sizes, parts: Sequence[str], workers: int) -> dict[str, str]:
    """Compile what will be timed, in ``workers`` processes; what goes wrong, by the job.

    Meanwhile this process traces FlexAttention, as soon as its kernels are compiled: it does so mask by mask, and what
    it traces is no use to another process.
    """
    wanted, failed = jobs(sizes, parts), {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {job: pool.submit(compile_job, sizes, job) for job in wanted}
        for job, future in futures.items():
            try:
                future.result()
                if job[2] == FLEX:
                    compile_job(sizes, job)
            except Exception as error:  # the others go on
                failed[f"compiling {job[0]}, {job[1]}: {job[2]}"] = said(error)
    return failed


# ---- the benchmark ---------------------------------------------------------------------------------------------------

_POINT = {
    **each(TEXT, "part", "case", "direction", "how"),
    "timed": {str: {**TIMING, "calls_a_lap": SIZE, "amount": POSITIVE, "unit": TEXT, "rate": POSITIVE}},
    "ratios": {str: RATIO},
    "computed": {str: POSITIVE},
    "errors": {str: NOT_NEGATIVE},
}
SCHEMA = {
    "points": [_POINT],
    "int4_wins_to": {str: COUNT},
    "lap_seconds": NOT_NEGATIVE,
    "compile_seconds": NOT_NEGATIVE,
    "unavailable": {str: TEXT},
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    sizes: Sizes | None = None,
    parts: Sequence[str] = PARTS,
    effort: Effort = EFFORT,
    workers: int = WORKERS,
) -> dict[str, Any]:
    """Every part; ``quick`` takes one shape of each.

    Args:
        effort: How long it is measured; laps of 4-bit weights are half as long.
        workers: Processes that compile; 0 to compile while measuring.

    Raises:
        RuntimeError: there is no GPU here.
    """
    sizes = sizes or (Sizes().quick() if quick else Sizes())
    start = time.monotonic()
    unavailable = compile_first(sizes, parts, workers) if workers else {}
    compiled = time.monotonic() - start
    print(f"compiled in {compiled:.0f} s", flush=True)
    points: list[dict[str, Any]] = []
    for part in parts:
        own = effort._replace(lap_seconds=effort.lap_seconds / (2 if part == INT4 else 1))
        warm_seconds = effort.warm_seconds
        try:
            for case in cases(sizes, part):
                measured = point(case, own, warm_seconds)
                warm_seconds = 0.0
                unavailable |= case.unavailable
                if measured is not None:
                    points.append(measured)
                    print(f"{time.monotonic() - start:4.0f} s  {short(measured)}", flush=True)
        except Exception as error:  # a part that fails does not end the others
            unavailable[part] = said(error)
            print(f"{part}: {unavailable[part]}", flush=True)
    return {
        "points": points,
        "int4_wins_to": int4_wins_to(points),
        "lap_seconds": effort.lap_seconds,
        "compile_seconds": compiled,
        "unavailable": unavailable,
    }


def int4_wins_to(points: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of each matrix, the largest batch up to which 4 bits are faster than bf16 at every one; 0 if at none."""
    found: dict[str, int] = {}
    lost: set[str] = set()
    for item in points:
        if item["part"] == INT4 and (ratio := item["ratios"].get(f"{OURS} / {BF16}")):
            matrix, batch = item["case"].split(", batch ")
            found.setdefault(matrix, 0)
            if ratio["ratio"] <= 1:
                lost.add(matrix)
            elif matrix not in lost:
                found[matrix] = int(batch)
    return found


def short(item: Mapping[str, Any]) -> str:
    """A point in one line: microseconds of each, and the ratios."""
    times = ", ".join(f"{name} {t['seconds'] * 1e6:,.1f} us" for name, t in item["timed"].items())
    ratios = ", ".join(f"{name} {r['ratio']:.3f}" for name, r in item["ratios"].items())
    return f"{item['part']}, {item['case']}, {item['direction']}, {item['how']}: {times}; {ratios}"


def table(results: Mapping[str, Any]) -> str:
    """A table for each part, one line a case: the time of each function in microseconds, its rate, and the ratios."""
    tables = []
    for part in dict.fromkeys(item["part"] for item in results["points"]):
        items = [item for item in results["points"] if item["part"] == part]
        names = list(dict.fromkeys(name for item in items for name in item["timed"]))
        labels = list(dict.fromkeys(label for item in items for label in item["ratios"]))
        rows = []
        for item in items:
            timed = [item["timed"].get(name) for name in names]
            cells = [f"{t['seconds'] * 1e6:,.1f} ({t['rate'] / 1e12:,.2f})" if t else "" for t in timed]
            ratios = [item["ratios"].get(label) for label in labels]
            cells += [f"{r['ratio']:.3f}" if r else "" for r in ratios]
            rows.append([f"{item['case']}, {item['direction']}, {item['how']}", *cells])
        tables.append(benchmark_cli.text_table([f"{part}: us (T/s)", *names, *labels], rows))
    wins = ", ".join(f"{matrix} {batch}" for matrix, batch in results["int4_wins_to"].items())
    tables.append(f"4 bits are faster than bf16 up to a batch of: {wins or 'not measured'}")
    return "\n\n".join([*tables, *(f"{name}: {reason}" for name, reason in results["unavailable"].items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: :func:`benchmarks.benchmark_cli.run`'s, and how long to measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier_kernels", description="Measure frontier_kernels and record it."
    )
    parser.add_argument("--quick", action="store_true", help="one shape of each, nothing recorded")
    parser.add_argument("--rounds", type=int, default=EFFORT.rounds, help="rounds at least")
    parser.add_argument("--lap-seconds", type=float, default=EFFORT.lap_seconds, help="work in a lap")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that compile")
    options = parser.parse_args(arguments)
    effort = Effort(options.rounds, options.lap_seconds, EFFORT.warm_seconds)
    measured = functools.partial(measure, effort=effort, workers=options.workers)
    return benchmark_cli.run("frontier_kernels", measured, table, SCHEMA, ["--quick"] if options.quick else [])


if __name__ == "__main__":
    raise SystemExit(main())
