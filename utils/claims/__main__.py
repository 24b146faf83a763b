"""``python -m utils.claims``: write the ledger page, or with ``--check`` prove that it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.claims.claim import LedgerError
from utils.claims.ledger import NOTEBOOKS, ledger, notebook_paths, problems
from utils.claims.page import page


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when all is well, 1 when a claim or the page is out of date (each on a line of its own)."""
    parser = argparse.ArgumentParser(prog="python -m utils.claims", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a claim or the page is out of date"
    )
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help="folder of the notebooks and of the page")
    options = parser.parse_args(arguments)
    target = options.notebooks / "CLAIMS.md"
    paths = notebook_paths(options.notebooks)
    found = problems(paths)
    try:
        text = page(paths)
    except LedgerError as error:
        print(f"[fail] {error}")
        return 1
    if options.check:
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            found.append(f"{target.name} is out of date: run `python -m utils.claims`")
    else:
        target.write_text(text, encoding="utf-8")
    for problem in found:
        print(f"[{'fail' if options.check else 'warn'}] {problem}")
    if not found or not options.check:
        print(f"[ok] {len(ledger(paths))} claims in {target.name}")
    return 1 if found and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
