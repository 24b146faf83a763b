"""The benchmarks behind the Triton lecture and lab 2 without a GPU: small sizes, known times, filled schemas."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from benchmarks import fused_operators, gemm, kernel_errors, profiler_truth, tile_order, tuning, weight_gradient
from benchmarks.benchmark_cli import problems
from utils import runtime, timing
from utils.kernel_profile import profile_kernel

# ---- tuning ----------------------------------------------------------------------------------------------------------


def test_tuning_fills_its_schema(known_times):
    tiles = [(16, 16, 16, 4, 4, 1), (16, 32, 16, 4, 4, 1)]
    results = tuning.measure(quick=True, shapes={"tiny": (16, 32, 16)}, tiles=tiles, rows={128: 2}, gelu_elements=1000)
    assert problems("tuning", results) == []
    assert [point["tile"] for point in results["matmul"][0]["points"]] == [list(tile) for tile in tiles]
    assert results["softmax"][0]["bytes_per_second"] == pytest.approx(4 * 2 * 128 / results["softmax"][0]["seconds"])
    assert "matmul tiny, best" in tuning.table(results)


def test_a_configuration_that_the_gpu_refuses_is_a_result_and_any_other_error_is_not(known_times):
    class OutOfResources(Exception):
        pass

    def refuse():
        raise OutOfResources("out of resource: shared memory\nReducing block sizes may help")

    found, refused = tuning._sweep({"good": lambda: None, "large": refuse}, rounds=2)
    assert list(found) == ["good"] and refused == {"large": "out of resource: shared memory"}

    def fail():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        tuning._sweep({"bad": fail}, rounds=2)


def test_resources_come_from_what_a_launch_returns():
    class Metadata:
        shared = 4096

    class Compiled:
        n_regs, n_spills, metadata = 40, 2, Metadata()

    assert tuning.resources(Compiled()) == {"registers": 40, "spills": 2, "shared_bytes": 4096}
    assert tuning.resources(None) == {"registers": 0, "spills": 0, "shared_bytes": 0}


def test_the_best_point_is_the_fastest():
    assert tuning.best([{"seconds": 2.0}, {"seconds": 1.0}]) == {"seconds": 1.0}


# ---- tile order ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tile_order_fills_its_schema(known_times, monkeypatch):
    sectors = dict.fromkeys(tile_order.NAMES, 7)
    monkeypatch.setattr(
        tile_order, "counters", lambda sizes, groups: {(n, group): sectors for n in sizes for group in groups}
    )
    monkeypatch.setattr(tile_order, "TILE", (16, 16, 16, 4, 1))
    results = tile_order.measure(sizes=[32], groups=(1, 2))
    assert problems("tile_order", results) == []
    assert [(p["n"], p["group"], p["dram_sectors_read"]) for p in results["points"]] == [(32, 1, 7), (32, 2, 7)]
    assert "MB from HBM" in tile_order.table(results)


def test_every_order_computes_the_same_product(monkeypatch):
    monkeypatch.setattr(tile_order, "TILE", (16, 16, 16, 4, 1))
    first, *others = (call() for call in tile_order.products(48, (1, 2, 128)).values())
    for other in others:
        assert torch.equal(first, other)


def test_counters_of_the_order_are_asked_of_ncu_product_by_product(monkeypatch):
    rows = ['"ID","Kernel Name","Metric Name","Metric Value"']
    for launch, (metric, base) in itertools.product(range(2), zip(tile_order.METRICS, (100, 200, 300), strict=True)):
        rows.append(f'"{launch}","tiled_matmul_kernel","{metric}","{base + launch}"')
    asked = []

    def run(command, **options):
        asked.append(command)
        return type("Done", (), {"returncode": 0, "stdout": "\n".join(rows), "stderr": ""})()

    monkeypatch.setattr(profiler_truth, "nsight_compute", lambda: "ncu")
    monkeypatch.setattr(tile_order.subprocess, "run", run)
    found = tile_order.counters([64], (1, 8))
    assert found[64, 8] == {"dram_sectors_read": 101, "l2_sectors_read": 201, "l1_sectors_received": 301}
    assert asked[0][0] == "ncu" and asked[0][-4:] == ["64", "--groups", "1", "8"]
    assert sys.executable in asked[0]


def test_counters_that_fail_say_what_ncu_said(monkeypatch):
    done = type("Done", (), {"returncode": 1, "stdout": "", "stderr": "==ERROR== no permission"})()
    monkeypatch.setattr(profiler_truth, "nsight_compute", lambda: "ncu")
    monkeypatch.setattr(tile_order.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(RuntimeError, match="no permission"):
        tile_order.counters([64], (1,))


# ---- weight gradient -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_weight_gradient_fills_its_schema(known_times):
    results = weight_gradient.measure(shapes=[(70, 130)], taken=(32, 64), repeats=3)
    assert problems("weight_gradient", results) == []
    assert [p["programs_per_element"] for p in results["points"]] == [3, 2, 3, 2]
    assert all(p["distinct_results"] == 1 for p in results["points"] if p["method"] == "two stages")
    assert "atomics, 70 x 130" in weight_gradient.table(results)


@pytest.mark.parametrize("method", weight_gradient.METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_methods_add_up_the_columns(method, dtype):
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(83, generator=generator).to(dtype).to(runtime.DEVICE)
    x = torch.randn(83, 150, generator=generator).to(dtype).to(runtime.DEVICE)
    with profile_kernel() as profile:
        found = weight_gradient.METHODS[method](grad, x, 32)
    expected = (grad.double()[:, None] * x.double()).sum(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert profile.findings == []


def test_results_are_distinct_when_their_bits_are():
    values = iter([1.0, 1.0, 2.0])
    assert weight_gradient.distinct_results(lambda: torch.tensor([next(values)]), 3) == 2


@pytest.mark.slow
def test_fused_operators_fill_their_schema_and_cover_what_the_lab_promises(known_times, monkeypatch):
    monkeypatch.setattr(fused_operators, "_compiled", lambda function: function)
    monkeypatch.setattr(fused_operators, "COLUMNS", 64)
    results = fused_operators.measure(elements=1 << 10, columns=64, softmax_columns=(16, 128))
    assert problems("fused_operators", results) == []
    found = {(point["name"], point["direction"]) for point in results["points"]}
    assert {
        ("weighted_sum", "forward"),
        ("weighted_sum", "backward"),
        ("online softmax, rows of 128", "forward"),
    } < found
    assert "bias_relu backward" in fused_operators.table(results)


def test_a_ratio_to_the_copy_compares_rates_not_times(known_times, monkeypatch):
    monkeypatch.setattr(fused_operators, "_compiled", lambda function: function)

    def compare(calls, **options):
        return {name: timing.summarize([2e-6 if name == "copy" else 1e-6] * 3) for name in calls}

    monkeypatch.setattr(timing, "compare", compare)
    case = next(case for case in fused_operators.cases(1 << 10, 64, ()) if case.name == "weighted_sum")
    point = fused_operators.point(case, lambda: None, copy_bytes=4 << 10, rounds=3)
    # half the time for a quarter of the bytes read and none written: (n + columns + rows) * 2 of 4n bytes
    assert point["of_copy"]["ratio"] == pytest.approx(2 * case.moved * 2 / (4 << 10))
    assert point["of_peer"]["torch"]["ratio"] == pytest.approx(1)


@pytest.mark.slow
def test_products_fill_their_schema(known_times):
    results = gemm.measure(sizes=[16])
    assert problems("gemm", results) == []
    assert {point["layout"] for point in results["points"]} == set(gemm.LAYOUTS)
    assert "pointers, grouped" in gemm.table(results)


@pytest.mark.slow
def test_errors_fill_their_schema_and_stay_within_what_pytorch_errs():
    results = kernel_errors.measure(count=2 * len(kernel_errors.OPERATORS), largest=120, elements=1 << 14, workers=1)
    assert problems("kernel_errors", results) == []
    assert all(kernel_errors.within(point) for point in (*results["points"], *results["large"]))
    assert "online_softmax" in kernel_errors.table(results)


def test_a_case_of_the_error_benchmark_is_the_same_on_every_run():
    assert kernel_errors.case(3, 50) == kernel_errors.case(3, 50)
    assert kernel_errors.case(3, 50) != kernel_errors.case(14, 50)


def test_an_error_beyond_what_is_allowed_is_counted(monkeypatch):
    spoiled = dict(kernel_errors.OPERATORS)
    ours, plain, kind = spoiled["gelu"]
    spoiled["gelu"] = (lambda x: ours(x) + 0.1, plain, kind)
    monkeypatch.setattr(kernel_errors, "OPERATORS", spoiled)
    point = kernel_errors.case(0, 50)
    assert not kernel_errors.within(point) and point["error"] > 0.09
    assert " 1" in kernel_errors.table({"points": [point], "large": []}).splitlines()[-1]
