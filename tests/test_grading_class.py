"""A folder of submissions: whose each entry is, however a platform names it, and what the table says of every one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from nbgrader.api import Gradebook
from quick_grader import rows, run, without_running
from submitted_files import KINDS, packed, written

from grading import grade, roster
from grading.class_folder import Class, find_submissions
from grading.lab import find_lab
from grading.roster import Roster, read_roster
from grading.submission import collect

LAB = find_lab("lab1")
DONE = b"x = 1\n"
OTHER = b"y = 2\n"
ZIP = packed({"labs/lab1_roofline/warp.py": DONE})


def handed_in(folder: Path, files: Mapping[str, bytes], known: Roster | None = None) -> Class:
    """What is found in a folder of these files."""
    return find_submissions(written(folder, files), LAB, known)


def files_of(found: Class, student: str) -> dict[str, bytes]:
    return collect(found.handed_in[student], LAB).files


def why(found: Class) -> dict[str, str]:
    """The lines without a score, by student."""
    return {line.student: f"{line.status}: {line.why}" for line in found.ungraded}


# ---- whose a submission is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "student"),
    [
        ("ada/warp.py", "ada"),
        ("Ada Lovelace/lab1.zip", "Ada Lovelace"),
        *((f"ada.l{ending}", "ada.l") for ending in KINDS),
        ("doejohn_12345_678910_lab1.zip", "doejohn"),
        ("doejohn_LATE_12345_678910_lab1.zip", "doejohn"),
        ("doejohn_late_12345_678910_lab1-1.tar.gz", "doejohn"),
        ("doejohn_12345_678910_warp.py", "doejohn"),
        ("doejohn_12345_678910_warp-1.py", "doejohn"),
        ("von_der_ahe_LATE_1_2_my_lab_1.zip", "von_der_ahe"),
        ("Jane Doe_12345_assignsubmission_file_/lab1.zip", "Jane Doe"),
        ("Jane Doe_12345_assignsubmission_file/lab1.zip", "Jane Doe"),
        ("Jane Doe_12345_assignsubmission_file_lab1.zip", "Jane Doe"),
        ("Jane Doe_12345_assignsubmission_file_warp.py", "Jane Doe"),
        ("lab1-jdoe/labs/lab1_roofline/warp.py", "jdoe"),
        ("lab1-roofline-j-doe/labs/lab1_roofline/warp.py", "j-doe"),
        ("ada/lab1_roofline/warp.py", "ada"),
        ("ada+lab1_roofline+2026-11-21 12:30:00.123456 UTC/warp.py", "ada"),
        ("a+da+lab1_roofline+2026-11-21 12:30:00.123456 UTC+c2VjcmV0/warp.py", None),
    ],
)
def test_a_student_is_known_by_what_people_and_platforms_call_a_submission(tmp_path, name, student):
    ending = next((ending for ending in KINDS if name.endswith(ending)), None)
    content = packed({"labs/lab1_roofline/warp.py": DONE}, ending) if ending else DONE
    found = handed_in(tmp_path / "in", {name: content})
    assert list(found.handed_in) == ([student] if student else [])
    if student:
        assert files_of(found, student) == {"warp.py": DONE} and found.ungraded == []
    else:
        assert "without / \\ + *" in why(found)["a+da"]


def test_the_name_of_github_classrooms_folder_is_taken_off(tmp_path):
    names = ["week-3-ada", "week-3-mary-ann", "week-3"]
    found = handed_in(tmp_path / "week-3-submissions", {f"{name}/warp.py": DONE for name in names})
    assert sorted(found.handed_in) == ["ada", "mary-ann", "week-3"]


def test_files_that_canvas_or_moodle_left_side_by_side_are_one_submission(tmp_path):
    files = {"doejohn_5_70_waves.py": DONE, "doejohn_5_71_warp.py": OTHER, "doejohn_5_72_notes.pdf": b"%"}
    files |= {"Jo Do_7_assignsubmission_file_waves.py": DONE, "Jo Do_7_assignsubmission_file_warp.py": OTHER}
    files |= {"Al Do_8_assignsubmission_file_/lab1.zip": ZIP, "Al Do_8_assignsubmission_onlinetext_/t.html": b"hi"}
    found = handed_in(tmp_path / "in", files)
    for student in ("doejohn", "Jo Do"):
        assert files_of(found, student) == {"waves.py": DONE, "warp.py": OTHER}
    assert "notes.pdf" in " ".join(collect(found.handed_in["doejohn"], LAB).notes)
    assert files_of(found, "Al Do") == {"warp.py": DONE}
    assert "onlinetext" in " ".join(collect(found.handed_in["Al Do"], LAB).notes)


def test_of_a_resubmission_in_canvas_the_newer_file_counts(tmp_path):
    files = {"doejohn_5_71_warp-1.py": DONE, "doejohn_5_70_warp.py": OTHER}
    found = handed_in(tmp_path / "in", files)
    assert files_of(found, "doejohn") == {"warp.py": DONE}
    assert found.handed_in["doejohn"].notes == ("doejohn_5_70_warp.py was not graded: doejohn_5_71_warp-1.py is newer",)
    files = {"do_5_70_lab1.zip": packed({"warp.py": OTHER}), "do_LATE_5_99_lab1-2.zip": ZIP, "do_5_71_lab1-1.zip": b""}
    assert files_of(handed_in(tmp_path / "two", files), "do") == {"warp.py": DONE}


def test_two_students_of_one_name_are_kept_apart_by_the_platforms_number(tmp_path):
    files = {"doejohn_5_70_warp.py": DONE, "doejohn_6_71_warp.py": OTHER}
    files |= {f"Jo Do_{number}_assignsubmission_file_/lab1.zip": ZIP for number in (1, 2)}
    found = handed_in(tmp_path / "in", files)
    assert sorted(found.handed_in) == ["Jo Do_1", "Jo Do_2", "doejohn_5", "doejohn_6"]
    assert files_of(found, "doejohn_6") == {"warp.py": OTHER}


def test_in_nbgraders_exchange_the_newest_counts_and_other_assignments_do_not(tmp_path):
    files = {f"ada+lab1_roofline+2026-11-2{day} 12:30:00.5 UTC+r/warp.py": bytes([day]) for day in (1, 3, 2)}
    files |= {"ada+lab2_triton_kernels+2026-11-24 12:30:00.5 UTC/gelu.py": DONE}
    files |= {"bob+lab2_triton_kernels+2026-11-24 12:30:00.5 UTC/gelu.py": DONE}
    found = handed_in(tmp_path / "inbound", files)
    assert files_of(found, "ada") == {"warp.py": b"\3"}
    other, newest = found.handed_in["ada"].notes
    assert "another assignment" in other and newest.startswith("the newest was graded, ada+lab1_roofline+2026-11-23")
    assert why(found) == {"bob": "missing: handed in for another assignment only"}


METADATA = """---
submission_101:
  :submitters:
  - :name: Jane Doe
    :sid: '3012'
    :email: jdoe@school.test
  :created_at: 2026-11-21 12:30:00.000000000 Z
  :results:
    :output: |-
      :sid: 'nobody'
