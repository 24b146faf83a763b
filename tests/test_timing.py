"""Timing without a GPU: the statistics, the order of calls, and what a stopwatch is asked to do."""

from __future__ import annotations

import collections
import itertools

import pytest

from utils import runtime, timing


class FakeStopwatch:
    """Runs what it is given and says that it took as long as ``times`` says of the call's name."""

    def __init__(self, times):
        self.times, self.running, self.pending = times, None, []
        self.flushed: list[bool] = []

    def call(self, name, log):
        def run():
            log.append(name)
            self.running = name

        return run

    def lap(self, fn, flush_l2):
        fn()
        self.flushed.append(flush_l2)
        self.pending.append(self.times[self.running].pop(0))

    def seconds(self):
        pending, self.pending = self.pending, []
        return pending


def test_a_timing_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one time"):
        timing.summarize([])


@pytest.mark.parametrize("bad", [0.0, -1e-6, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError, match="positive and finite, got"):
        timing.summarize([1e-3, bad])


def test_a_timing_is_the_median_between_its_fifths():
    timed = timing.summarize([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timed.median, timed.low, timed.high, timed.rounds) == (3.5, 2.0, 5.0, 6)
    assert timed.samples == (5.0, 1.0, 2.0, 3.0, 4.0, 100.0)
    assert timed.as_dict() == {"seconds": 3.5, "low": 2.0, "high": 5.0, "rounds": 6}


def test_warm_up_calls_are_not_timed():
    log = []
    watch = FakeStopwatch({"f": [3.0, 1.0, 2.0]})
    timed = timing.measure(watch.call("f", log), warmup=4, rounds=3, stopwatch=watch)
    assert len(log) == 7
    assert timed.samples == (3.0, 1.0, 2.0) and timed.median == 2.0
    assert watch.flushed == [True] * 3


def test_without_a_flush_the_stopwatch_is_told_so():
    watch = FakeStopwatch({"f": [1.0]})
    timing.measure(watch.call("f", []), warmup=0, rounds=1, flush_l2=False, stopwatch=watch)
    assert watch.flushed == [False]


def test_a_comparison_preheats_and_interleaves_in_balanced_orders():
    log = []
    watch = FakeStopwatch({name: [1.0] * 3 for name in "abcd"})
    timing.compare({name: watch.call(name, log) for name in "abcd"}, warmup=1, rounds=3, stopwatch=watch)
    assert "".join(log) == "abcd" + "abdc" + "bcad" + "cdba"


@pytest.mark.parametrize("count", range(1, 8))
def test_in_balanced_orders_everybody_stands_everywhere_and_follows_everybody_equally_often(count):
    names = "abcdefg"[:count]
    orders = timing.balanced_orders(names)
    repeats = 2 if count % 2 and count > 1 else 1
    assert len(orders) == repeats * count
    for place in range(count):
        assert sorted(order[place] for order in orders) == sorted(names * repeats)
    followed = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(followed.values()) <= {repeats} and len(followed) == count * (count - 1)


def test_samples_of_a_comparison_belong_to_their_function_and_round():
    watch = FakeStopwatch({"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0]})
    log = []
    timed = timing.compare({n: watch.call(n, log) for n in "ab"}, warmup=0, rounds=3, stopwatch=watch)
    assert timed["a"].samples == (1.0, 2.0, 3.0)
    assert timed["b"].samples == (10.0, 20.0, 30.0)
    assert list(timed) == ["a", "b"]


def test_a_ratio_is_the_median_of_ratios_within_rounds_so_a_drifting_clock_cancels():
    drift = [1.0, 1.5, 4.0, 1.2, 9.0]
    watch = FakeStopwatch({"slow": [2.0 * d for d in drift], "fast": list(drift)})
    timed = timing.compare({n: watch.call(n, []) for n in ("slow", "fast")}, warmup=0, rounds=5, stopwatch=watch)
    found = timing.ratio(timed["slow"], timed["fast"])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert found.as_dict() == {"ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0}


def test_a_ratio_of_timings_that_were_not_made_together_is_refused():
    with pytest.raises(ValueError, match="same rounds, got 2 and 3"):
        timing.ratio(timing.summarize([1.0, 2.0]), timing.summarize([1.0, 2.0, 3.0]))


def test_bad_arguments_are_refused_by_name():
    watch = FakeStopwatch({})
    with pytest.raises(TypeError, match="fn must be a function without arguments, got 3"):
        timing.measure(3, stopwatch=watch)
    with pytest.raises(ValueError, match="at least one function"):
        timing.compare({}, stopwatch=watch)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        timing.measure(lambda: None, rounds=0, stopwatch=watch)
    with pytest.raises(ValueError, match="warmup must not be negative, got -1"):
        timing.measure(lambda: None, warmup=-1, stopwatch=watch)


def test_without_a_gpu_timing_says_what_to_show_instead(monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    timing.cuda_stopwatch.cache_clear()
    with pytest.raises(RuntimeError, match=r"timing needs a CUDA GPU.*utils\.records\.load"):
        timing.measure(lambda: None)
