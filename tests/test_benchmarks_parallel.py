"""The benchmarks on several GPUs without a GPU: two ranks on the CPU, a tiny model, the schemas of their records."""

from __future__ import annotations

import pytest
import torch

from benchmarks import benchmark_cli, collectives, model_parallel, overlap, parallel_training, ranks
from benchmarks.benchmark_cli import problems
from utils import gpt, runtime, timing
from utils.distributed import calls
from utils.transformer_math import ring_volume

#: Two ranks share everything in it evenly, so that what is sent is the formulas' to the element.
CONFIG = gpt.GPTConfig(vocabulary=64, context=16, layers=4, heads=4, hidden=32, tied=False, frozen_positions=False)


# ---- two ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_parallel_training_fills_its_schema_and_sends_and_keeps_what_the_formulas_say():
    results = parallel_training.measure(
        world_sizes=[2], config=CONFIG, shallow=CONFIG, rows=2, warmup=1, rounds=2, overlap_rounds=2
    )
    assert problems("parallel_training", results) == []
    (point,) = results["points"]
    assert point["world_size"] == 2 and set(point["ratios"]) == {"ddp", "zero3"}
    methods = {method["name"]: method for method in point["methods"]}
    assert list(methods) == ["ddp", "torch ddp", "zero1", "zero2", "zero3", "torch fully_shard"]
    for name in ("ddp", "torch ddp", "zero1", "zero2", "zero3"):
        assert methods[name]["sent_elements"] == methods[name]["formula_elements"], name
    assert set(methods["zero2"]["collectives"]) == {"reduce_scatter", "all_gather"}
    for name, method in methods.items():  # on a CPU the state alone is seen, not the activations
        assert method["peak_bytes"] == pytest.approx(method["formula_bytes"], rel=0.01), name
    dropped = methods["zero3"]["peak_bytes"] - methods["zero3"]["peak_dropped_bytes"]
    assert dropped == pytest.approx(4 * results["model"]["parameters"] / 2, rel=0.01)  # fp32 gradients of a shard
    assert list(point["overlap"]) == ["ddp", "reduced afterwards", "not reduced", "all-reduces alone"]
    text = parallel_training.table(results)
    assert "2 x torch fully_shard" in text and "ours over PyTorch's: ddp" in text


@pytest.mark.slow
def test_cut_models_fill_their_schema_and_1f1b_holds_fewer_micro_batches_than_gpipe():
    results = model_parallel.measure(
        world_sizes=[2], config=CONFIG, rows=2, micro_batches_a_stage=(1, 2), warmup=1, rounds=2
    )
    assert problems("model_parallel", results) == []
    points = {model_parallel.name_of(point): point for point in results["points"]}
    assert len(points) == len(results["points"]) == 6
    assert points["data"]["ratio"] == 1
    assert points["gpipe, 4 micro-batches"]["in_flight"] == [4, 4]
    assert points["1f1b, 4 micro-batches"]["in_flight"] == [2, 1]
    whole = results["model"]["parameters"]
    assert points["data"]["parameters"] == [whole, whole]
    assert sum(points["gpipe, 2 micro-batches"]["parameters"]) == whole
    assert all(whole / 2 < mine < whole for mine in points["tensor"]["parameters"])
    activation = 4 * CONFIG.context * CONFIG.hidden  # a batch of 4 rows
    assert points["tensor"]["sent_elements"] == [ring_volume("all_reduce", 4 * CONFIG.layers * activation, 2)] * 2
    assert points["1f1b, 4 micro-batches"]["sent_elements"] == [activation, activation]
    assert "1f1b, 4 micro-batches" in model_parallel.table(results)


@pytest.mark.slow
def test_collectives_fill_their_schema_and_agree_with_the_backends():
    results = collectives.measure(world_sizes=[2], sizes=(256, 4096), warmup=1, rounds=2)
    assert problems("collectives", results) == []
    assert [(p["kind"], p["bytes"]) for p in results["points"]] == [
        (kind, size) for kind in collectives.KINDS for size in (256, 4096)
    ]
    first = results["points"][0]
    assert first["sent_bytes"] == 256 and first["calls_a_lap"] == collectives.MOST_CALLS
    assert first["timed"]["ours"]["bus_bytes_per_second"] == pytest.approx(256 / first["timed"]["ours"]["seconds"])
    assert "2 x reduce_scatter" in collectives.table(results)


