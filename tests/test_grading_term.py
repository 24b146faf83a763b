"""Due dates, lateness and decisions for single students: what ``class.toml`` may say, and where it reaches."""

from __future__ import annotations

import csv
import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from nbgrader.api import Gradebook
from nbgrader.plugins.export import CsvExportPlugin
from quick_grader import rows, run, without_running
from submitted_files import written

from grading import export, gradescope
from grading.class_folder import Class, Ungraded
from grading.feedback import page
from grading.lab import ROOT, find_lab
from grading.lateness import applied, days_late, lines, prepared
from grading.results import Verdict, result
from grading.roster import Roster
from grading.submission import HandedIn
from grading.term import Late, Override, Term, read_term
from grading.times import UNKNOWN, Submitted

LAB = find_lab("lab1")
DONE = b"x = 1\n"
DUE = datetime(2026, 11, 28, 23, 0, tzinfo=UTC)
LATE = Late(10, grace_minutes=15, last_day=3)


def told(submitted: Submitted = UNKNOWN, override: Override | None = None, **term: object) -> dict:
    """The result of a student with 60 of 100 points, once a term is applied."""
    passed = {"1.1", "1.2"}
    verdicts = {e.number: Verdict("passed" if e.number in passed else "failed", "no") for e in LAB.exercises}
    plain = {**result(LAB, "ada", "digest", verdicts), "score": 60}
    everyone = Class({"ada": HandedIn("ada", ())}, {"ada": submitted})
    given = Term(**{"due": DUE, "late": LATE} | term, overrides={"ada": override} if override else {})
    return applied(given, {"ada": plain}, everyone)["ada"]


def after(**late: float) -> Submitted:
    return Submitted(DUE + timedelta(**late), "nbgrader")


# ---- the file ------------------------------------------------------------------------------------------------------

WHOLE = """
timezone = "Europe/Berlin"

[late]
percent_per_day = 10
grace_minutes = 15
last_day = 5

[lab1]
due = 2026-11-28T23:59:00

[lab1.students]
ada = { due = 2026-12-01, reason = "ill" }
"Jo Do" = { score = 80, reason = "shown on paper" }
bo = { excused = true }

[lab2_triton_kernels]
due = 2026-12-12T23:59:00+01:00
"""


def read(folder: Path, text: str, lab: str = "lab1") -> Term:
    (folder / "class.toml").write_text(text, encoding="utf-8")
    return read_term(folder / "class.toml", find_lab(lab))


def test_one_file_holds_due_dates_the_policy_and_what_was_decided_for_students(tmp_path):
    term = read(tmp_path, WHOLE)
    assert term.late == Late(10, 15, 5) and term.due.astimezone(UTC) == datetime(2026, 11, 28, 22, 59, tzinfo=UTC)
    assert term.overrides["ada"].due.isoformat() == "2026-12-01T23:59:59+01:00"  # a day ends at its end
    assert term.overrides["Jo Do"] == Override(score=80, reason="shown on paper")
    assert term.overrides["bo"] == Override(excused=True)
    other = read(tmp_path, WHOLE, "lab2")
    assert other.due.astimezone(UTC) == datetime(2026, 12, 12, 22, 59, tzinfo=UTC) and other.overrides == {}
    assert read(tmp_path, WHOLE, "lab3").due is None and read_term(tmp_path / "none.toml", LAB) == Term()


def test_a_student_of_whom_something_was_decided_may_have_any_name_in_the_roster(tmp_path):
    known = Roster(("Participant 901", "bo"), {"u1": "Participant 901", "jodo": "Participant 901"})
    read(tmp_path, WHOLE)
    term = read_term(tmp_path / "class.toml", LAB, known)
    assert term.overrides.keys() == {"ada", "Participant 901", "bo"} and term.overrides["Participant 901"].score == 80
    read(tmp_path, WHOLE.replace("ada = {", "u1 = {"))
    with pytest.raises(ValueError, match=r"lab1\.students: 'Jo Do' is a second name of Participant 901, who is there"):
        read_term(tmp_path / "class.toml", LAB, known)


