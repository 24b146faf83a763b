"""``python -m grading.mutation lab3 [--only 3.1 3.3] [--sample 64]``: mutants of a lab's solutions, and a report.

The report on each exercise is written as soon as its last mutant is done, to ``solutions/LAB/answers/mutants/3.1.md``.
The exit status is 0 if no mutant survived.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from grading.lab import find_lab
from grading.mutation.report import equivalents, fate, write
from grading.mutation.run import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line above; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grading.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("lab", help="lab3, 3 or lab3_flash_attention")
    parser.add_argument("--only", nargs="+", metavar="N.M", help="these exercises, not all")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="at most N of an exercise, drawn at random (default: all)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        lab = find_lab(given.lab).name
        known, holes = equivalents(lab), 0
        results = run(given.lab, given.only, given.jobs, given.sample)
        for number, of_one in itertools.groupby(results, key=lambda result: result.place.split(":")[0]):
            found = []
            for result in of_one:
                found.append(result)
                if fate(result, known) in ("survived", "wide"):
                    holes += 1
                    print(f"{result.fate}: {result.file}:{result.line}: {result.before} → {result.after}", flush=True)
            print(f"{number}: {len(found)} mutants: {write(lab, number, found)}", flush=True)
    except ValueError as error:
        parser.error(str(error))
    return int(holes > 0)


if __name__ == "__main__":
    sys.exit(main())
