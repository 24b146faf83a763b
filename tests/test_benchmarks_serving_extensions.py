"""The benchmarks of lecture 18's extensions and of the engine in few bits: tiny models and made-up traces on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_idle, low_bit_serving, overlapped_serving, shared_prefix
from benchmarks.benchmark_cli import problems
from utils.serving import ModelConfig

TINY = ModelConfig("qwen3", 97, 48, 80, 1, 4, 2, 16, 256, qk_norm=True, tied_head=True)
#: Layers of 4 bits have inputs in groups of 128.
WIDE = ModelConfig("qwen3", 97, 128, 128, 1, 8, 2, 16, 256, qk_norm=True, tied_head=True)
IDLE = {"steps": 4, "seconds": 0.04, "busy": 0.03, "between": 0.008, "within": 0.002}


def with_idle(results):
    """The results with what only a GPU's trace holds, which is None without one."""
    engines = {name: found | {"idle": found["idle"] or IDLE} for name, found in results["engines"].items()}
    return results | {"engines": engines}


# ---- idle time -------------------------------------------------------------------------------------------------------


def event(name, start, duration):
    return {"name": name, "ts": start, "dur": duration}


def test_idle_time_is_told_apart_by_whether_it_lies_at_the_copy_that_begins_a_step():
    events = [
        event("leftover", 0, 5), event("Memcpy HtoD (Pinned -> Device)", 10, 1), event("a", 14, 6), event("b", 22, 8),
        event("Memcpy DtoH", 30, 1), event("Memcpy HtoD (Pinned -> Device)", 41, 1), event("a", 42, 8),
        event("Memcpy HtoD (Pinned -> Device)", 50, 1), event("a", 51, 3),
    ]  # fmt: skip
    found = gpu_idle.of(events)
    assert found["steps"] == 2
    for name, microseconds in (("seconds", 40), ("between", 3 + 10), ("within", 2), ("busy", 25)):
        assert found[name] == pytest.approx(microseconds * 1e-6), name


def test_kernels_that_run_side_by_side_are_not_counted_twice():
    events = [event("HtoD", 0, 1), event("a", 1, 10), event("b", 3, 4), event("c", 12, 2), event("HtoD", 14, 1)]
    found = gpu_idle.of(events)
    assert found["within"] == pytest.approx(1e-6) and found["busy"] == pytest.approx(13e-6)


def test_a_trace_without_two_steps_is_refused():
    with pytest.raises(ValueError, match="the beginnings of two steps at least, got 1"):
        gpu_idle.of([event("HtoD", 0, 1), event("a", 1, 10)])


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_engines_serve_the_same_tokens_and_fill_the_schema():
    results = overlapped_serving.measure(
        config=TINY, dtype=torch.float32, requests=5, lengths=(3, 20), new_tokens=6, token_budget=16, runs=2,
        settings={"cuda_graphs": True},
    )  # fmt: skip
    assert results["same"] == 5 and results["tokens"]["equal"] == results["tokens"]["checked"] == 30
    for found in results["engines"].values():
        assert found["of_bound"]["peak"] == pytest.approx(results["bound_seconds"]["peak"] / found["seconds"])
        assert found["decode"]["steps"] + found["mixed"]["steps"] == found["steps"]
    assert problems("overlapped_serving", with_idle(results)) == []
    assert "5 of 5 requests got the same tokens" in overlapped_serving.table(with_idle(results))


@pytest.mark.slow
def test_a_common_beginning_is_shared_in_every_decode_step_and_its_bytes_are_counted_once():
    results = shared_prefix.measure(
        config=TINY, dtype=torch.float32, requests=5, common=32, own=(2, 9), new_tokens=5, token_budget=64, runs=1,
        settings={"cuda_graphs": True}, min_saved=1,
    )  # fmt: skip
    assert results["same"] == 5
    steps = 4  # after the step of all prompts
    saved = steps * 4 * 32 * TINY.kv_bytes_per_token(4)
    assert results["bytes"]["separately"] - results["bytes"]["once"] == saved
    assert results["shared_steps"] == (1 + 1) * steps + runtime_steps(results)
    assert problems("shared_prefix", with_idle(results)) == []


def runtime_steps(results):
    """Shared steps of the engine whose idle time is traced, on a GPU only."""
    return 4 if results["engines"]["once"]["idle"] else 0


@pytest.mark.slow
def test_few_bits_are_compared_with_the_same_engine_in_bf16():
    results = low_bit_serving.measure(
        config=WIDE, requests=4, lengths=(3, 12), new_tokens=4, token_budget=16, runs=1,
        names=("bf16", "int4 weights", "int4 and fp8"),
    )  # fmt: skip
    assert set(results["gain"]) == {"int4 weights", "int4 and fp8"}
    errors = results["errors"]
    assert errors["int4 and fp8"]["decode_error"] > errors["int4 weights"]["decode_error"]
    assert problems("low_bit_serving", with_idle(results)) == []
    assert "times bf16's tokens per second" in low_bit_serving.table(with_idle(results))


def test_rounded_weights_are_those_that_the_runner_multiplies_by():
    from benchmarks.decoding import random_model
    from solutions.lab6_frontiers import LowBitRunner

    runner = LowBitRunner(random_model(WIDE, torch.bfloat16), 8, weights="int4")
    wide = low_bit_serving.rounded(runner.model)
    weight = runner.model.layers[0].mlp.up_proj.weight.packed.dequantize()
    assert torch.equal(wide.layers[0].mlp.up_proj.weight, weight)
    assert wide.lm_head.weight is wide.embed_tokens.weight


def test_logits_that_are_further_off_than_allowed_are_not_timed(monkeypatch):
    from benchmarks.decoding import random_model
    from solutions.lab5_serving import ModelRunner

    runner, prompts = ModelRunner(random_model(TINY, torch.float32), 16), [[3, 4, 5], [6, 7]]
    low_bit_serving.errors(runner, prompts)
    compute = runner.compute
    monkeypatch.setattr(runner, "compute", lambda batch: compute(batch).roll(1, 1))
    with pytest.raises(AssertionError, match="prefill_error of the logits is"):
        low_bit_serving.errors(runner, prompts)