def test_the_guides_example_is_read(tmp_path):
    (text,) = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "grading" / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    term = read(tmp_path, text, "lab2")
    assert term.late == Late(10, 15, 5) and term.overrides.keys() == {"jdoe", "Jane Doe", "bo"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[lab1]", "[lab9]"), r"lab9 is not known; there are timezone, late, lab1_roofline, lab1"),
        (("[lab1]", "[lab1"), r"class\.toml: "),
        (("[lab1]", "[lab1]\ndeu = 2026-11-28"), r"lab1\.deu is not known; there are due, skip, students"),
        (("due = 2026-11-28T23:59:00", 'due = "28 November"'), r"lab1\.due must be a date, got '28 November'"),
        (("Europe/Berlin", "Berlin/Europe"), r"timezone must be one such as \"Europe/Berlin\", got 'Berlin/Europe'"),
        (("Europe/Berlin", "../../etc"), r"timezone must be one such as"),
        (('timezone = "Europe/Berlin"', ""), r"lab1\.due has no offset: write 2026-11-28T23:59:00\+01:00, say, or"),
        (("percent_per_day = 10", "percent_per_day = -1"), r"late\.percent_per_day must be between 0 and 100, got -1"),
        (("percent_per_day = 10", "percent_per_day = nan"), r"late\.percent_per_day must be between"),
        (("percent_per_day = 10", "percent_per_day = true"), r"late\.percent_per_day must be a number, got True"),
        (("percent_per_day = 10", ""), r"late needs percent_per_day; without a penalty, leave out \[late\]"),
        (("last_day = 5", "last_day = 1.5"), r"late\.last_day must be a whole number, got 1\.5"),
        (("score = 80, reason", "score = 80, why"), r"lab1\.students\.Jo Do\.why is not known"),
        (('score = 80, reason = "shown on paper"', "score = 80"), r"Jo Do: a score needs a reason"),
        (("score = 80", "score = 101"), r"Jo Do\.score: the lab has 100 points, got 101"),
        (("score = 80", "score = -1"), r"Jo Do\.score must be at least 0, got -1"),
        (("score = 80", "score = inf"), r"Jo Do\.score must be at least 0, got inf"),
        (("score = 80", "score = 80, excused = true"), r"give one of due, score and excused, got score, excused"),
        (("bo = { excused = true }", "bo = {}"), r"bo: give one of due, score and excused, got none"),
        (("bo = { excused = true }", "bo = { excused = false }"), r"bo: leave it out, or say excused = true"),
        (("bo = { excused = true }", "bo = 80"), r"lab1\.students\.bo must be a table, got 80"),
        (("bo = ", '"../bo" = '), r"'\.\./bo' is no id"),
        (("due = 2026-11-28T23:59:00", ""), r"lab1\.students\.ada has a due date, and lab1 itself has none"),
        (("lab2_triton_kernels", "lab1_roofline"), r"lab1_roofline is there twice"),
        (("[lab1]", '[lab1]\nskip = ["1.11"]'), r"lab1\.skip: there is no exercise '1\.11', but 1\.1, 1\.2, "),
        (("[lab1]", "[lab1]\nskip = [1.1]"), r"lab1\.skip: there is no exercise 1\.1, but 1\.1, .*, each as a text"),
        (("[lab1]", '[lab1]\nskip = "1.1"'), r"lab1\.skip must be a list, got '1\.1'"),
        (("[lab2_triton_kernels]", '[lab2_triton_kernels]\nskip = ["1.1"]'), r"triton_kernels\.skip: there is no"),
        (("[lab1]", f"[lab1]\nskip = {[e.number for e in LAB.exercises]}"), r"lab1\.skip: no exercise is left"),
        (("[lab1]", '[lab1]\nskip = ["1.3", "1.10"]'), r"Jo Do\.score: the lab has 75 points, got 80"),
    ],
)
def test_what_the_file_says_wrongly_is_named_before_anything_is_graded(tmp_path, change, says):
    assert WHOLE.count(change[0]) == 1
    with pytest.raises(ValueError, match=says) as raised:
        read(tmp_path, WHOLE.replace(*change))
    assert str(raised.value).startswith(str(tmp_path / "class.toml"))
    with pytest.raises(ValueError):  # also by the instructor of another lab: it is one file
        read(tmp_path, WHOLE.replace(*change), "lab1")


