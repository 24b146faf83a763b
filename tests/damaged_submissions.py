"""Submissions to lab 1 as people, platforms and accidents leave them: how each is made, and what the table must say."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from submitted_files import KINDS, packed

from grading.lab import find_lab
from grading.verdicts import exercises_in

LAB = find_lab("lab1")
DONE, OTHER = b"x = 1\n", b"y = 2\n"
ZIP = packed({"labs/lab1_roofline/warp.py": DONE})
STUB = (LAB.released / "waves.py").read_bytes()
NOTEBOOK = LAB.notebook.read_bytes()
BIG = b"#" * (2**22 + 1)
BOMB = {kind: packed({f"{n}.py": bytes(2**22) for n in range(9)}, kind) for kind in (".zip", ".tar.bz2")}
MANY = packed({f"{n}.txt": b"" for n in range(5001)}, ".tgz")
#: The score where waves.py is refused.
LESS = f"{100 - sum(LAB.exercise(number).points for number in {*exercises_in(LAB, 'waves.py')}):g}"
ACCENTS = "# Größe\nx = 'é'\n"

Files = dict[str, Any]
Damage = tuple[Callable[[str], Files], str, str]


def _course() -> dict[str, bytes]:
    """The course as it is handed out with its solutions, as far as lab 1 goes."""
    places = {"labs": LAB.released, "solutions": LAB.solution}
    return {f"{at}/{LAB.name}/{p.name}": p.read_bytes() for at, home in places.items() for p in home.glob("*.py")}


def _with_link() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, kind in (("warp.py", tarfile.REGTYPE), ("waves.py", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    return made.getvalue()


def _encrypted() -> bytes:
    content = bytearray(ZIP)
    content[content.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def _method(number: int) -> bytes:
    """The zip with another method of compression, as Windows takes Deflate64 (9) for large files."""
    content = bytearray(ZIP)
    for start, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        struct.pack_into("<H", content, content.index(start) + at, number)
    return bytes(content)


def _other_byte() -> bytes:
    """An uncompressed zip in which one byte of a file has changed."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("warp.py", DONE)
    return made.getvalue().replace(DONE, OTHER, 1)


def _nested(depth: int) -> bytes:
    return ZIP if depth == 1 else packed({"inner.zip": _nested(depth - 1)})


def _twice() -> bytes:
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w") as archive:
        warnings.simplefilter("ignore", UserWarning)  # of the name that is there twice
        archive.writestr("warp.py", DONE)
        archive.writestr("warp.py", OTHER)
    return made.getvalue()


def _notebook(foreign: str) -> bytes:
    notebook = json.loads(NOTEBOOK)
    cell = {"cell_type": "code", "source": "", "metadata": {"nbgrader": {"grade_id": foreign, "grade": True}}}
    return json.dumps({**notebook, "cells": [*notebook["cells"], cell]}).encode()


def _waves(content: Any, **more: Any) -> Callable[[str], Files]:
    """A submission of one module, as ``content``, and of more files (by name, with ``_`` for the dot)."""
    others = {name.replace("_", "."): given for name, given in more.items()}
    return lambda s: {f"{s}/{name}": given for name, given in {"waves.py": content, **others}.items()}


def _in_zip(*names: str, content: bytes = DONE) -> Callable[[str], Files]:
    return lambda s: {f"{s}.zip": packed(dict.fromkeys(names, content))}


def _of(*names: str, content: Any = DONE) -> Callable[[str], Files]:
    return lambda s: {f"{s}/{name}": content for name in names}


