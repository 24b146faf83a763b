"""Public-domain English from Debian packages: Jane Austen's six novels, Moby-Dick and the King James Bible.

``python -m utils.serving.training.corpus --packages FOLDER --out corpus.txt`` reads the ``.deb`` files of a folder. All
authors died before 1900; the copyright of the texts has expired. One
chapter is one document, a paragraph one line; documents are separated by a form feed.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

#: Debian packages that hold the texts, with what they hold.
PACKAGES = {
    "r-cran-janeaustenr": "the six novels of Jane Austen (1811-1817)",
    "r-cran-tokenizers": "Herman Melville, Moby-Dick (1851)",
    "bible-kjv": "the program that reads the next",
    "bible-kjv-text": "the King James Version of the Bible (1611)",
}
SEPARATOR = "\f\n"
#: Of so many documents, one is held out of training.
HELD_OUT_EVERY = 40

_DATA = "usr/lib/R/site-library/{}/data/Rdata.rdb"
_CHARACTER, _STRINGS, _LIST = 9, 16, 2
_PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "_": "", "\t": " "})


def read_corpus(path: str | Path) -> list[str]:
    """The documents of a corpus file.

    Raises:
        ValueError: fewer than two documents, so that none could be held out.
    """
    documents = [text for text in Path(path).read_text(encoding="utf-8").split(SEPARATOR) if text.strip()]
    if len(documents) < 2:
        raise ValueError(f"{path} holds {len(documents)} document(s); at least 2 are needed, separated by a form feed")
    return documents


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Documents for training and documents held out, every :data:`HELD_OUT_EVERY`-th (of few: the last)."""
    middle = min(HELD_OUT_EVERY // 2, len(documents) - 1)
    held = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY == middle]
    return [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY != middle], held


def r_strings(path: Path) -> Iterator[list[str]]:
    """The character vectors in an R package's ``Rdata.rdb``: records of 4 bytes of length and one zlib stream each.

    The streams are R's serialisation in XDR form (R Internals, section 1.8): big-endian words, a vector of strings is
    type 16, a string type 9.
    """
    raw, at = path.read_bytes(), 0
    while at < len(raw):
        inflate = zlib.decompressobj()
        data = inflate.decompress(raw[at + 4 :]) + inflate.flush()
        at = len(raw) - len(inflate.unused_data)
        if data[:2] != b"X\n":
            raise ValueError(f"{path} holds a record that is not R's XDR serialisation")
        version = struct.unpack_from(">i", data, 2)[0]
        here = 14 if version < 3 else 18 + struct.unpack_from(">i", data, 14)[0]
        kind, count = struct.unpack_from(">ii", data, here)
        if kind & 0xFF != _STRINGS:
            continue
        here, strings = here + 8, []
        for _ in range(count):
            flags, size = struct.unpack_from(">ii", data, here)
            if flags & 0xFF != _CHARACTER:
                raise ValueError(f"{path}: a vector of strings holds type {flags & 0xFF}")
            strings.append(data[here + 8 : here + 8 + max(size, 0)].decode("utf-8", errors="replace"))
            here += 8 + max(size, 0)
        yield strings


def chapters(lines: list[str]) -> Iterator[str]:
    """The chapters of a novel in lines, unwrapped: one paragraph a line."""
    text = "\n".join(line.rstrip() for line in lines).translate(_PLAIN)
    # What the distributor of a text wrote before and after it is not the author's.
    text = re.split(r"\n.*\bEND OF (?:THE |THIS )?PROJECT GUTENBERG", text, flags=re.IGNORECASE)[0]
    text = re.split(r"\n.*START OF (?:THE |THIS )?PROJECT GUTENBERG.*\n", text, flags=re.IGNORECASE)[-1]
    for chapter in re.split(r"\n(?=\s*(?:CHAPTER|Chapter)\s+(?:\d+|[IVXLC]+)\b)", text):
        paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", chapter))
        whole = "\n".join(paragraph for paragraph in paragraphs if paragraph and "Project Gutenberg" not in paragraph)
        if len(whole) > 400:  # less is a title page or a line of the table of contents
            yield whole + "\n"


def bible(root: Path) -> Iterator[str]:
    """The chapters of the Bible, as the ``bible`` program of the package prints them, one verse a line."""
    printed = subprocess.run(
        [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-f", "gen1:1-rev22:21"],
        capture_output=True, check=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    chapter, verses = "", []
    for line in printed.stdout.splitlines():
        found = re.match(r"\s*(\S+\d+):\d+\s+(.*)", line)
        if not found:
            continue
        if found[1] != chapter and verses:
            yield "\n".join(verses) + "\n"
            verses = []
        chapter = found[1]
        verses.append(" ".join(found[2].split()))
    if verses:
        yield "\n".join(verses) + "\n"


def collect(root: Path) -> list[str]:
    """All documents of the unpacked packages under ``root``."""
    documents: list[str] = []
    for package in ("janeaustenr", "tokenizers"):
        for strings in r_strings(root / _DATA.format(package)):
            lines = strings if len(strings) > 1 else strings[0].splitlines()
            documents += chapters(lines)
    return documents + list(bible(root))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m utils.serving.training.corpus", description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="a folder with the .deb files")
    parser.add_argument("--out", type=Path, required=True, help="the corpus file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as unpacked:
        for package in PACKAGES:
            found = sorted(args.packages.glob(f"{package}_*.deb"))
            if not found:
                parser.error(f"no {package}_*.deb in {args.packages}: apt-get download {' '.join(PACKAGES)}")
            subprocess.run(["dpkg-deb", "-x", str(found[-1]), unpacked], check=True)
        documents = collect(Path(unpacked))
    args.out.write_text(SEPARATOR.join(documents), encoding="utf-8")
    print(f"{len(documents):,} documents, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    main()
