"""The places of a lab that a student fills, and the lab's modules with answers in them."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from grading.handed_out import init_of, modules_of
from grading.strip import places

ROOT = Path(__file__).resolve().parent.parent


def labels(lab: str) -> list[tuple[str, str]]:
    """Module and label (``3.1: merge``) of every place in ``solutions/<lab>``."""
    return [(place.module, place.label) for place in places(ROOT / "solutions" / lab)]


def write_lab(lab: str, folder: Path, answers: Mapping[str, str]) -> None:
    """Write a lab's modules into a folder, its places filled with ``answers``; one without an answer stays a stub.

    Where students write functions of their own, at the margin, nothing stands in for them.
    """
    folder.mkdir()
    home, number = ROOT / "solutions" / lab, re.search(r"\d+", lab).group()
    filled = {path.stem: path.read_text().splitlines() for path in modules_of(home)}
    filled["__init__"] = init_of(home).splitlines()
    for place in reversed(places(home)):  # from the last on: the lines above keep their numbers
        stub = f'raise NotImplementedError("Lab {number}, exercise {place.label}")'
        answer = textwrap.dedent(answers.get(place.label, stub if place.indent else "")).strip("\n")
        filled[place.module][place.first - 1 : place.last + 1] = [textwrap.indent(answer, place.indent)]
    for module, lines in filled.items():
        (folder / f"{module}.py").write_text("\n".join(lines) + "\n")


def forget(name: str) -> None:
    """Let a package be imported anew."""
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
        del sys.modules[loaded]


@contextmanager
def lab_with(lab: str, folder: Path, name: str, answers: Mapping[str, str]) -> Iterator[ModuleType]:
    """A lab as a package called ``name``, its places filled with these answers."""
    write_lab(lab, folder / name, answers)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        forget(name)
