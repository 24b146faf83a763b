"""The texts that small models are trained on."""

import pytest

from utils.serving.training.books import OPENINGS, opening, read_books
from utils.serving.training.corpus import split
from utils.serving.training.excerpts import TRAINING_EVERY, beginning, excerpt


@pytest.fixture(scope="module")
def openings() -> dict[str, str]:
    return {book: opening(book) for book in OPENINGS}


def test_three_books_begin_where_they_should_and_end_with_a_paragraph(openings):
    beginnings = {"austen": "It is a truth universally acknowledged", "melville": "Call me Ishmael.", "bible": "In the"}
    for book, text in openings.items():
        assert text.find(beginnings[book]) in range(0, 30), book
        assert 47_000 < len(text) <= 48_000 and text.endswith("\n"), book
    with pytest.raises(ValueError, match="book must be one of austen, melville, bible, got 'joyce'"):
        opening("joyce")


def test_the_openings_have_few_characters_that_a_model_of_characters_must_know(openings):
    letters = set("".join(openings.values()))
    assert len(letters) < 80 and all(letter.isascii() for letter in letters)


def test_an_excerpt_is_the_beginnings_of_chapters():
    for name, count in (("training", 130), ("held_out", 40)):
        assert len(excerpt(name)) == count and max(map(len, excerpt(name))) <= 1601
    assert beginning("one two three four", 9) == "one two\n"
    with pytest.raises(ValueError, match="got 'test'"):
        excerpt("test")


def test_the_excerpts_are_cut_out_of_the_corpus_that_comes_with_the_course():
    training, held_out = split(read_books())
    assert excerpt("training") == [beginning(text) for text in training[::TRAINING_EVERY]]
    assert excerpt("held_out") == [beginning(text) for text in held_out]
