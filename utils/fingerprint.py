"""A fingerprint of measured source code: the same while the code does the same, different once it may not.

A recorded measurement is worth what its source is: when the measured code has changed since, the figures are of
something else. The fingerprint of Python source ignores comments, docstrings and formatting, and is the same on
Python 3.11, 3.12 and 3.13 (``ast.dump`` is not: later versions add fields, omit defaults and parse f-strings
differently). CUDA C++ source is compared token by token, without comments and whitespace.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_PYTHON = (".py",)
_CPP = (".cu", ".cuh", ".cpp", ".h")

# Positions, and hints that do not change what code does.
_IGNORED_FIELDS = {"lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "kind", "type_comment"}

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


def fingerprint(sources: Sequence[str], root: Path | None = None) -> str:
    """Fingerprint of one or more sources, in the order given: 64 hexadecimal digits (SHA-256).

    Args:
        sources: Paths relative to the root of the course, ``"benchmarks/latency.py"``.
            ``"utils/example_kernels.py::softmax"`` means that top-level function, class or assignment only, so that
            its neighbours may change.
        root: The root; the course's own by default.

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
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.encode() + b"\0" + _one(source, ROOT if root is None else root).encode() + b"\0")
    return digest.hexdigest()


def _one(source: str, root: Path) -> str:
    name, _, member = source.partition("::")
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"a source must be a path inside the course, relative to its root, got {source!r}")
    if path.suffix not in _PYTHON + _CPP:
        raise ValueError(f"a source must end in one of {', '.join(_PYTHON + _CPP)}, got {source!r}")
    if not (root / path).is_file():
        raise FileNotFoundError(f"measured source {name!r} is not there any more")
    text = (root / path).read_text(encoding="utf-8")
    if path.suffix in _CPP:
        if member:
            raise ValueError(f"only a Python source may name one member after '::', got {source!r}")
        return cpp_form(text)
    return python_form(text, member or None, name)


def python_form(text: str, member: str | None = None, filename: str = "<source>") -> str:
    """Canonical text of Python source: its syntax tree without comments, docstrings, formatting and positions.

    Raises:
        ValueError: ``text`` is not Python, or no top-level function, class or assignment is called ``member``.
    """
    try:
        tree = ast.parse(text, filename=filename)
    except SyntaxError as error:
        raise ValueError(f"{filename} does not parse: {error}") from error
    if member is None:
        return "".join(_walk(tree))
    found = [node for node in tree.body if member in _names(node)]
    if not found:
        raise ValueError(f"{filename} has no top-level function, class or assignment called {member!r}")
    return "".join(part for node in found for part in _walk(node))


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _walk(node: object) -> Iterator[str]:
    """The tree as text. Absent fields and empty lists are left out: newer versions add fields that are mostly empty."""
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(values=_merged(node.values))
    if isinstance(node, ast.Constant):
        yield f"({_constant(node.value)})"
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list) and _has_docstring(node):
                value = value[1:]
            if name in _IGNORED_FIELDS or value is None or value == []:
                continue
            yield f" {name}="
            yield from _walk(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _walk(item)
        yield "]"
    else:
        yield _constant(node)


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return False
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string, neighbouring texts joined, empty ones dropped: versions differ in how they split them."""
    merged: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(value=merged[-1].value + value.value)
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            merged.append(value)
    return merged


def _constant(value: object) -> str:
    """Type and value. Texts as hexadecimal bytes: which characters ``repr`` escapes depends on the Unicode version."""
    if isinstance(value, str):
        return "str:" + value.encode("utf-8", "surrogatepass").hex()
    return f"{type(value).__name__}:{value!r}"


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
