"""The course's extension of JupyterLab, written into the environment that runs this: ``python -m utils.jupyterlab``.

With it prompts take a guess (:mod:`utils.predictions`), a lab opens with its module beside it, what a text says of
other lectures is a link, long work says how far it is (:mod:`utils.progress`), figures that wait for their cell say so,
and a notebook that nobody changed counts as saved. It is one script, put together from the files beside this one;
nothing is built and nothing fetched. It lies below ``share/jupyter/labextensions`` of the environment, where JupyterLab
finds it, and changes no notebook.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from utils import predictions
from utils.claims.ledger import ROOT, notebook_paths

NAME = "making-llms-fast"
FOLDER = Path(__file__).parent


#: JupyterLab's settings where a reader has chosen nothing: no question about news before the first page.
SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}
#: The files of the extension, in this order.
FILES = ("prompts.js", "links.js", "running.js", "plugin.js")


def named_notebooks() -> dict[str, str]:
    """What the texts call other lectures and labs -> their path in the course: ``{"lab 3": "labs/lab3_...ipynb"}``."""
    found = {f"notebook {path.stem[:2]}": path for path in notebook_paths()}
    found |= {f"lab {path.stem[3]}": path for path in sorted((ROOT / "labs").glob("lab*/lab*.ipynb"))}
    return {name: path.relative_to(ROOT).as_posix() for name, path in found.items()}


def script() -> str:
    """The extension: a container in the form that JupyterLab loads."""
    style = predictions.style() + (FOLDER / "course.css").read_text(encoding="utf-8")
    named = {"NAME": NAME, "STYLE": style, "NOTEBOOKS": named_notebooks()}
    parts = [f"const {name} = {json.dumps(value)};" for name, value in named.items()]
    parts += [(FOLDER / file).read_text(encoding="utf-8") for file in FILES]
    return predictions.script() + '\n(function (root) {\n"use strict";\n' + "\n".join(parts) + "\n})(globalThis);\n"


def install(prefix: Path | str = sys.prefix) -> Path:
    """Write the extension and settings below an environment, in place of older ones; returns the extension's folder."""
    folder = Path(prefix) / "share" / "jupyter" / "labextensions" / NAME
    source = script()
    load = (
        f"static/remoteEntry.{hashlib.sha256(source.encode()).hexdigest()[:20]}.js"  # a browser keeps what has a name
    )
    about = {
        "name": NAME,
        "version": "1.0.0",
        "description": "Prompts that take a guess before the answer shows",
        "license": "MIT",
        "jupyterlab": {"extension": True, "_build": {"load": load, "extension": "./extension"}},
    }
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "static").mkdir(parents=True)
    (folder / load).write_text(source, encoding="utf-8")
    (folder / "package.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    defaults = Path(prefix) / "etc" / "jupyter" / "labconfig" / "default_setting_overrides.json"
    defaults.parent.mkdir(parents=True, exist_ok=True)
    others = json.loads(defaults.read_text(encoding="utf-8")) if defaults.exists() else {}
    defaults.write_text(json.dumps(others | SETTINGS, indent=1) + "\n", encoding="utf-8")
    return folder
