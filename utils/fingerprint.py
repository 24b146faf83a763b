"""A fingerprint of measured source code: the same while the code does the same, different once it may not.

A recorded measurement is worth what its source is: when the measured code has changed since, the figures are of
something else. A Python source counts with whatever of the course it leads to by name (:data:`FOLLOWED`): of a script,
what running it needs, of another file all of it. How it counts is said in :mod:`utils.source_form`; of CUDA C++ source
every token counts, but comments and whitespace do not. Paths and the order of the sources do not count.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.course_modules import ROOT, Course, Module, parse
from utils.source_form import definitions_used, form

__all__ = ["FOLLOWED", "ROOT", "cpp_form", "files", "fingerprint", "python_form"]

#: Where names are followed to: what is measured, and not what times, counts, checks or prints.
FOLLOWED = (
    "benchmarks/",
    "solutions/",
    "utils/example_kernels/",
    "utils/gpt.py",
    "utils/quantization/",
    "utils/serving/",
)
_NOT_FOLLOWED = ("benchmarks/benchmark_cli.py",)
#: What a benchmark says of its record: it is not measured, and does not lead anywhere.
_SAID = {"SCHEMA", "SOURCES"}

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
            its neighbours may change. ``"!benchmarks/truth.py"`` is left out, though a source leads to it; so is what
            lies in ``"!solutions/lab1_roofline/"``.
        course: The files; by default those of this course, read now.

    Raises:
        TypeError: ``sources`` is one path instead of a list, or holds something that is no path.
        ValueError: there are no sources, one leaves the root, is of an unknown kind, has no such name, or does not
            parse.
        FileNotFoundError: a source is not there.
    """
    course = course or Course()
    statements, others = _measured(sources, course)
    parts = form(course, statements) + [cpp_form((course.root / path).read_text(encoding="utf-8")) for path in others]
    digest = hashlib.sha256()
    for part in sorted(parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def files(sources: Sequence[str], course: Course | None = None) -> list[str]:
    """The files that :func:`fingerprint` sees something of, sorted."""
    statements, others = _measured(sources, course or Course())
    return sorted({path for path, _ in statements} | set(others))


def _measured(sources: Sequence[str], course: Course) -> tuple[set[tuple[str, int]], list[str]]:
    """The measured statements of Python, as (path, index), and the files in C++."""
    if isinstance(sources, str) or not all(isinstance(source, str) for source in sources):
        raise TypeError(f"sources must be a list of paths, got {sources!r}")
    given = list(dict.fromkeys(source for source in sources if not source.startswith("!")))
    left_out = (*_NOT_FOLLOWED, *(source[1:] for source in sources if source.startswith("!")))
    if not given:
        raise ValueError("sources must name at least one file, got none")
    others, waiting = [], []
    for source in given:
        path, _, member = source.partition("::")
        _check(source, course.root)
        if Path(path).suffix in _CPP:
            others.append(path)
        else:
            waiting += [(path, i) for i in (_indices(course, path, member) if member else _run(course.module(path)))]
    found: set[tuple[str, int]] = set()
    while waiting:
        where = waiting.pop()
        if where not in found:
            found.add(where)
            for path, name in definitions_used(course, *where):
                if path == where[0] or (path.startswith(FOLLOWED) and not path.startswith(left_out)):
                    waiting += [(path, i) for i in _led_to(course.module(path), name)]
    return found, others


def _run(module: Module) -> set[int]:
    """Positions of what runs with a file: of a script what its last block names, of another file everything."""
    scripts = _scripts(module)
    if not scripts:
        return set(range(len(module.statements))) - _bound(module, _SAID)
    named = {node.id for i in scripts for node in ast.walk(module.statements[i]) if isinstance(node, ast.Name)}
    return scripts | _acts(module) | _bound(module, named - _SAID)


def _led_to(module: Module, name: str | None) -> set[int]:
    """Positions of what a name of a file leads to (None: the file): its definition, and what acts on import."""
    named = module.definitions if name is None else {name}
    return _bound(module, set(named) - _SAID) | _acts(module) - _scripts(module)


def _acts(module: Module) -> set[int]:
    return set(range(len(module.statements))) - _bound(module, module.definitions)


def _scripts(module: Module) -> set[int]:
    """Positions of ``if __name__ == "__main__"``."""
    tests = {i: ast.unparse(node.test) for i, node in enumerate(module.statements) if isinstance(node, ast.If)}
    return {i for i, test in tests.items() if "__name__" in test}


def _bound(module: Module, names: Iterable[str]) -> set[int]:
    return {i for name in names for i, _ in module.definitions.get(name, ())}


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