#: What is wrong -> the files that are handed in, whether there is a score (and which), and what the table must say.
ARCHIVES: dict[str, Damage] = {
    "no-zip": (lambda s: {f"{s}.zip": b"not a zip"}, "0", "cannot be read: BadZipFile"),
    "web-page-as-zip": (lambda s: {f"{s}/a.zip": b"<html>"}, "0", "a.zip cannot be read: BadZipFile"),
    "cut-zip": (lambda s: {f"{s}.zip": ZIP[:40]}, "0", "cannot be read: BadZipFile"),
    "cut-tar": (lambda s: {f"{s}.tar": packed({"warp.py": DONE * 999}, ".tar")[:2000]}, "0", "cannot be read"),
    "cut-gz": (lambda s: {f"{s}.tgz": packed({"warp.py": DONE}, ".tgz")[:50]}, "0", "cannot be read: "),
    "wrong-byte": (lambda s: {f"{s}.zip": _other_byte()}, "0", "cannot be read: BadZipFile: Bad CRC-32"),
    "deflate64": (lambda s: {f"{s}.zip": _method(9)}, "0", "That compression method is not supported"),
    "empty-archive": (lambda s: {f"{s}.tar.xz": b""}, "0", "cannot be read: ReadError: empty file"),
    "nothing-in-it": (lambda s: {f"{s}.zip": packed({})}, "0", "it is empty"),
    "encrypted": (lambda s: {f"{s}.zip": _encrypted()}, "0", "the zip is encrypted"),
    "bomb-zip": (lambda s: {f"{s}.zip": BOMB[".zip"]}, "0", "unpacks to more than 32 MiB"),
    "bomb-tar": (lambda s: {f"{s}.tar.bz2": BOMB[".tar.bz2"]}, "0", "unpacks to more than 32 MiB"),
    "too-many": (lambda s: {f"{s}.tgz": MANY}, "0", "more than 5,000 files"),
    "too-deep": (lambda s: {f"{s}.zip": _nested(4)}, "0", "was not opened: 3 archives lie around it"),
    "rar-inside": (lambda s: {f"{s}/lab1.rar": b"Rar!"}, "0", "lab1.rar was not opened: only .zip and .tar"),
    "rar": (lambda s: {f"{s}.rar": b"Rar!"}, "", "only .zip and .tar archives can be opened"),
    "climbs": (_in_zip("../../x.py", "warp.py"), "100", "../../x.py was ignored: it points out of the subm"),
    "absolute": (_in_zip("/tmp/mlf-x.py", "warp.py"), "100", "/tmp/mlf-x.py was ignored: it points out of the subm"),
    "drive-letter": (_in_zip("C:\\lab\\waves.py"), "0", "C:/lab/waves.py was ignored: it points out of the subm"),
    "backslashes": (_in_zip("labs\\lab1_roofline\\warp.py"), "100", "handed out: __init__.py, operators.py"),
    "link": (lambda s: {f"{s}.tgz": _with_link()}, "100", "waves.py was ignored: it is a link"),
    "twice-in-a-zip": (lambda s: {f"{s}.zip": _twice()}, "100", "in the archive more than once"),
    "broken-inside": (lambda s: {f"{s}/warp.py": DONE, f"{s}/new.zip": b"?"}, "100", "new.zip cannot be read"),
    "mac-zip": (_in_zip("__MACOSX/._waves.py", "__MACOSX/waves.py", "waves.py"), "100", "residual.py, warp.py"),
    "mac-zip-only": (_in_zip("__MACOSX/._waves.py"), "0", "only what is hidden or made by programs: __MACOSX"),
}  # fmt: skip
WHOSE: dict[str, Damage] = {
    "loose-file": (lambda s: {f"{s}.py": DONE}, "", "does not say whose it is"),
    "bad-id": (lambda s: {f"{s}+x/warp.py": DONE}, "", "without / \\ + * ? [ ] { }"),
    "long-id": (lambda s: {f"{s}-{'x' * 100}/warp.py": DONE}, "", "at most 100 bytes"),
    "two-that-differ": (lambda s: {f"{s}.zip": ZIP, f"{s}/warp.py": OTHER}, "", "the files differ: keep one"),
    "two-that-agree": (lambda s: {f"{s}.zip": ZIP, f"{s}/warp.py": DONE}, "100", "more than once, with the same"),
    "other-assignment": (lambda s: {f"{s}+lab2+2026-11-21 10:00:00 UTC/gelu.py": DONE}, "", "another assignment only"),
    "only-text": (lambda s: {f"{s}_5_text.html": b"sorry"}, "0", "_5_text.html"),
    "stranger": (_of("warp.py"), "100", "not in the roster"),
    "handed-in-nothing": (lambda s: {}, "", "nothing was handed in"),
    "loop": (lambda s: {s: s}, "", "a link leads nowhere"),
    "link-to-nothing": (lambda s: {f"{s}.zip": "/nowhere/lab1.zip"}, "", "a link leads nowhere"),
    "link-to-a-folder": (lambda s: {s: "/"}, "0", "the submission is a link"),
}  # fmt: skip
PLACES: dict[str, Damage] = {
    "two-versions": (lambda s: {f"{s}/a/warp.py": DONE, f"{s}/b/warp.py": OTHER}, "0", "different versions of the lab"),
    "other-lab": (_of("labs/lab2_triton_kernels/gelu.py"), "0", "it holds labs/lab2_triton_kernels/ (1 file)"),
    "two-labs": (
        _of("labs/lab2_triton_kernels/gelu.py", "labs/lab1_roofline/warp.py"), "100",
        "not graded, since no module of the lab: labs/lab2_triton_kernels/ (1 file)",
    ),
    "whole-course": (lambda s: {f"{s}/{n}": c for n, c in _course().items()}, "100", "only labs/lab1_roofline is"),
    "solutions-only": (
        lambda s: {f"{s}/{n}": c for n, c in _course().items() if n.startswith("sol")}, "0", "solutions/lab1_roofline/",
    ),
    "copied-solution": (_waves((LAB.solution / "waves.py").read_bytes()), "100", "a copy of the course's solution"),
    "other-case": (_of("Labs/Lab1_Roofline/Waves.py"), "100", "Waves.py was graded as waves.py, which is missing"),
    "loud": (_of("warp.PY"), "100", "warp.PY was graded as warp.py, which is missing"),
    "near-name": (
        lambda s: {f"{s}/waves (1).py": DONE, f"{s}/waves.py": STUB}, "100", "waves (1).py was graded as waves.py",
    ),
    "near-and-done": (lambda s: {f"{s}/waves-1.py": DONE, f"{s}/waves.py": OTHER}, "100", "waves-1.py was not graded"),
    "two-near-names": (
        lambda s: {f"{s}/waves-1.py": DONE, f"{s}/waves copy.py": OTHER}, "100", "not clear which one is meant",
    ),
    "text-ending": (_of("waves.py.txt"), "100", "waves.py.txt was graded as waves.py"),
    "accent": (_of("wärp.py"), "0", "it holds w?rp.py"),
    "deep": (_of("/".join(["d"] * 60 + ["waves.py"])), "100", "rates.py, residual.py, warp.py"),
    "file-for-a-folder": (_of("labs", content=b"?"), "0", "it holds labs"),
    "folder-for-a-file": (_of("waves.py/plot.png", "warp.py"), "100", "waves.py/ (1 file)"),
    "empty-folder": (lambda s: {s: Path.mkdir}, "0", "it is empty"),
    "a-document": (_of("lab 1.docx"), "0", "it holds lab 1.docx"),
    "compiled": (_of("waves.pyc"), "0", "it holds waves.pyc"),
    "only-checkpoints": (_of(".ipynb_checkpoints/waves-checkpoint.py"), "0", "made by programs: .ipynb_checkpoints"),
    "checkpoints-too": (
        lambda s: {f"{s}/.ipynb_checkpoints/waves-checkpoint.py": OTHER, f"{s}/waves.py": DONE}, "100",
        "residual.py, warp.py",
    ),
    "only-ds-store": (_of(".DS_Store", "labs/.DS_Store"), "0", "made by programs: .DS_Store"),
    "more-files": (lambda s: {f"{s}/warp.py": DONE, f"{s}/plots/a.png": b""}, "100", "plots/ (1 file)"),
    "loop-inside": (_waves(DONE, again=".."), "100", "again was ignored: it is a link, or cannot be read"),
    "link-to-itself": (_waves("waves.py", warp_py=DONE), "100", "waves.py was ignored: it is a link, or cannot"),
    "pipe": (_waves(os.mkfifo, warp_py=DONE), "100", "waves.py was ignored: it is not a plain file"),
}  # fmt: skip
CONTENT: dict[str, Damage] = {
    "syntax-error": (_waves(b"def f(:\n"), LESS, "waves.py was not run: line 1: not Python: invalid syntax"),
    "tabs-and-spaces": (_waves(b"if 1:\n\tx = 1\n        y = 2\n"), LESS, "line 3: not Python: inconsistent use"),
    "merge": (_waves(b"x = 1\n<<<<<<< HEAD\n"), LESS, "waves.py was not run: line 2: not Python"),
    "utf-16": (_waves("x = 1\n".encode("utf-16")), LESS, "bytes that are no UTF-8: save the file as UTF-8"),
    "utf-16-bare": (_waves("x = 1\n".encode("utf-16-le")), LESS, "a null byte: save the file as plain UTF-8 text"),
    "latin-1": (_waves(ACCENTS.encode("latin-1")), LESS, "bytes that are no UTF-8: save the file as UTF-8"),
    "latin-1-said": (_waves(b"# coding: latin-1\n"), LESS, "the encoding 'latin-1': save the file as UTF-8"),
    "junk": (_waves(bytes(range(128, 256)) * 9), LESS, "waves.py was not run: line 1: bytes that are no UTF-8"),
    "no-byte": (_waves(b""), "100", "nothing is written in waves.py: the file is empty"),
    "windows-lines": (_waves(b"x = 1\r\nif x:\r\n    y = 2\r\n"), "100", "residual.py, warp.py"),
    "old-mac-lines": (_waves(b"x = 1\rif x:\r    y = 2\r"), "100", "residual.py, warp.py"),
    "byte-order-mark": (_waves(b"\xef\xbb\xbfx = 1\n"), "100", "residual.py, warp.py"),
    "huge-module": (_waves(b"#" * 2**21), "100", "at most 1,024 KiB"),
    "huge-file": (_waves(BIG, warp_py=DONE), "100", "larger than 4 MiB"),
    "notebook-only": (_of("lab1_roofline.ipynb", content=NOTEBOOK), "100", "no module was handed in, only the"),
    "notebook-renamed": (_of("Untitled.ipynb", content=NOTEBOOK), "0", "it holds Untitled.ipynb"),
    "no-notebook": (lambda s: {f"{s}/lab1_roofline.ipynb": b"{", f"{s}/warp.py": DONE}, "100", "not a notebook"),
    "foreign-cells": (
        lambda s: {f"{s}/warp.py": DONE, f"{s}/lab1_roofline.ipynb": _notebook("check-9-9")}, "100", "'check-9-9'",
    ),
}  # fmt: skip
DAMAGE = ARCHIVES | WHOSE | PLACES | CONTENT


