"""Tables in notebooks."""

import pytest

from utils.tables import table


def test_numbers_go_right_and_words_left(capsys):
    table(("operator", "FLOP"), [("dot", 8192), ("ReLU, in place", 7)], caption="Costs")
    assert capsys.readouterr().out.splitlines() == [
        "Costs",
        "operator         FLOP",
        "--------------  -----",
        "dot             8,192",
        "ReLU, in place      7",
    ]


def test_a_missing_cell_is_blank_and_a_verdict_is_a_word(capsys):
    table(("a", "b"), [(1.23456, True), (None, False)])
    assert capsys.readouterr().out.splitlines()[2:] == ["1.235  yes", "       no"]


def test_a_row_of_the_wrong_length_is_refused_by_its_number():
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
        table(("a", "b"), [(1, 2), (3,)])


def test_a_table_without_rows_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        table(("a",), [])
