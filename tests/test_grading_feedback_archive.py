"""Feedback archives: what Moodle and Canvas make of each entry, and that no id stops a class or stays in an archive."""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from quick_grader import rows, run, without_running
from submitted_files import packed, written

from grading import export, gradescope
from grading.class_folder import find_submissions
from grading.feedback_archive import FOR_CANVAS, FOR_MOODLE, IDS, write
from grading.lab import find_lab
from grading.results import Verdict, result
from grading.roster import Roster

LAB = find_lab("lab1")
DONE = b"x = 1\n"
ZIP = packed({"warp.py": DONE})


def moodle_gives(name: str, participants: set[int]) -> tuple[int, str] | None:
    """Whose entry of a zip Moodle takes, and as which file: ``is_valid_filename_for_import``, of Moodle 4.0 and before.

    Those want a part behind the fourth ``_``; later ones do not.
    """
    *folders, last = name.split("/")
    if last.startswith((".", "~")):
        return None
    for place, part in enumerate([*folders, last]):
        parts = part.split("_", 4)
        known = len(parts) == 5 and parts[1].isdigit() and int(parts[1]) in participants
        if known and parts[2:4] == ["assignsubmission", "file"]:
            return int(parts[1]), "/".join([parts[4], *[*folders, last][place + 1 :]]).lstrip("/")
    return None


def canvas_gives(name: str) -> tuple[int, int] | None:
    """The user and the attachment that Canvas takes an entry for: ``infer_comment_context_from_filename``."""
    parts = [part for part in name.rpartition("/")[2].split("_") if part != "LATE"]
    numbers = [int(part) for part in parts if part.isdigit()][:2]
    return None if len(numbers) < 2 or parts[-1].startswith("link") else (numbers[0], numbers[1])


def archived(folder: Path, files: dict[str, bytes], roster: Roster | None = None) -> tuple[dict[str, dict], dict]:
    """The archives of a class: name of the archive -> name -> content; and who was left out."""
    found = find_submissions(written(folder / "in", files), LAB, roster)
    verdicts = {exercise.number: Verdict("failed", "3 of 9 differ") for exercise in LAB.exercises}
    results = {student: result(LAB, student, "digest", verdicts) for student in found.handed_in}
    left = write(folder / "out", results, found.handed_in)
    return {path.name: opened(path) for path in (folder / "out").glob("*.zip")}, left


