"""The notebooks as files: one setup cell stamped into all of them, their execution, and the rules that they keep.

``python -m utils.notebooks stamp|execute|check NOTEBOOK...``

- *stamp* writes the setup cell (the code cell tagged ``setup``) from one template.
- *execute* runs a notebook in its own folder and stores the outputs, with a mark in each cell's metadata of the source
  that was executed and of how many outputs it gave. nbval compares stored outputs but passes a notebook that was
  stripped of them; the mark is what tells. Run on a machine without a GPU, it keeps the outputs that only a GPU can
  give (the cells tagged ``gpu-output``), as long as their source is unchanged.
- *check* lists everything in which a notebook falls short of these rules, and of those of its prompts
  (:mod:`utils.predictions`).
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from utils import predictions
from utils.claims.expressions import claim_values

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 2_000_000
MAX_CODE_LINES = 40
#: Metadata key of the mark that :func:`execute` leaves.
MARK = "making-llms-fast"

#: Packages that the notebooks import, beside those that come with a kernel or with these.
NEEDED = "torch triton numpy matplotlib tqdm cloudpickle safetensors tokenizers fastapi uvicorn httpx"

SETUP_TEMPLATE = """\
# Setup, the same in every notebook. Inside the course it does nothing;
# a notebook that is opened on its own fetches the course first.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def run(*command):
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        told = f"{{' '.join(map(str, command))}} failed: is this runtime connected to the internet?"
        raise RuntimeError(f"{{told}}\\n{{done.stderr.strip()}}")


if not importable("utils.kernel_profile"):
    here = Path.cwd()
    folders = (here, *here.parents)
    root = next((folder for folder in folders if (folder / "utils" / "runtime.py").is_file()), None)
    if root is None:
        root = here / "making-llms-fast"
        if not (root / "utils" / "runtime.py").is_file():
            source = os.environ.get("MLF_REPOSITORY", "{url}")
            run("git", "clone", "-q", "--depth", "1", source, root)
        if not (here.name == "{name}" and (here / "__init__.py").is_file()):  # a lab's modules may lie beside it
            os.chdir(root / "{folder}")
        print(f"The course is in {{root}}. The files of this notebook are in {{Path.cwd()}}.")
    needed = "{needed}".split()
    if missing := [name for name in needed if not importable(name)]:
        run(sys.executable, "-m", "pip", "install", "-q", *missing)
    sys.modules.pop("utils", None)  # another package of that name may have been found first
    sys.path.insert(0, str(root))
"""


class NotebookError(ValueError):
    """A file is not a notebook that can be read, or lacks what the course's notebooks have."""


def repository_url() -> str:
    """The address that a notebook opened on its own fetches the course from (``pyproject.toml``, project.urls)."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]["urls"]["Repository"]


def home(path: Path) -> str:
    """The folder, relative to the course, that a notebook works in when it fetched the course itself.

    A lab's notebook is generated from ``solutions/`` and must stay the same file in both places: it works in ``labs/``.
    """
    folder = path.resolve().parent
    parts = folder.relative_to(ROOT).parts if folder.is_relative_to(ROOT) else (folder.name,)
    return "/".join(("labs", *parts[1:]) if parts[:1] == ("solutions",) else parts)


def setup_source(path: Path) -> str:
    """The setup cell of the notebook at ``path``, as it must read."""
    folder = home(path)
    named = {"url": repository_url(), "folder": folder, "name": folder.split("/")[-1], "needed": NEEDED}
    return SETUP_TEMPLATE.format(**named).rstrip("\n")


#: Digests of the texts that were found to be valid: it takes ten times as long to find out as to read one.
_VALID: set[bytes] = set()


def read(path: Path) -> NotebookNode:
    """Read a notebook (format 4).

    Raises:
        NotebookError: the file is missing, is not JSON, or is not a valid notebook.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("nbformat") != 4:
            raise NotebookError(f"{path}: not a valid notebook: its nbformat must be 4")
        notebook = nbformat.v4.reads(text)  # nbformat.reads would validate it too
        if (digest := hashlib.sha256(text.encode()).digest()) not in _VALID:
            nbformat.validate(notebook)
            if nbformat.v4.reads(text) == notebook:  # what is not quite valid is repaired each time
                _VALID.add(digest)
    except FileNotFoundError:
        raise NotebookError(f"{path}: there is no such notebook") from None
    except (UnicodeDecodeError, json.JSONDecodeError, nbformat.ValidationError) as error:
        raise NotebookError(f"{path}: not a valid notebook: {str(error).splitlines()[0][:200]}") from error
    return notebook


