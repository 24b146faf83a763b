"""What a wrong number looks like in a check's message."""

from __future__ import annotations

import pytest

from utils.checks import attempt as attempting
from utils.checks.forms import Count, Rate


@pytest.mark.parametrize(
    ("got", "expected", "shown"),
    [
        (684, 684.8, ("684", "684.8")),
        (411205509, 411205509.3333333, ("411205509", "411205509.333")),
        (1e9 + 1, 1e9, ("1000000001", "1000000000")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.29999999999999999")),
        (float("nan"), 1.0, ("nan", "1")),
    ],
)
def test_two_numbers_that_differ_are_shown_with_the_digits_that_tell_them_apart(got, expected, shown):
    assert Rate().show_both(got, expected) == shown


def test_counts_are_shown_whole():
    assert Count().show_both(1234567, 1234568) == ("1,234,567", "1,234,568")


def test_an_answer_that_swallows_the_end_of_its_time_is_late_all_the_same(monkeypatch):
    class Swallow:
        def __enter__(self):
            pass

        def __exit__(self, *error):
            return True

    def slow():
        with Swallow():
            while True:
                pass
        return 3

    monkeypatch.setattr(attempting, "DEADLINE_SECONDS", 0.05)
    made = attempting.attempt(slow, {}, {})
    assert made.late and made.value == 3
    assert not attempting.attempt(lambda: 3, {}, {}).late
