"""Excerpts of the course's corpus, for small models that a lecture or a benchmark trains.

::

    from utils.serving.training.excerpts import excerpt, opening

    excerpt("training"), excerpt("held_out")  # lists of texts: beginnings of chapters
    opening("austen")  # the beginning of a book

The models were trained on the documents of the first list, and on none of the second. The texts are in the public
domain (see :mod:`utils.serving.training.corpus`).
"""

from __future__ import annotations

from utils.serving.training.corpus import BOOKS, read_corpus, split

#: Of so many training documents, one is in the excerpt. Of the documents that are held out, all are.
TRAINING_EVERY = 12
#: The most characters of a document; its beginning is cut after a word.
CHARACTERS = 1600
#: First lines of Jane Austen's *Pride and Prejudice* (1813), of Herman Melville's *Moby-Dick* (1851), from chapter 1,
#: and of Genesis in the King James Version of the Bible (1611).
OPENINGS = {
    "austen": "Chapter 1\nIt is a truth universally acknowledged",
    "melville": "CHAPTER 1. Loomings.",
    "bible": "In the beginning God created the heaven and the earth.",
}
#: The most characters of a book's opening; it ends with a paragraph.
OPENING_CHARACTERS = 48_000


def excerpt(name: str) -> list[str]:
    """The texts of an excerpt, each the beginning of one chapter.

    Args:
        name: "training" or "held_out".

    Raises:
        ValueError: another name.
    """
    if name not in ("training", "held_out"):
        raise ValueError(f'name must be "training" or "held_out", got {name!r}')
    training, held_out = split(read_corpus(BOOKS))
    return [beginning(text) for text in (training[::TRAINING_EVERY] if name == "training" else held_out)]


def beginning(document: str, characters: int = CHARACTERS) -> str:
    """At most so many characters of a document, up to the end of a word."""
    return document if len(document) <= characters else document[:characters].rsplit(maxsplit=1)[0] + "\n"


def opening(book: str) -> str:
    """The beginning of a book, up to the last paragraph that ends within :data:`OPENING_CHARACTERS`.

    Args:
        book: one of :data:`OPENINGS`.

    Raises:
        ValueError: another name.
    """
    if book not in OPENINGS:
        raise ValueError(f"book must be one of {', '.join(OPENINGS)}, got {book!r}")
    text = "".join(read_corpus(BOOKS))
    start = text.index(OPENINGS[book])
    return text[start : text.rindex("\n", start, start + OPENING_CHARACTERS) + 1]
