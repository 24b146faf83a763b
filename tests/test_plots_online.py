"""Figures of online softmax: they follow the recurrence, refuse states that do not, and show what really happened."""

import base64
import dataclasses
import itertools
import math
import re
from functools import cache

import pytest

from tests.drawn import pixels_of, player_data
from utils import plots
from utils.plots.animate import LARGEST
from utils.plots.online import TileStep, check_steps, online_animation
from utils.plots.recurrence import merge_tree, surrogate_plot

ROW, VALUES = (-29.0, -30.0, -20.0, -20.0), ((1.0, 0.0), (0.0, 1.0), (2.0, 1.0), (4.0, 3.0))
ALT = "Four scores in two tiles, one after the other."


def steps_of(scores, tile, values=()):
    """The states of an online softmax, written as the definition has it and not as the recurrence does."""
    steps, before = [], -math.inf
    for start in range(0, len(scores), tile):
        seen, part = scores[: start + tile], scores[start : start + tile]
        maximum = max(seen)
        weights = [math.exp(score - maximum) for score in seen]
        output = tuple(sum(w * v[c] for w, v in zip(weights, values)) for c in range(len(values[0]) if values else 0))
        steps.append(
            TileStep(
                tuple(part), maximum, math.exp(before - maximum), tuple(weights[start:]), math.fsum(weights), output
            )
        )
        before = maximum
    return steps


@cache
def play(values=(), scores=ROW, tile=2):
    return online_animation(steps_of(scores, tile, values), values, title="A row in tiles", alt=ALT)


@pytest.mark.slow
def test_the_worked_row_is_played_step_by_step_and_the_softmax_reads_it_twice():
    captions = player_data(play())["captions"]
    assert len(captions) == 1 + 2 * 4 + 2
    assert "e^(−29 − (−20)) = 0.00012341" in captions[6]
    assert "1.368 × 0.0001234 = 0.0001688" in captions[7] and "d = 2.000169" in captions[8]
    assert [caption.startswith("Second read") for caption in captions[-2:]] == [True, True]


@pytest.mark.slow
def test_with_values_each_tile_is_read_once_and_one_division_ends_it():
    made = play(VALUES)
    captions = player_data(made)["captions"]
    assert len(made.html.encode()) < LARGEST / 2 and len(captions) == 1 + 2 * 4 + 1
    assert [k for k, caption in enumerate(captions) if caption.endswith("its scores and its values.")] == [1, 5]
    assert "(6.0001, 4) / 2.0002" in captions[-1]


@pytest.mark.slow
def test_a_tile_without_a_new_maximum_says_so_and_keeps_the_past():
    captions = player_data(play(scores=(5.0, 1.0, 2.0), tile=1))["captions"]
    assert "no new maximum" in captions[6] and captions[6].endswith("= 1.")


@pytest.mark.slow
def test_the_still_shows_the_step_in_which_the_past_is_rescaled():
    made = play()
    stored = player_data(made)
    assert len(made.html.encode()) < LARGEST / 2
    assert stored["captions"][7].startswith("d becomes")
    changed = "#009E73"  # the state that was just changed
    assert pixels_of(made.poster, changed) and not pixels_of(base64.b64decode(stored["frames"][0][2]), changed)


def spoiled(**changes):
    first, second = steps_of(ROW, 2, VALUES)
    return [first, dataclasses.replace(second, **changes)]


@pytest.mark.parametrize(
    ("steps", "values", "words"),
    [
        (spoiled(total=2 + 1 + math.exp(-1)), VALUES, "tile 2: total must be 2.0002 by the recurrence, got 3.3679"),
        (spoiled(maximum=-29.0), VALUES, "tile 2: maximum must be −20"),
        (spoiled(factor=1.0), VALUES, "tile 2: factor must be 0.00012341"),
        (spoiled(exponentials=(1.0, 0.5)), VALUES, "tile 2: exponentials must be"),
        (spoiled(output=(7.0, 4.3679)), VALUES, "tile 2: output must be"),
        (steps_of(ROW, 2), VALUES, "tile 1: output must be"),
        (steps_of(ROW, 2, VALUES), VALUES[:3], "one row of values for each of the 4 scores, got 3"),
        (steps_of(ROW, 2, ((1.0,) * 4,) * 4), ((1.0,) * 4,) * 4, "at most 3 numbers, got 4"),
        ([], (), "one to 5 scores"),
        (steps_of((1.0,) * 6, 2), (), "got 6"),
    ],
)
def test_a_state_that_does_not_follow_is_refused_by_tile_and_name(steps, values, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_steps(steps, values)


def sequences(scores):
    maxima = list(itertools.accumulate(scores, max))
    prefix = [scores[: i + 1] for i in range(len(scores))]
    surrogate = [math.fsum(math.exp(x - m) for x in seen) for seen, m in zip(prefix, maxima)]
    final = [math.fsum(math.exp(x - maxima[-1]) for x in seen) for seen in prefix]
    return scores, maxima, surrogate, final


@pytest.mark.slow
def test_the_surrogate_is_drawn_with_every_place_where_the_maximum_moves():
    fig = surrogate_plot(*sequences([1.0, 3.0, 2.0, 5.0, 4.0]), title="Two sums, one end")
    assert "(scores 2, 4)" in fig.alt and plots.png(fig)
    assert "(scores none)" in surrogate_plot(*sequences([3.0, 2.0, 1.0]), title="Descending").alt


def test_a_surrogate_that_ends_elsewhere_or_has_another_length_is_refused():
    scores, maxima, surrogate, final = sequences([1.0, 3.0, 2.0])
    with pytest.raises(ValueError, match="must end at the same sum"):
        surrogate_plot(scores, maxima, [*surrogate[:-1], 9.0], final, title="t")
    with pytest.raises(ValueError, match="maxima must have one entry for each of the 3"):
        surrogate_plot(scores, maxima[:2], surrogate, final, title="t")
    with pytest.raises(ValueError, match="must be positive"):
        surrogate_plot(scores, maxima, [0.0, *surrogate[1:]], final, title="t")


def levels_of(scores):
    """Pairs of every level, each from the scores that it covers."""
    levels, span = [], 1
    while True:
        groups = [scores[k : k + span] for k in range(0, len(scores), span)]
        levels.append([(max(g), math.fsum(math.exp(x - max(g)) for x in g)) for g in groups])
        if len(groups) == 1:
            return levels
        span *= 2


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_tree_of_any_number_of_leaves_ends_in_one_pair(count):
    fig = merge_tree(levels_of([float(k * k % 7) for k in range(count)]), title="Merged in pairs")
    assert f"{count} leaves" in fig.alt and plots.png(fig)


def test_a_tree_whose_merge_is_wrong_or_whose_levels_do_not_fit_is_refused():
    good = levels_of([3.0, 1.0, 4.0, 1.0])
    wrong = [good[0], [(3.0, 2.0), good[1][1]], good[2]]  # added up without the factor
    with pytest.raises(ValueError, match=r"level 1, pair 0 must be \(3\.0, 1\.13"):
        merge_tree(wrong, title="t")
    with pytest.raises(ValueError, match="level 1 must hold 2 pairs, got 1"):
        merge_tree([good[0], good[1][:1]], title="t")
    with pytest.raises(ValueError, match="2 to 8 leaves"):
        merge_tree(good[:2], title="t")