# ---- what the ranks share --------------------------------------------------------------------------------------------


def test_a_round_takes_as_long_as_on_the_slowest_rank():
    timed = ranks.slowest([{"a": (1.0, 2.0, 9.0)}, {"a": (3.0, 1.0, 4.0)}])
    assert timed["a"].samples == (3.0, 2.0, 9.0) and timed["a"].median == 3.0


def test_a_record_needs_as_many_gpus_as_the_largest_world(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    measured = []
    monkeypatch.setattr(benchmark_cli, "run", lambda *a: measured.append(a) or 0)
    assert ranks.run("collectives", lambda quick: {}, str, collectives.SCHEMA, []) == 1
    assert "a record needs 4 GPUs in one machine and this one has 2" in capsys.readouterr().out
    assert not measured
    assert ranks.run("collectives", lambda quick: {}, str, collectives.SCHEMA, ["--quick"]) == 0
    assert ranks.world_sizes() == [2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks.run("collectives", lambda quick: {}, str, collectives.SCHEMA, []) == 0
    assert ranks.world_sizes() == [2, 4]
    assert len(measured) == 2


def test_no_listener_hears_what_is_timed():
    heard = []
    with calls.listen(heard.append):
        with calls.unobserved():
            assert calls._listeners == []
            samples = ranks.compare({"a": lambda: None, "b": lambda: None}, warmup=1, rounds=3)
        assert calls._listeners == [heard.append]
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}
    assert all(time > 0 for time in samples["a"])


@pytest.mark.slow
def test_a_tensor_counts_as_memory_once_however_many_look_into_it():
    before = ranks.allocated()
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100)]
    assert ranks.allocated() - before == 4000
    assert len(views) == 2


# ---- the timeline ----------------------------------------------------------------------------------------------------


def event(cat, name, ts, dur, correlation=None):
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def launch_of(number, launched, name, start, duration):
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, 1, number),
        event("kernel", name, start, duration, number),
    ]


STEP = [
    event("user_annotation", "forward", 1, 5),  # of a step before
    *launch_of(1, 2, "gemm", 3, 4),
    event("user_annotation", "measured step", 100, 100),
    event("user_annotation", "forward", 101, 9),
    event("user_annotation", "backward", 111, 29),
    event("user_annotation", "optimizer", 141, 9),
    *launch_of(2, 102, "gemm", 200, 50),
    *launch_of(3, 103, "void gelu<4>(int)", 252, 8),
    *launch_of(4, 112, "gemm", 261, 39),
    *launch_of(5, 120, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300, 60),
    *launch_of(6, 130, "gemm", 302, 20),
    *launch_of(7, 131, "gemm", 400, 10),
    *launch_of(8, 145, "adamw", 411, 20),
    *launch_of(9, 160, "fill", 432, 3),
    *launch_of(10, 250, "of the next step", 500, 3),
]


def test_a_steps_kernels_become_spans_by_phase_and_collectives_stand_alone():
    found = overlap.spans(STEP)
    assert [(s["lane"], s["phase"], s["name"], s["kernels"]) for s in found] == [
        ("compute", "forward", "gemm", 2),
        ("compute", "backward", "gemm", 2),
        ("communication", "backward", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1),
        ("compute", "backward", "gemm", 1),
        ("compute", "optimizer", "adamw", 2),
    ]
    assert [(s["start"], s["end"]) for s in found] == [
        pytest.approx(pair)
        for pair in ((0, 60e-6), (61e-6, 122e-6), (100e-6, 160e-6), (200e-6, 210e-6), (211e-6, 235e-6))
    ]
    lanes = {lane: [s for s in found if s["lane"] == lane] for lane in ("compute", "communication")}
    assert overlap.covered(lanes["communication"], lanes["compute"]) == pytest.approx(22e-6)


def test_a_ratio_above_one_means_that_ours_takes_longer():
    timed = {"ours": timing.summarize([2.0, 4.0]), "nccl": timing.summarize([1.0, 2.0])}
    assert timing.ratio(timed["ours"], timed["nccl"]).median == 2
    samples = {"ours": (2.0, 4.0), "nccl": (1.0, 2.0)}
    found = collectives.point(4, [{"kind": "all_reduce", "size": 1000, "calls": 1, "samples": samples}] * 4)
    assert found["ratio"] == 2 and found["sent_bytes"] == 1500
    assert found["timed"]["nccl"]["bus_bytes_per_second"] == 1000
