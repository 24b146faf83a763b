"""The benchmarks of serving without a GPU: a tiny model, a few requests, the schemas of their records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from serving_runs import request, right_logits, tiny_model

from benchmarks import batching, serving_peer, serving_throughput, serving_work
from benchmarks.benchmark_cli import problems
from benchmarks.decoding import SHAPE
from solutions.lab5_serving import ModelRunner, StepRecord
from utils import runtime
from utils.serving import ModelConfig

TINY = ModelConfig("qwen3", 97, 48, 80, 1, 4, 2, 16, 256, qk_norm=True, tied_head=True)


# ---- throughput ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_peer(monkeypatch):
    """Somebody who answers every prompt with zeros, in five seconds at first, then in three and in two."""
    seconds = [2.0, 3.0, 5.0]
    monkeypatch.setattr(serving_peer, "peer_of", lambda model: None)
    monkeypatch.setattr(serving_peer, "version", lambda: "5.0")
    monkeypatch.setattr(serving_peer, "generate", lambda _, prompts, new: ([[0] * new for _ in prompts], seconds.pop()))


@pytest.mark.slow
def test_throughput_fills_its_schema_and_takes_the_quickest_of_theirs(fake_peer):
    results = serving_throughput.measure(
        config=TINY, dtype=torch.float32, requests=5, lengths=(3, 20), new_tokens=6, token_budget=16,
        runs=(2, 2), settings={"cuda_graphs": True},
    )  # fmt: skip
    text = serving_throughput.table(results)
    assert "30 of 30 tokens are float32's" in text and "transformers 5.0" in text
    assert results["theirs"]["tokens_per_second"] == 30 / 2.0
    assert results["theirs"]["ratio"] == pytest.approx(2.0 / results["ours"]["seconds"])
    kernels = {"launches": 1, "seconds": {"attention": 1.0}, "longest": [{"name": "k", "launches": 1, "seconds": 1.0}]}
    assert (results["kernels"] is None) is not runtime.HAS_GPU  # a GPU's; the layout asks for them
    assert problems("serving_throughput", results | {"kernels": kernels}) == []


def test_the_bound_reads_all_weights_and_each_context_once_a_step():
    step = StepRecord(0.0, 1.0, (("a", 100, 1), ("b", 0, 50)), 0, 1, 1, (), ())
    kv = 2 * 28 * 8 * 128 * 2
    assert kv == 114_688 == SHAPE.kv_bytes_per_token(2)
    assert serving_work.step_bytes(step, SHAPE, 2) == 2 * SHAPE.parameters + 151 * kv


def test_prompts_are_drawn_with_both_ends_and_the_same_each_time():
    prompts = serving_throughput.draw_prompts(400, (3, 6), 50)
    assert {len(prompt) for prompt in prompts} == {3, 4, 5, 6} and max(map(max, prompts)) == 49
    assert prompts == serving_throughput.draw_prompts(400, (3, 6), 50)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("paged_decode_kernel", "attention"),
        ("nvjet_tst_128x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("rotate_and_store_kernel", "between the products"),
        ("void at::native::reduce_kernel<512, 1>", "sampling and copies"),
    ],
)
def test_a_kernel_is_what_its_name_says(name, kind):
    assert serving_throughput.kind_of(name) == kind


def test_a_runner_that_computes_something_else_is_not_timed(monkeypatch):
    model = tiny_model()
    runner, prompts = ModelRunner(model, 40, 4), [request(f"r{i}", 5 + i).tokens for i in range(3)]
    wide = serving_work.widened(model)
    good = serving_work.logits_errors(runner, wide, prompts)
    outputs = [[int(right_logits(model, prompt)[-1].argmax())] for prompt in prompts]
    agreement = serving_work.token_agreement(wide, prompts, outputs)
    assert agreement == {"checked": 3, "equal": 3, "largest_gap": 0.0}
    serving_work.assert_right(good, agreement)
    wrong = serving_work.token_agreement(wide, prompts, [[(token + 1) % 61] for (token,) in outputs])
    with pytest.raises(AssertionError, match="a token was chosen whose float32 logit is"):
        serving_work.assert_right(good, wrong)
    compute = runner.compute
    monkeypatch.setattr(runner, "compute", lambda batch: compute(batch).roll(1, 1))
    with pytest.raises(AssertionError, match="prefill_error of the logits is"):
        serving_work.assert_right(serving_work.logits_errors(runner, wide, prompts), agreement)


@pytest.mark.slow
def test_the_peer_has_our_weights():
    pytest.importorskip("transformers", reason="a test extra: pip install -e '.[test]'")
    model = tiny_model()
    tokens = request("asked", 12).tokens
    peer = serving_peer.peer_of(model)
    theirs = peer(torch.tensor([tokens], device=model.device)).logits[0]
    torch.testing.assert_close(theirs, right_logits(model, tokens), rtol=1e-4, atol=1e-4)


# ---- batching --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batching_fills_its_schema_and_static_batches_take_more_steps_where_lengths_differ():
    results = batching.measure(
        quick=True, config=TINY, dtype=torch.float32, requests=12, prompts=(3, 9), mean=8, longest=30, max_batch=4,
        token_budget=32, loads=(0.5, 1.0),
    )  # fmt: skip
    assert problems("batching", results) == []
    equal, widest = results["spreads"]
    assert equal["variation"] == 0 and equal["mean"] == 8 and equal["steps_ratio"] <= 1.1
    assert widest["variation"] > 0.5 and widest["steps_ratio"] > 1.3
    assert widest["static"]["slots"] < widest["continuous"]["slots"]
    assert [point["rate"] for point in results["loads"]] == [results["capacity"]]
    assert "lognormal" in batching.table(results)


def test_the_spreads_have_one_mean_and_grow():
    drawn = {name: draw(np.random.default_rng(0), 20000) for name, draw in batching.spreads().items()}
    variations = [lengths.std() / lengths.mean() for lengths in drawn.values()]
    assert variations == sorted(variations) and variations[0] == 0 and variations[-1] > 0.8
    for name, lengths in drawn.items():
        assert lengths.mean() == pytest.approx(batching.MEAN, rel=0.03), name
        assert lengths.min() >= 1 and lengths.max() <= batching.LONGEST, name
