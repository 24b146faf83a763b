"""When a submission was handed in: what each platform's export tells, and that nothing else is trusted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from submitted_files import packed, written

from grading.class_folder import find_submissions
from grading.lab import find_lab
from grading.roster import read_roster
from grading.times import UNKNOWN, Submitted, commit_time, gradescope_times, parse_time

LAB = find_lab("lab1")
DONE = b"x = 1\n"
NOON = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)


def times(folder: Path, files: Mapping[str, bytes]) -> dict[str, Submitted]:
    return find_submissions(written(folder, files), LAB).times


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-21 12:30:00.000000 UTC",  # nbgrader
        "2026-11-21 12:30:00.000000000 Z",  # Gradescope
        "2026-11-21T13:30+01:00",
        "2026-11-21 13:30 +0100",
    ],
)
def test_a_time_is_read_as_platforms_write_it(text):
    assert parse_time(text) == NOON


def test_a_time_without_an_offset_has_none_and_what_is_no_time_is_refused():
    assert (
        parse_time("2026-11-21 12:30")
        == parse_time("Saturday, 21 November 2026, 12:30 PM")
        == datetime(2026, 11, 21, 12, 30)
    )
    for text in ("2026-11-21", "yesterday", "12:30", "", "21.11.2026 12:30", "2026-11-21 12:30 CET"):
        with pytest.raises(ValueError, match="is no time such as 2026-11-21 12:30"):
            parse_time(text)


def test_nbgrader_says_when_in_the_name_of_the_exchange_and_in_what_it_collects(tmp_path):
    files = {f"ada+lab1_roofline+2026-11-2{day} 12:30:00.0 UTC/warp.py": DONE for day in (0, 1)}
    files |= {"bo/lab1_roofline/timestamp.txt": b"2026-11-21 12:30:00.0 UTC", "bo/lab1_roofline/warp.py": DONE}
    files |= {"cy+lab1_roofline+2026-11-21 12:30:00.0 XYZ/warp.py": DONE}
    found = times(tmp_path / "in", files)
    assert found == {"ada": Submitted(NOON, "nbgrader"), "bo": Submitted(NOON, "nbgrader"), "cy": UNKNOWN}


def test_canvas_says_late_or_not_and_never_when(tmp_path):
    files = {"do_5_70_warp.py": DONE, "ro_LATE_6_71_warp.py": DONE, "ro_LATE_6_72_waves.py": DONE}
    found = times(tmp_path / "in", files)
    assert {student: (one.when, one.late) for student, one in found.items()} == {
        "do": (None, False),
        "ro": (None, True),
    }


METADATA = """---
submission_101:
  :submitters:
  - :name: Jane Doe
    :sid: '3012'
    :email: jdoe@school.test
  :created_at: 2026-11-21 12:30:00.000000000 Z
  :history:
  - :id: 99
    :created_at: 2026-11-20 12:30:00.000000000 Z
  :results:
    :output: |-
      :created_at: 2026-11-01 12:30:00.000000000 Z
submission_102:
  :created_at: !ruby/object:ActiveSupport::TimeWithZone
    utc: &1 2026-11-21 12:30:00.000000000 Z
    zone: !ruby/object:ActiveSupport::TimeZone
      name: America/Los_Angeles
    time: 2026-11-21 04:30:00.000000000 Z
  :submitters:
  - :name: Pair One
    :email: one@school.test
