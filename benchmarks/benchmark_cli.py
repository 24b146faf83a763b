"""What every benchmark's command line shares: measure, print a short table, record."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from utils import record_schemas, records, runtime

FOLDER = Path(__file__).resolve().parent


def run(
    benchmark: str,
    measure: Callable[..., dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    schema: object,
    arguments: Sequence[str] | None = None,
    *,
    needs_gpu: bool = True,
) -> int:
    """Measure one benchmark on this machine's GPU, print its table and renew its record; return an exit status.

    ``--quick`` measures fewer sizes in a few seconds and records nothing.

    Args:
        benchmark: Name of the record.
        measure: Returns the results; takes ``quick``.
        table: Results as a short text.
        schema: What the results must hold (:mod:`utils.record_schemas`).
        arguments: Command line; the process's own by default.
        needs_gpu: False where the results are arithmetic, not timings. They are computed on the CPU, even beside a GPU,
            and the record names the CPU.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=f"Measure {benchmark} and record it."
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, a few seconds, nothing recorded")
    options = parser.parse_args(arguments)
    if needs_gpu and not runtime.HAS_GPU:
        print(f"{benchmark}: needs a CUDA GPU and none is in use here (python -m utils.runtime says why)")
        return 1
    print(f"{benchmark} on {runtime.gpu_name() if needs_gpu else records.CPU}", flush=True)
    results = measure(quick=options.quick)
    print(table(results))
    if not options.quick:
        command = f"python -m benchmarks.{benchmark}"
        path = records.save(benchmark, results, schema, sources(benchmark), command, on_cpu=not needs_gpu)
        print(f"recorded in utils/records/{path.name}")
    return 0


def benchmark_names() -> list[str]:
    """The benchmarks that make a record, by name: those that have its ``SCHEMA``."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "\nSCHEMA = " in path.read_text(encoding="utf-8"))


def schema(benchmark: str) -> object:
    """The schema of a benchmark's results."""
    return importlib.import_module(f"benchmarks.{benchmark}").SCHEMA


def problems(benchmark: str, results: object) -> list[str]:
    """How results differ from their benchmark's schema, as sentences; empty when they could be recorded."""
    return record_schemas.check(json.loads(json.dumps(results)), schema(benchmark), "results")


def sources(benchmark: str) -> list[str]:
    """What a benchmark measures: its own file, and in ``SOURCES`` what that does not lead to by name."""
    return [f"benchmarks/{benchmark}.py", *getattr(importlib.import_module(f"benchmarks.{benchmark}"), "SOURCES", ())]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves out PyTorch's remark that the thread of the backward pass takes the process's CUDA context."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        yield


def text_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under headings in aligned columns; the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def thin(items: Sequence[Any], most: int = 24) -> list[Any]:
    """At most ``most`` of ``items``, evenly spread, the last one included: what a short table shows of a long sweep."""
    step = -(-len(items) // most)
    chosen = list(items[::step])
    return chosen if not items or chosen[-1] is items[-1] else [*chosen, items[-1]]
