"""The benchmark of lecture 13 without a GPU: tiny models, known times, the schema of its record."""

from __future__ import annotations

import pytest
import torch
from fake_stopwatch import FakeStopwatch

from benchmarks import speculation
from benchmarks.benchmark_cli import problems
from benchmarks.decoding import random_model
from benchmarks.speculative_rounds import BatchCache, Rounds, prompts_of
from utils import runtime, timing
from utils.serving import ModelConfig, SamplingParams, attend_causally, generate

TINY = ModelConfig("qwen3", 4096, 16, 24, 2, 4, 2, 8, 64, qk_norm=True, tied_head=True)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    target = random_model(TINY, torch.float32)
    draft = random_model(TINY, torch.float32)
    draft.load_state_dict({n: w + 0.002 * torch.randn_like(w) for n, w in target.state_dict().items()})
    return target, draft


def test_speculation_fills_its_schema_and_counts_speed_by_what_was_accepted(pair, monkeypatch):
    monkeypatch.setattr(timing, "cuda_stopwatch", FakeStopwatch)
    monkeypatch.setattr(speculation, "WAYS", {"temperature 1": SamplingParams(temperature=1.0)})
    known, count = [], Rounds.count
    monkeypatch.setattr(Rounds, "count", lambda self, *args: known.append(int(self.length.max())) or count(self, *args))
    results = speculation.measure(
        drafts=(0, 2), batches=(1, 3), counted=4, shapes={"tiny": TINY}, pass_batches=(2,), pass_tokens=(1, 3),
        context=16, pair=pair, rounds=3,
    )  # fmt: skip
    assert problems("speculation", results) == []
    plain, drafting = results["acceptance"]["temperature 1"]
    assert (plain["tokens_per_round"], plain["accepted"]) == (1.0, {})
    assert drafting["tokens_per_round"] == pytest.approx(1 + sum(drafting["accepted"].values()))
    played = runtime.pick(cpu=0, gpu=3)  # rounds before a graph is captured: each writes one token to three
    for k, length, found in zip((0, 2), known, (plain, drafting), strict=True):
        assert 12 + played <= length <= 12 + played * (k + 1)
        assert found["rounds"] == 4 * ((64 - length) // (k + 1))
    first, second = results["rounds"][:2]
    assert second["tokens_per_second"] == pytest.approx(drafting["tokens_per_round"] / second["seconds"])
    assert first["ratio"] == 1.0 and [p["tokens"] for p in results["passes"]] == [1, 3]
    assert "tokens a round" in speculation.table(results)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_greedy_rounds_of_a_batch_write_what_the_target_writes_alone(pair, k):
    target, draft = pair
    prompts = prompts_of([[5, 6, 7, 8, 9], [100, 200, 300, 400], [9, 9, 9, 9]], 3, 4)
    rounds = Rounds(target, draft, prompts, k, SamplingParams())
    accepted = rounds.count(10)
    assert torch.equal(rounds.length.cpu(), (4 + 10 + accepted.sum(0)).cpu())
    for row, prompt in enumerate(prompts.tolist()):
        known = int(rounds.length[row])
        expected = generate(target, prompt, SamplingParams(max_new_tokens=known - 4))
        assert rounds.text[row, 4:known].tolist() == expected.tokens
    if k:
        assert 0 < int(accepted.sum()) < 30 * k


def test_the_cache_of_a_batch_is_causal_attention_over_each_sequence():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 7, heads, 8, generator=generator).to(runtime.DEVICE) for heads in (4, 2, 2))
    expected, cache = attend_causally(0, q, k, v), BatchCache(TINY, 2, 16, torch.float32)
    positions = torch.arange(7, device=runtime.DEVICE).expand(2, -1)
    torch.testing.assert_close(cache.at(positions[:, :5])(0, q[:, :5], k[:, :5], v[:, :5]), expected[:, :5])
    torch.testing.assert_close(cache.at(positions[:, 5:])(0, q[:, 5:], k[:, 5:], v[:, 5:]), expected[:, 5:])


def test_a_text_that_is_too_short_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 4 tokens, got one of 2"):
        prompts_of([[1, 2, 3, 4], [1, 2]], 2, 4)
