"""The ledger: the claims that executed notebooks made, as their stored outputs have them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from utils.claims.claim import MIME, Claim, LedgerError, is_claim

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"


def notebook_paths(folder: Path = NOTEBOOKS) -> list[Path]:
    """The lecture notebooks, in reading order; hidden files are somebody's passing copies."""
    return sorted(folder.glob("[!.]*.ipynb"))


def ledger(notebooks: Iterable[Path | str] | None = None) -> list[Claim]:
    """Read the claims from the *stored* outputs of notebooks, in order; by default from all lectures.

    Nothing is executed and no source is read: a claim is in the ledger when a cell made it and its output was kept.

    Raises:
        LedgerError: a file is no notebook, an output is damaged, or two cells give one id different values.
    """
    made: dict[str, Claim] = {}
    for path in notebook_paths() if notebooks is None else map(Path, notebooks):
        for index, cell in enumerate(_cells(path)):
            for output in cell.get("outputs", []):
                stored = output.get("data", {}).get(MIME)
                if stored is None:
                    continue
                found = Claim.from_json(stored, notebook=path.stem, cell=index)
                first = made.setdefault(found.id, found)
                if first != found:
                    raise LedgerError(
                        f"claim {found.id!r} is made twice with different values: {first.computed_text} "
                        f"({first.notebook}, cell {first.cell}) and {found.computed_text} ({path.stem}, cell {index})"
                    )
    return list(made.values())


def problems(notebooks: Iterable[Path | str] | None = None) -> list[str]:
    """Everything that is wrong between the notebooks' sources and their stored outputs, in plain sentences."""
    paths = notebook_paths() if notebooks is None else [Path(p) for p in notebooks]
    try:
        made = ledger(paths)
    except LedgerError as error:
        return [str(error)]
    found = []
    for path in paths:
        found += _unexecuted(path)
    found += [f"claim {c.id!r} in {c.notebook} does not hold: {c.line()}" for c in made if not c.holds]
    return found


# ---- reading notebooks ---------------------------------------------------------------------------------------------


def _cells(path: Path) -> list[dict[str, Any]]:
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path.name}: not a readable notebook ({error})") from error
    return cells


def _unexecuted(path: Path) -> list[str]:
    """Claims in a cell's source that its outputs lack, and claims in its outputs that its source no longer makes."""
    found = []
    code = [(i, cell) for i, cell in enumerate(_cells(path)) if cell.get("cell_type") == "code"]
    anywhere = [p for _, cell in code for p in claim_patterns("".join(cell["source"]), inside_functions=True)]
    for index, cell in code:
        patterns = claim_patterns("".join(cell["source"]))
        stored = [o["data"][MIME]["id"] for o in cell.get("outputs", []) if MIME in o.get("data", {})]
        where = f"{path.stem}, cell {index}"
        for pattern in patterns:
            if not any(re.fullmatch(pattern, id) for id in stored):
                found.append(f"{where}: the source claims {_readable(pattern)!r} but the outputs lack it; execute it")
        for id in stored:
            if not any(re.fullmatch(pattern, id) for pattern in anywhere):
                found.append(f"{where}: the outputs claim {id!r} but the source no longer does; execute it")
    return found


def claim_patterns(source: str, *, inside_functions: bool = False) -> list[str]:
    """Regular expressions for the ids that a cell's source claims; an id built at run time matches what it may be.

    A call inside a function definition makes no claim in its own cell; it is counted with ``inside_functions`` only.
    """
    kept = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
    try:
        tree = ast.parse(kept)
    except SyntaxError:
        return []
    calls = [node for node in _walk(tree, inside_functions) if is_claim(node)]
    ids = [
        call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "id"), None) for call in calls
    ]
    return [_pattern(node) for node in ids if node is not None]


def _walk(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if inside_functions or not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from _walk(child, inside_functions)


def _pattern(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) for part in node.values)
    return ".+"


def _readable(pattern: str) -> str:
    return pattern.replace(".+", "...").replace("\\", "")
