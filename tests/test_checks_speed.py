"""Speed is compared on a GPU in the same rounds, and a line says why where it is not."""

import pytest
import torch

from utils import runtime, timing
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
    """A machine with a GPU whose times are known."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(runtime, "gpu_name", lambda: "a GPU of the test")
    compare = timing.compare
    monkeypatch.setattr(
        timing, "compare", lambda functions, rounds: compare(functions, rounds=rounds, stopwatch=KnownTimes())
    )


def spec(at_least=0.9, **changes):
    return Speed(inputs=lambda: (torch.ones(4),), peer=lambda x: 10e-6, at_least=at_least, **changes)


def test_a_fast_answer_passes_with_its_rate(gpu):
    line, problem = run_speed(spec(bytes_moved=30_000_000), lambda x: 10e-6)
    assert problem is None
    assert line == "1.00 times the speed of PyTorch: 10.0 µs (3.00 TB/s) against 10.0 µs on a GPU of the test"


def test_a_slow_answer_is_told_both_times_and_what_is_asked_for(gpu):
    line, problem = run_speed(spec(peer_name="torch.compile"), lambda x: 40e-6)
    assert problem.headline == f"expected at least 0.9 times the speed of torch.compile, got {line}"
    assert "0.25 times the speed of torch.compile: 40.0 µs against 10.0 µs" in line
    assert "neighbouring lanes on neighbouring addresses" in problem.cause


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


def test_the_module_compares_through_the_courses_timing():
    assert module.timing is timing