submission_102:
  :created_at: 2026-11-21 12:30:00.000000000 Z
  :submitters:
  - :name: Pair One
    :sid: ''
    :email: one@school.test
  - :name: Pair Two
    :email: two@school.test
"""


def test_a_gradescope_export_says_who_handed_in_each_folder(tmp_path):
    files = {f"submission_{n}/warp.py": bytes([n]) for n in (101, 102, 103)}
    found = handed_in(tmp_path / "in", files | {"submission_metadata.yml": METADATA.encode()})
    assert {s: files_of(found, s)["warp.py"][0] for s in found.handed_in} == {
        "3012": 101, "one": 102, "two": 102, "submission_103": 103,
    }  # fmt: skip
    assert found.handed_in["two"].notes == ("handed in by a group: each member has a line",)
    known = Roster(("jdoe", "pair2"), {"pairtwo": "pair2", "jdoeschooltest": "jdoe"})
    assert {"jdoe", "pair2", "one"} <= find_submissions(tmp_path / "in", LAB, known).handed_in.keys()


def test_a_student_with_a_folder_and_an_archive_counts_once_where_they_agree_else_not_at_all(tmp_path):
    found = handed_in(tmp_path / "same", {"ada/warp.py": DONE, "ada.zip": ZIP, "bob/warp.py": DONE})
    assert sorted(found.handed_in) == ["ada", "bob"] and found.ungraded == []
    assert found.handed_in["ada"].notes == ("handed in more than once, with the same files: ada, ada.zip",)
    found = handed_in(tmp_path / "other", {"ada/warp.py": OTHER, "ada.zip": ZIP, "bob/warp.py": DONE, "bob.tgz": b""})
    assert found.handed_in == {}
    assert why(found)["ada"] == "not graded: handed in more than once, and the files differ: keep one"
    assert [line.submission for line in found.ungraded] == ["ada, ada.zip", "bob, bob.tgz"]


@pytest.mark.parametrize("name", ["a+b", "a*b", "[ab]", "{a}", "a?b", " ab", "a\tb", "a\u202eb", "x" * 101, "a\udcffb"])
def test_a_name_that_cannot_be_an_id_costs_nobody_else_anything(tmp_path, name):
    written(tmp_path / "in", {"ada/warp.py": DONE, f"{name}/warp.py": DONE})
    found = find_submissions(tmp_path / "in", LAB)
    assert list(found.handed_in) == ["ada"] and len(found.ungraded) == 1
    assert "rename it" in found.ungraded[0].why and found.ungraded[0].student.isascii()


def test_a_loose_file_and_an_archive_of_another_kind_have_a_line(tmp_path):
    found = handed_in(tmp_path / "in", {"warp.py": DONE, "ada.7z": b"?", ".DS_Store": b"", "bob.zip": ZIP})
    assert list(found.handed_in) == ["bob"]
    assert "does not say whose it is" in why(found)["warp.py"] and "only .zip and .tar" in why(found)["ada.7z"]


def test_an_archive_of_the_class_is_to_be_unpacked_first(tmp_path):
    (tmp_path / "all.zip").write_bytes(ZIP)
    with pytest.raises(ValueError, match=r"no folder of submissions: .*all\.zip \(unpack it first\)"):
        find_submissions(tmp_path / "all.zip", LAB)


# ---- the roster ----------------------------------------------------------------------------------------------------

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Lab 1 (77)
Points Possible,,,,,100
"Doe, John",5,u5,jdoe,A,
"Doe, John",6,u6,jdoe2,A,
"Roe, Jane",7,u7,jroe,A,
"""


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ada\nbob\n\nada\n", ["ada", "bob"]),
        ("\ufeffstudent,name\nada,Ada Lovelace\n", ["ada"]),
        ("Name,Username\nAda,ada\nBob,\n", ["ada"]),
        ("identifier,github_username,github_id,name\nada@x.test,countess,9,\n", ["ada@x.test"]),
        (CANVAS, ["jdoe", "jdoe2", "jroe"]),
    ],
)
def test_a_roster_is_a_column_of_ids_or_what_a_platform_exports(tmp_path, text, ids):
    (tmp_path / "roster.csv").write_text(text, encoding="utf-8")
    assert list(read_roster(tmp_path / "roster.csv").ids) == ids


