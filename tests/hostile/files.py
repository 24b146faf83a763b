"""Tricks with files: ones that Python would import by itself, links, archives, and modules that cannot be read."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from pathlib import Path

from grading.lab import Lab
from hostile import ALL, add, hostile, target

NOT_WRITTEN = ("not attempted",)
FAKE = "def __getattr__(name):\n    return lambda *_, **__: print('passed')\n"


def _beside(name: str, text: str) -> None:
    """A file that the lab does not have, at the top of the submission."""

    def build(folder: Path, lab: Lab) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    tries = f"hands in a {name} of its own, to be imported instead of the real one"
    hostile(f"own-{name.split('.')[0].replace('/', '-')}", tries, *NOT_WRITTEN, reason=r"written|not run")(build)


_beside("sitecustomize.py", "import builtins\nbuiltins.abs = lambda x: 0\n")
_beside("usercustomize.py", "raise SystemExit(0)\n")
_beside("conftest.py", "raise SystemExit(0)\n")
_beside("utils.py", FAKE)
_beside("utils/checks.py", FAKE)
_beside("torch.py", FAKE)
_beside("nbgrader_config.py", "c = get_config()\nc.Autograde.exclude_overwriting = {}\n")


@hostile("own-folder-utils", "hands in a utils beside its lab", "not attempted", reason=r"written|ignored")
def _utils(folder: Path, lab: Lab) -> None:
    inside = folder / "labs" / lab.name
    inside.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(inside / path.name)
    (folder / "utils" / "checks").mkdir(parents=True)
    (folder / "utils" / "__init__.py").write_text("")
    (folder / "utils" / "checks" / "__init__.py").write_text(FAKE)


@hostile(
    "helper-module",
    "puts the trick into a module that it adds: it is not run, and what imports it fails",
    "failed",
    reason=r"cannot be imported.*helper\.py was not run.*import os",
)
def _helper(folder: Path, lab: Lab) -> None:
    (folder / "helper.py").write_text("import os\n\n\ndef trick():\n    os._exit(0)\n")
    add(folder, lab, "from .helper import trick\n\ntrick()")


@hostile("pickled", "hands in a pickle that runs code when it is read", *NOT_WRITTEN, reason=r"written")
def _pickled(folder: Path, lab: Lab) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("touch /tmp/mlf-hostile-was-here",)

    (folder / "weights.pkl").write_bytes(pickle.dumps(Payload()))
    (folder / "model.pt").write_bytes(pickle.dumps(Payload()))


@hostile("link-to-a-file", "hands in a link in the place of a module", *NOT_WRITTEN, reason=r"link")
def _link(folder: Path, lab: Lab) -> None:
    target(folder, lab).unlink()
    target(folder, lab).symlink_to(lab.solution / target(folder, lab).name)


@hostile("link-to-a-folder", "hands in a link to the root of the file system", *NOT_WRITTEN, reason=r"link|written")
def _folder_link(folder: Path, lab: Lab) -> None:
    (folder / "data").symlink_to("/")


@hostile("link-to-itself", "hands in a link that leads back to itself", *NOT_WRITTEN, reason=r"link|written")
def _loop(folder: Path, lab: Lab) -> None:
    (folder / "again").symlink_to(folder)


@hostile("named-pipe", "hands in a pipe in the place of a module: whoever reads it waits", *NOT_WRITTEN, reason=r".")
def _pipe(folder: Path, lab: Lab) -> None:
    target(folder, lab).unlink()
    os.mkfifo(target(folder, lab))


def _zipped(folder: Path) -> zipfile.ZipFile:
    """The submission as an archive of the same name, open for more."""
    archive = zipfile.ZipFile(folder.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED)
    for path in sorted(folder.iterdir()):
        archive.write(path, path.name)
    shutil.rmtree(folder)
    return archive


@hostile("zip-that-climbs", "hands in an archive whose paths lead out of it", *NOT_WRITTEN, reason=r".")
def _climbs(folder: Path, lab: Lab) -> None:
    with _zipped(folder) as archive:
        archive.writestr("../../../../tmp/mlf-hostile-was-here", "x")
        archive.writestr("/tmp/mlf-hostile-was-here", "x")


@hostile("zip-bomb", "hands in an archive that is a thousand times larger inside", *NOT_WRITTEN, reason=r".")
def _bomb(folder: Path, lab: Lab) -> None:
    with _zipped(folder) as archive:
        for number in range(20):
            archive.writestr(f"big{number}.py", b"\0" * 2**24)


@hostile("zip-broken", "hands in an archive that is none", reason=r".", loses=ALL)
def _no_zip(folder: Path, lab: Lab) -> None:
    shutil.rmtree(folder)
    folder.with_suffix(".zip").write_bytes(b"PK\x03\x04 and no more")


@hostile("nothing", "hands in an empty folder", reason=r"no file", loses=ALL)
def _empty(folder: Path, lab: Lab) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _module(name: str, tries: str, reason: str, content: bytes, outcome: str = "refused") -> None:
    """The target in bytes that are no module."""
    hostile(name, tries, outcome, reason=reason)(lambda folder, lab: _put(target(folder, lab), content))


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


_module("null-bytes", "hands in a module with null bytes", r"null byte", b"x = 1\0\nimport os\n")
_module("no-python", "hands in a module that is no Python", r"not Python", b"def num_tiles(:\n")
_module("no-text", "hands in a module that is no text", r"UTF-8", bytes(range(128, 256)))
_module("nested-brackets", "hands in a module that no parser can read", r"not Python|nested", b"(" * 90_000)
_module(
    "nested-signs", "hands in a module that overflows a walk over its tree", r"nested|not Python", b"-" * 90_000 + b"1"
)
_module(
    "hidden-encoding",
    "hides its code in another encoding",
    r"utf-7",
    b"# -*- coding: utf-7 -*-\n+AGkAbQBwAG8AcgB0ACAAbwBz-\n",
)
_module("module-huge", "hands in a module of 900 kB", r"characters", b"x = 1\n" * 150_000)
