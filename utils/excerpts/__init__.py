"""Three pieces of English in the public domain, for small models: the beginnings of books of the course's corpus.

Jane Austen, *Pride and Prejudice* (1813); Herman Melville, *Moby-Dick* (1851), from chapter 1; the King James Version
of the Bible (1611), from Genesis 1. They are cut from what ``utils.serving.training.corpus`` collects, after the last
paragraph that ends within 48,000 characters. A paragraph, or a verse, is one line.
"""

from __future__ import annotations

from pathlib import Path

BOOKS = ("austen", "melville", "bible")


def read_excerpts() -> dict[str, str]:
    """The text of each of :data:`BOOKS`, in that order."""
    return {book: Path(__file__).with_name(f"{book}.txt").read_text(encoding="utf-8") for book in BOOKS}
