"""Lab 2's benchmarks without a GPU: each runs on small sizes, with known times, and fills its record's schema."""

from __future__ import annotations

import pytest
from fake_stopwatch import FakeStopwatch

from benchmarks import blocked_stream, fused_operators, gemm, kernel_errors
from benchmarks.benchmark_cli import problems
from utils import runtime, timing


@pytest.fixture
def known_times(monkeypatch):
    monkeypatch.setattr(blocked_stream, "stopwatch", FakeStopwatch)
    monkeypatch.setattr(fused_operators, "_compiled", lambda function: function)


@pytest.mark.slow
def test_fused_operators_fill_their_schema_and_cover_what_the_lab_promises(known_times, monkeypatch):
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
    def compare(calls, **options):
        return {name: timing.summarize([2e-6 if name == "copy" else 1e-6] * 3) for name in calls}

    monkeypatch.setattr(timing, "compare", compare)
    case = next(case for case in fused_operators.cases(1 << 10, 64, ()) if case.name == "weighted_sum")
    point = fused_operators.point(case, lambda: None, copy_bytes=4 << 10, rounds=3)
    # half the time for a quarter of the bytes read and none written: (n + columns + rows) * 2 of 4n bytes
    assert point["of_copy"]["ratio"] == pytest.approx(2 * case.moved * 2 / (4 << 10))
    assert point["of_peer"]["torch"]["ratio"] == pytest.approx(1)


def test_products_fill_their_schema(known_times):
    results = gemm.measure(sizes=[16])
    assert problems("gemm", results) == []
    assert {point["layout"] for point in results["points"]} == set(gemm.LAYOUTS)
    assert "pointers, grouped" in gemm.table(results)


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


def test_the_head_start_needs_a_gpu_and_says_so(monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="timing needs a CUDA GPU"):
        blocked_stream.BlockedStreamTimer()
