"""The benchmarks of lectures 16 to 18 on two GPUs without a GPU: two ranks on the CPU, tiny sizes, their schemas."""

from __future__ import annotations

import pytest
import torch

from benchmarks import benchmark_cli, context_parallel, expert_parallel, ranks, tensor_parallel_serving
from benchmarks.benchmark_cli import problems
from solutions.lab6_frontiers.mixture_of_experts import MoEConfig
from utils import runtime
from utils.distributed import DistributedError
from utils.serving import ModelConfig

TINY = ModelConfig("llama", 97, 48, 80, 2, 4, 2, 16, 256)


@pytest.mark.slow
def test_a_sequence_on_two_ranks_sends_and_keeps_what_the_formulas_say():
    results = context_parallel.measure(config=TINY, tokens=(16, 32), checked=24, rounds=2)
    assert problems("context_parallel", results) == []
    assert [point["tokens"] for point in results["points"]] == [16, 32]
    for point in results["points"]:
        for way, formula in point["formula_bytes"].items():
            assert point["sent_bytes"][way] == [formula, formula], way
        assert [of_pass["pass"] for of_pass in point["passes"]] == ["forward", "forward and backward"]
        assert set(point["passes"][0]["timed"]) == {"one GPU", "ring", "all-to-all"}
    one, two = results["memory"]
    assert one["kept_bytes"] == one["formula_bytes"] == 2 * two["kept_bytes"] and two["memory_ratio"] == 1
    assert "2 ranks:" in context_parallel.table(results)


@pytest.mark.slow
def test_a_layer_of_experts_on_two_ranks_fills_its_schema_and_counts_what_it_sends():
    layers = {"tiny": (MoEConfig(hidden=32, inner=16, experts=4, chosen=2, balance="none"), 8)}
    results = expert_parallel.measure(layers=layers, checked=8, warmup=1, rounds=2)
    assert problems("expert_parallel", results) == []
    (layer,) = results["layers"]
    assert layer["parameters"] == 4 * 3 * 32 * 16 + 32 * 4
    first, second = layer["sent_bytes"]
    assert first == second  # what one sends out comes back from the other, in each pass
    rows = (first - 2 * 8) / (2 * 64)  # less the counts of two experts; rows of 64 bytes, in two passes
    assert rows == int(rows) and 0 < rows < 2 * 16
    assert "tiny, forward and backward" in expert_parallel.table(results)


@pytest.mark.slow
def test_a_model_on_two_ranks_says_what_one_says_and_fills_its_schema():
    results = tensor_parallel_serving.measure(
        quick=True, config=TINY, small=TINY, requests=4, lengths=(3, 20), new_tokens=5, token_budget=128,
        one_graphs=True,
    )  # fmt: skip
    assert problems("tensor_parallel_serving", results) == []
    assert results["graphs"] == tensor_parallel_serving.GRAPHS
    asked = results["tokens"]["requests"]
    assert results["tokens"]["same"] == dict.fromkeys(tensor_parallel_serving.PAIRS, asked)
    assert list(results["engines"]) == [
        "one GPU", "one GPU, overlapped", "two GPUs, launched", "two GPUs", "two GPUs, overlapped",
    ]  # fmt: skip
    assert set(results["replayed"]) == {"one GPU", "two GPUs"}
    assert results["step_sent_bytes"] == 2 * TINY.num_layers * 4 * TINY.hidden_size * 2
    assert "two GPUs, overlapped over one GPU, overlapped" in tensor_parallel_serving.table(results)


def test_a_time_without_two_whole_decode_steps_is_refused():
    with pytest.raises(AssertionError, match="only 0 decode steps have all 3 requests"):
        tensor_parallel_serving.decode_seconds(tensor_parallel_serving.serving_work.Run([], 1.0, []), 3)


def test_too_few_gpus_and_ranks_that_fail_end_in_a_message(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    arguments = ("expert_parallel", expert_parallel.measure, str, expert_parallel.SCHEMA, ["--quick"])
    assert ranks.run_on(2, *arguments) == 1
    assert "measuring needs 2 GPUs in one machine and this one has 1" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def fail(*_):
        raise DistributedError("rank 1 of 2 raised", rank=1)

    monkeypatch.setattr(benchmark_cli, "run", fail)
    assert ranks.run_on(2, *arguments) == 1
    assert "nothing is recorded, because the ranks failed:\nrank 1 of 2 raised" in capsys.readouterr().out
