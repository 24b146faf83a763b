"""What was recorded of the capstone: whole, right on every case, and the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import (
    attention_errors,
    attention_speed,
    hopper_attention,
    hopper_errors,
    hopper_implementations,
    hopper_sanitize,
)
from benchmarks.hopper_races import CONTROLS
from utils import records

#: Ragged cases that compute-sanitizer watches.
CASES = len(list(hopper_sanitize.cases()))


def shape_of(item: dict[str, Any]) -> tuple:
    return tuple(item[name] for name in ("batch", "heads", "seq_len", "head_dim", "causal"))


def test_every_shape_was_timed_in_both_dtypes_and_directions_with_everybody_there():
    results = records.load("hopper_attention").results
    timed = {(item["dtype"], item["direction"], shape_of(item)) for item in results["points"]}
    assert timed == {
        (dtype, direction, shape)
        for dtype in hopper_implementations.DTYPES
        for direction in attention_speed.DIRECTIONS
        for shape in hopper_attention.SHAPES
    }
    assert [(item["dtype"], item["direction"], shape_of(item)) for item in results["long"]] == [
        (dtype, "both", hopper_attention.LONG) for dtype in hopper_implementations.DTYPES
    ]
    for item in (*results["points"], *results["long"]):
        mine = {
            hopper_implementations.OURS,
            hopper_implementations.LAB,
            *([] if item["direction"] == "forward" else [hopper_implementations.FAST]),
        }
        missing = [why.partition(", ")[0] for why in results["unavailable"] if f"D {item['head_dim']}," in why]
        assert set(item["timed"]) | set(missing) == mine | set(hopper_implementations.BASELINES)
        assert set(item["ours_over"]) == set(item["timed"]) - {hopper_implementations.OURS}


def test_rates_are_those_of_the_times():
    results = records.load("hopper_attention").results
    for item in (*results["points"], *results["long"]):
        assert item["flops"] == attention_speed.flops(shape_of(item), item["direction"])
        for timed in item["timed"].values():
            assert timed["flops_per_second"] == pytest.approx(item["flops"] / timed["seconds"])


def test_every_case_of_both_modes_was_within_what_is_allowed():
    results = records.load("hopper_errors").results
    assert len(results["points"]) == 2 * hopper_errors.CASES >= 300
    assert [point for point in results["points"] if not attention_errors.within(point)] == []
    tried = {(point["mode"], point["dtype"], point["head_dim"]) for point in results["points"]}
    assert len(tried) == 2 * 2 * 3


def test_the_deterministic_mode_gave_the_same_bits_a_thousand_times():
    results = records.load("hopper_errors").results
    repeats = [item for item in results["repeats"] if item["mode"] == "deterministic"]
    assert len(repeats) == len(hopper_errors.REPEATED) and all(item["runs"] >= 1000 for item in repeats)
    assert [item for item in repeats if any(item["differ"].values())] == []
    # the fast mode may sum gradients in any order
    assert not any(item["differ"]["o"] or item["differ"]["lse"] for item in results["repeats"])


def test_no_element_was_left_unwritten_and_no_tool_found_anything():
    results = records.load("hopper_errors").results
    assert len(results["poisoned"]) == 2 * len(hopper_errors.POISONED)
    assert [item for item in results["poisoned"] if item["bad"]] == []
    assert set(results["sanitizer"]) >= {"memcheck", "racecheck"}
    assert [item for item in results["sanitizer"].values() if item["status"] or item["cases"] != CASES] == []
    # racecheck was told of the kernels, and sees the bytes that it does not follow
    assert set(results["beside"]) == {"as compiled", *CONTROLS} and results["beside"]["as compiled"] > 0
