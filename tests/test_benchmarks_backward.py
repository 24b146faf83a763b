"""The benchmarks behind the backward lecture without a GPU: small sizes, known times, the schemas of their records."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from fake_stopwatch import READINGS, FakeStopwatch

from benchmarks import (
    attention_determinism,
    attention_speed,
    attention_tutorial,
    blocked_stream,
    power,
    sustained,
    thermal_warmup,
)
from benchmarks.benchmark_cli import problems
from utils import reference, runtime, timing

# ---- power -----------------------------------------------------------------------------------------------------------


def test_power_is_the_median_of_whole_readings_in_si_units_and_a_call_is_the_mean_over_its_laps():
    ticks, calls = iter(range(100)), []
    found = power.alone(
        lambda: calls.append(1), settle=1, seconds=3, start=lambda: lambda: READINGS, clock=lambda: next(ticks)
    )
    assert {name: found[name] for name in power.FIELDS} == {"clock_hz": 1.6e9, "watts": 700.0, "celsius": 61.0}
    assert len(calls) == 3 * power.BATCH and found["seconds"] == 4 / len(calls)


def test_a_meter_is_stopped_when_the_function_fails_and_no_reading_is_an_error():
    stopped = []

    def start():
        return lambda: stopped.append(1) or ["[N/A], [N/A], 40"]

    with pytest.raises(ZeroDivisionError):
        power.alone(lambda: 1 / 0, settle=0, seconds=0, start=start)
    assert stopped == [1]
    with pytest.raises(RuntimeError, match="no reading of clock, power and temperature"):
        power.alone(lambda: None, settle=0, seconds=0, start=start)


# ---- attention_speed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_speed_of_attention_fills_its_schema_and_names_backends_that_are_not_there(known_times):
    shapes = [(1, 2, 32, 16, False), (1, 2, 32, 16, True)]
    results = attention_speed.measure(
        shapes=shapes, long=(1, 1, 48, 16, True), rounds=3, seconds=0, lap_seconds=0, alone=(1, 1, 16, 16, False)
    )
    assert problems("attention_speed", results) == []
    assert [p["direction"] for p in results["points"]] == ["forward", "backward"] * 2
    assert all(attention_speed.OURS in p["timed"] for p in results["points"])
    assert all(set(p["ours_over"]) == set(p["timed"]) - {attention_speed.OURS} for p in results["points"])
    assert set(results["unavailable"]) | set(results["long"]["timed"]) == {"ours", "flash", "efficient", "cudnn"}
    assert results["long"]["direction"] == "both"
    assert {p["calls_a_lap"] for p in (*results["points"], results["long"])} == {1}
    text = attention_speed.table(results)
    assert "forward, D 16, N 32, causal" in text and "forward and backward, ms: ours" in text


def test_flops_follow_the_papers_convention():
    full, causal = (2, 3, 100, 64, False), (2, 3, 100, 64, True)
    assert attention_speed.flops(full, "forward") == 4 * 2 * 3 * 100**2 * 64
    assert attention_speed.flops(full, "backward") == 2.5 * attention_speed.flops(full, "forward")
    assert attention_speed.flops(full, "both") == 3.5 * attention_speed.flops(full, "forward")
    assert attention_speed.flops(causal, "forward") == attention_speed.flops(full, "forward") / 2


def test_a_ratio_above_one_means_that_ours_is_faster(monkeypatch):
    def compare(calls, **options):
        return {name: timing.summarize([1e-3 if name == attention_speed.OURS else 3e-3] * 3) for name in calls}

    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(blocked_stream, "stopwatch", FakeStopwatch)
    names = {("forward", "ours"): lambda: None, ("forward", "flash"): lambda: None}
    point = attention_speed.point((1, 1, 4, 16, False), "forward", names, rounds=3, lap_seconds=0)
    assert point["ours_over"]["flash"]["ratio"] == pytest.approx(3)


def test_everybody_computes_the_same_attention_and_gradients():
    shape = (1, 2, 40, 16, True)
    q, k, v, do = attention_speed.inputs(shape)
    exact, _ = reference.attention(q, k, v, causal=True)
    gradients = reference.attention_backward(q, k, v, do, causal=True)
    for name, attention in attention_speed.functions().items():
        try:
            o = attention(q, k, v, True)
        except RuntimeError:
            assert name != attention_speed.OURS
            continue
        found = torch.autograd.grad(o, (q, k, v), do)
        for mine, right in zip((o, *found), (exact, *gradients), strict=True):
            torch.testing.assert_close(mine.detach().cpu().double(), right, rtol=0.05, atol=0.05)


def test_an_error_of_ours_is_not_taken_for_a_missing_backend(monkeypatch):
    def broken(q, k, v, causal):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        attention_speed.calls((1, 1, 16, 16, False), {attention_speed.OURS: broken})


# ---- attention_tutorial ----------------------------------------------------------------------------------------------

SMALL = ((2, 2, 24, 16, False), (1, 2, 24, 16, True))
#: A stand-in for the tutorial's file: one axis of heads, its precision by name, and gradients of causal attention only.
STAND_IN = """
import torch
import types
tl = types.SimpleNamespace(float16=torch.float16, bfloat16=torch.bfloat16)
loaded = []


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        assert q.shape[0] == 1 and q.dtype == tl.float16
        ctx.save_for_backward(q, k, v)
        ctx.sm_scale = sm_scale
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)

    @staticmethod
    def backward(ctx, do):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=ctx.sm_scale)
        return *torch.autograd.grad(o, (q, k, v), do), None, None


