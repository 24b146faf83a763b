"""Rounds of a lab's right answers: one exercise and one round, without what a GPU's machine lacks, and the table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_answers import LABS, answers, exercises

from grading.check_lab import Checked, imports_of, needed
from grading.lab import Exercise, find_lab
from tests.gpu_rounds import HandIn, Round, seeded, table, told, unusual

ROOT = Path(__file__).resolve().parent.parent
#: What a machine with a GPU need not have.
ABSENT = ("IPython", "fastapi", "jupyter_client", "matplotlib", "nbclient", "nbformat", "nbgrader", "uvicorn", "xdist")
WARP = Exercise("1.1", "a warp", 10, "check-1-1", "")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command, where importing any of the packages above fails."""
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name!r}', name={name!r})\n")
    environment = os.environ | {"MLF_DEVICE": "cpu", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "tests.gpu_rounds", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_round_of_one_exercise_runs_without_jupyter_and_nbgrader(tmp_path):
    done = run("lab1", "--exercise", "1.1", "--rounds", "1", "--answers", "solution", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, played, _, _, row = done.stdout.rstrip().split("\n")
    assert first == "lab1_roofline on no GPU: the kernels run in the interpreter: 1 answers, 1 rounds each"
    assert played.startswith("✓ solution, round 1, seed 1000: ")
    assert row.split()[:5] == ["solution", "1", "of", "1", "1"]


@pytest.mark.slow
def test_what_the_budget_does_not_allow_is_not_run_and_counts_as_not_shown(tmp_path):
    done = run("lab1", "--exercise", "1.1", "--answers", "unusual", "--budget", "1e-9", folder=tmp_path)
    assert done.returncode == 1
    assert {line.split()[2] for line in done.stdout.split("\n") if line.startswith("unusual")} == {"0"}


@pytest.mark.parametrize("lab", LABS)
def test_each_unusual_answer_is_in_one_hand_in_and_gets_along_with_the_others(lab):
    hand_ins = unusual(answers(lab), exercises(lab))
    held = [str(answer) for hand_in in hand_ins for answer in hand_in.unusual.values()]
    assert sorted(held) == sorted(map(str, answers(lab).unusual))
    for hand_in in hand_ins:
        places = [place for answer in hand_in.unusual.values() for place in answer.edits]
        assert len(places) == len(set(places)), hand_in.name


@pytest.mark.parametrize("lab", LABS)
def test_each_check_gets_another_seed_and_no_import_that_it_does_not_need(lab):
    lab = find_lab(lab)
    for exercise in lab.exercises:
        assert "seed=123456)" in seeded(exercise, 123456).source
        assert seeded(exercise, 123456).source.count("seed=") == 1
    imports = needed(imports_of(lab), lab.exercises)
    assert "plots" not in imports and "server" not in imports and "sys.path.insert" in imports


def test_a_check_without_a_seed_is_refused():
    with pytest.raises(ValueError, match=r"1\.1 must name one seed, it names 0"):
        seeded(WARP, 1)


def test_a_round_that_fails_names_the_answer_and_shows_the_whole_message():
    failed = Checked(WARP, "failed", "exercise 1.1 (a warp): 3 is not 4\n  reproduce: seed 5", 2.0)
    answer = answers(LABS[0]).unusual[0]
    shown = told(HandIn("unusual 1", {"1.1": answer}), 2, Round(7, [failed], 0.0, 3.0), [WARP])
    assert shown.split("\n") == [
        "✗ unusual 1, round 2, seed 7: 0 of 10 points in 3.0 s",
        f"  1.1, unusual answer {answer.name!r}: failed after 2.0 s",
        "    exercise 1.1 (a warp): 3 is not 4",
        "      reproduce: seed 5",
    ]


def test_the_table_tells_the_first_round_from_the_later_ones():
    failed = Checked(WARP, "failed", "", 1.0)
    rounds = [
        Round(seed, failed, 10 - 10 * len(failed), seconds)
        for seed, (failed, seconds) in enumerate([([], 40.0), ([], 4.0), ([failed], 5.0), ([failed], 9.0)])
    ]
    rows = [line.split() for line in table({"solution": rounds, "unusual 1": []}, 5).split("\n")[2:]]
    assert rows[0] == ["solution", "4", "of", "5", "2", "40.0", "5.0", "9.0", "1.1", "(2", "x)"]
    assert rows[1] == ["unusual", "1", "0", "of", "5", "0", "-", "-", "-", "-"]
