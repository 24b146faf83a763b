"""The reading of what holds the capstone's kernels, without a GPU: reports, the schema of the record, the table."""

import pytest

from benchmarks import hopper_limits
from benchmarks.benchmark_cli import problems
from solutions.capstone_hopper import tuning
from utils import runtime

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'hopper_forward_kernel' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
    0 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads
"""


def test_a_report_gives_registers_and_the_bytes_spilled_by_all_functions():
    assert hopper_limits.numbers(REPORT) == {"registers": 168, "spilled_bytes": 16}
    with pytest.raises(RuntimeError, match="does not say how many registers"):
        hopper_limits.numbers("nothing of use")


def test_the_assembler_is_asked_and_its_refusal_is_quoted():
    ptx = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry nothing() { ret; }\n"
    found = hopper_limits.report(ptx)
    assert found["spilled_bytes"] == 0 and 0 < found["registers"] < 64
    with pytest.raises(RuntimeError, match="ptxas"):
        hopper_limits.report("no assembler's language")


def test_a_consumer_has_the_registers_that_the_table_of_tiles_gives_it():
    assert hopper_limits.consumers("forward", 64, True)["consumer_registers"] == tuning.forward(64, True).registers
    assert hopper_limits.consumers("backward, fast", 128, False)["warpgroups"] == 2


def test_the_record_has_its_schema_and_its_table_names_every_row():
    kernel = {"pass": "forward", "head_dim": 64, "causal": True, **hopper_limits.numbers(REPORT), "shared_bytes": 1000,
              **hopper_limits.consumers("forward", 64, True)}  # fmt: skip
    reading = {"seconds": 1e-3, "clock_hz": 1.5e9, "watts": 700.0, "celsius": 70.0}
    row = hopper_limits._row("ours", (2, 16, 8192, 128, True), reading, 10**12)
    results = {"kernels": [kernel], "alone": [row]}
    assert problems("hopper_limits", results) == []
    assert row["flops_per_second"] == 1e15
    text = hopper_limits.table(results)
    assert "forward, D 64, causal" in text and "alone, ours, D 128, causal: 1000 TFLOP/s at 1.50 GHz, 700 W" in text


@pytest.mark.skipif(runtime.HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(RuntimeError, match="need a Hopper GPU"):
        hopper_limits.measure(quick=True)
