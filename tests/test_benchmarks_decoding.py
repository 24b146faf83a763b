"""The benchmark of lecture 10 without a GPU: a tiny model, known times, the schema of its record."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from fake_stopwatch import FakeStopwatch

from benchmarks import decoding
from benchmarks.benchmark_cli import problems
from utils import runtime, timing
from utils.serving import ModelConfig

TINY = ModelConfig("qwen3", 32, 16, 24, 2, 4, 2, 8, 64, qk_norm=True, tied_head=True)


def test_decoding_fills_its_schema_and_counts_what_a_step_must_read(monkeypatch):
    monkeypatch.setattr(timing, "cuda_stopwatch", FakeStopwatch)
    results = decoding.measure(config=TINY, contexts=(8, 32), batches=(1, 3), step_contexts=(8, 16), rounds=3)
    assert problems("decoding", results) == []
    assert [(s["context"], s["batch"]) for s in results["steps"]] == [(8, 1), (8, 3), (16, 1), (16, 3)]
    last = results["steps"][-1]
    assert last["bytes"] == 2 * TINY.parameters + 3 * 16 * 2 * 2 * 2 * 8 * 2
    assert last["tokens_per_second"] == pytest.approx(3 / last["seconds"])
    assert "context x batch" in decoding.table(results)


def test_the_cached_step_of_the_benchmark_is_attention_over_its_slots():
    model = decoding.random_model(TINY, torch.float32)
    tokens = torch.arange(12, device=runtime.DEVICE).reshape(2, 6)
    positions = torch.arange(6, device=runtime.DEVICE).expand(2, 6)
    expected = decoding.next_tokens(model, tokens, positions, decoding.attend_causally)
    cache, step = decoding.Slots(TINY, 2, 6, torch.float32), {}

    def keep(layer, q, k, v):
        step[layer] = k.transpose(1, 2), v.transpose(1, 2)
        return decoding.attend_causally(layer, q, k, v)

    decoding.next_tokens(model, tokens, positions, keep)
    for layer, (k, v) in step.items():  # the past, and rubbish where the step's own will be
        cache.keys[layer, :, :, :-1], cache.values[layer, :, :, :-1] = k[:, :, :-1], v[:, :, :-1]
    assert torch.equal(decoding.next_tokens(model, tokens[:, -1:], positions[:, -1:], cache), expected)


def test_the_parameters_of_the_measured_shape_are_those_of_qwen3():
    assert decoding.SHAPE.parameters == 596_049_920


def test_what_a_graph_reads_lives_as_long_as_the_graph(monkeypatch):
    monkeypatch.setattr(decoding.operator_classes, "replayed", lambda step: lambda: None)  # addresses, no tensors
    model = decoding.random_model(TINY, torch.float32)
    step = decoding.decode_step(model, 1, 4)
    read = weakref.ref(step)
    replay = decoding.replayed(step)
    del step
    gc.collect()
    assert read() is not None
    del replay
    gc.collect()
    assert read() is None