"""


def test_gradescope_says_when_each_folder_was_created(tmp_path):
    created = Submitted(NOON, "Gradescope")
    assert gradescope_times(METADATA) == {"submission_101": created, "submission_102": created}
    files = {f"submission_{n}/warp.py": DONE for n in (101, 102)} | {"submission_metadata.yml": METADATA.encode()}
    assert times(tmp_path / "in", files) == {"3012": created, "one": created}


def git(folder: Path, *arguments: str, **more: str) -> str:
    """Run git in a clone; what it prints."""
    who = {f"GIT_{who}_{what}": "x@x.test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **who, **more}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path) -> Path:
    folder = written(tmp_path / "in" / "lab1-ada", {"labs/lab1_roofline/warp.py": DONE})
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "done\n\ncommitter x <x> 5 +0000", GIT_COMMITTER_DATE="2026-11-21T13:30:00+0100")
    return folder


def test_a_clone_says_when_its_last_commit_was_made_loose_or_packed_on_a_branch_or_not(tmp_path, clone):
    expected = {"ada": Submitted(NOON, "the date of the last commit")}
    assert find_submissions(tmp_path / "in", LAB).times == expected
    git(clone, "gc", "-q")
    assert not (clone / ".git/refs/heads/main").exists() and find_submissions(tmp_path / "in", LAB).times == expected
    git(clone, "checkout", "-q", "--detach")
    assert find_submissions(tmp_path / "in", LAB).times == expected


def test_no_program_that_a_clone_names_is_run(tmp_path, clone):
    """A clone can say that missing objects are fetched, and by which program."""
    ran, program = tmp_path / "ran", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    program.chmod(0o755)
    for name, value in {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": "ssh://none.invalid/x", "core.sshCommand": str(program),
    }.items():  # fmt: skip
        git(clone, "config", name, value)
    assert commit_time(clone / ".git") == NOON
    (clone / ".git/HEAD").write_text("f" * 40)
    with pytest.raises(subprocess.CalledProcessError):
        git(clone, "cat-file", "commit", "f" * 40)
    assert ran.exists(), "the trap is none"
    ran.unlink()
    assert commit_time(clone / ".git") is None and not ran.exists()


HEADS = ["", "ref: refs/heads/none", "ref: refs/../../../../etc/passwd", "--help", "f" * 40, "ref: refs/heads/main\nx"]


@pytest.mark.parametrize("head", HEADS)
def test_a_clone_without_a_commit_that_can_be_read_says_nothing(clone, head):
    (clone / ".git/HEAD").write_text(head)
    assert commit_time(clone / ".git") is None


def test_a_pipe_or_a_link_in_the_place_of_a_clone_stops_nobody(tmp_path, clone):
    (clone / ".git/HEAD").unlink()
    os.mkfifo(clone / ".git/HEAD")
    assert commit_time(clone / ".git") is None
    (tmp_path / "link").symlink_to(clone / ".git")
    assert commit_time(tmp_path / "link") is None


def test_times_of_files_and_of_members_of_archives_are_not_taken(tmp_path):
    """A student's own archive can also hold what nbgrader writes, or a clone."""
    inside = {"lab1_roofline/timestamp.txt": b"2026-11-21 12:30:00.0 UTC", "lab1_roofline/warp.py": DONE}
    files = {"ada.zip": packed(inside), "bo.tar.gz": packed(inside, ".tar.gz"), "cy/warp.py": DONE}
    files |= {f"Jo Do_7_assignsubmission_file_/{name}": content for name, content in inside.items()}
    assert times(tmp_path / "in", files) == dict.fromkeys(["ada", "bo", "cy", "Jo Do"], UNKNOWN)


#: Moodle's offline grading worksheet.
WORKSHEET = """\
Identifier,"Full name","ID number",Status,Grade,"Last modified (submission)","Last modified (grade)"
"Participant 7","Jo Do",u7,"Submitted for grading",,"Saturday, 21 November 2026, 12:30 PM",-
"Participant 8","Jo Do",u8,"Submitted for grading",,"Saturday, 21 November 2026, 1:30 PM",-
"Participant 9","Al Roe",u9,"No submission",,-,-
"""


def test_a_table_beside_the_submissions_says_when_by_any_name_and_is_believed_first(tmp_path):
    files = {"ada/warp.py": DONE, "do_LATE_5_70_warp.py": DONE, "bo/warp.py": DONE}
    files["times.csv"] = b"student,submitted\nada,2026-11-21 12:30\ndo,2026-11-21T12:30Z\n"
    folder = written(tmp_path / "in", files)
    found = find_submissions(folder, LAB)
    assert found.times == {
        "ada": Submitted(datetime(2026, 11, 21, 12, 30), "your table of times"),
        "do": Submitted(NOON, "your table of times"),
        "bo": UNKNOWN,
    }
    assert found.ungraded == []  # the table is no submission


def test_moodles_worksheet_says_when_as_a_table_of_times_or_as_the_roster(tmp_path):
    files = {f"Jo Do_{n}_assignsubmission_file_/warp.py": DONE for n in (7, 8)}
    folder = written(tmp_path / "in", files | {"Al Roe_9_assignsubmission_file_/warp.py": DONE})
    (tmp_path / "worksheet.csv").write_text(WORKSHEET, encoding="utf-8-sig")
    roster = read_roster(tmp_path / "worksheet.csv")
    found = find_submissions(folder, LAB, roster).times
    assert {name: one.when and one.when.hour for name, one in found.items()} == {
        "Participant 7": 12, "Participant 8": 13, "Participant 9": None,
    }  # fmt: skip
    (folder / "times.csv").write_text(WORKSHEET)
    found = find_submissions(folder, LAB).times
    assert {name: one.when and one.when.hour for name, one in found.items()} == {
        "Jo Do_7": 12, "Jo Do_8": 13, "Al Roe": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("student,submitted\nada,yesterday\n", r"times\.csv, ada: 'yesterday' is no time"),
        ("ada,2026-11-21 12:30\n", "needs a line of headings"),
        ("student,when\nada,2026-11-21 12:30\n", "needs a line of headings"),
    ],
)
def test_a_table_of_times_that_says_none_is_refused_at_once(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        times(tmp_path / "in", {"ada/warp.py": DONE, "times.csv": text.encode()})
