"""Figures of decoding and of a paged cache: drawn from what really happened, and refused where it cannot have."""

from __future__ import annotations

import numpy as np
import pytest

from solutions.lab5_serving import BlockManager
from tests.drawn import player_data
from utils.plots.blocks import block_animation, block_tables, pool_state
from utils.plots.cache import DecodeStep, decode_animation, request_timeline
from utils.plots.memory_map import block_history, memory_map, share_bars, slot_kinds
from utils.serving.allocation import paged, reserve_maximum

ALT = "A grid of scores that grows by a row in each step."
WORDS = ["In", "the", "beginning", "was", "the", "whale"]


# ---- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_decoding_says_what_each_step_computes_and_what_it_reads():
    runs = {
        "without": [DecodeStep(3, 3), DecodeStep(4, 4), DecodeStep(5, 5)],
        "with": [DecodeStep(3, 3), DecodeStep(1, 4), DecodeStep(1, 5)],
    }
    said = player_data(decode_animation(WORDS, runs, title="Two ways to go on", alt=ALT))["captions"]
    assert said[0] == "Step 1 gives “was”. without: 3 rows computed; with: 3 rows computed"
    assert said[2] == "Step 3 gives “whale”. without: 5 rows computed; with: 1 row computed, 4 keys and values read"


def test_the_first_query_of_a_step_comes_after_the_cached_keys():
    assert DecodeStep(1, 5).cached == DecodeStep(1, 5).first == 4


def test_a_request_is_drawn_with_its_first_token_and_the_mean_gap_after_it():
    fig = request_timeline({"alone": [0.008, 0.012, 0.017]}, title="The first token takes longest")
    assert "first token after 8 ms, then 2 tokens, one every 4.5 ms, the last after 17 ms" in fig.alt


# ---- blocks ----------------------------------------------------------------------------------------------------------


def managed():
    """Two sequences of one beginning in a pool of six blocks of four, and the words of their tokens."""
    manager = BlockManager(num_blocks=6, block_size=4)
    manager.allocate("a", [1, 2, 3, 4, 5, 6])
    manager.fork("a", "b")
    return manager, {id: ["In", "the", "beginning", "was", "the", "whale", "and"] for id in "ab"}


def test_a_picture_of_a_pool_tells_its_tables_and_what_is_shared():
    manager, words = managed()
    state = pool_state(manager, words)
    assert state.wasted == 2  # the shared half block counts once
    alt = block_tables(state, title="Two tables, the same blocks").alt
    assert "a: 6 tokens in blocks 0, 1; b: 6 tokens in blocks 0, 1. 4 of 6 blocks are free. Shared: block 0, 1." in alt


def test_a_state_stays_as_it_was_when_the_manager_goes_on():
    manager, words = managed()
    before = pool_state(manager, words)
    copies = manager.append("b", [7])
    after = pool_state(manager, words, copies=copies, caption="b writes")
    assert before.tables["b"] == (0, 1) and after.tables["b"] == (0, 2) and after.copies == ((1, 2),)
    assert after.contents[1] == ("the", "whale") and after.contents[2] == ("the", "whale", "and")


@pytest.mark.slow
def test_states_are_played_with_their_captions():
    manager, words = managed()
    states = [pool_state(manager, words, caption="forked")]
    manager.free("a")
    states.append(pool_state(manager, words, caption="a has ended"))
    assert player_data(block_animation(states, title="A pool", alt=ALT))["captions"] == ["forked", "a has ended"]


def test_words_that_do_not_fit_the_tokens_are_refused():
    manager, words = managed()
    with pytest.raises(ValueError, match="'b' has 6 tokens, but 2 words"):
        pool_state(manager, words | {"b": ["In", "the"]})
    with pytest.raises(ValueError, match="block 0 is shared, but"):
        pool_state(manager, words | {"b": ["At", *words["b"][1:]]})


# ---- where memory goes -----------------------------------------------------------------------------------------------


def test_the_map_of_a_memory_has_every_slot_in_its_kind():
    trace = reserve_maximum([(3, 2), (4, 4)], 20, 8, keep_maps=True)
    kinds = slot_kinds(trace, 1)
    assert kinds.tolist() == [1] * 4 + [3] + [4] * 3 + [2] * 5 + [3] * 3 + [0] * 4
    trace = paged([(3, 2), (20, 2)], 48, 32, watermark=0, keep_maps=True)
    counted = np.bincount(slot_kinds(trace, 0), minlength=5)
    assert counted[1] == 3 and counted[2] == 20 and counted[3] == 0 and counted[4] == trace.internal[0] == 25


def test_maps_say_how_much_is_used():
    lengths = [(3, 2), (4, 4)]
    traces = {"all": reserve_maximum(lengths, 16, 8, keep_maps=True), "blocks": paged(lengths, 16, 8, keep_maps=True)}
    fig = memory_map(traces, {"all": 1, "blocks": 0}, row=8, title="Two memories")
    assert "all: 2 requests, 56.2 % of the slots hold a token" in fig.alt


def test_shares_add_up_and_stand_beside_what_is_published():
    shares = {"all": {"used": 0.2, "reserved": 0.1, "internal": 0.6, "external": 0.1}}
    fig = share_bars(shares, published={"all": 0.204}, title="Where it goes")
    assert (
        "holds a token 20 %, will hold one 10 %, internal waste 60 %" in fig.alt and "published 20.4 % used" in fig.alt
    )


def test_a_history_of_blocks_knows_who_came_back():
    held = [{0: ("a", 3), 1: ("b", 4)}, {0: ("a", 4), 1: ("a", 1)}, {0: ("a", 4), 1: ("a", 2)}, {2: ("b", 4)}]
    fig = block_history(held, 3, 4, title="A small pool")
    assert "at most 2 held at a time, by requests a, b; b lost their blocks and came back." in fig.alt
