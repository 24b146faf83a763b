"""MathJax as part of the site: a copy of what typesets TeX, and nothing that asks another host."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

#: The bundle: TeX in, HTML with CSS out, and MathML beside it for screen readers.
BUNDLE = "tex-chtml.js"
#: What the bundle loads by itself when a page needs it.
PARTS = ("input/tex/extensions", "output/chtml/fonts/woff-v2", "a11y", "ui")
CONFIG = {
    "chtml": {"displayAlign": "left"},  # a long equation begins where its line does, and scrolls to its end
    "options": {"enableMenu": False},  # its settings would load voices and languages from elsewhere
}


def write(static: Path) -> None:
    """Copy MathJax from the Python package that ``make site`` installs into a folder of static files."""
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    (static / "mathjax").mkdir(parents=True, exist_ok=True)
    shutil.copy2(package / BUNDLE, static / "mathjax" / BUNDLE)
    for part in PARTS:
        shutil.copytree(package / part, static / "mathjax" / part, dirs_exist_ok=True)
