"""Builds the site: stages every page's source in one folder, then runs Sphinx over it with warnings as errors."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sphinx.cmd.build import build_main

from website import icons, mathjax
from website.places import ROOT, WEBSITE

#: Modules with ``write(source)``, each of which stages some pages.
GENERATORS = (
    "notebooks",
    "predictions",
    "ledger",
    "record_pages",
    "reference",
    "course_map",
    "plans",
    "hero",
    "explorers",
)


def stage(source: Path) -> None:
    """Write the sources of every page below an empty folder."""
    shutil.copytree(WEBSITE / "pages", source, dirs_exist_ok=True)
    shutil.copytree(WEBSITE / "static", source / "_static", dirs_exist_ok=True)
    shutil.copytree(WEBSITE / "templates", source / "_templates")
    for file in ("conf.py", "references.bib"):
        shutil.copy2(WEBSITE / file, source / file)
    icons.write(source / "_static")
    mathjax.write(source / "_static")
    for name in GENERATORS:
        importlib.import_module(f"website.{name}").write(source)


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Look for no garbage meanwhile, which takes a fifth of a build's time; it is 1 GB in the end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
            gc.collect()


def build(out: Path, jobs: int = 2) -> int:
    """Build the site in ``out``/html; returns Sphinx's exit status, 0 if all is well.

    Args:
        out: A folder of the build's own; what it held before is replaced.
        jobs: Processes that Sphinx may use.
    """
    source, pages = out / "source", out / "html"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(pages, ignore_errors=True)
    source.mkdir(parents=True)
    arguments = ["-W", "--keep-going", "-q", "-b", "html", "-j", str(jobs), "-d", str(out / "doctrees")]
    with garbage_kept():
        stage(source)
        return build_main([*arguments, str(source), str(pages)])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m website.build", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "site", help="folder of the build (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that Sphinx may use (default: %(default)s)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    status = build(arguments.out.resolve(), arguments.jobs)
    if status == 0:
        size = sum(file.stat().st_size for file in (arguments.out / "html").rglob("*") if file.is_file())
        print(f"{arguments.out / 'html' / 'index.html'}: {size / 1e6:.1f} MB in {time.perf_counter() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
