"""The benchmark of paged attention without a GPU: small sizes, known times, the schema of its record."""

from __future__ import annotations

import pytest
import torch
from fake_stopwatch import FakeStopwatch

from benchmarks import blocked_stream, paged_attention
from benchmarks.benchmark_cli import problems


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocked_stream, "stopwatch", FakeStopwatch)
    for name, value in {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(paged_attention, name, value)


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


def test_the_copy_moves_the_bytes_that_it_is_held_against():
    call = paged_attention.copy_call(64)
    assert call().numel() == 32 and call().dtype == torch.uint8


def test_the_parts_in_the_record_are_those_that_the_kernel_takes(small, monkeypatch):
    seen = []
    real = paged_attention.tuning.splits
    monkeypatch.setattr(paged_attention.tuning, "splits", lambda *args: seen.append(args) or real(*args))
    paged_attention.inputs((1, 40)).attention()
    paged_attention.chosen_splits((1, 40))
    assert seen[0] == seen[1]
