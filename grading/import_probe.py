"""Imports a lab's package module by module and writes down where that fails: ``python -m grading.import_probe``.

Runs in the sandbox, after an import has failed there. What it writes decides only which of the student's own modules is
replaced by the one that was handed out, so whoever forges it wins nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

FOUND, STANDING = "found.json", "standing.txt"


def probe(name: str, root: Path, out: Path, limit: float) -> None:
    """Import ``name`` from ``root``; what went wrong is in ``out``.

    ``found.json`` holds ``stack`` (the files that were being imported, outermost first), ``error``, ``line`` of the
    innermost of them, and ``home`` (the file that a name could not be imported from). A process that hangs or dies
    leaves the stack alone, and in ``standing.txt`` where Python stood.
    """
    folder = (root / name).resolve()
    stack: list[str] = []

    def write(**more: object) -> None:
        (out / FOUND).write_text(json.dumps({"stack": stack, **more}), encoding="utf-8")

    execute = SourceFileLoader.exec_module

    def followed(self: SourceFileLoader, module: ModuleType) -> None:
        path = Path(self.path).resolve()
        if path.parent != folder:
            return execute(self, module)
        stack.append(path.name)
        write()
        execute(self, module)  # one that fails stays on the stack
        stack.pop()
        return write()

    SourceFileLoader.exec_module = followed
    sys.path.insert(0, str(root))
    with open(out / STANDING, "w", encoding="utf-8") as standing:
        faulthandler.enable(standing, all_threads=False)
        faulthandler.dump_traceback_later(limit, exit=True, file=standing)
        write()
        try:
            importlib.import_module(name)
        except BaseException as error:  # a student's code may raise anything
            home = Path(error.path).name if isinstance(error, ImportError) and error.path else ""
            write(error=f"{type(error).__name__}: {error}"[:1000], line=_line(error, folder, stack), home=home)


def _line(error: BaseException, folder: Path, stack: Sequence[str]) -> int:
    """The line of the innermost module of ``stack`` that an error came from; 0 when there is none."""
    found, step = 0, error.__traceback__
    while step is not None and stack:
        if step.tb_frame.f_code.co_filename == str(folder / stack[-1]):
            found = step.tb_lineno
        step = step.tb_next
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m grading.import_probe", description=__doc__.split("\n")[0])
    parser.add_argument("lab", help="the lab's package, such as lab2_triton_kernels")
    parser.add_argument("--package-root", type=Path, required=True, help="the folder that holds the package")
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="what the import may take")
    given = parser.parse_args(arguments)
    probe(given.lab, given.package_root.resolve(), given.out, given.limit)


if __name__ == "__main__":
    main()
