"""Two short excerpts of the corpus, which come with the course: beginnings of chapters, for training and held out.

::

    from utils.serving.training.excerpts import excerpt

    excerpt("training"), excerpt("held_out")  # lists of texts

``python -m utils.serving.training.excerpts --corpus corpus.txt`` writes them. The models were trained on the documents
of the first, and on none of the second. The texts are in the public domain (see :mod:`utils.serving.training.corpus`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from utils.serving.training.corpus import SEPARATOR, read_corpus, split

FOLDER = Path(__file__).parent.parent / "texts"
#: Of so many training documents, one is in the excerpt. Of the documents that are held out, all are.
TRAINING_EVERY = 12
#: The most characters of a document; its beginning is cut after a word.
CHARACTERS = 1600


def excerpt(name: str) -> list[str]:
    """The texts of an excerpt, each the beginning of one chapter.

    Args:
        name: "training" or "held_out".

    Raises:
        ValueError: another name.
    """
    if name not in ("training", "held_out"):
        raise ValueError(f'name must be "training" or "held_out", got {name!r}')
    return read_corpus(FOLDER / f"{name}.txt")


def beginning(document: str, characters: int = CHARACTERS) -> str:
    """At most so many characters of a document, up to the end of a word."""
    return document if len(document) <= characters else document[:characters].rsplit(maxsplit=1)[0] + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m utils.serving.training.excerpts", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="what utils.serving.training.corpus wrote")
    parser.add_argument("--out", type=Path, default=FOLDER, help="a folder")
    args = parser.parse_args()
    training, held_out = split(read_corpus(args.corpus))
    for name, documents in (("training", training[::TRAINING_EVERY]), ("held_out", held_out)):
        text = SEPARATOR.join(map(beginning, documents))
        (args.out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(documents)} documents, {len(text):,} characters")


if __name__ == "__main__":
    main()
