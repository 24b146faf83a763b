"""Damaged submissions: each has a line in the table that says what happened, and costs nobody else anything."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from damaged_submissions import DAMAGE, DONE, LAB, gradescope, healthy
from quick_grader import rows, run, without_running
from submitted_files import written

from grading import gradebook
from grading.class_folder import find_submissions
from grading.seeds import ClassSeeds
from grading.submission import HandedIn
from grading.worker import Job, grade


@pytest.fixture
def quick(monkeypatch) -> list[str]:
    return without_running(monkeypatch)


def held(tmp_path: Path, kinds: Iterable[str | None]) -> None:
    """Grade a class, one student for each kind of damage (None is healthy), and hold every line of the table."""
    folder, ids = tmp_path / "in", []
    expected: dict[str, tuple[str, str]] = {}
    for index, damage in enumerate(kinds):
        student, files = healthy(index)
        score, says = "100", "missing, so taken as handed out"
        if damage is not None:
            student = f"s{index:03}-{damage}"
            make, score, says = DAMAGE[damage]
            files = make(student)
        written(folder, files)
        ids += [] if damage == "stranger" else [student]
        expected[student] = score, says
    (folder / "submission_metadata.yml").write_bytes(gradescope(range(len(expected))))
    (tmp_path / "roster.csv").write_text("student\n" + "\n".join(ids))
    assert run(folder, "--roster", str(tmp_path / "roster.csv")) == 0
    table = rows(folder)
    wrong = {}
    for student, (score, says) in expected.items():
        lines = [row for name, row in table.items() if name.startswith(student)]
        if not any(row["score"] == score and says in row["notes"] for row in lines):
            wrong[student] = [says, *((row["score"], row["notes"]) for row in lines)]
    assert wrong == {}
    whose = [name for name in table if not any(name.startswith(student) for student in expected)]
    assert whose == [], "lines of nobody"
    assert not list(tmp_path.rglob("x.py")) and not os.path.exists(tmp_path.parent / "x.py")
    assert not Path("/tmp/mlf-x.py").exists()


@pytest.mark.slow
def test_each_kind_of_damage_has_a_line_that_says_what_happened(tmp_path, quick, monkeypatch):
    for name in ("register", "enter", "enter_term"):  # nbgrader takes its time
        monkeypatch.setattr(gradebook, name, lambda *_: None)
    monkeypatch.setattr(gradebook, "corrections", lambda *_: {})
    assert len(DAMAGE) >= 30
    held(tmp_path, [*DAMAGE, *[None] * 20])


@pytest.mark.thorough
def test_a_class_of_300_with_every_kind_of_damage_has_a_line_for_each_that_says_what_happened(tmp_path, quick):
    kinds = [*DAMAGE, *[None] * 20]
    held(tmp_path, [kinds[index % len(kinds)] for index in range(300)])


@pytest.fixture
def anybody() -> Iterator[Path]:
    """A folder that this test's user owns, where that is not the superuser, who may read everything."""
    folder = Path(tempfile.mkdtemp())
    superuser = os.geteuid() == 0
    if superuser:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if superuser:
            os.seteuid(0)
        for path in folder.iterdir():
            path.chmod(0o700)
        shutil.rmtree(folder)


def test_a_folder_or_archive_that_may_not_be_read_has_a_line_and_stops_nobody(anybody):
    modes = {"no-folder": 0o000, "no-entering": 0o444, "no-listing": 0o111}
    written(anybody, {"ada/warp.py": DONE, "bob.zip": b"PK", **{f"{name}/warp.py": DONE for name in modes}})
    for name, mode in {**modes, "bob.zip": 0o000}.items():
        (anybody / name).chmod(mode)
    found = find_submissions(anybody, LAB)
    assert list(found.handed_in) == ["ada"]
    assert sorted(line.student for line in found.ungraded) == ["bob.zip", "no-entering", "no-folder", "no-listing"]
    assert all(line.why.startswith("it cannot be read: you lack the permission") for line in found.ungraded)


@pytest.mark.sandbox
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("damage", "loses", "says"),
    [
        (lambda source: source.replace(b"\n", b"\r\n"), False, "taken as handed out"),
        (lambda source: source.replace(b"\n", b"\r"), False, "taken as handed out"),
        (lambda source: b"\xef\xbb\xbf" + source, False, "taken as handed out"),
        (lambda source: source.decode().encode("utf-16"), True, "save the file as UTF-8"),
        (lambda source: source + b"\ndef f(:\n", True, "not Python: invalid syntax"),
        (lambda source: b"", True, "nothing is written in waves.py: the file is empty"),
        (lambda source: source + b"\nprint(1 / 0)\n", True, "waves.py cannot be imported"),
    ],
    ids=["windows-lines", "old-mac-lines", "byte-order-mark", "utf-16", "syntax-error", "no-byte", "raises"],
)
def test_what_is_wrong_in_a_module_costs_what_is_written_in_it_and_nothing_else(tmp_path, damage, loses, says):
    source = (LAB.solution / "waves.py").read_bytes()
    others = ("operators.py", "prediction.py", "rates.py", "residual.py", "warp.py")
    files = {f"in/{name}": (LAB.solution / name).read_bytes() for name in others}
    written(tmp_path, {**files, "in/waves.py": damage(source)})
    (tmp_path / "expected").mkdir()
    job = Job(LAB, ClassSeeds("x", tuple(e.number for e in LAB.exercises)), tmp_path / "expected")
    done = grade(job, HandedIn("ada", (("", tmp_path / "in"),)), "digest", tmp_path / "submitted")
    lost = [one["number"] for one in done["exercises"] if one["outcome"] != "passed"]
    assert lost == (["1.8"] if loses else [])
    assert says in "; ".join(done["notes"])
