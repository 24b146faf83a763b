"""Generates ``labs/`` from ``solutions/``: the same files with the solutions and the hidden tests cut out.

    python -m grading.release           write labs/, remove what has no source any more
    python -m grading.release --check   write nothing; list what differs and exit with 1 if anything does

``labs/manifest.json`` holds a digest of every generated file. A file that no longer matches its digest was edited by
hand (a student's work, or a change that belongs in ``solutions/``), and is not overwritten without ``--overwrite``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

from grading.handed_out import INIT, handed_out, init_of
from grading.strip import strip_notebook, strip_source

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "manifest.json"
ANSWERS = "answers/"  # right and wrong answers, for tests
UNSTRIPPED = (b"BEGIN SOLUTION", b"BEGIN HIDDEN TESTS")  # must not stand in a file that is copied as it is


def files_below(folder: Path) -> dict[str, Path]:
    """Every file below ``folder`` that is neither cache nor hidden, by its path relative to it, in a fixed order."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name.as_posix(): path for name, path in found.items() if not any(map(_ignored, name.parts))}


def _ignored(part: str) -> bool:
    return part == "__pycache__" or part.startswith(".")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def generate(solutions: Path) -> dict[str, bytes]:
    """What ``labs/`` must hold: the content of each file by its path relative to ``labs/``, manifest included.

    A package without a notebook, such as ``capstone_hopper``, is no lab.

    Raises:
        StripError: a source whose markers do not pair up.
        ValueError: a file outside modules and notebooks that holds a marker of either.
    """
    wanted: dict[str, bytes] = {}
    for lab in sorted(path.parent for path in solutions.glob("lab*/lab*.ipynb") if path.stem == path.parent.name):
        wanted |= {f"{lab.name}/{name}": content for name, content in generate_lab(lab).items()}
    digests = {name: _digest(content) for name, content in wanted.items()}
    wanted[MANIFEST] = (json.dumps(digests, indent=1, sort_keys=True) + "\n").encode()
    return wanted


def generate_lab(lab: Path) -> dict[str, bytes]:
    """What students get of one lab, ``solutions/labN_topic``: the content of each file by its path in that folder.

    Raises:
        StripError: a source whose markers do not pair up.
        ValueError: a file outside modules and notebooks that holds a marker of either, or a list of what is handed out
            that names a module which is not there.
    """
    released: dict[str, bytes] = {}
    modules = handed_out(lab)
    for relative, path in files_below(lab).items():
        behind = modules is not None and path.suffix == ".py" and path.parent == lab and path.name not in modules
        if behind or relative.startswith(ANSWERS):
            continue
        name, content = f"{lab.name}/{relative}", init_of(lab).encode() if relative == INIT else path.read_bytes()
        if path.suffix == ".py":
            content = strip_source(content.decode(), name).encode()
        elif path.suffix == ".ipynb":
            content = strip_notebook(content.decode(), name).encode()
        elif any(marker in content for marker in UNSTRIPPED):
            raise ValueError(
                f"{name}: solutions are cut out of .py and .ipynb files only, and so are hidden tests; got "
                f"{path.suffix or name!r}"
            )
        released[relative] = content
    return released


def differences(labs: Path, wanted: dict[str, bytes]) -> dict[str, str]:
    """What is wrong with ``labs``: ``missing``, ``differs`` or ``no source`` for each file that is not as wanted."""
    present = files_below(labs) if labs.is_dir() else {}
    verdicts = {name: "no source" for name in present if name not in wanted}
    for name, content in wanted.items():
        if name not in present:
            verdicts[name] = "missing"
        elif present[name].read_bytes() != content:
            verdicts[name] = "differs"
    return dict(sorted(verdicts.items()))


def edited_by_hand(labs: Path, changed: dict[str, str]) -> list[str]:
    """Those of the ``changed`` files that are not as they were generated last."""
    manifest = labs / MANIFEST
    digests = json.loads(manifest.read_text()) if manifest.is_file() else {}
    there = (name for name, verdict in changed.items() if verdict != "missing" and name != MANIFEST)
    return [name for name in there if digests.get(name) != _digest((labs / name).read_bytes())]


def write(labs: Path, wanted: dict[str, bytes], changed: dict[str, str]) -> None:
    """Make ``labs`` equal to ``wanted``: write what is missing or differs, remove what has no source."""
    for name, verdict in changed.items():
        path = labs / name
        if verdict == "no source":
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[name])


def main(arguments: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the command line above on the repository at ``root``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grading.release", description="Generate labs/ from solutions/.")
    parser.add_argument("--check", action="store_true", help="write nothing; list what differs and exit with 1")
    parser.add_argument("--overwrite", action="store_true", help="overwrite files in labs/ that were edited by hand")
    options = parser.parse_args(arguments)
    labs, wanted = root / "labs", generate(root / "solutions")
    changed = differences(labs, wanted)
    if options.check:
        for name, verdict in changed.items():
            print(f"labs/{name}: {verdict}")
        print("labs/ equals what solutions/ generates" if not changed else "labs/ is out of date: run `make labs`")
        return 1 if changed else 0
    edited = [] if options.overwrite else edited_by_hand(labs, changed)
    if edited:
        print("edited by hand, not overwritten (change solutions/ instead, or pass --overwrite):", file=sys.stderr)
        print("\n".join(f"  labs/{name}" for name in edited), file=sys.stderr)
        return 1
    write(labs, wanted, changed)
    print(f"labs/: {len(changed)} of {len(wanted)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
