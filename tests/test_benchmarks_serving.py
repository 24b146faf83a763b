"""The benchmarks of decoding and serving without a GPU: tiny models, known times, the schemas of their records."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from serving_runs import request, right_logits, tiny_model

from benchmarks import batching, decoding, paged_attention, serving_peer, serving_throughput, serving_work, speculation
from benchmarks.benchmark_cli import problems
from benchmarks.decoding import SHAPE, random_model
from benchmarks.speculative_rounds import BatchCache, Rounds, prompts_of
from solutions.lab5_serving import ModelRunner, StepRecord
from utils import runtime
from utils.serving import ModelConfig, SamplingParams, attend_causally, generate

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


DECODED = ModelConfig("qwen3", 32, 16, 24, 2, 4, 2, 8, 64, qk_norm=True, tied_head=True)


def test_decoding_fills_its_schema_and_counts_what_a_step_must_read(known_times):
    results = decoding.measure(config=DECODED, contexts=(8, 32), batches=(1, 3), step_contexts=(8, 16), rounds=3)
    assert problems("decoding", results) == []
    assert [(s["context"], s["batch"]) for s in results["steps"]] == [(8, 1), (8, 3), (16, 1), (16, 3)]
    last = results["steps"][-1]
    assert last["bytes"] == 2 * DECODED.parameters + 3 * 16 * 2 * 2 * 2 * 8 * 2
    assert last["tokens_per_second"] == pytest.approx(3 / last["seconds"])
    assert "context x batch" in decoding.table(results)


def test_the_cached_step_of_the_benchmark_is_attention_over_its_slots():
    model = decoding.random_model(DECODED, torch.float32)
    tokens = torch.arange(12, device=runtime.DEVICE).reshape(2, 6)
    positions = torch.arange(6, device=runtime.DEVICE).expand(2, 6)
    expected = decoding.next_tokens(model, tokens, positions, decoding.attend_causally)
    cache, step = decoding.Slots(DECODED, 2, 6, torch.float32), {}

    def keep(layer, q, k, v):
        step[layer] = k.transpose(1, 2), v.transpose(1, 2)
        return decoding.attend_causally(layer, q, k, v)

    decoding.next_tokens(model, tokens, positions, keep)
    for layer, (k, v) in step.items():  # the past, and rubbish where the step's own will be
        cache.keys[layer, :, :, :-1], cache.values[layer, :, :, :-1] = k[:, :, :-1], v[:, :, :-1]
    assert torch.equal(decoding.next_tokens(model, tokens[:, -1:], positions[:, -1:], cache), expected)


def test_what_a_graph_reads_lives_as_long_as_the_graph(monkeypatch):
    monkeypatch.setattr(decoding.operator_classes, "replayed", lambda step: lambda: None)  # addresses, no tensors
    model = decoding.random_model(DECODED, torch.float32)
    step = decoding.decode_step(model, 1, 4)
    read = weakref.ref(step)
    replay = decoding.replayed(step)
    del step
    gc.collect()
    assert read() is not None
    del replay
    gc.collect()
    assert read() is None


@pytest.fixture
def small(known_times, monkeypatch):
    for name, value in {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(paged_attention, name, value)


@pytest.mark.slow
def test_paged_attention_fills_its_schema(small):
    results = paged_attention.measure(many=(2, 32), long=(1, 48), contexts=(16,), splits=(1, 3), rounds=2)
    assert problems("paged_attention", results) == []
    assert results["batched"]["bytes"] == 2 * 2 * 32 * 2 * 16 * 2
    shown = paged_attention.table(results)
    assert "2 x 32 tokens" in shown and "1 x 48" in shown


def test_what_is_timed_computes_the_same_attention(small):
    given = paged_attention.inputs((2, 40))
    gathered = given.gathered().float()
    for parts in (None, 1, 3):
        assert (given.attention(parts).float() - gathered).norm() < 1e-2 * gathered.norm()
    assert sorted(given.block_tables.flatten().tolist()) == list(range(6))


def test_the_parts_in_the_record_are_those_that_the_kernel_takes(small, monkeypatch):
    seen = []
    real = paged_attention.tuning.splits
    monkeypatch.setattr(paged_attention.tuning, "splits", lambda *args: seen.append(args) or real(*args))
    paged_attention.inputs((1, 40)).attention()
    paged_attention.chosen_splits((1, 40))
    assert seen[0] == seen[1]


DRAFTED = ModelConfig("qwen3", 4096, 16, 24, 2, 4, 2, 8, 64, qk_norm=True, tied_head=True)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    target = random_model(DRAFTED, torch.float32)
    draft = random_model(DRAFTED, torch.float32)
    draft.load_state_dict({n: w + 0.002 * torch.randn_like(w) for n, w in target.state_dict().items()})
    return target, draft


def test_speculation_fills_its_schema_and_counts_speed_by_what_was_accepted(pair, known_times, monkeypatch):
    monkeypatch.setattr(speculation, "WAYS", {"temperature 1": SamplingParams(temperature=1.0)})
    known, count = [], Rounds.count
    monkeypatch.setattr(Rounds, "count", lambda self, *args: known.append(int(self.length.max())) or count(self, *args))
    results = speculation.measure(
        drafts=(0, 2), batches=(1, 3), counted=4, shapes={"tiny": DRAFTED}, pass_batches=(2,), pass_tokens=(1, 3),
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
    expected, cache = attend_causally(0, q, k, v), BatchCache(DRAFTED, 2, 16, torch.float32)
    positions = torch.arange(7, device=runtime.DEVICE).expand(2, -1)
    torch.testing.assert_close(cache.at(positions[:, :5])(0, q[:, :5], k[:, :5], v[:, :5]), expected[:, :5])
    torch.testing.assert_close(cache.at(positions[:, 5:])(0, q[:, 5:], k[:, 5:], v[:, 5:]), expected[:, 5:])
