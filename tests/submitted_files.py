"""What tests hand in: files in folders, and archives of every kind that the grader opens."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

KINDS = [".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"]


def packed(files: Mapping[str, bytes], ending: str = ".zip") -> bytes:
    """An archive with these files."""
    made = io.BytesIO()
    if ending == ".zip":
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        mode = {".tgz": "gz", ".tbz2": "bz2", ".txz": "xz"}.get(ending, ending.removeprefix(".tar").lstrip("."))
        with tarfile.open(fileobj=made, mode=f"w:{mode}") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def written(folder: Path, files: Mapping[str, bytes | str | Callable[[Path], None]]) -> Path:
    """The folder, with these files in it; a text is where a link leads, and a function makes what is to be there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif isinstance(content, str):
            (folder / name).symlink_to(content)
        else:
            content(folder / name)
    return folder