def opened(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert len(set(archive.namelist())) == len(archive.namelist())
        return {name: archive.read(name) for name in archive.namelist()}


MOODLE = {
    "Jane Doe_12345_assignsubmission_file_/lab1.zip": ZIP,  # before Moodle 4.1
    "Jo Roe_7_assignsubmission_file/lab1.zip": ZIP,  # since then
    "Al Poe_8_assignsubmission_file_warp.py": DONE,  # not in folders
    "Zoë \N{SNOWMAN}_9_assignsubmission_onlinetext_/t.html": b"hi",
    "Under_Score_10_assignsubmission_file_/lab1.zip": ZIP,
}


def test_moodle_gives_each_page_to_its_student(tmp_path):
    made, left = archived(tmp_path, MOODLE, Roster(("jd",), {"janedoe": "jd"}))
    assert left == {} and made.keys() == {IDS, FOR_MOODLE}
    given = {moodle_gives(name, {12345, 7, 8, 9, 10}): content for name, content in made[FOR_MOODLE].items()}
    assert given.keys() == {(number, "feedback.html") for number in (12345, 7, 8, 9, 10)}
    assert given[12345, "feedback.html"] == made[IDS]["jd.html"]
    assert "Jane Doe_12345_assignsubmission_file_/feedback.html" in made[FOR_MOODLE]


#: How an archive is compressed, by the last two letters of its name.
PACKING = {"gz": "gz", "z2": "bz2", "bz": "bz2", "xz": "xz"}


def test_canvas_gives_each_page_to_its_student_as_a_file_that_opens_under_the_name_it_was_handed_in_with(tmp_path):
    """Canvas shows what comes back under the name of the attachment, with its ending (canvas-lms, issue 2406)."""
    files = {"doejohn_5_70_lab1-1.zip": ZIP, "roe_LATE_6_80_warp.py": DONE, "roe_LATE_6_81_waves.py": DONE}
    kinds = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz"]
    files |= {f"s{n}_{n}_{n}0_lab1{kind}": packed({"warp.py": DONE}, ".tar") for n, kind in enumerate(kinds, 10)}
    files |= {"text_7_text.html": b"", "book_8_90_lab1.ipynb": b"{}"}
    made, left = archived(tmp_path, files)
    assert left.keys() == {"text", "book"} and "archives and .py files only" in left["book"]
    numbers = {(5, 70), (6, 80), *((n, 10 * n) for n in range(10, 10 + len(kinds)))}
    assert {canvas_gives(name) for name in made[FOR_CANVAS]} == numbers and made[FOR_CANVAS].keys() <= files.keys()
    with zipfile.ZipFile(io.BytesIO(made[FOR_CANVAS]["doejohn_5_70_lab1-1.zip"])) as inner:
        assert inner.read("feedback.html") == made[IDS]["doejohn.html"]
    for n, kind in enumerate(kinds, 10):
        packing = PACKING.get(kind[-2:], "")
        content = io.BytesIO(made[FOR_CANVAS][f"s{n}_{n}_{n}0_lab1{kind}"])
        with tarfile.open(fileobj=content, mode=f"r:{packing}") as tar:
            assert tar.extractfile("feedback.html").read() == made[IDS][f"s{n}.html"]
    text = made[FOR_CANVAS]["roe_LATE_6_80_warp.py"].decode()
    compile(text, "warp.py", "exec")
    assert "0 of 100 points" in text and "3 of 9 differ" in text and all(line[0] == "#" for line in text.splitlines())


def test_without_a_platform_there_is_a_page_for_each_id_and_an_archive_of_earlier_goes(tmp_path):
    made, _ = archived(tmp_path, {"ada/warp.py": DONE, "bo.zip": ZIP, "do_5_70_lab1.zip": ZIP})
    assert made[IDS].keys() == {"ada.html", "bo.html", "do.html"} and len(made[FOR_CANVAS]) == 1
    (tmp_path / "in" / "do_5_70_lab1.zip").unlink()
    shutil.rmtree(tmp_path / "in" / "ada")
    made, _ = archived(tmp_path, {})
    assert made.keys() == {IDS} and made[IDS].keys() == {"bo.html"}


# ---- odd ids, and who is gone --------------------------------------------------------------------------------------

ODD = ["Zoë", "a b", "-rf", "--help", "=1", "@x", "ﬁ\N{SNOWMAN}李", "a'b\"c", "a,b;c", "%s", "$HOME", "~", "CON"]
ODD += ["a" * 100]
REFUSED = ["a+b", "x" * 200, "lab1-..", "lab1-.", "lab1-.x", "a\tb", "a\\b", "b "]


@pytest.mark.slow
def test_no_odd_id_stops_a_class_or_leaves_the_folder_of_grades(tmp_path, monkeypatch):
    without_running(monkeypatch)
    folder = written(tmp_path / "in", {f"{name}/warp.py": DONE for name in ["ada", *ODD, *REFUSED]})
    (tmp_path / "in" / "submission_metadata.yml").write_text("submission_1:\n  :submitters:\n  - :sid: '..'\n")
    written(folder, {"submission_1/warp.py": DONE})
    assert run(folder) == 0
    table = rows(folder)
    graded = {name for name, row in table.items() if row["score"] == "100"}
    assert {name.removeprefix("'") for name in graded} == {"ada", *ODD}
    refused = [row for name, row in table.items() if name not in graded]
    assert len(refused) == len(REFUSED) and all("rename it" in row["notes"] for row in refused)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "grades"}
    out = tmp_path / "grades" / LAB.name
    assert opened(out / IDS).keys() == {f"{name}.html" for name in ["ada", *ODD]}
    assert {path.stem for path in (out / "gradescope").iterdir()} == {"ada", *ODD}
    assert run(folder, "--students", "ada") == 0 and run(folder, "--students=-rf") == 0
    # one is gone: from the table, the archive and what is made of the table
    shutil.rmtree(folder / "Zoë")
    assert run(folder) == 0 and "Zoë" not in rows(folder) and "Zoë.html" not in opened(out / IDS)
    assert "Zoë" not in gradescope.packed(out)[1]
    people = "".join(f'"{name}",{n},"{name}",A,\n' for n, name in enumerate(["ada", "Zoë", "-rf", "a b"], 1))
    (tmp_path / "c.csv").write_text("Student,ID,SIS Login ID,Section,Lab 1 (7)\n    Points Possible,,,,100\n" + people)
    assert export.main([str(out / "grades.csv"), str(tmp_path / "c.csv"), "--column", "Lab 1"]) == 0
    with open(tmp_path / "c-import.csv", newline="") as file:
        assert [row["Student"].strip() for row in csv.DictReader(file)] == ["Points Possible", "ada", "-rf", "a b"]