# ---- lateness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "days"),
    [
        ({"seconds": -1}, 0), ({}, 0), ({"minutes": 15}, 0), ({"minutes": 15, "seconds": 1}, 1), ({"hours": 24}, 1),
        ({"hours": 24, "seconds": 1}, 2), ({"days": 6, "hours": 1}, 7),
    ],
)  # fmt: skip
def test_a_day_counts_once_it_has_begun_and_the_grace_has_passed(late, days):
    assert days_late(DUE + timedelta(**late), DUE, 15) == days


def test_a_day_has_24_hours_when_clocks_change(tmp_path):
    text = WHOLE.replace("2026-11-28T23:59:00", "2026-10-24T12:00:00")  # on the 25th, a clock shows an hour twice
    term = read(tmp_path, text)
    assert days_late(term.due + timedelta(days=1), term.due) == 2  # the same time on the clock, after 25 hours


@pytest.mark.parametrize(
    ("late", "score", "says"),
    [
        ({"hours": -1}, 60, "Handed in 28 November 2026, 22:00 UTC: on time."),
        ({"minutes": 10}, 60, "on time."),
        ({"hours": 1}, 50, "1 day late. Score 60, penalty 10 (10 % of 100 points for each day begun), final score 50."),
        ({"hours": 49}, 30, "3 days late. Score 60, penalty 30 "),
        ({"hours": 73}, 0, "4 days late. Score 60, penalty 60 (nothing counts after day 3), final score 0."),
    ],
)
def test_the_penalty_grows_by_the_day_and_ends_at_the_last_day(late, score, says):
    made = told(after(**late))
    assert made["score"] == score and made["term"]["penalty"] == 60 - score and made["term"]["status"] == ""
    assert says in " ".join(made["term"]["said"]) and made["term"]["said"][0] == "Due 28 November 2026, 23:00 UTC."


def test_a_score_is_never_below_zero():
    made = told(after(days=8), late=Late(10))
    assert (made["score"], made["term"]["penalty"]) == (0, 60)


def test_without_a_policy_lateness_is_said_and_costs_nothing():
    made = told(after(hours=30), late=None)
    assert made["score"] == 60 and "2 days late." in made["term"]["said"][1]
    assert made["term"]["notes"] == ["2 days late by nbgrader: no late policy"]


def test_without_a_due_date_nothing_is_said_of_time():
    made = told(after(hours=30), due=None)
    assert made["score"] == 60 and made["term"]["said"] == made["term"]["notes"] == []
    assert made["term"]["submitted"] == "2026-11-30 05:00:00+00:00"


def test_an_unknown_time_costs_nothing_and_is_seen():
    unknown = {"it is not known when it was handed in: no penalty": UNKNOWN}
    unknown["Canvas marks it as late, and does not say when it was handed in: no penalty"] = Submitted(None, "", True)
    for note, submitted in unknown.items():
        made = told(submitted)
        assert made["score"] == 60 and made["term"]["status"] == "time unknown" and made["term"]["notes"] == [note]
        assert "no penalty is taken off" in made["term"]["said"][1]
        assert told(submitted, late=None)["term"]["status"] == ""  # nothing depends on it
    assert told(Submitted(None, "Canvas", False))["term"]["status"] == ""


def test_a_decision_for_a_student_is_stronger_than_the_policy():
    extended = told(after(days=2), Override(due=DUE + timedelta(days=2), reason="ill."))
    assert extended["score"] == 60
    assert extended["term"]["said"][0] == "Due 30 November 2026, 23:00 UTC, extended for you: ill."
    assert told(after(days=2, hours=1), Override(due=DUE + timedelta(days=2)))["score"] == 50
    for score in (0, 35.5, 90):
        made = told(after(days=9), Override(score=score, reason="seen in class"))
        assert made["score"] == score and made["term"]["penalty"] == 0 and made["term"]["status"] == ""
        (said,) = made["term"]["said"]
        assert said == f"Your instructor set the score to {score:g}: seen in class. The checks gave 60."
    excused = told(after(days=9), Override(excused=True))
    assert (excused["score"], excused["term"]["status"]) == (60, "excused")
    assert "You are excused from this lab" in excused["term"]["said"][0]


