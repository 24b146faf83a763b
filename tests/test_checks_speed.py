"""Speed is compared on a GPU in the same rounds, repeated before it costs, and a line says why where it is not."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from utils import hardware, runtime
from utils.checks import speed as module
from utils.checks.speed import Speed, run_speed, why_not


class KnownTimes:
    """A stopwatch on which a function takes as many seconds as it returns."""

    def __init__(self):
        self.laps = []

    def lap(self, fn, flush_l2):
        self.laps.append(fn())

    def seconds(self):
        laps, self.laps = self.laps, []
        return laps


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU whose times are known, as a GPU that no table knows."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "gpu_name", lambda: "a GPU of the test")
    monkeypatch.setattr(module, "stopwatch_for", lambda functions: KnownTimes())
    monkeypatch.setattr(hardware, "this_gpu", lambda: None)


def spec(at_least=0.9, peer=lambda x: 10e-6, **changes):
    return Speed(inputs=lambda: (torch.ones(4),), peer=peer, at_least=at_least, **changes)


class Taking:
    """A function that takes other times in each comparison, warm-up and rounds; ``calls`` counts comparisons."""

    def __init__(self, *seconds):
        self.seconds, self.calls = seconds, 0

    def __call__(self, x):
        seconds = self.seconds[self.calls // 30]  # 5 calls to warm up and 25 rounds
        self.calls += 1
        return seconds


def test_a_fast_answer_passes_with_its_rate(gpu):
    line, problem = run_speed(spec(bytes_moved=30_000_000), lambda x: 10e-6)
    assert problem is None
    assert line == "1.00 times the speed of PyTorch: 10.0 µs (3.00 TB/s) against 10.0 µs on a GPU of the test"


def test_a_slow_answer_is_told_both_times_all_readings_and_what_is_asked_for(gpu, capsys):
    line, problem = run_speed(spec(peer_name="torch.compile"), Taking(40e-6, 50e-6, 40e-6))
    assert problem.headline == f"expected at least 0.9 times the speed of torch.compile, got {line}"
    assert "0.25 times the speed of torch.compile: 40.0 µs against 10.0 µs" in line
    assert problem.details == ("timed 3 times: 0.25, 0.20, 0.25",)
    assert "neighbouring lanes on neighbouring addresses" in problem.cause
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[0].startswith("timed again, since 0.9 times torch.compile was expected: 0.25 times")


def test_a_slow_reading_that_does_not_come_again_costs_nothing(gpu, capsys):
    line, problem = run_speed(spec(), Taking(40e-6, 10e-6))
    assert problem is None
    assert line.startswith("1.00 times the speed of PyTorch") and line.endswith("; before that 0.25")
    assert capsys.readouterr().out.startswith("timed again")


def test_where_the_peer_itself_is_unsteady_a_slow_answer_is_not_judged(gpu):
    times = itertools.cycle([10e-6, 20e-6, 10e-6])
    line, problem = run_speed(spec(peer=lambda x: next(times)), lambda x: 40e-6)
    assert problem is None
    assert line.startswith(
        "speed is not judged, since PyTorch itself took from 10 to 20 µs, as on a GPU that is shared"
    )


def test_where_the_peer_is_far_below_the_gpus_bandwidth_a_slow_answer_is_not_judged(gpu, monkeypatch):
    monkeypatch.setattr(hardware, "this_gpu", lambda: SimpleNamespace(memory_bandwidth=3.35e12))
    line, problem = run_speed(spec(peer_bytes=10_000_000), lambda x: 40e-6)
    assert problem is None and "itself reaches 1.00 of 3.35 TB/s" in line
    _, problem = run_speed(spec(peer_bytes=25_000_000), lambda x: 40e-6)
    assert problem is not None, "a peer at three quarters of the bandwidth has the GPU to itself"


def test_inputs_that_do_not_fit_the_gpu_are_not_timed(gpu):
    def inputs():
        raise torch.OutOfMemoryError("CUDA out of memory")

    line, problem = run_speed(Speed(inputs, lambda: None, 0.9), lambda: pytest.fail("must not run"))
    assert problem is None and "too little free memory" in line


def test_the_gpu_waits_twice_as_long_as_the_slowest_call_takes_to_be_enqueued(monkeypatch):
    clock = itertools.count(step=1e-3)  # a millisecond between any two looks
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module, "WaitingStopwatch", lambda wait: wait)
    assert module.stopwatch_for({"yours": lambda: next(clock), "peer": lambda: None}) == pytest.approx(4e-3)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)
    assert module.stopwatch_for({"yours": lambda: None}) == module.LEAST_WAIT
    clock = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert module.stopwatch_for({"yours": lambda: None}) == module.MOST_WAIT


def test_the_function_is_timed_with_its_options_and_the_peer_without(gpu):
    line, _ = run_speed(spec(options={"parts": 4}), lambda x, parts: parts * 10e-6)
    assert "40.0 µs against 10.0 µs" in line


def test_without_a_gpu_one_line_says_why_nothing_is_timed(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    line, problem = run_speed(spec(), lambda x: pytest.fail("must not run"))
    assert problem is None and line.startswith("speed is not checked here: without a GPU")
    assert "\n" not in line


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_ci_never_times(monkeypatch, value):
    monkeypatch.setenv("CI", value)
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    assert "not checked in CI" in why_not()


def test_an_impossible_ratio_is_refused():
    with pytest.raises(ValueError, match="at_least must be positive, got 0"):
        spec(at_least=0)
