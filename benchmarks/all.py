"""Runs every benchmark in a process of its own, so that one failure leaves the others: ``python -m benchmarks.all``.

``--quick`` measures little and records nothing; names on the command line choose benchmarks. ``attention_tutorial``
needs a file that ``TRITON_TUTORIAL`` names and fails without it, ``hopper_peers`` and ``hopper_causes`` a package that
the course does not install.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import benchmark_cli
from utils import runtime
from utils.fingerprint import ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print a summary; return 1 when any of them failed."""
    known = benchmark_cli.benchmark_names()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description="Measure every benchmark and record it."
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, a few seconds each, nothing recorded")
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help=f"which to measure: {', '.join(known)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.benchmarks if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(known)}")
    if not runtime.HAS_GPU:
        print("measuring needs a CUDA GPU and none is in use here (python -m utils.runtime says why)")
        return 1
    outcomes = []
    for name in options.benchmarks or known:
        start = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if options.quick else [])]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        outcomes.append((name, status, time.monotonic() - start))
        print(flush=True)
    return summary(outcomes)


def summary(outcomes: Sequence[tuple[str, int, float]]) -> int:
    """Print one line per benchmark (name, exit status, seconds); return 1 when any failed, else 0."""
    for name, status, seconds in outcomes:
        print(f"{'FAIL' if status else 'ok  '} {name:17s} {seconds:6.1f} s{f'  status {status}' if status else ''}")
    return int(any(status for _, status, _ in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
