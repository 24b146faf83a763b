"""``python -m grading.mutation lab3 [--only 3.1 3.3] [--every 10]``: every mutant of a lab's solutions, and a report.

With all exercises and all mutants it is written to ``solutions/LAB/answers/mutants.md``; otherwise it is printed. The
exit status is 0 if no mutant survived.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from grading.lab import find_lab
from grading.mutation.report import equivalents, fate, page, write
from grading.mutation.run import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line above; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grading.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("lab", help="lab3, 3 or lab3_flash_attention")
    parser.add_argument("--only", nargs="+", metavar="N.M", help="these exercises, not all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th mutant of a place (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        lab, results = find_lab(given.lab).name, []
        for result in run(given.lab, given.only, given.jobs, given.every):
            results.append(result)
            if result.fate in ("survived", "wide"):
                print(f"{result.fate}: {result.file}:{result.line}: {result.before} → {result.after}", flush=True)
    except ValueError as error:
        parser.error(str(error))
    if given.only or given.every > 1:
        print(page(lab, results))
    else:
        print(f"{len(results)} mutants: {write(lab, results)}")
    known = equivalents(lab)
    return int(any(fate(result, known) in ("survived", "wide") for result in results))


if __name__ == "__main__":
    sys.exit(main())
