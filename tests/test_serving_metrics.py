"""Latencies and throughput of a run, by hand."""

import math

import numpy as np
import pytest

from utils.serving import Report, RequestRecord
from utils.serving.metrics import percentile


def record(id="a", arrival=1.0, times=(3.0, 3.5, 5.0), reason="length", end=5.0):
    return RequestRecord(id, arrival, 7, tuple(times), reason, end, None if reason != "error" else "broken")


def test_latencies_are_counted_from_the_arrival():
    request = record()
    assert (request.ttft, request.tpot, request.latency) == (2.0, 1.0, 4.0)
    assert request.latency == request.ttft + request.tpot * (request.output_tokens - 1)


def test_a_request_without_enough_tokens_has_no_such_latency():
    assert math.isnan(record(times=()).ttft) and math.isnan(record(times=()).latency)
    assert math.isnan(record(times=(3.0,)).tpot) and record(times=(3.0,)).latency == 2.0


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent):
    values = np.random.default_rng(0).random(37)
    assert percentile(values.tolist(), percent) == pytest.approx(np.percentile(values, percent))


def test_percentiles_leave_out_what_is_not_there():
    assert percentile([math.nan, 2.0, math.nan], 90) == 2.0 and math.isnan(percentile([], 50))
    for percent in (-1, 101, math.nan):
        with pytest.raises(ValueError, match="between 0 and 100"):
            percentile([1.0], percent)


def test_a_report_counts_tokens_of_all_and_latencies_of_those_that_got_their_answer():
    requests = (record(), record("b", 0.0, (1.0, 2.0)), record("c", 0.0, (1.0,), "abort"), record("d", 0, (), "error"))
    report = Report(requests, duration=5.0, steps=9, busy=4.0, utilisation={"slots": 0.5})
    assert [r.id for r in report.completed] == ["a", "b"]
    assert report.output_tokens == 6 and report.throughput == 6 / 5 and report.request_rate == 2 / 5
    assert report.prompt_tokens == 14
    assert report.percentiles("ttft") == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert report.as_dict()["tpot"]["p50"] == 1.0 and report.as_dict()["utilisation"] == {"slots": 0.5}
    text = str(report)
    assert "2 of 4 requests answered in 5.00 s" in text and "slots in use: 50.0%" in text and "1500.0 ms" in text
    with pytest.raises(ValueError, match="metric must be"):
        report.values("speed")
