"""A fingerprint of measured source code: the same while the code does the same, different once it may not.

A recorded measurement is worth what its source is: when the measured code has changed since, the figures are of
something else. What counts of a Python source is said in :mod:`utils.source_form`; of CUDA C++ source every token
counts, but comments and whitespace do not. Paths and the order of the sources do not count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from utils.course_modules import ROOT, Course, Module, parse
from utils.source_form import form

__all__ = ["ROOT", "cpp_form", "fingerprint", "python_form"]

_PYTHON = (".py",)
_CPP = (".cu", ".cuh", ".cpp", ".h")

_CPP_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<raw>(?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)")
  | (?P<text>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>'(?:\\.|[^'\\\n])+')
  | (?P<number>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<newline>\n)
  | (?P<space>[^\S\n]+)
  | (?P<operator><<<|>>>|<<=|>>=|\.\.\.|->\*|[-+*/%&|^<>=!:]=|\+\+|--|<<|>>|&&|\|\||::|->|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def fingerprint(sources: Sequence[str], course: Course | None = None) -> str:
    """Fingerprint of one or more sources: 64 hexadecimal digits (SHA-256).

    Args:
        sources: Paths relative to the root of the course, ``"benchmarks/latency.py"``.
            ``"utils/example_kernels.py::softmax"`` means that top-level function, class or assignment only, so that
            its neighbours may change.
        course: The files; by default those of this course, read now.

    Raises:
        TypeError: ``sources`` is one path instead of a list, or holds something that is no path.
        ValueError: there are no sources, one leaves the root, is of an unknown kind, has no such name, or does not
            parse.
        FileNotFoundError: a source is not there.
    """
    if isinstance(sources, str) or not all(isinstance(source, str) for source in sources):
        raise TypeError(f"sources must be a list of paths, got {sources!r}")
    if not sources:
        raise ValueError("sources must name at least one file, got none")
    course = course or Course()
    statements: set[tuple[str, int]] = set()
    parts: list[str] = []
    for source in dict.fromkeys(sources):
        path, _, member = source.partition("::")
        _check(source, course.root)
        if Path(path).suffix in _CPP:
            parts.append(cpp_form((course.root / path).read_text(encoding="utf-8")))
        else:
            statements |= {(path, i) for i in _indices(course, path, member)}
    parts += form(course, statements)
    digest = hashlib.sha256()
    for part in sorted(parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def python_form(text: str, member: str | None = None) -> str:
    """Canonical text of one Python source, as :func:`fingerprint` sees it when nothing else is measured.

    Raises:
        ValueError: ``text`` is not Python, or no top-level function, class or assignment is called ``member``.
    """
    course = _OneFile(text)
    return "\n".join(sorted(form(course, {(course.path, i) for i in _indices(course, course.path, member or "")})))


class _OneFile(Course):
    """A course of a single file that is not on disk."""

    path = "<source>"

    def __init__(self, text: str) -> None:
        super().__init__(Path(self.path))
        self.text = text

    def module(self, path: str) -> Module:
        return parse(self.text, path)


def _indices(course: Course, path: str, member: str) -> set[int]:
    """Positions of the measured statements in a file: all of them, or those that bind ``member``."""
    module = course.module(path)
    if not member:
        return set(range(len(module.statements)))
    if member not in module.definitions:
        raise ValueError(f"{path} has no top-level function, class or assignment called {member!r}")
    return {i for i, _ in module.definitions[member]}


def _check(source: str, root: Path) -> None:
    name, _, member = source.partition("::")
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"a source must be a path inside the course, relative to its root, got {source!r}")
    if path.suffix not in _PYTHON + _CPP:
        raise ValueError(f"a source must end in one of {', '.join(_PYTHON + _CPP)}, got {source!r}")
    if not (root / path).is_file():
        raise FileNotFoundError(f"measured source {name!r} is not there any more")
    if path.suffix in _CPP and member:
        raise ValueError(f"only a Python source may name one member after '::', got {source!r}")


def cpp_form(text: str) -> str:
    """Canonical text of C++ or CUDA source: its tokens, one a line, without comments and whitespace.

    The end of a preprocessor directive counts as a token, because there a line break has a meaning.
    """
    tokens: list[str] = []
    in_directive = False
    at_line_start = True
    for match in _CPP_TOKEN.finditer(text.replace("\\\r\n", " ").replace("\\\n", " ")):
        kind, token = match.lastgroup, match.group()
        if kind == "fence":  # lastgroup names the innermost group of a raw string
            kind = "raw"
        if kind == "newline":
            if in_directive:
                tokens.append("<end of directive>")
            in_directive, at_line_start = False, True
        elif kind not in ("space", "comment"):
            in_directive = in_directive or (at_line_start and token == "#")
            at_line_start = False
            tokens.append(token)
    return "\n".join(tokens)
