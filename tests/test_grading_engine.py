"""From what a student handed in to verdicts: seeds, the graded copy, cells in a kernel, and messages."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from parameters import thorough_but

from grading import worker
from grading.graded_copy import graded_copy, notebook_notes
from grading.lab import find_lab
from grading.results import Verdict, digest_of, read_result, result, write_json
from grading.seeds import INPUT_SETS, ClassSeeds, seeds_of
from grading.submission import Submission
from grading.verdicts import attempted, clean, explain, judge

LAB = find_lab("lab1")
NUMBERS = [exercise.number for exercise in LAB.exercises]


def ran(**special: dict) -> dict[str, dict]:
    """Every check passed, but for those named (``e1_2`` for exercise 1.2)."""
    fine = {"outcome": "ok", "why": "", "seconds": 0.1, "intact": True}
    return {number: fine | special.get("e" + number.replace(".", "_"), {}) for number in NUMBERS}


# ---- hidden seeds and the graded copy ------------------------------------------------------------------------------


def test_seeds_are_kept_private_and_drawn_again_only_when_asked(tmp_path):
    first = seeds_of(tmp_path, LAB)
    assert stat.S_IMODE((tmp_path / "seeds.json").stat().st_mode) == 0o600
    assert set(first.of("ada").checks) == set(NUMBERS)
    assert seeds_of(tmp_path, LAB) == first
    other = seeds_of(tmp_path, find_lab("lab2"))
    assert seeds_of(tmp_path, LAB) == first and seeds_of(tmp_path, find_lab("lab2")) == other
    fresh = seeds_of(tmp_path, LAB, fresh=True)
    assert fresh.name != first.name and fresh.of("ada") != first.of("ada")
    assert seeds_of(tmp_path, LAB) == fresh and seeds_of(tmp_path, find_lab("lab2")) == other


def test_each_student_has_seeds_of_their_own_and_shares_scenarios_with_one_in_sixteen():
    seeds, students = ClassSeeds("secret", tuple(NUMBERS)), [f"s{number}" for number in range(400)]
    everybody = {student: seeds.of(student) for student in (None, *students)}
    drawn = [seed for each in everybody.values() for seed in each.checks.values()]
    assert len(set(drawn)) > 0.99 * len(drawn) and min(drawn) >= 1_000_000 and max(drawn) < 2**31
    assert len({each.name for each in everybody.values()}) == len(everybody)
    scenarios = {(each.input_set, each.scenarios) for each in everybody.values()}
    assert sorted(number for number, _ in scenarios) == list(range(INPUT_SETS)) and len(dict(scenarios)) == 16
    sharing = [sum(each.input_set == number for each in everybody.values()) for number in range(INPUT_SETS)]
    assert min(sharing) > 5 and max(sharing) < 60  # 25 each on average


def test_a_students_seeds_depend_on_the_secret_and_on_nobody_else():
    mine = ClassSeeds("secret", tuple(NUMBERS)).of("ada")
    fewer, other = ClassSeeds("secret", ("1.2",)).of("ada"), ClassSeeds("another", tuple(NUMBERS)).of("ada")
    assert fewer.checks == {"1.2": mine.checks["1.2"]} and fewer.scenarios == mine.scenarios
    assert not set(other.checks.values()) & set(mine.checks.values())
    assert other.scenarios != mine.scenarios and other.name != mine.name
    assert "secret" not in repr(ClassSeeds("secret", tuple(NUMBERS)))


def test_the_file_of_seeds_holds_a_secret_for_each_lab_and_nothing_for_each_student(tmp_path):
    for lab in (LAB, find_lab("lab2")):
        seeds_of(tmp_path, lab).of("ada")
    kept = json.loads((tmp_path / "seeds.json").read_text())
    assert kept.keys() == {LAB.name, "lab2_triton_kernels"} and all(len(secret) == 64 for secret in kept.values())
    kept[LAB.name] = {"checks": {}, "scenarios": 7, "name": "seeds of the whole class, as earlier versions drew them"}
    (tmp_path / "seeds.json").write_text(json.dumps(kept))
    assert len(seeds_of(tmp_path, LAB).secret) == 64


@pytest.mark.parametrize("damaged", ["{", "[]"])
def test_a_damaged_file_of_seeds_is_named(tmp_path, damaged):
    (tmp_path / "seeds.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"seeds\.json is damaged"):
        seeds_of(tmp_path, LAB)


@pytest.mark.parametrize("name", ["lab1", "lab2", "lab3", "lab4", "lab5", "lab6", "lab7"])
def test_the_graded_copy_is_the_courses_cells_with_hidden_seeds(name):
    lab = find_lab(name)
    seeds = {exercise.number: 10_000_000 + index for index, exercise in enumerate(lab.exercises)}
    cells = graded_copy(lab, seeds).cells
    roles = [cell.metadata.grading["role"] for cell in cells]
    assert roles == ["prelude"] * 3 + ["student"] + ["check"] * len(lab.exercises)
    assert "snapshot()" in cells[2].source and f"from {lab.name}" not in cells[1].source and lab.name in cells[3].source
    assert f"from labs.{lab.name}.exercises." in cells[1].source and f"from {lab.name}.exercises" not in cells[3].source
    assert "utils" in cells[1].source and not any("plots" in cell.source for cell in cells[1:])
    for exercise, cell in zip(lab.exercises, cells[4:], strict=True):
        assert cell.id == exercise.grade_id and f"seed={seeds[exercise.number]})" in cell.source
    shown = graded_copy(lab, None, [lab.exercises[0].number]).cells
    assert shown[-1].source == lab.exercises[0].source and len(shown) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", thorough_but(["lab1", "lab2", "lab3", "lab5", "lab6", "lab7"], "lab2"))
def test_a_graded_copy_imports_nothing_that_takes_its_time_and_that_no_check_needs(name):
    lab = find_lab(name)
    first = next(exercise for exercise in lab.exercises if exercise.number.endswith(".1"))
    cells = graded_copy(lab, None, [first.number]).cells
    source = "\n".join(cell.source for cell in cells if cell.id != "prelude-2")  # without the seal
    said = "import sys; print('loaded:', [name for name in ('matplotlib', 'torch._dynamo') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{source}\n{said}"], cwd=lab.solution, capture_output=True, text=True,
        env={**os.environ, "MLF_DEVICE": "cpu", "PYTHONPATH": str(lab.solution.parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_what_was_done_to_the_notebook_is_told_and_changes_nothing():
    notebook = json.loads(LAB.notebook.read_text())
    assert notebook_notes(json.dumps(notebook).encode(), LAB) == []
    cells = {cell["id"]: cell for cell in notebook["cells"]}
    cells["check-1-1"]["source"] = ["print('passed')"]
    notebook["cells"].remove(cells["check-1-2"])
    notebook["cells"].append(cells["check-1-3"])
    cells["check-1-4"]["metadata"]["nbgrader"]["grade_id"] = "check-9-9"
    foreign, missing, twice, edited = notebook_notes(json.dumps(notebook).encode(), LAB)
    assert "not the lab's" in foreign and foreign.endswith(": 'check-9-9'")
    assert "exercise 1.2, 1.4 is missing" in missing and "1.3 is there more" in twice and "1.1 is edited" in edited
    assert "is missing" in notebook_notes(None, LAB)[0]
    for odd in (b"{", b"[]", b"[" * 100_000, b'{"cells": 3}', b'{"cells": [1]}', b"\xff\xfe"):
        assert "not a notebook" in notebook_notes(odd, LAB)[0], odd[:20]


def test_hidden_tests_are_run_for_the_grade_and_neither_shown_nor_taken_for_an_edit():
    hidden = "### BEGIN HIDDEN TESTS\nassert dot_product_flops(3) == 6\n### END HIDDEN TESTS"
    with_hidden = replace(LAB.exercises[0], source=f"{LAB.exercises[0].source}\n{hidden}")
    lab = replace(LAB, exercises=(with_hidden, *LAB.exercises[1:]))
    assert notebook_notes(LAB.notebook.read_bytes(), lab) == []
    seeds = dict.fromkeys(NUMBERS, 10_000_000)
    assert "assert dot_product_flops" in graded_copy(lab, seeds, ["1.1"]).cells[-1].source
    assert graded_copy(lab, None, ["1.1"]).cells[-1].source.strip() == LAB.exercises[0].source


# ---- verdicts ------------------------------------------------------------------------------------------------------


def test_each_way_a_check_ends_has_its_verdict():
    verdicts = judge(
        LAB,
        ran(
            e1_1={"intact": False},
            e1_2={"outcome": "error", "why": "NotImplementedError: Lab 1, exercise 1.2: FLOPs"},
            e1_3={"outcome": "error", "why": "NotImplementedError: Lab 1, exercise 1.2: FLOPs"},
            e1_4={"outcome": "error", "why": "CheckFailed: exercise 1.4: wrong for n=123456"},
            e1_5={"outcome": "timed out", "why": "it ran longer than 9 seconds"},
            e1_6={"outcome": "crashed", "why": "it ended Python itself"},
            e1_9={"outcome": "error", "why": "NotImplementedError: Lab 1, exercise 1.9: cycles"},
        ),
        {"warp.py": Verdict("refused", "warp.py was not run: line 3: import os: leave it out")},
    )
    outcomes = [verdicts[number].outcome for number in NUMBERS]
    assert outcomes[:6] == ["tampered", "not attempted", "not attempted", "failed", "timed out", "crashed"]
    assert outcomes[6:] == ["passed", "passed", "refused", "passed"]
    assert "needs exercise 1.2" in verdicts["1.3"].message
    assert "line 3: import os" in verdicts["1.9"].message
    assert "123456" not in verdicts["1.4"].message


def test_a_number_that_is_no_exercises_is_not_told():
    for number in ("1.98", "98.76", "7.1"):
        why = f"NotImplementedError: Lab 1, exercise {number}: n"
        verdict = judge(LAB, ran(e1_1={"outcome": "error", "why": why}), {})["1.1"]
        assert verdict.outcome == "failed" and number not in verdict.message


def test_a_message_comes_from_the_run_that_shows_nothing_hidden():
    hidden = judge(LAB, ran(e1_1={"outcome": "error", "why": "CheckFailed: n=987654321 is hidden"}), {})
    shown = {
        "1.1": {
            "outcome": "error",
            "why": "CheckFailed: exercise 1.1: wrong (seed 11)\n  reproduce: seed 11",
            "seconds": 1,
        }
    }
    assert explain(hidden, shown)["1.1"].message == "exercise 1.1: wrong"
    assert explain(hidden, {"1.1": {"outcome": "ok", "why": "", "seconds": 1}}) == {}
    assert "987654321" not in hidden["1.1"].message and "passes on the inputs" in hidden["1.1"].message


def test_what_a_module_costs_that_was_left_out_is_told_and_not_looked_for_again():
    unwritten = {"outcome": "error", "why": "NotImplementedError: Lab 1, exercise 1.9: cycles"}
    wrong = {"outcome": "error", "why": "CheckFailed: exercise 1.1: 3 differ"}
    left_out = {"warp.py": Verdict("failed", "warp.py cannot be imported (line 3): NameError: x")}
    verdicts = judge(LAB, ran(e1_9=unwritten, e1_1=wrong), left_out)
    assert verdicts["1.9"].message == left_out["warp.py"].message
    assert attempted(verdicts, left_out) == ["1.1"]


def test_a_message_holds_no_seed_and_has_an_end():
    text = "CheckFailed: exercise 1.1: 3 differ (seed 7)\n  first at 4\n  reproduce: seed 7, n=3\n  likely the tail"
    assert clean(text) == "exercise 1.1: 3 differ\n  first at 4\n  likely the tail"
    assert len(clean("x" * 10**6)) < 10**4


def test_a_result_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path):
    made = result(LAB, "ada", "d", {number: Verdict("passed") for number in NUMBERS})
    assert (made["score"], made["max_score"]) == (100, 100)
    write_json(tmp_path / "ada.json", made)
    assert read_result(tmp_path / "ada.json") == made
    (tmp_path / "cut.json").write_text('{"format": 1, ')
    assert read_result(tmp_path / "cut.json") is None


@pytest.mark.parametrize("outcome", ["failed", "not attempted", "refused", "timed out", "crashed", "tampered"])
def test_every_verdict_but_passed_gives_no_points(outcome):
    verdicts = {number: Verdict("passed") for number in NUMBERS} | {"1.1": Verdict(outcome)}
    made = result(LAB, "ada", "d", verdicts)
    assert made["exercises"][0]["score"] == 0 and made["score"] == 100 - LAB.exercises[0].points


def test_a_digest_tells_any_difference():
    assert digest_of({"a": b"bc"}) != digest_of({"ab": b"c"}) != digest_of({"a": b"bc"}, "")
    assert digest_of({"a": b"1", "b": b"2"}) == digest_of({"b": b"2", "a": b"1"})


def test_what_leaves_nothing_to_run_is_run_once_and_everything_else_for_itself(tmp_path, monkeypatch):
    worked: list[str] = []
    stub = {
        number: {"outcome": "error", "why": "NotImplementedError", "seconds": 1, "intact": True} for number in NUMBERS
    }

    def execute(self, seeds):
        worked.append((self.submission.student, seeds))
        return stub if self.submission.student != "eve" else stub | {"1.1": stub["1.1"] | {"outcome": "crashed"}}

    monkeypatch.setattr(worker._Grading, "_execute", execute)
    seeds = ClassSeeds("x", tuple(NUMBERS))
    job = worker.Job(LAB, seeds, tmp_path / "expected")
    handed_in = {"eve": {}, "ada": {}, "bob": {"waves.py": b"import os\n"}, "cyd": {"waves.py": b"x = 1\n"}}
    handed_in |= {"dan": {"waves.py": (LAB.released / "waves.py").read_bytes()}, "fay": {"helper.py": b"x = 1\n"}}
    for student, files in handed_in.items():
        grading = worker._Grading(job, Submission(student, files), tmp_path / student)
        grading._lay_out()
        assert grading._checks().keys() == stub.keys()
    whose = {"eve": None, "ada": None, "cyd": "cyd", "fay": "fay"}  # nothing of a student's runs with the class's seeds
    assert worked == [(student, seeds.of(owner).checks) for student, owner in whose.items()]


def test_scenarios_run_on_a_students_own_seed_and_are_held_against_its_set_if_there_is_any_to_run(
    tmp_path, monkeypatch
):
    seen: list[tuple] = []
    monkeypatch.setattr(worker, "observe", lambda lab, files, seed, numbers, *_, **__: seen.append((seed,)) or {})
    monkeypatch.setattr(worker, "expected_observations", lambda lab, seed, to: seen.append((seed, to)) or to)
    monkeypatch.setattr(worker, "compared", lambda lab, expected, *_: seen.append((expected,)) or {})
    monkeypatch.setattr(worker._Grading, "_lay_out", lambda self: None)
    monkeypatch.setattr(worker._Grading, "_checks", lambda self: ran())
    job = worker.Job(LAB, ClassSeeds("x", tuple(NUMBERS)), tmp_path / "expected")
    for student in ("ada", "bob"):
        assert all(each.passed for each in worker._Grading(job, Submission(student, {}), tmp_path).verdicts().values())
        seeds = job.seeds.of(student)
        folder = tmp_path / "expected" / f"{seeds.input_set:02}"
        assert seen == [(seeds.scenarios,), (seeds.scenarios, folder), (folder,)]
        seen.clear()
    stubs = {number: {"outcome": "crashed", "why": "it ended", "seconds": 1, "intact": True} for number in NUMBERS}
    monkeypatch.setattr(worker._Grading, "_checks", lambda self: stubs)
    worker._Grading(job, Submission("ada", {}), tmp_path).verdicts()
    assert seen == []


# ---- the kernel ----------------------------------------------------------------------------------------------------


@pytest.mark.sandbox
@pytest.mark.slow
def test_a_cell_that_kills_hangs_or_floods_the_kernel_costs_itself_only(tmp_path):
    import nbformat

    from grading.kernel import run_checks
    from grading.sandbox import Sandbox

    def cell(source: str, role: str = "check") -> nbformat.NotebookNode:
        return nbformat.v4.new_code_cell(source, metadata={"grading": {"role": role}})

    checks = [
        "x",
        "import os; os._exit(0)",
        "while True: pass",
        "while True: print('x' * 999)",
        "1 / 0",
        "raise SystemExit",
        "x + 1",
        "import sys; print('slow', file=sys.stderr)",
        "0.0",
        "get_ipython().showtraceback = lambda *_, **__: None; 1 / 0",
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell("x = 1", "student"), *map(cell, checks)])
    run_checks(notebook, lambda: Sandbox(tmp_path), seconds=5, verify="assert x == 1")
    found = [each.metadata.grading["ran"] for each in notebook.cells[1:]]
    outcomes = [each["outcome"] for each in found]
    assert outcomes == ["ok", "crashed", "timed out", "crashed", "error", "error", "ok", "ok", "ok", "error"]
    assert found[3]["why"] == "it printed more than 1,024 KiB"
    assert all(each["intact"] for each in (found[0], *found[4:]))
