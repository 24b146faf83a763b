"""Copies of a student's modules as people make them so that nobody notices."""

from __future__ import annotations

import ast
import io
import random
import re
import tempfile
import tokenize
from collections.abc import Mapping
from pathlib import Path

from lab_places import ROOT, write_lab

Modules = dict[str, str]


def modules_of(folder: Path) -> Modules:
    """The modules in a folder, by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


def released(lab: str) -> Modules:
    """A lab's modules as they are handed out."""
    return modules_of(ROOT / "labs" / lab)


def filled(lab: str, answers: Mapping[str, str]) -> Modules:
    """A lab's modules with answers in their places."""
    with tempfile.TemporaryDirectory() as folder:
        write_lab(lab, Path(folder) / lab, answers)
        return modules_of(Path(folder) / lab)


def renamed(text: str, handed_out: str) -> str:
    """A module in which everything has another name that the student named: variables, helpers, parameters of these."""
    given = set(re.findall(r"\w+", handed_out))
    own = {
        node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.arg | ast.FunctionDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    names = {name: f"mine{index}" for index, name in enumerate(sorted(own - given))}
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        (row, start), (_, end) = token.start, token.end
        if token.type == tokenize.NAME and token.string in names and token.line[max(start - 1, 0) : start] != ".":
            lines[row - 1] = lines[row - 1][:start] + names[token.string] + lines[row - 1][end:]
    return "".join(lines)


def reordered(text: str) -> str:
    """A module with its functions and classes in another order, written in another layout and without comments."""
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.ClassDef)
    places = [index for index, node in enumerate(tree.body) if isinstance(node, kinds)]
    shuffled = random.Random(1).sample(places, len(places))
    body = list(tree.body)
    for to, index in zip(places, shuffled):
        body[to] = tree.body[index]
    return ast.unparse(ast.Module(body, [])) + "\n"


def recommented(text: str) -> str:
    """A module with a comment of its own above every line that returns, loops or decides."""
    return "# my own work\n" + re.sub(r"(?m)^( *)((?:return|for|if)\b)", r"\1# next step\n\1\2", text)


def copy_of(modules: Mapping[str, str], handed_out: Mapping[str, str], *, names_only: bool = False) -> Modules:
    """A copy with other names; unless ``names_only``, with other comments, order and layout, too."""
    named = {name: renamed(text, handed_out.get(name, "")) for name, text in modules.items()}
    return named if names_only else {name: recommented(reordered(text)) for name, text in named.items()}
