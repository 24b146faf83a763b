"""What a submission is observed to do: within which limits, and by a process that may be forked afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from grading import observed
from grading.lab import ROOT
from grading.sandbox import Limits
from solutions.lab4_zero.exercises import distributed_check, on_rank, scenario_runs

CODE = """
import contextlib, pathlib, sys, torch
from grading import lab, observed

torch.set_num_threads(4)
with contextlib.suppress(Exception):
    observed._compare(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]), lab.find_lab("lab2"), ["2.1"])
raise SystemExit(torch.get_num_threads() != 1)
"""


@pytest.mark.slow
def test_what_is_expected_is_compared_on_one_thread(tmp_path):
    """A thread that is left behind would be missing in every worker that is forked later."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=100).returncode == 0


def test_a_run_of_scenarios_ends_after_each_of_them_would_have_been_ended():
    limits = observed.scenario_limits(Limits(), 120, count=9)
    assert limits.seconds > 9 * observed.EACH and limits == replace(Limits(), seconds=limits.seconds)
    assert observed.scenario_limits(Limits(), 3600, count=1).seconds == 3600
    assert distributed_check.HIDDEN_PATIENCE < on_rank.SCENARIO_SECONDS < scenario_runs.LAUNCH_SECONDS < observed.EACH


@pytest.mark.slow
def test_the_solutions_scenarios_end_with_a_grader_that_is_killed(tmp_path):
    out = tmp_path / "expected"
    program = (
        "import pathlib, sys; from grading.lab import find_lab; from grading.observed import expected_observations; "
        "expected_observations(find_lab('lab3'), 1, pathlib.Path(sys.argv[1]))"
    )

    def running() -> list[list[str]]:
        lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [line for line in lines if "grading.scenarios" in line and str(tmp_path) in " ".join(line)]

    def wait_until(condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        assert condition(), running()

    grader = subprocess.Popen([sys.executable, "-c", program, str(out)], cwd=ROOT)
    wait_until(lambda: len(running()) == 2, 60)  # the one that imported the package, and its fork, which has much to do
    grader.kill()
    grader.wait()
    wait_until(lambda: not running(), 2)
    assert not out.exists()
