"""Grades go into what Canvas, Moodle and Gradescope take, column by column, and nobody stops the class."""

from __future__ import annotations

import csv
import json
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from grading import gradescope
from grading.export import Sheet, entered, main, read_sheet

GRADES = """\
student,score,max_score,2.1,status,submission,notes
ada,85,100,10,graded,ada.zip,
bo,92.5,100,10,graded,bo.zip,
cyd,,,,missing,,nothing was handed in
'=dan,40,100,10,graded,dan.zip,
eve,50,100,10,graded,eve.zip,
"""
#: Canvas's export with SIS ids, a posting row, a custom column, computed columns, an excused and an unassigned student.
CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,Notes,Lab 1 (77),Lab 2 (1234),Labs Current Score,Current Score,Final Grade
,,,,,,Manual Posting,,,,
    Points Possible,,,,,,100.00,100.00,(read only),(read only),(read only)
"Lovelace, Ada",901,u1,ada,CS 1,likes cats,9.00,,9.00,9.00,A
"Boole, Bo",902,u2,BO@uni.edu,CS 1,,3.00,4.00,3.50,3.50,B
"Doe, Cyd",903,u3,cyd,"CS 1, and CS 2",,,55.00,,,
"=Dan, Dan",904,u4,=dan,CS 1,,EX,EX,,,
"Doe, Fay",905,u5,fay,CS 1,,1.00,2.00,,,
"Student, Test",906,,0aff,CS 1,,,,,,
"""
#: Moodle's offline grading worksheet with identity fields, comments, and a student whose grade is locked.
MOODLE = """\
Identifier,"Full name","ID number","Email address",Status,Grade,"Maximum Grade","Grade can be changed",\
"Last modified (submission)","Online text","Last modified (grade)","Feedback comments"
"Participant 901","Ada Lovelace",u1,ada@uni.edu,"Submitted for grading - ",,100.00,Yes,"Friday, 3 May 2026, 1:02 PM",,-,
"Participant 902","Bo Boole",u2,bo@uni.edu,"Submitted for grading - ",4.00,100.00,Yes,-,,"Friday, 3 May 2026",fine
"Participant 903","Cyd Doe",u3,cyd@uni.edu,"No submission",,100.00,Yes,-,,-,
"Participant 904","Dan Dan",u4,=dan@uni.edu,"No submission",,100.00,No,-,,-,
"""


def written(tmp_path: Path, exported: str, grades: str = GRADES, *more: str) -> tuple[list[dict], dict[str, str]]:
    """The rows to import, and the report: why, by student or person."""
    (tmp_path / "grades.csv").write_text(grades, encoding="utf-8")
    (tmp_path / "exported.csv").write_text(exported, encoding="utf-8-sig")
    assert main([str(tmp_path / "grades.csv"), str(tmp_path / "exported.csv"), *more]) == 0
    with open(tmp_path / "exported-import.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with open(tmp_path / "exported-import-report.csv", newline="", encoding="utf-8") as file:
        report = list(csv.DictReader(file))
    return rows, {line["student"] or line["Canvas" if "Canvas" in line else "Moodle"]: line["why"] for line in report}


LAB = ("--column", "Lab 2 (1234)")


def test_canvas_gets_who_a_student_is_and_one_column_of_scores(tmp_path):
    rows, report = written(tmp_path, CANVAS, GRADES, *LAB)
    who = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    assert list(rows[0]) == [*who, "Lab 2 (1234)"]  # neither another assignment nor a computed or custom column
    first = ["    Points Possible", "", "", "", "", "100.00"]
    assert [list(row.values()) for row in rows] == [
        first,
        ["Lovelace, Ada", "901", "u1", "ada", "CS 1", "85"],
        ["Boole, Bo", "902", "u2", "BO@uni.edu", "CS 1", "92.5"],
    ]
    assert report == {
        "cyd": "missing: nothing was handed in",
        "'=dan": "excused in Canvas",
        "eve": "nobody in Canvas",
        "Doe, Fay": "no score in grades.csv",
        "Student, Test": "no score in grades.csv",
    }


def test_canvas_reads_the_headings_as_its_importer_does(tmp_path):
    """``GradebookImporter.row_has_student_headers?``, ``last_student_info_column`` and ``process_pp``."""
    written(tmp_path, CANVAS, GRADES, *LAB)
    content = (tmp_path / "exported-import.csv").read_bytes()
    head, second, *_ = csv.reader(content.decode("ascii").splitlines())  # no byte order mark
    assert head[0] == "Student" and head[1] == "ID" and head[2:4] == ["SIS User ID", "SIS Login ID"]
    assert head.index("Section") == 4 and "Points Possible" in second[0] and second[-1] == "100.00"


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ((), 5),
        (
            (
                ",SIS User ID",
                "",
                ",u1",
                "",
                ",u2",
                "",
                ",u3",
                "",
                ",u4",
                "",
                ",u5",
                "",
                ",,,,,,M",
                ",,,,,M",
                "906,",
                "906",
            ),
            4,
        ),
    ],
)
def test_canvas_with_and_without_sis_ids(tmp_path, change, columns):
    text = CANVAS
    for old, new in zip(change[::2], change[1::2]):
        text = text.replace(old, new)
    text = text.replace("Possible,,,,,,", "Possible,,,,,") if change else text
    rows, _ = written(tmp_path, text, GRADES, *LAB)
    assert len(rows[0]) == columns + 1 and [row["Lab 2 (1234)"] for row in rows] == ["100.00", "85", "92.5"]


def test_canvas_with_first_and_last_names_and_semicolons(tmp_path):
    text = 'LastName;FirstName;ID;SIS Login ID;Section;Lab 2 (1234)\n"    Points Possible";;;;;100,00\n'
    rows, _ = written(
        tmp_path, text + "Lovelace;Ada;901;x1;CS 1;\n", "student,score,max_score\nlovelaceada,8.5,100\n", *LAB
    )
    (line, _) = (tmp_path / "exported-import.csv").read_text().splitlines()[::-1][0], rows
    assert line == "Lovelace;Ada;901;x1;CS 1;8.5"


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path, capsys):
    (tmp_path / "canvas.csv").write_text(CANVAS)
    assert read_sheet(tmp_path / "canvas.csv", "Lab 2").column == 7  # the title alone
    for column in ("Lab 3 (1234)", "Final Grade", "Notes", "Section", None):
        with pytest.raises(ValueError, match=r"must name one of 'Lab 1 \(77\)', 'Lab 2 \(1234\)', got"):
            read_sheet(tmp_path / "canvas.csv", column)
    (tmp_path / "canvas.csv").write_text("student,score\nada,3\n")
    assert main(["no.csv", str(tmp_path / "canvas.csv"), *LAB]) == 2
    assert "neither Canvas's gradebook" in capsys.readouterr().err


def test_moodle_gets_its_own_worksheet_with_grades_in_it(tmp_path):
    rows, report = written(tmp_path, MOODLE)
    own = list(csv.DictReader(MOODLE.splitlines()))
    assert [row["Grade"] for row in rows] == ["85", "92.5"]
    assert [row | {"Grade": ""} for row in rows] == [row | {"Grade": ""} for row in own[:2]]  # nothing else changed
    assert report == {
        "cyd": "missing: nothing was handed in",
        "'=dan": "locked in Moodle",
        "eve": "nobody in Moodle",
    }


def test_names_of_moodles_folders_are_known(tmp_path):
    grades = "student,score,max_score\nAda Lovelace,1,100\nBo Boole_902,2,100\nParticipant 903,3,100\n"
    rows, _ = written(tmp_path, MOODLE, grades)
    assert {row["Full name"]: row["Grade"] for row in rows} == {"Ada Lovelace": "1", "Bo Boole": "2", "Cyd Doe": "3"}


BAD = ["", "'", "\N{SNOWMAN}", "../ada", "a" * 5000, "Ada", "ADA", "901", "nobody", '"', "=1+1", "Points Possible"]


@pytest.mark.parametrize("exported", [CANVAS, MOODLE], ids=["canvas", "moodle"])
@pytest.mark.parametrize("score", ["7", "nan", "-3", "1e999", "eighty", "100.5"])
def test_one_bad_line_never_stops_the_class(tmp_path, exported, score):
    lines = [
        ["fay" if exported is CANVAS else "cyd", score, "100"],
        *([bad, "7", "100"] for bad in BAD if bad.lower() != "ada"),
    ]
    with open(tmp_path / "more.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)
    grades = GRADES.replace("cyd,,,,missing,,nothing was handed in\n", "") + (tmp_path / "more.csv").read_text()
    rows, report = written(tmp_path, exported, grades, *(LAB if exported is CANVAS else ()))
    column = "Lab 2 (1234)" if exported is CANVAS else "Grade"
    assert report.pop("bo", None) is None
    assert "92.5" in [row[column] for row in rows]
    assert {"nobody", "../ada", "\N{SNOWMAN}", "=1+1"} <= report.keys()
    right = score == "7" or (score == "100.5" and exported is CANVAS)
    assert (score in [row[column] for row in rows]) == right == (lines[0][0] not in report)


def sheet(*people: tuple[str, str]) -> Sheet:
    """Canvas's gradebook of these names and logins."""
    rows = [[name, str(k), login, "CS 1", ""] for k, (name, login) in enumerate(people)]
    head = ["Student", "ID", "SIS Login ID", "Section", "Lab 2 (1234)"]
    return Sheet("Canvas", head, rows, 4, [0, 1, 2, 3, 4], 100, [], ",")


