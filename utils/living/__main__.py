"""Renews the scripts of the living figures that notebooks store: ``python -m utils.living notebooks/*.ipynb``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from utils import living


def renew(path: Path) -> bool:
    """Give the figures in a notebook's outputs the scripts of today; returns whether something changed."""
    before = path.read_text("utf-8")
    notebook = json.loads(before)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if page := output.get("data", {}).get("text/html"):
                output["data"]["text/html"] = living.renewed("".join(page)).splitlines(True)
    after = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    if after != before:
        path.write_text(after, "utf-8")
    return after != before


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {'renewed' if renew(Path(name)) else 'up to date'}")