def test_a_reason_is_text_on_the_page_and_nothing_more():
    made = page(told(override=Override(score=5, reason="<script>x</script>")))
    assert "5 <small>of 100 points" in made and "&lt;script&gt;x" in made and "<script>" not in made


def test_a_time_without_an_offset_is_the_classs_and_refused_where_that_is_not_known(tmp_path):
    naive = Class({}, {"ada": Submitted(datetime(2026, 11, 29, 0, 30), "your table of times")})
    with pytest.raises(ValueError, match=r"2026-11-29 00:30:00 in your table of times has no offset"):
        prepared(Term(due=DUE), LAB, naive)
    prepared(read(tmp_path, WHOLE), LAB, naive)
    assert naive.times["ada"].when.astimezone(UTC) == datetime(2026, 11, 28, 23, 30, tzinfo=UTC)


def test_whoever_handed_in_nothing_is_excused_extended_or_has_the_score_that_was_set():
    overrides = {"ada": Override(excused=True, reason="ill"), "bo": Override(score=80, reason="on paper")}
    overrides |= {"cy": Override(due=DUE), "typo": Override(due=DUE)}
    everyone = Class(ungraded=[Ungraded(who, "nothing was handed in", "missing") for who in ("ada", "bo", "cy", "di")])
    term = Term(due=DUE, overrides=overrides)
    absent = prepared(term, LAB, everyone)
    made = applied(term, absent, everyone)
    assert made["bo"]["score"] == 80 and made["bo"]["notes"] == ["missing: nothing was handed in"]
    assert {line.student: (line.status, line.why) for line in lines(term, everyone.ungraded, made)} == {
        "di": ("missing", "nothing was handed in"),
        "ada": ("excused", "excused; ill; nothing was handed in"),
        "cy": ("missing", "due date moved to 28 November 2026, 23:00 UTC; nothing was handed in"),
        "typo": (
            "missing",
            "due date moved to 28 November 2026, 23:00 UTC; nothing was handed in under this id of class.toml",
        ),
    }


# ---- where it reaches ----------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch) -> list[str]:
    return without_running(monkeypatch)


TOML = """
[late]
percent_per_day = 10
[lab1]
due = 2026-11-28T23:00:00Z
[lab1.students]
"Doe, Eve" = { due = 2026-11-30T00:00:00Z, reason = "ill" }
set = { score = 80, reason = "on paper" }
paper = { score = 70, reason = "on paper" }
out = { excused = true }
away = { excused = true }
"""
CANVAS = "Student,ID,SIS Login ID,Section,Lab 1 (7)\n    Points Possible,,,,100\n" + "".join(
    f"{name},{number},{name},A,\n"
    for number, name in enumerate(["late", "fine", "who", "ext", "set", "paper", "out", "away"], 1)
)


def handed_in(folder: Path) -> Path:
    day = {"late": 30, "fine": 28, "ext": 29, "set": 30, "out": 30}
    files = {f"{name}+lab1_roofline+2026-11-{d} 12:00:00.0 UTC/warp.py": DONE for name, d in day.items()}
    return written(folder, files | {"who/warp.py": DONE})


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> Path:
    """A class in which everybody has full marks, graded with a ``class.toml``."""
    folder = tmp_path_factory.mktemp("class")
    written(folder / "grades", {"class.toml": TOML.encode()})
    (folder / "roster.csv").write_text('student,name\naway,\nlate,\next,"Doe, Eve"\n')
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_running(monkeypatch)
        assert run(handed_in(folder / "in"), "--roster", str(folder / "roster.csv")) == 0
    return folder


@pytest.fixture
def term(tmp_path, graded, quick) -> Path:
    """A copy of the folder of grades of that class."""
    shutil.copytree(graded, tmp_path, dirs_exist_ok=True)
    return tmp_path / "grades"


