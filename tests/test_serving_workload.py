"""Workloads: drawn at random, recorded, and played in real and in simulated time."""

import time

import numpy as np
import pytest
from serving_runs import tiny_model

from solutions.lab5_serving import Engine
from utils.serving import SamplingParams, Workload, replay_workload
from utils.serving.lengths import (
    at_once,
    bursty,
    evenly,
    fixed,
    lognormal,
    poisson,
    sharegpt_like,
    uniform,
)
from utils.serving.workload import TimedRequest, TraceError

RNG = np.random.default_rng


def drawn(count=20, seed=3, **changes):
    options = {"prompts": uniform(2, 9), "outputs": lognormal(6, 0.8), "tokens": 50, "arrivals": poisson(4.0)}
    return Workload.draw(count, **{**options, **changes}, seed=seed)


# ---- draws ----


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_arrivals_keep_their_rate_whatever_their_bursts(variation):
    times = bursty(5.0, variation)(RNG(1), 40_000)
    gaps = np.diff(times, prepend=0)
    assert (gaps >= 0).all() and len(times) / times[-1] == pytest.approx(5.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_a_poisson_process_has_as_much_variance_as_mean_in_each_second():
    counts = np.histogram(poisson(7.0)(RNG(2), 70_000), bins=np.arange(9000))[0]
    assert counts.mean() == pytest.approx(7, rel=0.03) and counts.var() == pytest.approx(7, rel=0.05)


def test_even_arrivals_are_even_and_those_at_once_are_at_zero():
    assert evenly(4.0)(RNG(0), 3).tolist() == [0, 0.25, 0.5]
    assert at_once()(RNG(0), 3).tolist() == [0, 0, 0]


def test_lognormal_lengths_have_the_mean_and_the_spread_that_were_asked_for():
    lengths = lognormal(338, 0.9)(RNG(0), 50_000)
    assert lengths.mean() == pytest.approx(338, rel=0.02) and lengths.std() / lengths.mean() == pytest.approx(
        0.9, rel=0.03
    )
    assert lognormal(338, 0.9, longest=400)(RNG(0), 1000).max() == 400 and lengths.min() >= 1
    assert set(lognormal(8, 0)(RNG(0), 9)) == {8}


def test_lengths_of_conversations_have_the_published_means():
    conversations = sharegpt_like()
    assert conversations.prompts(RNG(0), 50_000).mean() == pytest.approx(161.31, rel=0.08)
    assert conversations.outputs(RNG(0), 50_000).mean() == pytest.approx(337.99, rel=0.03)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: fixed(0), "length"),
        (lambda: uniform(0, 4), "low"),
        (lambda: uniform(5, 4), "high"),
        (lambda: lognormal(0.5, 1), "mean"),
        (lambda: lognormal(5, -1), "variation"),
        (lambda: lognormal(5, 1, longest=0), "longest"),
        (lambda: poisson(0), "rate"),
        (lambda: poisson(float("nan")), "rate"),
        (lambda: bursty(1, 0), "variation"),
    ],
)
def test_an_impossible_distribution_is_refused_by_name(draw, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        draw()


# ---- workloads ----


def test_the_same_seed_draws_the_same_workload_and_another_seed_another():
    assert drawn() == drawn() and drawn() != drawn(seed=4)


def test_requests_ignore_the_end_of_text_so_that_an_answer_is_as_long_as_was_drawn():
    workload = drawn(params=SamplingParams(temperature=1.0, ignore_eos=True))
    assert all(r.params.ignore_eos and r.output_tokens == r.params.max_new_tokens for r in workload)
    assert [r.params.seed for r in workload] == list(range(3, 23))
    assert workload.output_tokens == sum(r.output_tokens for r in workload)
    assert workload.prompt_tokens == sum(len(r.prompt) for r in workload)


def test_prompt_and_output_stay_within_the_context():
    workload = drawn(200, prompts=uniform(1, 80), outputs=uniform(1, 80), longest=64)
    totals = [len(r.prompt) + r.output_tokens for r in workload]
    assert max(totals) == 64 and all(len(r.prompt) < 64 and r.output_tokens >= 1 for r in workload)


def test_prompts_may_share_their_beginning():
    workload = drawn(40, prompts=12, shared=8, groups=2)
    assert len({r.prompt[:8] for r in workload}) == 2 and len({r.prompt for r in workload}) == 40
    assert len({r.prompt for r in drawn(40, prompts=5, shared=8)}) == 1  # shorter than what is shared


def test_prompts_can_be_pieces_of_a_text():
    text = list(range(100, 200))
    for request in drawn(30, tokens=text):
        first = request.prompt[0]
        assert request.prompt == tuple(range(first, first + len(request.prompt)))
    with pytest.raises(ValueError, match="cannot be cut from a text of 3"):
        drawn(tokens=[1, 2, 3])


def test_output_lengths_vary_as_much_as_was_asked_for():
    assert drawn(outputs=7).variation == 0
    assert drawn(5000, outputs=lognormal(100, 0.7)).variation == pytest.approx(0.7, rel=0.1)


def test_a_faster_workload_has_the_same_requests_sooner():
    slow, fast = drawn(), drawn().at_rate(4)
    assert [r.arrival / 4 for r in slow] == [r.arrival for r in fast]
    assert [r.prompt for r in slow] == [r.prompt for r in fast]
    with pytest.raises(ValueError, match="factor must be over 0"):
        slow.at_rate(0)


def test_impossible_workloads_are_refused():
    request = TimedRequest("a", 1.0, (1,), SamplingParams())
    for requests, words in (
        ((), "at least one request"),
        ((request, request), "same id"),
        ((request, TimedRequest("b", 0.5, (1,), SamplingParams())), "'b' arrives at 0.5 s, before 1.0 s"),
        ((TimedRequest("b", -1, (1,), SamplingParams()),), "before 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Workload(requests)
    for changes in ({"count": 0}, {"shared": -1}, {"groups": 0}):
        with pytest.raises(ValueError, match="at least"):
            drawn(**changes)


def test_a_recorded_trace_comes_back_as_it_was(tmp_path):
    workload = drawn(params=SamplingParams(temperature=0.7, top_k=9, top_p=0.8))
    workload.save(tmp_path / "trace.jsonl")
    assert Workload.load(tmp_path / "trace.jsonl") == workload


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", '{"id": "a"}', '{"id": "a", "arrival": 0, "prompt": [1], "temperature": -1}',
     '{"id": "a", "arrival": 0, "prompt": [1], "beams": 4}', '{"id": "a", "arrival": 0, "prompt": 5}'],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"id": "x", "arrival": 0, "prompt": [1]}\n\n' + line + "\n")
    with pytest.raises(TraceError, match=r"trace.jsonl, line 3: "):
        Workload.load(path)


def test_an_empty_or_disordered_trace_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceError, match="at least one request"):
        Workload.load(path)