def scores(*students: str) -> list[dict[str, str]]:
    return [{"student": student, "score": str(60 + k), "max_score": "100"} for k, student in enumerate(students)]


#: Students without a score, and what the column notes of grades.csv says of them.
WHY = {"ada": "excused: ill", "bo": "a note"}


def test_a_name_of_two_is_nobodys_and_two_scores_of_one_are_not_entered():
    two = sheet(("Doe, Jo", "jdoe"), ("Doe, Jo", "jo"), ("Roe, Al", "al"))
    rows, left = entered(two, scores("doejo", "jo", "al", "roeal"))
    assert [row[2:] for row in rows] == [["jo", "CS 1", "61"]]
    assert [(line.student, line.why) for line in left] == [
        ("doejo", "2 people in Canvas are called so"),
        ("", "no score in grades.csv"),
        ("al", "several scores are this person's"),
        ("roeal", "several scores are this person's"),
    ]


def test_why_nobody_is_entered_is_said_once():
    lines = [{"student": who, "score": "", "status": "excused", "notes": notes} for who, notes in WHY.items()]
    moodle = replace(sheet(*((who, who) for who in WHY)), platform="Moodle")
    assert [line.why for line in entered(moodle, lines)[1][: len(WHY)]] == ["excused: ill", "excused: a note"]


