"""The corpus that the course's models were trained on comes with the course: books in the public domain, compressed.

::

    from utils.serving.training.books import opening, read_books

    read_books()  # what utils.serving.training.corpus collects, a text for each chapter
    opening("austen")  # the beginning of a book
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

from utils.serving.training.corpus import SEPARATOR

#: The corpus as :mod:`utils.serving.training.corpus` collects it from its packages.
BOOKS = Path(__file__).with_name("books.txt.xz")
#: First lines of Jane Austen's *Pride and Prejudice* (1813), of Herman Melville's *Moby-Dick* (1851), from chapter 1,
#: and of Genesis in the King James Version of the Bible (1611).
OPENINGS = {
    "austen": "Chapter 1\nIt is a truth universally acknowledged",
    "melville": "CHAPTER 1. Loomings.",
    "bible": "In the beginning God created the heaven and the earth.",
}
#: The most characters of a book's opening; it ends with a paragraph.
CHARACTERS = 48_000


@cache
def _text() -> str:
    """The corpus, decompressed once."""
    return lzma.decompress(BOOKS.read_bytes()).decode("utf-8")


def read_books() -> list[str]:
    """The documents of the corpus, a text for each chapter."""
    return _text().split(SEPARATOR)


def opening(book: str) -> str:
    """The beginning of a book, up to the last paragraph that ends within :data:`CHARACTERS`.

    Args:
        book: one of :data:`OPENINGS`.

    Raises:
        ValueError: another name.
    """
    if book not in OPENINGS:
        raise ValueError(f"book must be one of {', '.join(OPENINGS)}, got {book!r}")
    text = _text().replace(SEPARATOR, "")
    start = text.index(OPENINGS[book])
    return text[start : text.rindex("\n", start, start + CHARACTERS) + 1]