@pytest.mark.slow
def test_what_was_decided_reaches_the_table_the_pages_the_gradebook_and_every_export(tmp_path, term):
    table = rows(tmp_path / "in")
    assert {name: (row["score"], row["penalty"], row["status"]) for name, row in table.items()} == {
        "late": ("80", "20", "graded"), "fine": ("100", "", "graded"), "who": ("100", "", "time unknown"),
        "ext": ("100", "", "graded"), "set": ("80", "", "graded"), "paper": ("70", "", "graded"),
        "out": ("", "", "excused"), "away": ("", "", "excused"),
    }  # fmt: skip
    assert table["late"]["submitted"] == "2026-11-30 12:00:00+00:00" and table["who"]["submitted"] == ""
    assert "2 days late by nbgrader: score 100, penalty 20" in table["late"]["notes"]
    folder = term / LAB.name
    page = (folder / "feedback" / "late.html").read_text()
    assert "80 <small>of 100 points" in page and "Score 100, penalty 20 (10 % of 100 points" in page
    assert "set the score to 70: on paper" in (folder / "feedback" / "paper.html").read_text()
    assert "You are excused" in (folder / "feedback" / "out.html").read_text()
    made = {name: json.loads((folder / "gradescope" / f"{name}.json").read_text()) for name in ("late", "set", "paper")}
    assert [one["score"] for one in made.values()] == [80, 80, 70] and "penalty 20" in made["late"]["output"]
    # nbgrader, and what its export writes
    with Gradebook(f"sqlite:///{term / 'gradebook.db'}") as book:
        assert book.find_assignment(LAB.name).duedate == datetime(2026, 11, 28, 23)
        late, ext = book.find_submission(LAB.name, "late"), book.find_submission(LAB.name, "ext")
        assert (late.timestamp, late.total_seconds_late) == (datetime(2026, 11, 30, 12), 37 * 3600)
        assert ext.extension == timedelta(hours=25) and ext.total_seconds_late == 0
        CsvExportPlugin(to=str(term / "all.csv")).export(book)
    with open(term / "all.csv", newline="") as file:
        columns = ("raw_score", "late_submission_penalty", "score")
        scores = {row["student_id"]: tuple(map(row.get, columns)) for row in csv.DictReader(file)}
    assert scores["late"] == ("100.0", "20.0", "80.0") and scores["paper"] == ("0.0", "-70.0", "70.0")
    assert scores["set"] == ("100.0", "20.0", "80.0") and scores["fine"] == ("100.0", "0.0", "100.0")
    # Canvas
    (tmp_path / "canvas.csv").write_text(CANVAS)
    assert export.main([str(folder / "grades.csv"), str(tmp_path / "canvas.csv"), "--column", "Lab 1"]) == 0
    with open(tmp_path / "canvas-import.csv", newline="") as file:
        entered = {row["Student"]: row["Lab 1 (7)"] for row in csv.DictReader(file)}
    assert entered == {
        "    Points Possible": "100", "late": "80", "fine": "100", "who": "100", "ext": "100", "set": "80",
        "paper": "70", "out": "EX", "away": "EX",
    }  # fmt: skip
    assert "excused" in gradescope.packed(folder)[1]["out"]


@pytest.mark.slow
def test_a_change_of_the_policy_runs_no_check_again_and_is_taken_back_without_a_trace(tmp_path, term, quick, capsys):
    stored = {path: path.read_bytes() for path in (term / LAB.name / "results").iterdir()}
    (term / "class.toml").write_text(TOML.replace("percent_per_day = 10", "percent_per_day = 50"))
    assert run(tmp_path / "in") == 0 and rows(tmp_path / "in")["late"]["score"] == "0"
    assert "TIME UNKNOWN, so no penalty: who " in capsys.readouterr().err
    (term / "class.toml").unlink()
    assert run(tmp_path / "in") == 0 and rows(tmp_path / "in")["late"]["score"] == "100"
    assert "paper" not in rows(tmp_path / "in")
    assert quick == [] and {path: path.read_bytes() for path in (term / LAB.name / "results").iterdir()} == stored
    assert "penalty" not in (term / LAB.name / "feedback" / "late.html").read_text()
    with Gradebook(f"sqlite:///{term / 'gradebook.db'}") as book:
        assert book.find_submission(LAB.name, "late").late_submission_penalty == 0
        assert book.find_submission(LAB.name, "ext").extension is None


