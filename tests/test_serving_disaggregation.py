"""Prefill and decode on separate workers, simulated: by hand where it can be, by its limits, and by brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from utils import records
from utils.serving import SamplingParams, TimedRequest, Workload
from utils.serving.disaggregation import (
    SLO,
    Case,
    Colocated,
    Disaggregated,
    Sample,
    StepTime,
    Work,
    fit,
    fit_step_time,
    goodput,
    request_rate,
    simulate,
    sweep,
)
from utils.serving.disaggregation.fit import engine_steps
from utils.serving.disaggregation.simulate import finished_requests
from utils.serving.lengths import lognormal, poisson

SECOND = StepTime(base=1.0, token=0.0)  # every step takes a second
BY_TOKENS = StepTime(base=1.0, token=0.1)
MEASURED = StepTime(2.2e-3, 2.1e-6, 4.5e-8, 5.2e-10)


def workload(*requests):
    """Requests of (arrival, prompt, output)."""
    return Workload(
        tuple(
            TimedRequest(f"r{i}", float(at), (0,) * prompt, SamplingParams(output, ignore_eos=True))
            for i, (at, prompt, output) in enumerate(requests)
        )
    )


def drawn(count=60, rate=20.0, prompt=800, output=30, seed=0):
    lengths = {"prompts": lognormal(prompt, 0.6), "outputs": lognormal(output, 0.6)}
    return Workload.draw(count, arrivals=poisson(rate), tokens=2, seed=seed, **lengths)


def together(gpus=1, budget=8, batch=8, **more):
    return Colocated(gpus, budget, max_batch=batch, **more)


def apart(prefill=1, decode=1, *, bandwidth=1.0, bytes_per_token=1, budget=8, batch=8, **more):
    return Disaggregated(prefill, decode, bandwidth, bytes_per_token, token_budget=budget, max_batch=batch, **more)


def times(report):
    return [list(record.token_times) for record in report.requests]


# ---- by hand ----


def test_the_work_of_a_step_is_the_sum_of_its_chunks():
    # A prompt's tokens 4 to 6 see 5, 6 and 7 keys; a decoding token behind 9 others sees 10.
    assert Work.of([(4, 3), (9, 1)]) == (2, 4, 17, 28)
    assert Work.of([(4, 3)]) + Work.of([(9, 1)]) == Work.of([(4, 3), (9, 1)])
    assert StepTime(1.0, 0.1, 0.01, 0.001)(Work.of([(4, 3), (9, 1)])) == pytest.approx(1 + 0.4 + 0.17 + 0.028)


def test_a_prompt_that_joins_makes_the_steps_of_the_others_longer():
    # r0 decodes alone until r1 arrives within its second step; r1's 10 tokens go beside r0's one, at most 8 in a step.
    report = simulate(together(), workload((0, 1, 5), (1.5, 10, 1)), BY_TOKENS)
    assert times(report)[0] == pytest.approx([1.1, 2.2, 4.0, 5.4, 6.5])  # steps of 1, 1, 1 + 7, 1 + 3 and 1 tokens
    assert times(report)[1] == pytest.approx([5.4])
    assert report.steps == 5 and report.busy == pytest.approx(6.5)
    assert report.utilisation == {"gpus": pytest.approx(1.0)}


def test_on_separate_workers_a_prompt_leaves_the_decoding_alone():
    # Handovers take 1 s for r0's token and 10 s for r1's: r1's first token comes at once, its second waits for it.
    report = simulate(apart(), workload((0, 1, 5), (1.5, 10, 2)), BY_TOKENS)
    assert times(report)[0] == pytest.approx([1.1, 3.2, 4.3, 5.4, 6.5])
    assert times(report)[1] == pytest.approx([1.5 + 1.8 + 1.2, 4.5 + 10 + 1.1])  # steps of 8 and 2 tokens


def test_a_link_carries_one_prompt_at_a_time():
    report = simulate(apart(latency=0.5), workload((0, 2, 2), (0, 2, 2)), SECOND)
    # Both are prefilled at 1; their handovers end at 3.5 and 6.
    assert times(report) == [[1.0, 4.5], [1.0, 7.0]]
    two = simulate(apart(prefill=2, decode=2, latency=0.5), workload((0, 2, 2), (0, 2, 2)), SECOND)
    assert times(two) == [[1.0, 4.5], [1.0, 4.5]]


def test_a_prompt_waits_in_the_prefill_workers_memory_until_the_decode_worker_has_room():
    # Memory for 4 tokens: one request needs 3 to decode. The third is prefilled when a handover has made room for it.
    report = simulate(apart(cache_tokens=4), workload((0, 2, 2), (0, 2, 2), (0, 2, 2)), SECOND)
    # r0: handover 1 to 3, decoded at 4. r1 is handed over from 4 to 6. r2 is prefilled from 3 to 4.
    assert times(report) == [[1.0, 4.0], [1.0, 7.0], [4.0, 10.0]]


def test_a_request_goes_to_the_gpu_with_the_fewest():
    report = simulate(together(gpus=2, batch=1, budget=4), workload(*[(0, 4, 1)] * 4), SECOND)
    assert times(report) == [[1.0], [1.0], [2.0], [2.0]]


def test_an_answer_of_one_token_needs_no_decode_worker():
    report = simulate(apart(bandwidth=1e-9), workload((0, 5, 1)), SECOND)
    assert times(report) == [[1.0]] and report.utilisation == {"prefill": 1.0, "decode": 0.0}


# ---- limits and invariants ----


def test_a_request_alone_waits_for_its_prefill_and_then_for_the_handover():
    prompt, output = 3000, 50
    apart_alone = Disaggregated(1, 1, 50e9, 114688, latency=1e-3, token_budget=8192)
    (record,) = simulate(apart_alone, workload((2, prompt, output)), MEASURED).requests
    prefill = MEASURED(Work.of([(0, prompt)]))
    decode = [MEASURED(Work.of([(prompt + i, 1)])) for i in range(output - 1)]
    handover = 1e-3 + prompt * 114688 / 50e9
    assert record.ttft == pytest.approx(prefill, rel=1e-9)
    assert record.tpot == pytest.approx((handover + sum(decode)) / (output - 1), rel=1e-9)
    (same,) = simulate(Colocated(2, 8192), workload((2, prompt, output)), MEASURED).requests
    assert same.ttft == pytest.approx(record.ttft) and same.tpot == pytest.approx(sum(decode) / (output - 1))


@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_all_its_tokens_in_order_and_no_gpu_works_twice_at_a_time(seed):
    asked = drawn(seed=seed)
    arrangements = [
        together(gpus=2, budget=256, batch=16, cache_tokens=9000),
        apart(2, 1, bandwidth=1e10, bytes_per_token=114688, budget=512, batch=16, cache_tokens=9000),
    ]
    for arrangement in arrangements:
        report = simulate(arrangement, asked, MEASURED)
        assert report == simulate(arrangement, asked, MEASURED)
        assert [record.id for record in report.requests] == [request.id for request in asked]
        for record, request in zip(report.requests, asked, strict=True):
            assert record.output_tokens == request.output_tokens and record.completed
            assert record.token_times[0] > request.arrival
            assert all(np.diff(record.token_times) >= 2.2e-3 * (1 - 1e-9))  # a step between any two
        assert all(0 < share <= 1 for share in report.utilisation.values())
        assert report.busy <= report.duration * arrangement.gpus


def test_work_does_not_depend_on_when_requests_come_if_they_come_alone():
    slow = drawn(count=12).at_rate(1e-3)
    chunked, split = (simulate(a, slow, MEASURED) for a in (Colocated(1, 8192), apart(budget=8192, batch=256)))
    assert chunked.steps == split.steps == sum(request.output_tokens for request in slow)
    assert chunked.busy == pytest.approx(split.busy)


def test_more_of_anything_serves_sooner():
    asked = drawn()

    def mean_end(arrangement, step_time=MEASURED):
        return np.mean([record.end for record in simulate(arrangement, asked, step_time).requests])

    link = {"bytes_per_token": 114688, "budget": 2048, "batch": 64}
    ends = [mean_end(apart(1, 1, bandwidth=bandwidth, **link)) for bandwidth in (1e9, 5e9, 5e10, 5e11)]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]
    ends = [mean_end(Colocated(gpus, 2048)) for gpus in (1, 2, 4)]
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]
    slower = replace(MEASURED, base=2 * MEASURED.base, token=2 * MEASURED.token)
    assert mean_end(Colocated(1, 2048), slower) > mean_end(Colocated(1, 2048))


# ---- goodput ----


def test_an_slo_needs_both_limits_from_enough_of_the_requests():
    report = simulate(together(), workload((0, 1, 5), (1.5, 10, 1)), BY_TOKENS)
    assert [record.ttft for record in report.requests] == pytest.approx([1.1, 3.9])
    assert SLO(4, 1.35).attainment(report) == 1  # one token has no time per output token
    assert SLO(4, 1.34).attainment(report) == 0.5 and SLO(3.8, 2).attainment(report) == 0.5
    assert SLO(3.8, 2, share=0.5).attained(report) and not SLO(3.8, 2).attained(report)


@pytest.mark.parametrize(
    "arrangement", [together(2, 512, 64), apart(1, 1, bandwidth=1e11, budget=4096, batch=64)], ids=str
)
@pytest.mark.parametrize("share", [0.5, 0.9, 1])
def test_a_simulation_that_ends_as_soon_as_the_slo_is_decided_decides_as_a_whole_one(arrangement, share):
    asked, slo = drawn(count=80), SLO(ttft=0.05, tpot=0.006, share=share)
    decisions = set()
    for rate in request_rate(asked) * 1.3 ** np.arange(-2, 16):
        played = asked.at_rate(rate / request_rate(asked))
        decisions.add(slo.attained_at(arrangement, played, MEASURED))
        assert slo.attained_at(arrangement, played, MEASURED) == slo.attained(simulate(arrangement, played, MEASURED))
    assert decisions == {True, False}


def test_requests_are_told_as_they_end_and_nobody_has_to_wait_for_the_last(monkeypatch):
    asked = drawn(count=40)
    records = list(finished_requests(Colocated(2, 512), asked, MEASURED))
    assert [record.end for record in records] == sorted(record.end for record in records)
    whole = simulate(Colocated(2, 512), asked, MEASURED)
    assert {record.id: record for record in records} == {record.id: record for record in whole.requests}
    steps = []
    monkeypatch.setattr(StepTime, "__call__", lambda self, work: steps.append(work) or 1.0)
    assert not SLO(ttft=1e-3, tpot=1e-3).attained_at(Colocated(2, 512), asked, MEASURED)
    assert len(steps) < whole.steps / 2


@pytest.mark.parametrize(
    "arrangement", [together(2, 512, 64), apart(1, 1, bandwidth=1e11, budget=4096, batch=64)], ids=str
)
def test_goodput_is_where_a_sweep_of_rates_stops_meeting_the_slo(arrangement):
    asked, slo = drawn(count=80), SLO(ttft=0.05, tpot=0.006)
    rates = request_rate(asked) * 1.05 ** np.arange(20, 100)
    met = [slo.attained(simulate(arrangement, asked.at_rate(rate / request_rate(asked)), MEASURED)) for rate in rates]
    assert met[0] and not met[-1]
    # Near the limit the share goes up and down a little: every rate below `sure` meets the SLO, none above `last` does.
    sure, last = rates[met.index(False) - 1], rates[len(met) - 1 - met[::-1].index(True)]
    assert last / sure < 1.3
    found = goodput(arrangement, asked, slo, MEASURED)
    assert sure / 1.03 <= found <= last * 1.05
    assert slo.attained(simulate(arrangement, asked.at_rate(found / request_rate(asked)), MEASURED))


def test_goodput_is_zero_where_no_rate_will_do_and_refuses_a_workload_that_cannot_fill_the_gpus():
    assert goodput(together(batch=4), drawn(count=5, prompt=20), SLO(10, 1e-3), MEASURED) == 0
    with pytest.raises(ValueError, match="all 5 requests meet the SLO even if they come at once: draw more of them"):
        goodput(Colocated(1, 2048), drawn(count=5), SLO(10, 10), MEASURED)
    with pytest.raises(ValueError, match="has no rate"):
        goodput(together(), workload((0, 1, 1)), SLO(1, 1), SECOND)


def test_a_sweep_names_the_best_of_each_kind():
    cases = [Case("a", drawn(count=40), SLO(0.05, 0.006))]
    kinds = {
        "chunked prefill": [Colocated(2, 256), Colocated(2, 2048)],
        "separate workers": [apart(1, 1, bandwidth=1e11, bytes_per_token=114688, budget=4096, batch=64)],
    }
    outcomes = sweep(cases, kinds, MEASURED, tolerance=0.1)
    assert [(o.case, o.kind) for o in outcomes] == [("a", kind) for kind in kinds]
    for outcome in outcomes:
        each = [goodput(a, cases[0].workload, cases[0].slo, MEASURED, tolerance=0.1) for a in kinds[outcome.kind]]
        assert outcome.goodput == max(each) and outcome.best == kinds[outcome.kind][each.index(max(each))]
    with pytest.raises(ValueError, match=r"all with the same number of GPUs, got 1 cases, .* GPUs \[2, 3\]"):
        sweep(cases, {**kinds, "more": [Colocated(3, 256)]}, MEASURED)


# ---- measured step times ----


def test_the_simulated_worker_repeats_the_273_steps_of_the_measured_engine_and_their_time():
    record = records.load("serving_throughput")
    steps = engine_steps(record)  # raises where a step differs in sequences, tokens or bytes
    fitted = fit_step_time()
    assert len(steps) == len(record.results["steps"]) == 273
    simulated, measured = sum(fitted.step_time(s.work) for s in steps), sum(s.seconds for s in steps)
    assert simulated == pytest.approx(measured, rel=0.01)
    assert np.median(abs(fitted.residuals())) < 0.015 and abs(fitted.residuals()).max() < 0.25
    assert abs(fitted.prompt_residuals()).max() < 0.05
    assert "273 steps: off by 0.8% (median)" in str(fitted)
    results = {**record.results, "token_budget": 4096}
    with pytest.raises(ValueError, match="step 0 of the record is"):
        engine_steps(replace(record, results=results))


def test_a_fit_finds_the_coefficients_that_made_its_samples():
    rng = np.random.default_rng(1)
    works = [Work.of([(int(rng.integers(5000)), int(rng.integers(1, 900)))]) for _ in range(30)]
    samples = [Sample(work, MEASURED(work)) for work in works]
    found = fit(samples, ("base", "token", "context", "pair"))
    assert list(vars(found).values()) == pytest.approx(list(vars(MEASURED).values()))
    assert fit(samples, ("base", "token"), context=MEASURED.context, pair=MEASURED.pair).token == pytest.approx(2.1e-6)
    with pytest.raises(ValueError, match="1 samples do not determine base, token"):
        fit(samples[:1], ("base", "token"))
    with pytest.raises(ValueError, match="do not determine base, pair"):
        fit(samples[:1] * 5, ("base", "pair"))


# ---- refused ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepTime(-1.0, 0.0), "base must be a finite number of seconds"),
        (lambda: StepTime(0.0, math.nan), "token must be a finite number"),
        (lambda: StepTime(0.0, 0.0), "every coefficient is 0"),
        (lambda: Colocated(0, 256), "gpus must be an integer of at least 1, got 0"),
        (lambda: Colocated(1, 255), "token_budget must be at least max_batch = 256, got 255"),
        (lambda: apart(decode=0), "decode must be an integer of at least 1, got 0"),
        (lambda: apart(bandwidth=0.0), r"bandwidth must be over 0 bytes/s, got 0\.0"),
        (lambda: apart(latency=-1.0), "latency must be a finite number"),
        (lambda: SLO(0, 1), "ttft must be over 0 s, got 0"),
        (lambda: SLO(1, math.nan), "tpot must be over 0 s, got nan"),
        (lambda: SLO(1, 1, share=0), "share must be over 0 and at most 1"),
        (lambda: goodput(together(), drawn(), SLO(1, 1), SECOND, tolerance=0), "tolerance must be over 0"),
        (lambda: simulate(together(cache_tokens=9), workload((0, 8, 3)), SECOND), r"'r0' has 8 \+ 3 tokens"),
        (lambda: sweep([], {}, SECOND), "at least one case and one arrangement"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_arrangement_of_another_type_is_refused():
    with pytest.raises(TypeError, match="arrangement must be Colocated or Disaggregated, got str"):
        simulate("2 GPUs", workload((0, 1, 1)), SECOND)
