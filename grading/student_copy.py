"""The students' copy of the course: what a student needs, and nothing of what decides on a grade.

    python -m grading.student_copy build/release

writes ``build/release/making-llms-fast/`` and ``making-llms-fast.zip`` beside it. The same source gives the same bytes.

Lectures run the finished code of some labs: a serving engine, say. Those modules are in the copy, in
``solutions/packed.bin``: a zip that Python imports from, and in which no search and no editor finds them. This keeps
nobody out who wants in. (Compiled modules would keep out few more, would bind the copy to one version of Python, and
Triton compiles a kernel from its source.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from grading.archives import zipped
from grading.lab import HANDED_OUT, ROOT
from grading.release import MANIFEST, files_below, generate
from utils.course_modules import Course, parse

NAME = "making-llms-fast"
#: What is handed out as it is: files, by patterns, and whole folders.
PLAIN = (
    "Makefile", "requirements.txt", "constraints.txt", "pyproject.toml", "LICENSE", ".gitignore", ".binder/*",
    ".devcontainer/*", "notebooks/[0-9][0-9]_*.ipynb", "notebooks/CLAIMS.md", "grading/feedback.css",
)  # fmt: skip
FOLDERS = ("utils", "benchmarks/cuda", "solutions/capstone_hopper")
#: What is handed out without the parts that are for instructors.
DOCUMENTS = ("README.md", "AGENTS.md", "CHANGELOG.md", "notebooks/README.md")
FOR_INSTRUCTORS = re.compile(r"^<!-- for instructors -->\n(.*?)^<!-- end -->\n\n?", re.DOTALL | re.MULTILINE)
#: What a student runs of the grader.
COMMANDS = ("grading.check_lab", "grading.submit")
RUN_AS_MODULE = re.compile(r"python -m ((?:benchmarks|solutions)[\w.]*)")
#: Where it is written what the lectures import.
SOURCES = ("notebooks/", "solutions/capstone_hopper/")
PACKED = "solutions/packed.bin"
PACKAGE = '''"""The labs' finished code, for the lectures that run it."""

__path__.append(f"{__path__[0]}/packed.bin")
'''


def student_copy(root: Path = ROOT) -> dict[str, bytes]:
    """The content of each file of the students' copy, by its path in it.

    Raises:
        ValueError: a document in which a part for instructors has no end.
        StripError: a lab whose solutions cannot be cut out.
    """
    course = Course(root)
    made = {path.relative_to(root).as_posix(): path for pattern in PLAIN for path in root.glob(pattern)}
    made |= {f"{folder}/{name}": path for folder in FOLDERS for name, path in files_below(root / folder).items()}
    files = {name: path.read_bytes() for name, path in made.items()}
    files |= {name: _for_students((root / name).read_text(encoding="utf-8"), name).encode() for name in DOCUMENTS}
    labs = {name: content for name, content in generate(root / "solutions").items() if name != MANIFEST}
    for home in (PurePosixPath("labs"), PurePosixPath(HANDED_OUT.as_posix())):
        files |= {f"{home}/{name}": content for name, content in labs.items()}
    named = (_named_in(name, content.decode()) for name, content in files.items() if name.startswith(SOURCES))
    needed = _imported(course, [*COMMANDS, *itertools.chain.from_iterable(named)])
    homes = {PurePosixPath(name).parts[1] for name in needed if name.startswith("solutions/lab")}
    # all modules of a lab that is run: some are imported by a name that is made from text
    modules = [path for home in homes for path in (root / "solutions" / home).glob("*.py")]
    files |= {name: (root / name).read_bytes() for name in needed if name.startswith(("benchmarks/", "grading/"))}
    files["solutions/__init__.py"] = PACKAGE.encode()
    files[PACKED] = zipped({f"{path.parent.name}/{path.name}": path.read_bytes() for path in modules})
    return dict(sorted(files.items()))


def _for_students(text: str, name: str) -> str:
    """A document without its parts for instructors."""
    kept = FOR_INSTRUCTORS.sub("", text)
    if "<!-- for instructors -->" in kept or "<!-- end -->" in kept:
        raise ValueError(f"{name}: a part for instructors stands between '<!-- for instructors -->' and '<!-- end -->'")
    return kept


def _named_in(name: str, text: str) -> Iterator[str]:
    """The modules that a notebook or a module imports, and those of the course that its text has a reader run."""
    for module in RUN_AS_MODULE.findall(text):
        yield from (module, f"{module}.__main__")
    if name.endswith(".py"):
        yield from _modules(text, name)
    for cell in json.loads(text)["cells"] if name.endswith(".ipynb") else ():
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).split("\n")
            yield from _modules("\n".join(line for line in lines if not line.startswith("%")), name)


def _modules(source: str, path: str) -> Iterator[str]:
    for module, attribute in parse(source, path).imports.values():
        yield f"{module}.{attribute}" if attribute else module


def _imported(course: Course, names: Iterable[str]) -> set[str]:
    """The files of these modules of the course, and of all that they import, with the packages around them."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):
            path = course.path_of(".".join(parts[:end]))
            if path and path not in found and (course.root / path).is_file():
                found.add(path)
                waiting += _modules((course.root / path).read_text(encoding="utf-8"), path)
    return found


def main(arguments: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the command line above on the course in ``root``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grading.student_copy", description="The students' copy.")
    parser.add_argument("out", type=Path, help="where folder and zip are written")
    out = parser.parse_args(arguments).out
    folder, archive = out / NAME, out / f"{NAME}.zip"
    if folder.exists() and not _is_as_written(folder, archive):
        parser.error(f"{folder} was worked in since it was written; move it away, or name another place: OUT=elsewhere")
    files = student_copy(root)
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    archive.write_bytes(zipped({f"{NAME}/{name}": content for name, content in files.items()}))
    print(f"{folder}: {len(files)} files\n{archive}: {archive.stat().st_size / 2**20:.1f} MiB")
    return 0


def _is_as_written(folder: Path, archive: Path) -> bool:
    """Whether a folder holds what is in the archive that was written with it, and nothing else."""
    if not archive.is_file():
        return False
    present = {f"{NAME}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*") if path.is_file()}
    with zipfile.ZipFile(archive) as written:
        same = present.keys() == set(written.namelist())
        return same and all(path.read_bytes() == written.read(name) for name, path in present.items())


if __name__ == "__main__":
    sys.exit(main())
