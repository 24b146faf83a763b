"""Finds in a student's source the libraries that solve the exercise: PyTorch's own, or the course's."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

#: Modules that solve an exercise: PyTorch's and other libraries'.
LIBRARIES = (
    "torch.nn.parallel",
    "torch.nn.DataParallel",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.algorithms",
    "torch.distributed._composable",
    "torch.distributed._tensor",
    "deepspeed",
    "fairscale",
    "accelerate",
    "apex",
    "megatron",
)
#: The course's own solutions.
_OURS = (
    "solutions",
    "labs",
    "exercises",
    "fully_sharded",
    "utils.transformer_math",
    "utils.checks",
    "utils.schedules.one_f_one_b",
    "utils.schedules.orders",
)


def find_library_use(functions: Sequence[Callable], libraries: Sequence[str] = (*LIBRARIES, *_OURS)) -> list[str]:
    """Libraries that the source of these functions names: ``zero1.py, line 7: torch.distributed.optim``.

    Looks through the whole module of a function, and through modules of the same package that it imports.
    """
    found: list[str] = []
    for name, text in _sources(functions).items():
        found += [f"{name}, line {line}: {module}" for line, module in _uses(text, libraries) if module not in found]
    return found


def _sources(functions: Sequence[Callable]) -> dict[str, str]:
    """Source text by file name; of a function typed into a notebook, its own lines."""
    texts: dict[str, str] = {}
    for function in functions:
        module = inspect.getmodule(inspect.unwrap(function))
        file = getattr(module, "__file__", None)
        if file and Path(file).suffix == ".py" and Path(file).is_file():
            _with_relatives(Path(file), texts)
            continue
        try:
            texts["a cell"] = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):
            continue
    return texts


def _with_relatives(file: Path, texts: dict[str, str]) -> None:
    if file.name in texts or not file.is_file():
        return
    texts[file.name] = file.read_text("utf-8")
    try:
        tree = ast.parse(texts[file.name])
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            _with_relatives(file.parent / f"{node.module.split('.')[0]}.py", texts)


def _uses(text: str, libraries: Sequence[str]) -> list[tuple[int, str]]:
    """Line and name of each such module that is imported or named."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    aliases = {
        "torch": "torch",
        "dist": "torch.distributed",
        "nn": "torch.nn",
        "schedules": "utils.schedules",
        "serving": "utils.serving",
    }
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (not node.level or (node.module or "").split(".")[0] in _OURS):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [_dotted(node, aliases)]
        found += [(node.lineno, name) for name in names if name and _belongs(name, libraries)]
    return found


def _belongs(name: str, libraries: Sequence[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in libraries)


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return ""
    return ".".join([aliases[node.id], *reversed(parts)])
