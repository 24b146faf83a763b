"""The texts that small models are trained on."""

from utils.excerpts import BOOKS, read_excerpts


def test_three_books_begin_where_they_should_and_end_with_a_paragraph():
    books = read_excerpts()
    assert tuple(books) == BOOKS
    beginnings = {"austen": "It is a truth universally acknowledged", "melville": "Call me Ishmael.", "bible": "In the"}
    for book, text in books.items():
        assert text.find(beginnings[book]) in range(0, 30), book
        assert 47_000 < len(text) <= 48_000 and text.endswith("\n"), book


def test_the_texts_have_few_characters_that_a_model_of_characters_must_know():
    letters = set("".join(read_excerpts().values()))
    assert len(letters) < 80 and all(letter.isascii() for letter in letters)
