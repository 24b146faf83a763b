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

from grading.strip import BEGIN, END

ROOT = Path(__file__).resolve().parent.parent


def labels(lab: str) -> list[tuple[str, str]]:
    """Module and label (``3.1: merge``) of every place in ``solutions/<lab>``."""
    found = []
    for path in sorted((ROOT / "solutions" / lab).glob("*.py")):
        marks = (BEGIN.match(line) for line in path.read_text().splitlines())
        found += [(path.stem, mark["label"].strip()) for mark in marks if mark]
    return found


def write_lab(lab: str, folder: Path, answers: Mapping[str, str]) -> None:
    """Write a lab's modules into a folder, its places filled with ``answers``; one without an answer stays a stub."""
    folder.mkdir()
    for path in (ROOT / "solutions" / lab).glob("*.py"):
        (folder / path.name).write_text(_filled(path.read_text(), answers, re.search(r"\d+", lab).group()))


def _filled(text: str, answers: Mapping[str, str], lab: str) -> str:
    lines, inside = [], False
    for line in text.splitlines():
        begin = BEGIN.match(line)
        if begin:
            inside, label = True, begin["label"].strip()
            stub = f'raise NotImplementedError("Lab {lab}, exercise {label}")'
            answer = textwrap.dedent(answers.get(label, stub)).strip("\n")
            lines.append(textwrap.indent(answer, begin["indent"]))
        elif END.match(line):
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


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