def test_a_roster_without_an_id_or_that_is_no_text_is_named(tmp_path):
    for content in (b"", b"student\n", b"\xff\xfe\0"):
        (tmp_path / "roster.csv").write_bytes(content)
        with pytest.raises(ValueError, match=r"the roster .*roster\.csv"):
            read_roster(tmp_path / "roster.csv")
    with pytest.raises(ValueError, match="cannot be read"):
        read_roster(tmp_path / "none.csv")


def test_the_roster_says_who_is_who_who_is_missing_and_who_is_a_stranger(tmp_path):
    (tmp_path / "roster.csv").write_text(CANVAS, encoding="utf-8")
    files = {"doejohn_6_70_warp.py": DONE, "roejane_LATE_7_71_lab1.zip": ZIP, "stranger/warp.py": DONE}
    found = handed_in(tmp_path / "in", files, read_roster(tmp_path / "roster.csv"))
    assert sorted(found.handed_in) == ["jdoe2", "jroe", "stranger"]
    assert found.handed_in["stranger"].notes == ("not in the roster",) and found.handed_in["jroe"].notes == ()
    assert why(found) == {"jdoe": "missing: nothing was handed in"}


TESTED = 'Student,ID,SIS User ID,SIS Login ID,Section,Lab 1 (77)\nPoints Possible,,,,,100\n"Roe, Jane",7,u7,jroe,A,\n'


