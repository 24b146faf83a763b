"""MathJax as part of the site: a copy of what typesets TeX, and nothing that asks another host.

The copy comes with the Python packages that ``make site`` installs. ``npm install --prefix website mathjax@3`` fetches
a newer one, which is then taken instead.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from website.places import WEBSITE

#: Where `npm install --prefix website` puts the package, and where the Python package of the same version has it.
NPM = WEBSITE / "node_modules" / "mathjax" / "es5"
#: The bundle: TeX in, HTML with CSS out, and MathML beside it for screen readers.
BUNDLE = "tex-chtml.js"
#: What the bundle loads by itself when a page needs it.
PARTS = ("input/tex/extensions", "output/chtml/fonts/woff-v2", "a11y", "ui")
#: Only when there is no copy; the site then depends on another host, and the build says so.
CDN = "https://cdn.jsdelivr.net/npm/mathjax@3.2.2/es5/tex-chtml.js"

#: Macros of the pages that are no notebooks. (Notebooks use none: they are read on GitHub and in JupyterLab too.)
MACROS = {
    "softmax": r"\operatorname{softmax}",
    "rowsum": r"\operatorname{rowsum}",
    "lse": r"\operatorname{logsumexp}",
    "bytes": [r"#1\,\text{bytes}", 1],
    "flops": [r"#1\,\text{FLOPs}", 1],
}
CONFIG = {
    "tex": {"macros": MACROS},
    "chtml": {"displayAlign": "center"},
    "options": {"enableMenu": False},  # its settings would load voices and languages from elsewhere
}


def copy() -> Path | None:
    """The folder that holds MathJax on this machine: npm's, or the Python package's; None if there is neither."""
    package = importlib.util.find_spec("sphinx-mathjax-offline")
    places = [NPM]
    if package is not None and package.submodule_search_locations:
        places += [Path(place) / "static" / "mathjax" for place in package.submodule_search_locations]
    return next((place for place in places if (place / BUNDLE).is_file()), None)


def write(static: Path) -> str:
    """Copy MathJax into a folder of static files; return its path there, or the CDN's address if there is no copy."""
    found = copy()
    if found is None:
        return CDN
    target = static / "mathjax"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy2(found / BUNDLE, target / BUNDLE)
    for part in PARTS:
        if (found / part).is_dir():
            shutil.copytree(found / part, target / part, dirs_exist_ok=True)
    return f"mathjax/{BUNDLE}"
