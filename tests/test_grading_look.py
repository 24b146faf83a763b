"""The column ``look``: which notes and outcomes are a reason to look, and who is fine."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path

from submitted_files import written

from grading import grade, outputs
from grading.class_folder import Ungraded
from grading.graded_copy import notebook_notes
from grading.lab import find_lab
from grading.look import CHECKS, COPIED, IGNORED, OUTDATED, SOLUTIONS, Note, look, looks
from grading.results import Verdict, result
from grading.similar import NotCompared, Similar
from grading.submission import HandedIn, collect

LAB = find_lab("lab1")


def graded(*notes: str, **outcomes: str) -> dict:
    """A result: everything passed but the exercises named (``e1_2`` for 1.2)."""
    verdicts = {e.number: Verdict(outcomes.get("e" + e.number.replace(".", "_"), "passed")) for e in LAB.exercises}
    return json.loads(json.dumps(result(LAB, "ada", "digest", verdicts, notes)))


def looks_of(folder: Path, files: dict[str, bytes]) -> list[str]:
    return looks(collect(HandedIn("ada", (("", written(folder, files)),)), LAB).notes)


def test_whoever_is_fine_has_an_empty_cell():
    assert look(graded("waves.py is missing", e1_1="failed", e1_2="not attempted", e1_3="timed out"), ["a note"]) == ""


def test_outcomes_similarity_and_notes_are_named_in_that_order_and_once():
    found = graded(Note("x", IGNORED), Note("y", IGNORED), Note("z"), e1_1="refused", e1_2="tampered", e1_4="refused")
    said = look(found, [Note("n", OUTDATED), "plain"], "87 % as grace: waves.py")
    assert said == f"tampered 1.2; refused 1.1, 1.4; 87 % as grace: waves.py; {IGNORED}; {OUTDATED}"
    assert "look" not in found["exercises"][0] and found["notes"] == ["x", "y", "z"]


def test_a_note_is_marked_where_it_is_made(tmp_path):
    waves = {"labs/lab1_roofline/waves.py": b"x = 1\n"}
    assert looks_of(tmp_path / "1", waves | {"labs/lab1_roofline/essay.pdf": b""}) == []
    assert looks_of(tmp_path / "2", waves | {"labs/lab1_roofline/tried.ipynb": b"{}"}) == [IGNORED]
    assert looks_of(tmp_path / "3", waves | {"solutions/lab1_roofline/waves.py": b"x = 2\n"}) == [SOLUTIONS]
    assert looks_of(tmp_path / "4", {"labs/lab1_roofline/waves.py": b"### BEGIN SOLUTION\n"}) == [COPIED]
    assert looks_of(tmp_path / "5", waves | {"labs/lab1_roofline/more.rar": b""}) == [IGNORED]
    notebook = json.loads(LAB.notebook.read_text())
    (check,) = (c for c in notebook["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == "check-1-1")
    check["source"] = "pass"
    assert looks(notebook_notes(json.dumps(notebook).encode(), LAB)) == [CHECKS]
    assert looks(notebook_notes(None, LAB)) == []


def test_a_note_keeps_its_reason_on_its_way_to_another_process():
    assert looks(pickle.loads(pickle.dumps((Note("text", IGNORED), "plain")))) == [IGNORED]


def test_the_table_has_the_column_and_only_the_instructor_sees_who_is_similar(tmp_path):
    pair = Similar("ada", "=grace", 87, 60, ["waves.py"], 9, "waves.py 1-9", "waves.py 2-10")
    handed_in = {"ada": HandedIn("ada", (("", tmp_path / "ada"),))}
    results = {"ada": graded()}
    outputs.publish(tmp_path, LAB, results)
    outputs.write_csv(tmp_path, LAB, results, handed_in, [Ungraded("bob", "rename it")], [pair])
    outputs.write_similar(tmp_path, LAB, [pair])
    with open(tmp_path / LAB.name / "grades.csv", newline="") as file:
        rows = {row["student"]: row["look"] for row in csv.DictReader(file)}
    assert rows == {"ada": "87 % as =grace: waves.py", "bob": "not graded"}
    head, line = (tmp_path / LAB.name / "similar.csv").read_text().splitlines()
    assert head == "student,similar_to,percent,percent_of_other,files,longest_lines,longest_at,other_at"
    assert line == "ada,'=grace,87,60,waves.py,9,waves.py 1-9,waves.py 2-10"
    for kind in ("feedback/ada.html", "gradescope/ada.json"):
        assert "grace" not in (tmp_path / LAB.name / kind).read_text()


def test_without_a_comparison_the_run_says_one_line_and_leaves_no_older_table(tmp_path, monkeypatch, capsys):
    def fails(*_: object) -> list[Similar]:
        raise NotCompared("copydetect is not installed")

    monkeypatch.setattr(grade, "similar_in", fails)
    outputs.write_similar(tmp_path, LAB, [])
    assert grade._similar(tmp_path, LAB, {"ada": HandedIn("ada", ())}, ["ada"]) == []
    assert capsys.readouterr().out == "Similar submissions were not looked for: copydetect is not installed.\n"
    assert not outputs.similar_path(tmp_path, LAB).exists()