def test_an_id_is_not_taken_for_another_that_looks_like_it():
    rows, left = entered(sheet(("Roe, Al", "al-roe"), ("Poe, Bo", "bo")), scores("alroe1", "al.roe", "b-o"))
    assert rows == [] and [line.why for line in left[:3]] == ["nobody in Canvas"] * 3


def test_other_points_are_refused_unless_they_are_to_be_scaled(tmp_path, capsys):
    ten = CANVAS.replace("100.00,100.00", "100.00,10.00")
    (tmp_path / "grades.csv").write_text(GRADES)
    (tmp_path / "exported.csv").write_text(ten)
    assert main([str(tmp_path / "grades.csv"), str(tmp_path / "exported.csv"), *LAB]) == 2
    assert "has 10 points and the lab 100" in capsys.readouterr().err
    rows, _ = written(tmp_path, ten, GRADES, *LAB, "--scale")
    assert [row["Lab 2 (1234)"] for row in rows] == ["10.00", "8.5", "9.25"]


def test_a_line_out_of_other_points_than_the_rest_is_left_out(tmp_path):
    rows, report = written(tmp_path, CANVAS, GRADES.replace("85,100", "8.5,10"), *LAB)
    assert [row["Lab 2 (1234)"] for row in rows] == ["100.00", "92.5"]
    assert report["ada"] == "its max_score is 10, and that of most 100"


