"""The capstone's benchmarks without a GPU: small sizes, known times, lab 3's kernels in place of Hopper's."""

from __future__ import annotations

import pytest
import torch
from attention_entries import plain
from fake_stopwatch import FakeStopwatch

from benchmarks import (
    attention_errors,
    attention_speed,
    benchmark_cli,
    blocked_stream,
    hopper_attention,
    hopper_errors,
    hopper_implementations,
    hopper_limits,
    hopper_sanitize,
)
from benchmarks.benchmark_cli import problems
from solutions import capstone_hopper
from solutions.capstone_hopper import tuning
from utils import runtime, timing
from utils.fingerprint import files

SHORT = {dtype: hopper_attention.Effort(1, 0, 0) for dtype in hopper_implementations.DTYPES}
TINY = (1, 2, 2, 5, 9, 64, True)


# ---- hopper_attention ------------------------------------------------------------------------------------------------


def test_the_speed_of_the_capstone_fills_its_schema_in_both_dtypes_and_modes(known_times, monkeypatch):
    everybody = dict.fromkeys(hopper_implementations.functions(), plain)
    monkeypatch.setattr(hopper_implementations, "functions", lambda: everybody)
    results = hopper_attention.measure(shapes=[(1, 1, 8, 64, False)], long=(1, 1, 9, 64, True), effort=SHORT, workers=0)
    assert problems("hopper_attention", results) == []
    assert [(p["dtype"], p["direction"]) for p in results["points"]] == [
        (dtype, direction) for dtype in ("bf16", "fp16") for direction in ("forward", "backward")
    ]
    forward, backward = results["points"][:2]
    assert set(forward["timed"]) == {"ours", "lab 3", "flash", "cudnn"} and forward["fast_over"] == {}
    assert (
        set(backward["timed"]) == set(backward["ours_over"]) | {"ours"} == set(backward["fast_over"]) | {"ours, fast"}
    )
    assert [p["direction"] for p in results["long"]] == ["both", "both"]
    text = hopper_attention.table(results)
    assert "fp16 backward, D 64, N 8, full" in text and "bf16, ours, fast: as fast as cuDNN or faster on" in text
    assert "long sequence, bf16, forward and backward, ms: ours" in text


def test_a_peer_that_cannot_is_named_and_an_error_of_ours_is_raised(known_times):
    def broken(q, k, v, causal):
        raise RuntimeError("no kernel for this\nand a long trace")

    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no backward pass")

    shape = (1, 1, 4, 256, False)
    attentions = {"ours": attention_speed.ours, "flash": broken, "cudnn": lambda q, k, v, causal: NoGradient.apply(q)}
    found, unavailable = hopper_implementations.calls(shape, torch.float16, attentions)
    assert unavailable == {
        "flash, D 256, forward": "no kernel for this",
        "cudnn, D 256, backward": "no backward pass",
    }
    assert set(found) == {("forward", "ours"), ("backward", "ours"), ("both", "ours"), ("forward", "cudnn")}
    point = hopper_attention.point(shape, "fp16", "backward", found, SHORT["fp16"])
    assert point["ours_over"] == {} and hopper_attention.short(point) == "no cudnn"
    with pytest.raises(RuntimeError, match="no kernel for this"):
        hopper_implementations.calls(shape, torch.float16, {"ours": broken})


def test_everybody_follows_everybody_equally_often():
    assert hopper_attention.whole_rounds("abcd", 5) == 8 and hopper_attention.whole_rounds("abcd", 8) == 8
    assert hopper_attention.whole_rounds("abcde", 4) == 10


