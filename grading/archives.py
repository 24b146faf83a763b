"""What lies in a submission: the files of its folders and archives, one inside another, read within limits.

Nothing is extracted and nothing is followed: files are read into memory, and everything that is left out becomes a
note for the student. :func:`zipped` writes what a student hands in, and the students' copy of the course.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

#: Bytes of one file, of all files that are read, and of all that is decompressed to find them.
MAX_FILE, MAX_TOTAL, MAX_UNPACKED = 4 * 2**20, 32 * 2**20, 128 * 2**20
MAX_MEMBERS = 5000
MAX_DEPTH = 3  # archives around a file
SKIPPED = ("__pycache__", "__MACOSX", "timestamp.txt")  # nbgrader writes the last one

ZIP, TAR = (".zip",), (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz")
OTHER_ARCHIVES = (".7z", ".rar", ".gz", ".bz2", ".xz", ".zst", ".lzma")
#: Files whose content a grade can depend on; of the others only the name is read.
READ = (".py", ".py.txt", ".ipynb")
#: How a compressed file begins, and what reads it.
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


class UnreadableSubmission(ValueError):
    """There is nothing in it that can be graded; the text is for the student."""


def archive_stem(name: str) -> str | None:
    """``ada`` for ``ada.tar.gz``: the name of an archive without its ending, or None for what is not one."""
    endings = [ending for ending in ZIP + TAR if name.lower().endswith(ending)]
    return name[: -max(map(len, endings))] if endings else None


def is_other_archive(name: str) -> bool:
    """Whether a name is that of an archive which cannot be opened here."""
    return archive_stem(name) is None and name.lower().endswith(OTHER_ARCHIVES)


def is_skipped(name: str) -> bool:
    """Whether a file or folder is left out without a note: it is hidden, or made by a program."""
    return name in SKIPPED or name.startswith(".")


def shown(name: str) -> str:
    """A name as a note shows it: one short line of ASCII that can be printed."""
    return "".join(sign if sign.isascii() and sign.isprintable() else "?" for sign in name[:120])


@dataclass(frozen=True)
class _Member:
    """A file in an archive, with the size that the archive claims; ``open`` gives what reads it."""

    name: str
    size: int
    plain: bool
    open: Callable[[], BinaryIO]


class Reader:
    """Reads one submission.

    Attributes:
        files: content by path; a file in an archive lies below the archive's name. None where it was not read.
        notes: what was left out, and why.
        skipped: the names of what was left out without a note, each once.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | None] = {}
        self.notes: list[str] = []
        self.skipped: dict[str, None] = {}  # ordered
        self._members = self._read = self._unpacked = 0

    def add(self, path: Path, name: str = "") -> None:
        """Read a folder, an archive or a file.

        Args:
            path: what to read.
            name: what it is called in the submission; empty when it is the whole submission.

        Raises:
            UnreadableSubmission: it exceeds a limit, or the whole submission cannot be read.
        """
        if path.is_symlink():
            raise UnreadableSubmission("the submission is a link, not a folder or an archive")
        if path.is_dir():
            self._folder(path, name)
        elif not self._on_disk(path, name, archived=archive_stem(path.name) is not None) and not name:
            raise UnreadableSubmission("the submission is neither a folder nor an archive that can be read")

    def _folder(self, folder: Path, base: str) -> None:
        def unlisted(error: OSError) -> None:
            self.notes.append(f"{shown(Path(error.filename).name)}/ was ignored: it cannot be read")

        for place, folders, names in os.walk(folder, followlinks=False, onerror=unlisted):
            self.skipped |= dict.fromkeys(sorted(filter(is_skipped, [*folders, *names])))
            links = [name for name in folders if os.path.islink(os.path.join(place, name))]
            folders[:] = sorted(name for name in folders if not is_skipped(name) and name not in links)
            for name in sorted([*names, *links]):
                if not is_skipped(name):
                    path = Path(place, name)
                    inside = _below(base, path.relative_to(folder).as_posix())
                    self._count()
                    self._on_disk(path, inside, archived=archive_stem(name) is not None)

    def _on_disk(self, path: Path, name: str, archived: bool) -> bool:
        """Read a file of the disk; False when it is none that can be read, which is noted."""
        try:  # opened without following a link, and asked afterwards what it is
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            self.notes.append(f"{shown(name)} was ignored: it is a link, or cannot be read")
            return False
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self.notes.append(f"{shown(name)} was ignored: it is not a plain file")
                return False
            if archived:
                self._archive(name, file, path.name, 1)
            else:
                self._file(name, status.st_size, lambda: file)
        return True

    def _archive(self, name: str, file: BinaryIO, called: str, depth: int) -> None:
        """Read an archive; what it is decides its beginning, and only then what it is ``called``."""
        try:
            head = file.read(8)
            file.seek(0)
            opener = next((opener for start, opener in COMPRESSED.items() if head.startswith(start)), None)
            is_zip = opener is None and (head.startswith(b"PK") or called.lower().endswith(ZIP))
            for member in _zip_members(file) if is_zip else self._tar_members(opener(file) if opener else file):
                self._member(name, member, depth)
        except UnreadableSubmission:
            raise
        except Exception as error:  # a crafted archive raises what it likes
            why = f"cannot be read: {type(error).__name__}: {error}"
            if not name:
                raise UnreadableSubmission(f"the submission {why}") from error
            self.notes.append(f"{shown(name)} {why}")

    def _tar_members(self, file: BinaryIO) -> Iterator[_Member]:
        with tarfile.open(fileobj=_Limited(file, self._unpack), mode="r|") as archive:
            for info in archive:
                if not info.isdir():
                    plain = info.isreg() and not info.issparse()
                    yield _Member(info.name, info.size, plain, lambda info=info: archive.extractfile(info))

    def _member(self, base: str, member: _Member, depth: int) -> None:
        name = member.name.replace("\\", "/")
        parts = PurePosixPath(name).parts
        skipped = [part for part in parts if part != ".." and is_skipped(part)]
        if name.endswith("/") or skipped:
            self.skipped |= dict.fromkeys(skipped[:1])
            return
        self._count()
        inside = _below(base, PurePosixPath(*parts).as_posix())
        if name.startswith("/") or ".." in parts or not parts or ":" in parts[0] or "\0" in name:
            self.notes.append(f"{shown(name)} was ignored: it points out of the submission")
        elif not member.plain:
            self.notes.append(f"{shown(inside)} was ignored: it is a link, or not a plain file")
        elif inside in self.files:
            self.notes.append(f"{shown(inside)} is in the archive more than once; the first was taken")
        elif archive_stem(inside) is None:
            self._file(inside, member.size, member.open)
        elif depth == MAX_DEPTH:
            self.notes.append(f"{shown(inside)} was not opened: {MAX_DEPTH} archives lie around it")
        else:
            content = self._content(inside, member.size, member.open, MAX_TOTAL)
            if content is not None:
                self._archive(inside, io.BytesIO(content), inside, depth + 1)

    def _file(self, name: str, size: int, opened: Callable[[], BinaryIO]) -> None:
        if is_other_archive(name):
            self.notes.append(f"{shown(name)} was not opened: only .zip and .tar archives are (.tar.gz, .bz2, .xz too)")
        elif not name.lower().endswith(READ):
            self.files[name] = None
        elif (content := self._content(name, size, opened, MAX_FILE)) is not None:
            self.files[name] = content

    def _content(self, name: str, size: int, opened: Callable[[], BinaryIO], most: int) -> bytes | None:
        content = opened().read(most + 1) if size <= most else None  # whatever size an archive claims
        if content is None or len(content) > most:
            self.notes.append(f"{shown(name)} was ignored: it is larger than {most // 2**20} MiB")
            return None
        self._read += len(content)
        if self._read > MAX_TOTAL:
            raise UnreadableSubmission(f"the submission holds or unpacks to more than {MAX_TOTAL // 2**20} MiB")
        return content

    def _count(self) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise UnreadableSubmission(f"the submission holds more than {MAX_MEMBERS:,} files")

    def _unpack(self, size: int) -> int:
        """Note that ``size`` more bytes were decompressed; how many may follow."""
        self._unpacked += size
        if self._unpacked > MAX_UNPACKED:
            raise UnreadableSubmission(f"the submission unpacks to more than {MAX_UNPACKED // 2**20} MiB")
        return MAX_UNPACKED - self._unpacked


class _Limited:
    """A file that can only be read from its beginning to its end, and not beyond a limit."""

    def __init__(self, file: BinaryIO, unpack: Callable[[int], int]) -> None:
        self._file, self._unpack = file, unpack

    def read(self, size: int) -> bytes:
        content = self._file.read(min(size, self._unpack(0) + 1))
        self._unpack(len(content))
        return content


def _zip_members(file: BinaryIO) -> Iterator[_Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.flag_bits & 1:
                raise ValueError("the zip is encrypted")
            plain = info.is_dir() or stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            yield _Member(info.filename, info.file_size, plain, lambda info=info: archive.open(info))


def _below(base: str, name: str) -> str:
    return f"{base}/{name}" if base else name


def zipped(files: Mapping[str, bytes], executable: Container[str] = ()) -> bytes:
    """These files as a zip; the same files give the same bytes, whenever and wherever they were written.

    Args:
        files: content by path in the zip.
        executable: the paths of those that may be run.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # of 1980, as all of them
            entry.external_attr = (0o100755 if name in executable else 0o100644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()
