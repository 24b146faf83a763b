"""A step of data parallelism in time: what of the all-reduces hides behind the backward pass, what is waited for."""

from __future__ import annotations

import math
import random

import pytest

from utils.plots.overlap import overlap_of
from utils.transformer_math import data_parallel_step, ring_seconds, tokens_to_hide

PSI, PEAK, LINK = 10**9, 400e12, 200e9


def step(buckets: int = 4, tokens: int = 2000, ranks: int = 8, **other: object):
    given = {"peak_flops": PEAK, "bandwidth": LINK, **other}
    return data_parallel_step(PSI, ranks, buckets, tokens, **given)


def test_one_bucket_and_buckets_that_wait_hide_nothing():
    whole = ring_seconds("all_reduce", 2 * PSI, 8, LINK)
    for each in (step(1), step(1, overlap=False), step(7, overlap=False)):
        assert each.communication == pytest.approx(whole) and each.exposed == pytest.approx(whole)
        assert each.hidden == pytest.approx(0, abs=1e-12) and each.seconds == pytest.approx(each.arithmetic + whole)


def test_with_enough_tokens_only_the_last_bucket_is_waited_for():
    each = step(5, tokens=10 * round(tokens_to_hide(PEAK, LINK)))
    assert each.exposed == pytest.approx(ring_seconds("all_reduce", 2 * PSI / 5, 8, LINK))
    assert all(bucket.start == bucket.ready for bucket in each.buckets)


def test_many_buckets_come_to_the_limit_of_lecture_8_and_latencies_make_them_slow_again():
    for tokens in (100, 2000, 50_000):
        fine = step(5000, tokens)
        whole = ring_seconds("all_reduce", 2 * PSI, 8, LINK)
        assert fine.seconds == pytest.approx(fine.forward + max(fine.backward, whole), rel=1e-3)
    assert step(5000, latency=5e-6).seconds > step(20, latency=5e-6).seconds


def test_the_link_carries_one_bucket_at_a_time_and_hidden_is_what_runs_beside_the_arithmetic():
    rng = random.Random(8)
    for _ in range(200):
        each = step(
            rng.randint(1, 60), rng.randint(1, 20_000), rng.randint(1, 64), latency=rng.choice((0, 1e-5)),
            overlap=rng.random() < 0.7, element_size=rng.choice((2, 4)),
        )  # fmt: skip
        for before, bucket in zip(each.buckets, each.buckets[1:], strict=False):
            assert bucket.start >= max(before.end, bucket.ready)
        found = overlap_of(each.spans())
        assert math.isclose(found.hidden, each.hidden, rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(found.exposed, each.exposed, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"buckets": 0}, "buckets"), ({"tokens": 0}, "tokens"), ({"ranks": 0}, "world_size"),
     ({"bandwidth": 0.0}, "bandwidth"), ({"peak_flops": math.inf}, "peak_flops"), ({"latency": -1e-6}, "latency")],
)  # fmt: skip
def test_impossible_sizes_and_rates_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        step(**wrong)