attention = Attention.apply
"""


@pytest.fixture
def stand_in(tmp_path):
    file = tmp_path / "06-fused-attention.py"
    file.write_text(STAND_IN)
    return file


def beside(path, shapes=SMALL):
    return attention_tutorial.measure(path=path, shapes=shapes, rounds=2, seconds=0, lap_seconds=0)


@pytest.mark.slow
def test_the_tutorial_is_timed_where_its_results_are_ours_and_named_where_they_are_not(known_times, stand_in):
    results = beside(stand_in)
    assert problems("attention_tutorial", results) == []
    rows = [(p["direction"], p["causal"]) for p in results["points"]]
    assert rows == [("forward", False), ("forward", True), ("backward", True)]
    assert all(set(p["timed"]) == {"ours", "tutorial"} == {*p["ours_over"], "ours"} for p in results["points"])
    assert list(results["left_out"]) == ["backward, D 16, N 24, full"]
    assert results["sha256"] == hashlib.sha256(STAND_IN.encode()).hexdigest()
    assert 0 <= results["farthest"] <= attention_tutorial.FAR
    text = attention_tutorial.table(results)
    assert "backward, D 16, N 24, full: not timed, its gradients are" in text and results["sha256"][:16] in text
    assert all(name in text for name in ("forward, D 16, N 24, causal", "x tutorial"))


def test_every_shape_has_a_tutorial_of_its_own_whose_copy_is_gone_afterwards(stand_in):
    with attention_tutorial.loaded(stand_in) as one, attention_tutorial.loaded(stand_in) as other:
        assert one is not other and one.loaded is not other.loaded
        copies = [Path(module.__file__) for module in (one, other)]
        assert all("tl.bfloat16" in copy.read_text() and "tl.float16" not in copy.read_text() for copy in copies)
    assert not any(copy.exists() for copy in copies) and stand_in.read_text() == STAND_IN


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("is_causal=causal", "is_causal=not causal", "its output for .* is .* of its size away from lab 3's"),
        ("tl.float16", "tl.float32", "no tl.float16 in it"),
        ("attention = Attention", "other = Attention", "no function attention"),
    ],
)
def test_a_file_that_is_not_the_tutorial_or_computes_something_else_is_refused(stand_in, old, new, problem):
    stand_in.write_text(STAND_IN.replace(old, new))
    with pytest.raises((RuntimeError, ValueError), match=problem):
        beside(stand_in, SMALL[:1])


def test_the_tutorials_file_is_named_by_a_variable_and_asked_for(monkeypatch, stand_in, capsys):
    monkeypatch.setenv("TRITON_TUTORIAL", str(stand_in))
    assert attention_tutorial.tutorial_file() == stand_in
    for value, problem in (("", "TRITON_TUTORIAL is not set"), ("nowhere.py", "nowhere.py is not a file")):
        monkeypatch.setenv("TRITON_TUTORIAL", value)
        assert attention_tutorial.main([]) == 1
        assert problem in capsys.readouterr().out


# ---- sustained -------------------------------------------------------------------------------------------------------


def test_a_lap_holds_the_same_number_of_calls_of_everybody_and_times_are_those_of_one():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    timed, times = sustained.compare(functions, warmup=2, rounds=4, stopwatch=FakeStopwatch(), lap_seconds=35e-6)
    assert times == 4  # a call takes 10 microseconds and more, says the stopwatch
    assert calls.count("a") == calls.count("b") == 2 + 3 + (1 + 4) * times
    assert calls[-8:] in (["a"] * 4 + ["b"] * 4, ["b"] * 4 + ["a"] * 4)  # one lap, then the other
    assert all(10e-6 <= t * times <= 12e-6 for timing in timed.values() for t in timing.samples)


# ---- attention_determinism -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_determinism_fills_its_schema(known_times):
    results = attention_determinism.measure(shapes=[(1, 1, 48, 16, True)], repeats=2, rounds=3, seconds=0)
    assert problems("attention_determinism", results) == []
    ways = {p["way"]: p for p in results["points"]}
    assert list(ways) == ["second pass", "atomics", "race", "lab 3"]
    for way in ("second pass", "lab 3"):
        assert (ways[way]["distinct_dq"], ways[way]["distinct_dk_dv"], ways[way]["elements_differ"]) == (1, 1, 0)
    assert ways["second pass"]["from_second_pass"] == 0
    assert (
        max(p["from_second_pass"] for p in results["points"]) < 0.01
    )  # the interpreter runs one program after another
    assert "atomics, D 16, causal" in attention_determinism.table(results)


def test_results_differ_when_one_bit_does():
    later = torch.tensor([1.0, 2.0])
    later[1] = torch.nextafter(later[1], later[0])
    values = iter([[1.0, 2.0]] * 3 + [later.tolist()])

    def call():
        dq = torch.tensor(next(values))
        return dq, torch.zeros(2), torch.zeros(2)

    found = attention_determinism.repeated(call, 3)
    assert (found["distinct_dq"], found["distinct_dk_dv"], found["elements_differ"]) == (2, 1, 1)
    assert 0 < found["largest_difference"] < 1e-6


def test_minus_zero_and_zero_are_different_bits():
    assert not torch.equal(attention_determinism.bits(torch.zeros(1)), attention_determinism.bits(-torch.zeros(1)))
    assert attention_determinism.bits(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.int16


# ---- warming up -----------------------------------------------------------------------------------------------------


def test_preheating_repeats_until_the_time_is_over(monkeypatch):
    clock = iter([0.0, 0.5, 1.0, 1.5, 2.0])
    monkeypatch.setattr(thermal_warmup.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    assert thermal_warmup.thermal_warmup(lambda: None, 2.0) == 3
