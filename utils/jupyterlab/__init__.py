"""The course's extension of JupyterLab, written into the environment that runs this: ``python -m utils.jupyterlab``.

It is one script, put together from ``plugin.js`` and what it shows; nothing is built and nothing fetched. It lies below
``share/jupyter/labextensions`` of the environment, where JupyterLab finds it, and changes no notebook.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from utils import predictions

NAME = "making-llms-fast"
FOLDER = Path(__file__).parent


def script() -> str:
    """The extension: a container in the form that JupyterLab loads."""
    names = f"const NAME = {json.dumps(NAME)};\nconst STYLE = {json.dumps(predictions.style())};\n"
    plugin = (FOLDER / "plugin.js").read_text(encoding="utf-8")
    return f"{predictions.script()}\n(function () {{\n{names}{plugin}\n}})();\n"


def install(prefix: Path | str = sys.prefix) -> Path:
    """Write the extension below an environment, in place of an older one; returns its folder."""
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
    return folder
