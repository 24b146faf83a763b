"""A small class through the whole grader: each submission gets its grade for its reason, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from grading_runs import MARK, grade, left_running, results
from hostile import HOSTILE
from synthetic_cohort import build

from grading.lab import find_lab, lab_names
from grading.sandbox import available

FEW = ("correct-with-helpers", "untouched", "checks-overwritten", "checks-shadowed", "named-pipe", "answers-by-heart")


@pytest.mark.parametrize("name", lab_names())
def test_each_lab_has_at_least_forty_hostile_submissions_of_names_of_their_own(name):
    number = find_lab(name).number
    names = [each.name for each in HOSTILE if number in each.labs]
    assert len(names) >= 40 and len(set(names)) == len(names)
    assert all(each.tries and each.reason for each in HOSTILE)


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason=f"no sandbox on this machine: {available()}")
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