@pytest.mark.parametrize("login", ["", "f19b7c1d9fba5d9e5a4a7d3a3f6e2c1b0a998877"])
def test_canvas_test_student_is_missed_by_nobody_and_may_hand_in(tmp_path, login):
    (tmp_path / "roster.csv").write_text(f'{TESTED}"Student, Test",9,,{login},A,\n', encoding="utf-8")
    known = read_roster(tmp_path / "roster.csv")
    assert known.ids == ("jroe",)
    found = handed_in(tmp_path / "in", {"roejane_7_70_warp.py": DONE}, known)
    assert list(found.handed_in) == ["jroe"] and found.ungraded == []
    found = handed_in(tmp_path / "in", {"studenttest_9_71_warp.py": DONE}, known)
    assert list(found.handed_in) == ["jroe", "studenttest"] and found.ungraded == []
    assert known.id_of(["Test Student"]) == known.id_of(["Student, Test"]) == "studenttest"


def test_a_name_stands_in_either_order_unless_it_is_another_students(tmp_path):
    people = ('"Doe, Jane"', "Jane Roe", "Ann Lee", "Lee Ann", '"Roe, Jo"', "Jo Roe")
    lines = ["id,name", *(f"j{number},{name}" for number, name in enumerate(people, start=1))]
    (tmp_path / "roster.csv").write_text("\n".join(lines))
    known = read_roster(tmp_path / "roster.csv")
    names = ("Jane Doe", "Doe, Jane", "roejane", "Jane Roe", "Ann Lee", "Lee Ann", "leeann", "Roe Jo", "Jo Roe")
    found = [known.id_of([name]) for name in names]
    assert found == ["j1", "j1", "j2", "j2", "j3", "j4", "j4", "j5", "j6"]


@pytest.mark.parametrize("known", [True, False])
def test_an_instructor_may_name_students_as_they_are_known(tmp_path, known):
    (tmp_path / "roster.csv").write_text(f'{TESTED}"Student, Test",9,,f19b7c,A,\n', encoding="utf-8")
    table = read_roster(tmp_path / "roster.csv") if known else Roster()
    found = handed_in(tmp_path / "in", {"roejane_7_70_warp.py": DONE, "studenttest_9_71_warp.py": DONE}, table)
    for name in ("Test Student", "Student, Test", "studenttest"):
        assert grade._student(name, found, table) == "studenttest"
    for name in ("Jane Roe", "Roe, Jane", "jane  roe"):
        assert grade._student(name, found, table) == ("jroe" if known else "roejane")
    assert grade._student("JROE", found, table) == ("jroe" if known else "JROE")


@pytest.mark.slow
def test_students_are_graded_by_name(tmp_path, monkeypatch, capsys):
    worked = without_running(monkeypatch)
    folder = written(tmp_path / "in", {"roejane_7_70_warp.py": DONE, "studenttest_9_71_warp.py": DONE})
    assert run(folder, "--students", "Test Student") == 0 and worked == ["studenttest"]
    assert run(folder, "--students", "Jo Roe") == 2 and "no submission of Jo Roe in" in capsys.readouterr().err


def test_moodles_folders_are_found_by_first_and_last_name(tmp_path):
    (tmp_path / "roster.csv").write_text("First name,Last name,ID number\nJane Ann,Doe,jd7\n")
    known = read_roster(tmp_path / "roster.csv")
    found = handed_in(tmp_path / "in", {"Jane Ann Doe_12_assignsubmission_file_/lab1.zip": ZIP}, known)
    assert list(found.handed_in) == ["jd7"] and found.ungraded == []


def test_a_name_that_two_students_share_stands_for_none_of_them():
    known = Roster(("a", "b"), {})
    assert known.id_of(["x", "b"]) == "b" and known.id_of(["x"]) is None
    assert roster.key("Müller, Jörg") == roster.key("mu\u0308llerjo\u0308rg")


# ---- the table -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch) -> list[str]:
    return without_running(monkeypatch)