# ---- playing ----


def two_slots():
    """An engine of two places, which gives each request that has one a token a step."""
    return Engine(tiny_model(layers=1), num_blocks=8, block_size=8, max_batch=2)


def requests(*specs):
    return Workload(tuple(
        TimedRequest(f"r{i}", arrival, (1,) * prompt, SamplingParams(max_new_tokens=n, ignore_eos=True))
        for i, (arrival, prompt, n) in enumerate(specs)
    ))  # fmt: skip


def test_simulated_time_passes_only_in_steps_and_in_waiting_for_requests():
    report = replay_workload(
        two_slots(), requests((0, 1, 2), (0, 1, 4), (1, 1, 2), (10, 2, 1)), step_seconds=lambda s: 1.0, progress=False
    )
    times = {r.id: r.token_times for r in report.requests}
    assert times == {"r0": (1, 2), "r1": (1, 2, 3, 4), "r2": (3, 4), "r3": (11,)}
    assert report.duration == 11 and report.steps == 5 and report.busy == 5
    assert report.utilisation == {"slots": 9 / 10, "blocks": 5 / 40}
    assert [r.ttft for r in report.requests] == [1, 1, 2, 1]


def test_a_step_can_cost_what_it_holds():
    report = replay_workload(
        two_slots(), requests((0, 1, 1), (0, 1, 3)), step_seconds=lambda s: len(s.chunks) / 10, progress=False
    )
    assert report.requests[1].token_times == pytest.approx((0.2, 0.3, 0.4))


def test_a_refused_request_is_recorded_with_its_reason_and_the_others_are_served():
    report = replay_workload(two_slots(), requests((0, 64, 3), (0, 1, 2)), step_seconds=lambda s: 1.0, progress=False)
    refused, served = report.requests
    assert (refused.finish_reason, refused.output_tokens) == (
        "error",
        0,
    ) and "shorter than max_seq_len" in refused.error
    assert served.finish_reason == "length" and len(report.completed) == 1


def test_real_time_is_the_clocks(capsys):
    start = time.perf_counter()
    report = replay_workload(two_slots(), requests((0, 1, 2), (0.05, 1, 1)))
    assert 0.05 <= report.duration <= time.perf_counter() - start
    assert report.requests[1].token_times[0] >= 0.05
    assert "2/2" in capsys.readouterr().err  # the progress bar


def test_an_engine_that_never_does_its_work_is_not_waited_for():
    engine = two_slots()
    engine.step = list
    with pytest.raises(RuntimeError, match="its steps do nothing"):
        replay_workload(engine, requests((0, 1, 2)), step_seconds=lambda s: 1.0, progress=False)