def test_the_ratio_of_the_fast_mode_is_its_own(monkeypatch):
    seconds = {"ours": 2e-3, "ours, fast": 1e-3, "cudnn": 3e-3}

    def compare(calls, **options):
        return {name: timing.summarize([seconds[name]] * 3) for name in calls}

    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(blocked_stream, "stopwatch", FakeStopwatch)
    calls = {("backward", name): lambda: None for name in seconds}
    point = hopper_attention.point((1, 1, 4, 64, False), "bf16", "backward", calls, SHORT["bf16"])
    assert point["ours_over"]["cudnn"]["ratio"] == pytest.approx(1.5)
    assert point["fast_over"]["cudnn"]["ratio"] == pytest.approx(3)
    assert point["fast_over"]["ours"]["ratio"] == pytest.approx(2)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    def broken(q, k, v, causal):
        raise ValueError("a stack of MLIR\nPassManager::run failed")

    job = ("fp16", "ours", True, ((1, 1, 4, 64, True),))
    assert hopper_implementations.compile_job(job) is None
    monkeypatch.setattr(hopper_implementations, "functions", lambda: {"ours": broken})
    assert hopper_implementations.compile_job(job) == "ours, fp16, D 64, causal: PassManager::run failed"


def test_a_gpu_that_is_no_hopper_is_refused(monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(capstone_hopper, "why_portable", lambda q, k, v: "an L4 is no Hopper GPU")
    for measure in (hopper_attention.measure, hopper_errors.measure):
        with pytest.raises(RuntimeError, match="do not run here: an L4 is no Hopper GPU"):
            measure()


def test_the_command_line_says_how_long_to_measure(monkeypatch):
    asked = {}

    def run(name, measure, table, sources, arguments):
        asked.update(name=name, arguments=arguments, **measure.keywords)
        return 0

    monkeypatch.setattr(benchmark_cli, "run", run)
    assert hopper_attention.main(["--quick", "--rounds", "6", "--lap-seconds", "0.2", "--workers", "3"]) == 0
    assert asked["name"] == "hopper_attention" and asked["arguments"] == ["--quick"] and asked["workers"] == 3
    assert asked["effort"]["bf16"][:2] == (6, 0.2) and asked["effort"]["fp16"][:2] == (3, 0.1)
    assert hopper_attention.main([]) == 0 and asked["effort"] == hopper_attention.EFFORT


@pytest.mark.slow
def test_the_capstones_modules_and_lab_3s_are_measured_and_no_steps():
    for name in ("hopper_attention", "hopper_errors"):
        found = files(benchmark_cli.sources(name))
        assert {f"solutions/capstone_hopper/{file}.py" for file in ("forward", "backward", "tuning")} <= set(found)
        assert "solutions/lab3_flash_attention/flash_forward.py" in found
        assert not any("steps" in file for file in found)


# ---- hopper_errors ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_bits_and_memory_fill_their_schema():
    results = hopper_errors.measure(count=2, longest=12, repeat=[TINY], poison=[TINY], runs=2, workers=1)
    assert problems("hopper_errors", results) == []
    assert [p["mode"] for p in results["points"]] == ["deterministic", "fast"] * 2
    assert all(map(attention_errors.within, results["points"]))
    assert all(not any(item["differ"].values()) and item["runs"] == 2 for item in results["repeats"])
    assert all(item["bad"] == 0 for item in results["poisoned"])
    text = hopper_errors.table(results)
    assert "fast: 2 of 2 cases within what is allowed" in text and "float16, D 64, dq" in text
    assert "runs of 2 with other bits: none" in text and "elements bad in poisoned memory" in text


def test_lab_3s_suite_is_itself_again_afterwards_also_when_a_case_fails(monkeypatch):
    names = ("our_attention", "DTYPES", "HEAD_DIMS")
    before = [getattr(attention_errors, name) for name in names]
    with pytest.raises(RuntimeError, match="stop"), hopper_errors.in_lab_3s_suite("fast"):
        assert attention_errors.our_attention.keywords == {"mode": "fast"}
        raise RuntimeError("stop")
    assert all(getattr(attention_errors, name) is one for name, one in zip(names, before, strict=True))


@pytest.mark.parametrize(("mode", "deterministic"), [("deterministic", True), ("fast", False)])
def test_a_mode_is_what_the_capstone_is_asked_for(monkeypatch, mode, deterministic):
    real, asked = capstone_hopper.flash_attention_with_lse, []

    def watched(q, k, v, causal, scale, deterministic):
        asked.append(deterministic)
        return real(q, k, v, causal, scale, deterministic)

    monkeypatch.setattr(capstone_hopper, "flash_attention_with_lse", watched)
    hopper_errors.attention(*hopper_errors.tensors(TINY, torch.float16), None, mode=mode)
    assert asked == [deterministic]


def test_runs_with_other_bits_are_counted_for_each_output(monkeypatch):
    real, runs = hopper_errors.attention, []

    def restless(*arguments):
        o, lse, dq, dk, dv = real(*arguments)
        runs.append(1)
        return o, lse, dq, dk, -dv if len(runs) in (2, 4) else dv

    monkeypatch.setattr(hopper_errors, "attention", restless)
    found = hopper_errors.repeated(TINY, torch.bfloat16, "fast", runs=4)
    assert found["differ"] == {"o": 0, "lse": 0, "dq": 0, "dk": 0, "dv": 2}


def test_an_element_that_nobody_writes_is_found(monkeypatch):
    shape = (1, 2, 2, 9, 5, 64, True)  # four queries see no key
    real = hopper_errors.attention
    assert hopper_errors.poisoned(shape, torch.float16, "fast")["bad"] == 0

    def forgetful(*arguments):
        o, lse, dq, dk, dv = real(*arguments)
        left = torch.empty_like(dq)
        left[..., 1:] = dq[..., 1:]
        lse[0, 0, 0] = 0.0  # a query that sees no key must have -inf
        return o, lse, left, dk, dv

    monkeypatch.setattr(hopper_errors, "attention", forgetful)
    assert hopper_errors.poisoned(shape, torch.float16, "fast")["bad"] == 2 * 9 + 1


def test_memory_is_full_of_nan_inside_and_pytorch_is_as_before_afterwards():
    before = torch.are_deterministic_algorithms_enabled()
    with hopper_errors.memory_full_of_nan([torch.ones(3)]):
        assert torch.empty(5, device=runtime.DEVICE).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.slow
def test_what_the_sanitizer_says_is_recorded_and_wrong_cases_are_not(monkeypatch):
    said = {"status": 0, "summary": "ERROR SUMMARY: 0 errors", "cases": 24, "races": 0}
    heard = {"as compiled": 40, "waits": 0, "does not wait": 1}
    ways = []
    monkeypatch.setattr(hopper_sanitize, "run_cases", lambda workers, atomic_starts: ways.append(atomic_starts))
    monkeypatch.setattr(hopper_sanitize, "inside", lambda tool: said)
    monkeypatch.setattr(hopper_sanitize, "beside", lambda: heard)
    options = {"count": 1, "longest": 5, "repeat": [TINY], "poison": [TINY], "runs": 1, "workers": 1}
    results = hopper_errors.measure(**options, tools=["memcheck", "racecheck"])
    assert problems("hopper_errors", results) == [] and results["beside"] == heard and ways == [False, True]
    assert results["sanitizer"] == {"memcheck": said, "racecheck": said}
    table = hopper_errors.table(results)
    assert "memcheck: status 0, 24 cases, ERROR SUMMARY: 0 errors" in table
    assert "racecheck, beside, as compiled: 40 reports" in table and "does not wait: 1 reports" in table
    assert hopper_errors.watched(["memcheck"], 1) == {"sanitizer": {"memcheck": said}, "beside": {}}
    assert hopper_errors.watched([], 1) == {"sanitizer": {}, "beside": {}} and ways == [False, True, False]
    for wrong in (False, True):
        monkeypatch.setattr(
            hopper_sanitize, "run_cases", lambda workers, atomic_starts, wrong=wrong: int(atomic_starts == wrong)
        )
        with pytest.raises(RuntimeError, match="cases are not right"):
            hopper_errors.watched(["racecheck"], 1)


def test_a_check_that_fails_is_named_with_what_was_tried(monkeypatch):
    def broken(*arguments, **keywords):
        raise AssertionError("12 elements are NaN or infinite")

    monkeypatch.setattr(attention_errors, "case", broken)
    with pytest.raises(RuntimeError, match=r"2 of 2 checks failed:\ncase\(0, 'deterministic', 9\).*12 elements"):
        hopper_errors.measure(count=1, longest=9, repeat=[], poison=[], workers=1)


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