def healthy(number: int) -> tuple[str, Mapping[str, bytes]]:
    """An undamaged submission, in one of the forms that platforms give it: the student, and the files."""
    student = f"s{number:03}"
    done = {"labs/lab1_roofline/warp.py": DONE}
    forms = [
        *({f"{student}{kind}": packed(done, kind)} for kind in KINDS),
        {f"{student}/labs/lab1_roofline/warp.py": DONE},
        {f"{student}/lab1.zip": ZIP},
        {f"{student}_{number}_{number}1_lab1.zip": ZIP},
        {f"{student}_LATE_{number}_{number}1_warp-1.py": DONE},
        {f"{student}_{number}_assignsubmission_file_/lab1.tar.gz": packed(done, ".tar.gz")},
        {f"lab1-{student}/labs/lab1_roofline/warp.py": DONE},
        {f"{student}+lab1_roofline+2026-11-21 10:00:00.5 UTC/warp.py": DONE},
        {f"{student}/lab1_roofline/warp.py": DONE, f"{student}/lab1_roofline/timestamp.txt": b"now"},
        {f"submission_{number}/warp.py": DONE},
    ]
    return student, forms[number % len(forms)]


def gradescope(numbers: range) -> bytes:
    """What Gradescope's export says of the submissions of these numbers."""
    lines = [f"submission_{n}:\n  :submitters:\n  - :name: S {n}\n    :sid: s{n:03}\n" for n in numbers]
    return "".join(["---\n", *lines]).encode()
