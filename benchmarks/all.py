"""Measures every family, each in its own process, so that one failure leaves the others: ``python -m benchmarks.all``.

``--quick`` measures little and records nothing; names on the command line choose families. ``attention_tutorial`` needs
a file that ``TRITON_TUTORIAL`` names, and fails without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import family
from utils import runtime
from utils.fingerprint import ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the families and print a summary; return 1 when any of them failed."""
    known = family.families()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description="Measure every family and record it.")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, a few seconds each, nothing recorded")
    parser.add_argument("families", nargs="*", metavar="family", help=f"which to measure: {', '.join(known)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.families if name not in known]
    if unknown:
        parser.error(f"unknown family {unknown[0]!r}; known: {', '.join(known)}")
    if not runtime.HAS_GPU:
        print("measuring needs a CUDA GPU and none is in use here (python -m utils.runtime says why)")
        return 1
    outcomes = []
    for name in options.families or known:
        start = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if options.quick else [])]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        outcomes.append((name, status, time.monotonic() - start))
        print(flush=True)
    return summary(outcomes)


def summary(outcomes: Sequence[tuple[str, int, float]]) -> int:
    """Print one line a family (name, exit status, seconds); return 1 when any failed, else 0."""
    for name, status, seconds in outcomes:
        print(f"{'FAIL' if status else 'ok  '} {name:17s} {seconds:6.1f} s{f'  status {status}' if status else ''}")
    return int(any(status for _, status, _ in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