def write(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook so that the same content always gives the same bytes; an interrupted write loses nothing."""
    text = nbformat.writes(notebook, version=nbformat.NO_CONVERT)
    if not text.endswith("\n"):
        text += "\n"
    draft = path.with_suffix(".ipynb.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def tags(cell: NotebookNode) -> list[str]:
    """The cell's tags."""
    return list(cell.metadata.get("tags", []))


def is_folded(cell: NotebookNode) -> bool:
    """Whether the cell's code is hidden until it is asked for, in JupyterLab and on the site."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def source_mark(cell: NotebookNode) -> str:
    """A short fingerprint of a cell's source."""
    return hashlib.sha256(cell.source.encode()).hexdigest()[:16]


def stamp(path: Path) -> bool:
    """Write the setup cell from the template; return whether the file changed.

    Inside the course the cell does nothing, so that a notebook which was executed with an older one counts as executed.

    Raises:
        NotebookError: the notebook has no code cell tagged ``setup``, or more than one.
    """
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and "setup" in tags(cell)]
    if len(cells) != 1:
        raise NotebookError(f"{path}: needs exactly one code cell tagged 'setup', has {len(cells)}")
    cell = cells[0]
    changed = cell.source != setup_source(path) or not is_folded(cell)
    if changed:
        cell.source = setup_source(path)
        cell.metadata["jupyter"] = {"source_hidden": True}  # plumbing: there to run, folded away while reading
        if MARK in cell.metadata:
            cell.metadata[MARK]["source"] = source_mark(cell)
        write(notebook, path)
    return changed


def _device() -> str:
    from utils import runtime

    return runtime.gpu_name() or "cpu"