@pytest.mark.slow
def test_the_table_has_a_line_for_everybody_and_says_what_was_not_graded(tmp_path, quick, capsys):
    files = {"ada/warp.py": DONE, "ada/essay.txt": b"", "a+b/warp.py": DONE, "=cmd()/warp.py": DONE, "notes.txt": b""}
    files |= {"bob.tar.gz": b"broken", "cyd/warp.py": DONE, "cyd.zip": packed({"warp.py": OTHER})}
    (tmp_path / "roster.csv").write_text("ada\nbob\ncyd\ndan\n")
    assert run(written(tmp_path / "in", files), "--roster", str(tmp_path / "roster.csv")) == 0
    table = rows(tmp_path / "in")
    states = {student: (row["score"], row["status"], row["submission"]) for student, row in table.items()}
    assert states == {
        "ada": ("100", "graded", "ada"),
        "bob": ("0", "unreadable", "bob.tar.gz"),
        "cyd": ("", "not graded", "cyd, cyd.zip"),
        "dan": ("", "missing", ""),
        "'=cmd()": ("100", "graded", "'=cmd()"),
        "a+b": ("", "not graded", "a+b"),
        "notes.txt": ("", "not graded", "notes.txt"),
    }
    assert "essay.txt" in table["ada"]["notes"] and "cannot be read" in table["bob"]["notes"]
    assert "not in the roster" in table["'=cmd()"]["notes"]
    printed = capsys.readouterr()
    assert "; without a score: 4\n" in printed.out and "NOT GRADED: a+b" in printed.err
    assert run(tmp_path / "in", "--students", "cyd") == 2
    assert "the files differ: keep one" in capsys.readouterr().err


@pytest.mark.slow
def test_a_submission_that_was_removed_is_not_in_the_next_table(tmp_path, quick, capsys):
    folder = written(tmp_path / "in", {f"{student}/warp.py": DONE for student in ("ada", "bob")})
    assert run(folder) == 0 and list(rows(folder)) == ["ada", "bob"]
    shutil.rmtree(folder / "bob")
    assert run(folder) == 0 and list(rows(folder)) == ["ada"]
    assert "No longer handed in, so not in grades.csv: bob" in capsys.readouterr().out
    written(folder, {"bob/warp.py": DONE, "cyd/warp.py": DONE})
    assert run(folder, "--students", "ada") == 0
    assert {student: row["status"] for student, row in rows(folder).items()} == {
        "ada": "graded", "bob": "graded", "cyd": "not graded yet",
    }  # fmt: skip
    assert quick == ["ada", "bob"] and "cyd" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_score_given_by_hand_survives_and_is_in_page_table_export_and_gradescopes_file(tmp_path, quick):
    folder = written(tmp_path / "in", {f"{student}/warp.py": DONE for student in ("ada", "bob")})
    out = tmp_path / "grades"
    assert run(folder) == 0
    with Gradebook(f"sqlite:///{out / 'gradebook.db'}") as book:
        book.find_grade("check-1-1", LAB.name, LAB.name, "bob").manual_score = 2
        book.find_grade("check-1-2", LAB.name, LAB.name, "bob").extra_credit = 1
        book.db.commit()
    lost = LAB.exercises[0].points - 3
    for more in ((), ("--regrade",), ("--students", "ada")):
        assert run(folder, *more) == 0
        row = rows(folder)["bob"]
        assert (float(row["score"]), row["1.1"]) == (100 - lost, "2") and rows(folder)["ada"]["score"] == "100"
        assert f"1.1 has 2 points by hand, {LAB.exercises[0].points:g} automatic" in row["notes"]
        page = (out / LAB.name / "feedback" / "bob.html").read_text()
        assert f"{100 - lost:g} <small>of 100 points" in page and "given by hand (automatic: " in page
        given = json.loads((out / LAB.name / "gradescope" / "bob.json").read_text())
        assert given["score"] == 100 - lost == sum(test["score"] for test in given["tests"])
        assert given["tests"][0]["status"] == "failed" and "given by hand" in given["tests"][0]["output"]
        with Gradebook(f"sqlite:///{out / 'gradebook.db'}") as book:
            assert book.find_submission(LAB.name, "bob").score == 100 - lost  # what `nbgrader export` writes
    assert "given by hand" not in (out / LAB.name / "feedback" / "ada.html").read_text()
