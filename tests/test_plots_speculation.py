"""Figures of speculative decoding: they say what was drafted, accepted and added, and refuse what cannot be."""

from utils import plots
from utils.plots.speculation import DraftedRound, drafted_text, overlap_bars, visible

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
