"""Expected values are compared before workers are forked, so no thread may be left behind that a fork would lose."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grading.lab import ROOT

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
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=100).returncode == 0
