"""Figures of decoding and of a paged cache: drawn from what really happened, and refused where it cannot have."""

from __future__ import annotations

import json
import re

import pytest

from utils.plots.cache import DecodeStep, decode_animation, request_timeline

ALT = "A grid of scores that grows by a row in each step."
WORDS = ["In", "the", "beginning", "was", "the", "whale"]


def captions(animation):
    """What stands below each frame."""
    return json.loads(re.search(r'\((\{"kind".*\}),"[0-9a-f]{12}"\);</script>', animation.html, re.S).group(1))[
        "captions"
    ]


# ---- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_decoding_says_what_each_step_computes_and_what_it_reads():
    runs = {
        "without": [DecodeStep(3, 3), DecodeStep(4, 4), DecodeStep(5, 5)],
        "with": [DecodeStep(3, 3), DecodeStep(1, 4), DecodeStep(1, 5)],
    }
    said = captions(decode_animation(WORDS, runs, title="Two ways to go on", alt=ALT))
    assert said[0] == "Step 1 gives “was”. without: 3 rows computed; with: 3 rows computed"
    assert said[2] == "Step 3 gives “whale”. without: 5 rows computed; with: 1 row computed, 4 keys and values read"


@pytest.mark.parametrize(
    ("words", "steps", "problem"),
    [
        (WORDS, [DecodeStep(3, 3), DecodeStep(1, 5)], "3 keys is followed by one of 5"),
        (WORDS[:3], [DecodeStep(2, 2), DecodeStep(1, 3)], "name the 3 positions and the one after"),
        (["a"] * 30, [DecodeStep(3, 3)], "24 at most"),
        (WORDS, [], "at least one"),
    ],
)
def test_a_decoding_that_cannot_have_happened_is_refused(words, steps, problem):
    with pytest.raises(ValueError, match=problem):
        decode_animation(words, {"run": steps}, title="A run", alt=ALT)


def test_a_step_has_no_more_queries_than_keys():
    assert DecodeStep(1, 5).cached == DecodeStep(1, 5).first == 4
    with pytest.raises(ValueError, match="between 1 and 2 queries"):
        DecodeStep(3, 2)


def test_a_request_is_drawn_with_its_first_token_and_the_mean_gap_after_it():
    fig = request_timeline({"alone": [0.008, 0.012, 0.017]}, title="The first token takes longest")
    assert "first token after 8 ms, then 2 tokens, one every 4.5 ms, the last after 17 ms" in fig.alt


@pytest.mark.parametrize("times", [[], [0.1], [0.0, 0.1], [0.2, 0.1]])
def test_a_request_whose_tokens_do_not_come_one_after_the_other_is_refused(times):
    with pytest.raises(ValueError, match="at least two times that rise"):
        request_timeline({"odd": times}, title="An odd request")
