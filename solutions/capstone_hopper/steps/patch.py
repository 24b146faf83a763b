"""A step that is given as edits of another one, so that its file holds only what it changes."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from typing import Any


def source_of(path: Path) -> str:
    """A step's source: its file or, where that has a ``BASE`` and ``EDITS``, the base's source with these edits.

    ``EDITS`` are pairs (text of the base, text instead); the file's docstring stands for the base's.

    Raises:
        ValueError: the text of an edit does not stand in the base exactly once.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    given = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    if "EDITS" not in given:
        return text
    base = path.with_name(ast.literal_eval(given["BASE"]))
    source = base.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)), ast.get_docstring(tree)
    for old, new in (docstring, *ast.literal_eval(given["EDITS"])):
        if source.count(old) != 1:
            raise ValueError(f"{path.name}: {base.name} must have this once, not {source.count(old)} times: {old!r}")
        source = source.replace(old, new)
    return source


def run(file: str, namespace: dict[str, Any]) -> None:
    """Run the edited source in the namespace of its module, so that ``inspect`` and Triton's JIT find it."""
    source, name = source_of(Path(file)), f"<{Path(file).name}, edits made>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