def test_what_is_read_is_not_written_over(tmp_path, capsys):
    (tmp_path / "grades.csv").write_text(GRADES)
    (tmp_path / "canvas.csv").write_text(CANVAS)
    paths = [str(tmp_path / name) for name in ("grades.csv", "canvas.csv")]
    assert main([*paths, *LAB, "--out", paths[1]]) == 2
    assert "another file" in capsys.readouterr().err and (tmp_path / "canvas.csv").read_text() == CANVAS


def test_nbgraders_table_is_refused_by_its_columns(tmp_path, capsys):
    (tmp_path / "all.csv").write_text("assignment,student_id,score,max_score\nlab2,ada,85,100\n")
    (tmp_path / "canvas.csv").write_text(CANVAS)
    assert main([str(tmp_path / "all.csv"), str(tmp_path / "canvas.csv"), *LAB]) == 2
    assert "has no column student: take grades/LAB/grades.csv" in capsys.readouterr().err


# ---- Gradescope
#: What an autograder finds in Gradescope's container, from *Submission Metadata* of its documentation.
METADATA = {
    "id": 123456,
    "created_at": "2018-07-01T14:22:32.365935-07:00",
    "assignment": {"id": 25828, "course_id": 1234, "title": "Programming Assignment 1", "total_points": "20.0"},
    "submission_method": "upload",
    "users": [{"email": "student@example.com", "id": 1234, "name": "Student User"}],
    "previous_submissions": [],
}
LINES = """\
student,score,max_score,status,submission,notes
ada,85,100,graded,submission_123456,
bo,85,100,graded,submission_123456,handed in by a group: each member has a line
cyd,7,100,graded,"submission_77, submission_78",
dan,,,not graded,submission_79,
eve,9,100,graded,eve.zip,
../grades,9,100,graded,submission_80,
"""


def test_gradescopes_autograder_hands_each_submission_its_result(tmp_path, capsys):
    folder, place = tmp_path / "lab1_roofline", tmp_path / "autograder"
    (folder / "gradescope").mkdir(parents=True)
    (folder / "grades.csv").write_text(LINES)
    (tmp_path / "lab1_roofline" / "grades.json").write_text("{}")
    for student, score in (("ada", 85), ("bo", 85), ("cyd", 7), ("eve", 9)):
        (folder / "gradescope" / f"{student}.json").write_text(json.dumps({"score": score, "tests": []}))
    assert gradescope.main([str(folder)]) == 0
    said = capsys.readouterr().err
    assert [line.split(": ")[1] for line in said.splitlines()] == ["dan", "eve", "../grades"]
    with zipfile.ZipFile(folder / "gradescope-autograder.zip") as archive:
        archive.extractall(place / "source")
        modes = {entry.filename: stat.filemode(entry.external_attr >> 16)[1:] for entry in archive.infolist()}
    assert modes == {
        **dict.fromkeys(["setup.sh", "run_autograder"], "rwxr-xr-x"),
        **dict.fromkeys([f"results/{number}.json" for number in (123456, 77, 78)], "rw-r--r--"),
    }
    (place / "results").mkdir()
    found = {}
    for number in (123456, 78, 99):
        (place / "submission_metadata.json").write_text(json.dumps(METADATA | {"id": number}))
        subprocess.run([sys.executable, str(place / "source" / "run_autograder"), str(place)], check=True)
        found[number] = json.loads((place / "results" / "results.json").read_text())
    assert [found[number]["score"] for number in found] == [85, 7, 0]
    assert found[99]["output"] == "This submission has not been graded yet."


def test_a_folder_without_grades_has_no_autograder(tmp_path, capsys):
    assert gradescope.main([str(tmp_path)]) == 2 and gradescope.main([]) == 2
    assert not list(tmp_path.iterdir())
