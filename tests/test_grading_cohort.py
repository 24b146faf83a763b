"""A small class through the whole grader: each submission gets its grade for its reason, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from grading_runs import MARK, grade, left_running, results
from hostile import HOSTILE
from synthetic_cohort import build

from grading.lab import ROOT, find_lab, lab_names

FEW = ("correct-with-helpers", "untouched", "checks-overwritten", "checks-shadowed", "named-pipe", "answers-by-heart")

#: Imports as a notebook makes them, checks and functions in any order, and one check: success is what it exits with.
NAIVE = """
import builtins, sys, types
sys.path.insert(0, '.')
cells = {}
builtins.get_ipython = lambda: types.SimpleNamespace(user_ns=cells)
exec('from solutions.lab1_roofline.exercises.waves import check_waves as check_before', cells)
exec('from lab1_roofline import num_tiles, num_waves, last_wave_utilisation, tiled_matmul_seconds', cells)
exec('from solutions.lab1_roofline.exercises.waves import check_waves as check_after', cells)
replaced = [check for check in (cells['check_before'], cells['check_after']) if check.__name__ != 'check_waves']
cells['check'] = replaced[0] if replaced else cells['check_after']
exec('check(num_tiles, num_waves, last_wave_utilisation, tiled_matmul_seconds, seed=18)', cells)
"""


def bwrap_works() -> bool:
    """Whether this machine lets us make a sandbox at all."""
    command = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", lab_names())
def test_each_lab_has_at_least_forty_hostile_submissions_of_names_of_their_own(name):
    number = find_lab(name).number
    names = [each.name for each in HOSTILE if number in each.labs]
    assert len(names) >= 40 and len(set(names)) == len(names)
    assert all(each.tries and each.reason for each in HOSTILE)


@pytest.mark.slow
@pytest.mark.skipif(not bwrap_works(), reason="bubblewrap cannot make a sandbox here: no untrusted code is run")
def test_a_small_class_is_graded_as_it_must_be(tmp_path: Path):
    lab = find_lab("lab1")
    members = build(lab, tmp_path / "submissions", FEW)
    run = grade(lab, tmp_path / "submissions", tmp_path / "grades", "--jobs", "2")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    found = results(lab, tmp_path / "grades")
    complaints = {member.student: member.complaints(lab, found.get(member.student)) for member in members}
    assert not any(complaints.values()), complaints
    assert set(found) == {member.student for member in members}
    assert left_running(tmp_path) == [] and not MARK.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check-function-replaced", "exit-at-once", "notebook-names-replaced"])
def test_a_naive_grader_would_have_been_fooled(name, tmp_path: Path):
    """The tricks are real: a check in the student's own process says what the student wants it to say."""
    lab = find_lab("lab1")
    (member,) = build(lab, tmp_path / "class", [name])
    package = tmp_path / lab.name
    (tmp_path / "class" / member.student).rename(package)
    naive = subprocess.run(
        [sys.executable, "-c", NAIVE], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert naive.returncode == 0, naive.stderr.decode()[-2000:]