@pytest.mark.slow
def test_an_exercise_that_is_not_assigned_has_no_points_anywhere_and_no_check_runs_again(tmp_path, term, quick):
    folder, canvas, roster = term / LAB.name, tmp_path / "canvas.csv", ("--roster", str(tmp_path / "roster.csv"))
    (term / "class.toml").write_text(TOML.replace("[lab1]\n", '[lab1]\nskip = ["1.1", "1.3"]\n'))
    assert run(tmp_path / "in", *roster) == 0 and quick == []
    table = rows(tmp_path / "in")
    assert not {"1.1", "1.3"} & table["fine"].keys() and table["fine"]["1.10"] == "15"
    assert {row["max_score"] for row in table.values()} == {"85", ""}
    assert {name: (row["score"], row["penalty"]) for name, row in table.items() if row["score"]} == {
        "late": ("68", "17"), "fine": ("85", ""), "who": ("85", ""), "ext": ("85", ""), "set": ("80", ""),
        "paper": ("70", ""),
    }  # fmt: skip
    page = (folder / "feedback" / "fine.html").read_text()
    assert "85 <small>of 85 points" in page and LAB.exercises[1].title in page and LAB.exercises[0].title not in page
    tests = json.loads((folder / "gradescope" / "fine.json").read_text())["tests"]
    assert sum(one["max_score"] for one in tests) == 85 and len(tests) == len(LAB.exercises) - 2
    with Gradebook(f"sqlite:///{term / 'gradebook.db'}") as book:
        assert book.find_assignment(LAB.name).max_score == 85 and book.find_submission(LAB.name, "fine").score == 85
        assert book.find_submission(LAB.name, "late").score == 85  # without its penalty, 17
        book.find_grade("check-1-1", LAB.name, LAB.name, "late").manual_score = 5  # of an exercise that has no points
        book.db.commit()
    assert run(tmp_path / "in", *roster) == 0 and rows(tmp_path / "in")["late"]["score"] == "68"
    with Gradebook(f"sqlite:///{term / 'gradebook.db'}") as book:
        late = book.find_submission(LAB.name, "late")
        assert late.score - late.late_submission_penalty == 68  # what nbgrader exports
        book.find_grade("check-1-1", LAB.name, LAB.name, "late").manual_score = None
        book.db.commit()
    canvas.write_text(CANVAS.replace("100", "85"))
    assert export.main([str(folder / "grades.csv"), str(canvas), "--column", "Lab 1"]) == 0
    assert "fine,2,fine,A,85\n" in (tmp_path / "canvas-import.csv").read_text()
    (term / "class.toml").write_text(TOML)
    assert run(tmp_path / "in", *roster) == 0 and quick == [] and rows(tmp_path / "in")["fine"]["score"] == "100"
    with Gradebook(f"sqlite:///{term / 'gradebook.db'}") as book:
        assert book.find_assignment(LAB.name).max_score == 100 == book.find_submission(LAB.name, "fine").score


@pytest.mark.slow
def test_a_score_given_by_hand_is_what_the_penalty_is_taken_from(tmp_path, term):
    with Gradebook(f"sqlite:///{term / 'gradebook.db'}") as book:
        book.find_grade("check-1-1", LAB.name, LAB.name, "late").manual_score = 0
        book.db.commit()
    assert run(tmp_path / "in") == 0
    lost = LAB.exercises[0].points
    row = rows(tmp_path / "in")["late"]
    assert (float(row["score"]), row["penalty"], row["1.1"]) == (80 - lost, "20", "0")


@pytest.mark.slow
def test_a_mistake_in_the_file_stops_the_run_before_anything_is_graded(tmp_path, quick, capsys):
    written(tmp_path / "grades", {"class.toml": b"[lab1]\ndue = 5\n"})
    assert run(handed_in(tmp_path / "in")) == 2 and quick == []
    assert "class.toml: lab1.due must be a date, got 5" in capsys.readouterr().err


def test_a_group_with_two_scores_is_set_in_gradescope_by_hand(tmp_path):
    lines = "student,score,max_score,submission\nada,85,100,submission_1\nbo,80,100,submission_1\n"
    made = {"gradescope/ada.json": b'{"score": 85}', "gradescope/bo.json": b'{"score": 80}'}
    folder = written(tmp_path / LAB.name, {"grades.csv": lines.encode()} | made)
    assert gradescope.packed(folder)[1] == {
        "bo": "its group has another score, and Gradescope takes one for all: set it there"
    }
