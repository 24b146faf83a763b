"""The picture of collectives before and after: drawn from recorded numbers, refused when they cannot be."""

from __future__ import annotations

import pytest

from utils.plots import exchange

BROADCAST = [([1, 1], [1, 1]), ([0, 0], [1, 1])]
ALL_REDUCE = [([1, 1], [3, 3]), ([2, 2], [3, 3])]


def test_each_collective_is_a_frame_and_the_alternative_text_says_who_holds_what() -> None:
    drawn = exchange.before_and_after({"broadcast": BROADCAST, "all-reduce": ALL_REDUCE}, title="Two collectives")
    assert "broadcast: ranks hold 0 | 0; - | - before and 0 | 0; 0 | 0 after" in drawn.alt
    assert "all-reduce: ranks hold 0 | 0; 1 | 1 before and 01 | 01; 01 | 01 after" in drawn.alt
    assert "2 of 4 chunks hold something else afterwards" in drawn.html
    assert len(drawn.html) < 100_000


def test_a_number_that_no_sum_of_contributions_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="no sum of distinct contributions"):
        exchange.before_and_after({"broadcast": BROADCAST, "odd": [([1, 1], [4, 3]), ([2, 2], [3, 3])]}, title="Two")


def test_ranks_with_other_numbers_of_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks each"):
        exchange.before_and_after({"broadcast": BROADCAST, "ragged": [([1, 1], [1, 1]), ([0], [1])]}, title="Two")
