"""What a machine without a GPU prints where a lecture shows a GPU's output: recorded once, shown beside it.

``python -m website.laptop [03_five_tricks ...]`` runs the lectures, or those named, on the CPU and renews the record.
An entry belongs to its cell's source.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from nbformat import NotebookNode

from utils.notebooks import source_mark, tags
from website.places import WEBSITE, lectures

RECORD = WEBSITE / "laptop.json"
#: The tag of a cell whose output only a GPU gives.
GPU_OUTPUT = "gpu-output"


@cache
def _record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def outputs(name: str, cell: NotebookNode) -> list[dict[str, Any]]:
    """A cell's outputs on a machine without a GPU, in the notebook format.

    Args:
        name: The notebook's file name without suffix.
        cell: The cell as the notebook has it.

    Raises:
        KeyError: The record has no such cell: it was changed since; renew the record.
    """
    try:
        return _record()["notebooks"][name][source_mark(cell)]
    except KeyError:
        raise KeyError(
            f"website/laptop.json has no output for a cell of {name} that begins with {cell.source[:60]!r}: "
            "renew it with `python -m website.laptop`"
        ) from None


def record(names: Sequence[str] = ()) -> dict[str, Any]:
    """Run the lectures without a GPU, or only those named, and keep what their GPU cells give there."""
    import nbformat
    from nbclient import NotebookClient

    found: dict[str, Any] = dict(_record()["notebooks"]) if names else {}
    for path in (path for path in lectures() if not names or path.stem in names):
        notebook = nbformat.read(path, as_version=4)
        started = time.perf_counter()
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
        found[path.stem] = {source_mark(c): _plain(c.outputs) for c in notebook.cells if GPU_OUTPUT in tags(c)}
        print(f"{path.stem}: {len(found[path.stem])} cells, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return {"notebooks": found}


def _plain(made: list[Any]) -> list[dict[str, Any]]:
    """Outputs without what differs from run to run."""
    kept = json.loads(json.dumps(made))
    for output in kept:
        output.pop("execution_count", None)
    return kept


if __name__ == "__main__":
    os.environ["MLF_DEVICE"] = "cpu"
    RECORD.write_text(json.dumps(record(sys.argv[1:]), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
