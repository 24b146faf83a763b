"""Figures of a serving engine and of speculative decoding: drawn from what happened, told in words."""

from types import SimpleNamespace

import pytest

from tests.drawn import boxes, picture_of
from utils import plots
from utils.plots.animate import LARGEST
from utils.plots.serving import LAST_COLOUR, PROMPT_COLOUR, TOKEN_COLOUR
from utils.plots.speculation import DraftedRound, drafted_text, overlap_bars, visible


def step(chunks, finished=()):
    return SimpleNamespace(chunks=[(id, 0, n) for id, n in chunks.items()], finished=tuple(finished))


#: Two slots: A runs 3 steps, B 1, C takes B's place, and at the end one slot idles.
HISTORY = [step({"A": 5, "B": 1}, ["B"]), step({"A": 1, "C": 2}), step({"A": 1, "C": 1}, ["A"]), step({"C": 1}, ["C"])]


def cells(ax, colour):
    return sorted((round(x), round(y)) for x, y, _ in boxes(ax, colour))


def test_a_request_keeps_its_slot_and_the_next_takes_the_lowest_free_one():
    grid = plots.slots_of(HISTORY, 2)
    assert [[cell and cell.request for cell in row] for row in grid.rows] == [
        ["A", "A", "A", None],
        ["B", "C", "C", "C"],
    ]
    assert (grid.busy, grid.utilisation, grid.until(3).utilisation) == (7, 7 / 8, 1.0)
    assert [cell.last for cell in grid.rows[1]] == [True, False, False, True]


def test_a_slot_timeline_draws_what_each_slot_did_and_says_how_much_idled():
    fig = plots.slot_timeline({"static": plots.slots_of(HISTORY, 2), "wide": plots.slots_of(HISTORY, 3)}, title="Two")
    ax = fig.axes[0]
    assert cells(ax, PROMPT_COLOUR) == [(0, 0), (1, 1)]  # A's first step, C's first step
    assert cells(ax, LAST_COLOUR) == [(0, 1), (2, 0), (3, 1)] and cells(ax, TOKEN_COLOUR) == [(1, 0), (2, 1)]
    assert "static, 7 of 8 slots used, 87.5%" in fig.alt and "wide, 7 of 12 slots used" in fig.alt
    picture_of(fig)


@pytest.mark.slow
def test_a_long_timeline_names_each_request_once():
    history = [step({"A": 1}) for _ in range(40)]
    fig = plots.slot_timeline({"long": plots.slots_of(history, 1)}, title="Long")
    assert [t.get_text() for t in fig.axes[0].texts] == ["A"]


@pytest.mark.slow
def test_the_pool_is_told_step_by_step():
    animation = plots.pool_animation(HISTORY, {"A": 0, "B": 0, "C": 0}, {"A": 3, "B": 1, "C": 3}, 2, title="A pool")
    assert "Iteration 1 computes A, B; new in the pool: A, B, C; A, B join; done: B; C must wait." in animation.alt
    assert (
        "Iteration 2 computes A, C; C joins." in animation.alt and "Iteration 4 computes C; done: C." in animation.alt
    )
    assert len(animation.html) < LARGEST / 4


def test_a_ragged_batch_counts_its_rows():
    fig = plots.ragged_batch({"x": 1, "y": 4, "z": 2}, title="Ragged")
    assert "x 1, y 4, z 2. Padded 12 rows, laid end to end 7" in fig.alt
    assert len(fig.axes[0].patches) == 12 and len(fig.axes[1].patches) == 7
    picture_of(fig)


def test_reservations_are_stacked_below_the_limit():
    steps = [{"A": (2, 6), "B": (1, 6)}, {"A": (3, 6), "B": (2, 6)}, {"B": (3, 6)}]
    fig = plots.reservation_plot({"reserved": steps}, 12, title="Set aside")
    assert "reserved: 3 iterations, at the end 3 of 12 slots hold tokens" in fig.alt
    tops = [patch.get_y() + patch.get_height() for patch in fig.axes[0].patches]
    assert max(tops) == 12
    picture_of(fig)


# ---- speculative decoding ----

ROUNDS = [
    DraftedRound((" the", " whale", "\n"), 2, " swam"),
    DraftedRound((" away", "."), 2, "\n"),
    DraftedRound((" End", " of"), 1, None),
    DraftedRound((), 0, "!"),
]


def test_the_picture_of_rounds_reads_as_the_text_that_came_of_them():
    figure = drafted_text(ROUNDS, title="Four rounds")
    assert "5 of 7 drafted tokens accepted, 8 tokens of text" in figure.alt
    assert figure.alt.endswith(" the whale[ swam] away.[\n] End[!]")
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text().startswith("+")] == [
        "+3", "+3", "+1", "+1",
    ]  # fmt: skip
    assert len(plots.png(figure)) > 1000


def test_blanks_and_line_ends_of_tokens_are_visible():
    assert [visible(token) for token in (" a", "\n", "")] == ["·a", "↵", "∅"]


def test_the_picture_of_two_distributions_names_them():
    figure = overlap_bars([0.5, 0.25], [0.25, 0.5], [" a", "b"], title="Two models")
    assert "·a p 0.5 q 0.25, b p 0.25 q 0.5" in figure.alt
    heights = sorted(round(patch.get_height(), 3) for patch in figure.axes[0].patches)
    assert heights == [0.25, 0.25, 0.25, 0.25] and len(plots.png(figure)) > 1000