def execute(path: Path, timeout: int = 600) -> None:
    """Execute a notebook in its own folder and store its outputs and marks.

    Args:
        path: The notebook.
        timeout: Seconds that one cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised; the file is left as it was.
    """
    from nbclient import NotebookClient

    from utils import runtime

    stored = {id_: cell for cell in read(path).cells if (id_ := cell.get("id"))}
    notebook = read(path)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.resolve().parent)}}).execute()
    device = _device()
    for cell in code_cells(notebook):
        cell.outputs = _joined(cell.outputs)
        before = stored.get(cell.get("id"))
        mark = before.metadata.get(MARK, {}) if before is not None else {}
        kept = (
            not runtime.HAS_GPU
            and "gpu-output" in tags(cell)
            and mark.get("device", "cpu") != "cpu"
            and mark.get("source") == source_mark(cell)
        )
        if kept:
            cell.outputs = before.outputs
        cell.metadata[MARK] = {
            "device": mark["device"] if kept else device,
            "outputs": len(cell.outputs),
            "source": source_mark(cell),
        }
        cell.metadata.pop("execution", None)
    notebook.metadata["language_info"] = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    notebook.metadata[MARK] = {"executed": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": device}
    write(notebook, path)


def _joined(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """The outputs with neighbouring pieces of one stream as one: text that came word by word reads as a text."""
    found: list[NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else {}
        if output["output_type"] == last.get("output_type") == "stream" and output["name"] == last["name"]:
            last["text"] += output["text"]
        else:
            found.append(output)
    return found


#: Calls whose cell must have an output: a cell that makes one of them at its top level and stores nothing was stripped.
SHOWING_CALLS = frozenset({"print", "display", "show", "claim", "table", "animate"})


def _must_show(source: str) -> bool:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return False
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in SHOWING_CALLS:
                return True
    return False


def _cell_problems(cell: NotebookNode, where: str) -> Iterable[str]:
    mark = cell.metadata.get(MARK, {})
    if cell.execution_count is None or not mark:
        yield f"{where}: never executed"
    elif mark.get("source") != source_mark(cell):
        yield f"{where}: its source changed after it was executed"
    elif mark.get("outputs") != len(cell.outputs) or (_must_show(cell.source) and not cell.outputs):
        yield f"{where}: its outputs were stripped ({mark.get('outputs')} when executed, {len(cell.outputs)} stored)"
    if len(cell.source.splitlines()) > MAX_CODE_LINES and "setup" not in tags(cell):
        yield f"{where}: {len(cell.source.splitlines())} lines; a cell holds at most {MAX_CODE_LINES}"
    ignored = "nbval-ignore-output" in tags(cell)
    if "gpu-output" in tags(cell) and not ignored:
        yield f"{where}: tagged gpu-output, which a laptop cannot give, but nbval would compare it"
    if "nbval-skip" in tags(cell):
        yield f"{where}: tagged nbval-skip; every cell is run"
    for output in cell.outputs:
        if output.output_type == "error" and "raises-exception" not in tags(cell):
            yield f"{where}: stores an error, {output.ename}: {output.evalue[:80]}"
        if output.output_type == "stream" and output.name == "stderr" and not ignored:
            yield f"{where}: stores text on stderr: {output.text.strip()[:80]!r}"
        data = output.get("data", {})
        if "image/svg+xml" in data:
            yield f"{where}: stores an SVG, which nbval compares byte by byte; figures are PNG"
        if "image/png" in data and len(output.metadata.get("image/png", {}).get("alt", "")) < 20:
            yield f"{where}: a figure without alternative text"
        if any(word in str(data.get("text/html", "")) for word in ('src="http', "src='http", 'href="http')):
            yield f"{where}: an output that loads something from the network"


@cache
def _claims() -> Mapping[str, Any]:
    return claim_values()


def problems(path: Path) -> list[str]:
    """Everything in which the stored notebook falls short, a line each; an empty list is a good notebook."""
    notebook = read(path)
    found: list[str] = []
    if (size := path.stat().st_size) > MAX_BYTES:
        found.append(f"{path.name}: {size:,} bytes; at most {MAX_BYTES:,}")
    setups = [cell for cell in code_cells(notebook) if "setup" in tags(cell)]
    if len(setups) != 1 or setups[0].source != setup_source(path):
        found.append(f"{path.name}: its setup cell is not the template's (make notebooks stamps it)")
    elif code_cells(notebook)[0] is not setups[0]:
        found.append(f"{path.name}: its setup cell is not its first code cell")
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.source.strip():
            found.extend(_cell_problems(cell, f"{path.name}, cell {number}"))
    if predictions.is_marked(notebook.cells):
        wrong = predictions.problems(notebook.cells, path.stem.partition("_")[0], _claims())
        found.extend(f"{path.name}, {problem}" for problem in wrong)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: stamp, execute or check the named notebooks."""
    parser = argparse.ArgumentParser(prog="python -m utils.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["stamp", "execute", "check"])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take (default 600)")
    options = parser.parse_args(arguments)
    failed = 0
    for path in options.notebooks:
        try:
            if options.action == "stamp":
                print(f"{path}: {'stamped' if stamp(path) else 'unchanged'}")
            elif options.action == "execute":
                execute(path, options.timeout)
                print(f"{path}: executed on {_device()}, {path.stat().st_size / 1e3:,.0f} kB")
            else:
                found = problems(path)
                failed += bool(found)
                print("\n".join(found) if found else f"{path}: executed, whole, and within the rules")
        except NotebookError as error:
            failed += 1
            print(error, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
