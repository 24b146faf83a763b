"""Similar submissions: copies are found whatever was done to hide them, and independent right answers are not.

What the thresholds of ``grading.similar`` rest on is asserted here with its figures: the solution and the plain right
answers stand for two students who worked alone, and copies are made of one of them (`copied_answers`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from copied_answers import Modules, copy_of, filled, released
from lab_answers import LABS, answers
from submitted_files import written

from grading import similar
from grading.lab import find_lab
from grading.similar import COURSE, NotCompared, Similar, code_lines, compare, similar_in, words, work_in
from grading.strip import places

LAB1, LAB3 = LABS[0], "lab3_flash_attention"
ALONE_PERCENT, ALONE_LINES = 45, 13
"""The most that two complete independent submissions have in common: per cent, and lines of the longest piece."""


def solved(lab: str) -> Modules:
    """A student who answers as the course's solution does."""
    return filled(lab, {place.label: place.text for place in places(find_lab(lab).solution)})


def plain(lab: str) -> Modules:
    """A student who answers in the plain way that `solutions/LAB/answers` writes down."""
    return filled(lab, answers(lab).right)


def pairs(lab: str, students: dict[str, Modules], **more: object) -> dict[tuple[str, str], Similar]:
    """What is found, by pair."""
    handed_out = released(lab)
    works = {student: work_in(modules, handed_out) for student, modules in students.items()}
    return {(pair.student, pair.similar_to): pair for pair in compare(works, handed_out, **more)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lab", [pytest.param(lab, marks=() if lab in (LAB1, LAB3) else pytest.mark.thorough) for lab in LABS]
)
def test_copies_are_flagged_and_independent_right_answers_are_not(lab, monkeypatch):
    monkeypatch.setattr(similar, "LISTED", 1)
    ada, handed_out = solved(lab), released(lab)
    students = {
        "ada": ada,
        "alone": plain(lab),
        "renamed": copy_of(ada, handed_out, names_only=True),
        "disguised": copy_of(ada, handed_out),
    }
    found = pairs(lab, students)
    for copy, least in (("renamed", 95), ("disguised", 85)):
        pair = found["ada", copy]
        assert pair.flagged and max(pair.percent, pair.percent_of_other) >= least, pair
    for student in ("ada", "renamed", "disguised"):
        pair = found.get(("alone", student))  # in lab 1 they share nothing
        assert pair is None or (
            not pair.flagged and pair.percent <= ALONE_PERCENT and pair.longest_lines <= ALONE_LINES
        ), pair


def test_the_thresholds_lie_between_independent_answers_and_copies():
    assert ALONE_PERCENT < similar.LISTED + 25 <= similar.PERCENT < 85 and ALONE_LINES < similar.LONG


def test_what_is_handed_out_is_nobodys(tmp_path):
    handed_out = released(LAB3)
    assert work_in(handed_out, handed_out).lines == ()
    same = {name: f"# {name}\n{text}\n\n" for name, text in handed_out.items()}
    assert work_in(same, handed_out).lines == ()
    assert pairs(LAB3, {"ada": same, "bob": handed_out}) == {}


def test_short_answers_that_everybody_writes_alike_are_not_flagged():
    handed_out = released(LAB1)
    few = {name: solved(LAB1)[name] if name == "rates.py" else text for name, text in handed_out.items()}
    work = work_in(few, handed_out)
    assert len(work.lines) > 0
    short = {"matmul.py": "def f(a, b):\n    return 2 * a * b\n\ndef g(a, b, c):\n    return a * b + b * c + a * c\n"}
    found = pairs(LAB1, {"ada": short, "bob": short})
    assert found["ada", "bob"].percent == 100 and not found["ada", "bob"].flagged and words(found.values()) == {}


def test_a_copied_module_is_flagged_in_a_submission_that_is_otherwise_ones_own():
    lab, handed_out = "lab2_triton_kernels", released("lab2_triton_kernels")
    ada, grace = solved(lab), plain(lab)
    grace["rms_norm.py"] = copy_of({"rms_norm.py": ada["rms_norm.py"]}, handed_out)["rms_norm.py"]
    pair = pairs(lab, {"ada": ada, "grace": grace})["grace", "ada"]
    assert pair.flagged and pair.percent < similar.PERCENT and pair.longest_at.startswith("rms_norm.py ")


ODD = """\
import torch


def helper{n}(x, y, w):
    total = torch.zeros_like(x)
    for index in range(0, w, {n}):
        total += (x[index] - y[index]) ** {n} * torch.exp(-x[index] / (y[index] + {n}.5))
    if total.sum() > w * {n}.25:
        return total.clamp(min=0).div(w + {n}).sqrt()
    scale = torch.where(total > {n}, total * {n}.75, total - w)
    return scale.mean(dim=0).unsqueeze(-1) + y.flip(0).cumsum(0)
"""


def test_what_many_submissions_hold_is_not_flagged_and_copies_that_only_rename_count_once():
    known = {f"s{n}": {"a.py": ODD.format(n=2) + ODD.format(n=n)} for n in range(3, 8 + similar.COMMON)}
    assert not any(pair.flagged for pair in pairs(LAB1, known).values())
    few = {student: known[student] for student in ("s3", "s4")}
    assert pairs(LAB1, few)["s3", "s4"].percent > 40
    ring = {f"r{n}": {"a.py": ODD.format(n=2).replace("total", f"t{n}")} for n in range(5 + similar.COMMON)}
    assert all(pair.flagged for pair in pairs(LAB1, ring).values()) and len(words(pairs(LAB1, ring).values())) == len(
        ring
    )


def test_members_of_a_group_are_not_compared_with_one_another():
    text = {"a.py": ODD.format(n=2)}
    found = pairs(LAB1, {"ada": text, "bob": text, "eve": text}, together=[["ada", "bob"], ["eve"]])
    assert {frozenset(pair) for pair in found} == {frozenset({"ada", "eve"}), frozenset({"bob", "eve"})}


def test_a_piece_is_told_with_its_lines_in_both_files():
    ada = "# mine\n\n" + ODD.format(n=2)
    bob = "import math\n\nX = math.tau\n\n\n" + ODD.format(n=2).replace("total", "result")
    pair = pairs(LAB1, {"ada": {"a.py": ada}, "bob": {"b.py": bob}})["ada", "bob"]
    assert (pair.files, pair.longest_at, pair.other_at) == (["a.py"], "a.py 6-13", "b.py 9-16")


@pytest.mark.parametrize("text", ["def f(:\n", "x = " + "(" * 5000, "\0", "x = " + "-" * 100_000 + "1"])
def test_a_module_that_python_cannot_read_has_no_code(text):
    assert code_lines(text) == []


def test_the_word_in_the_table_names_the_most_similar_and_few_files():
    def of(student: str, other: str, percent: int, files: list[str], lines: int = 9) -> Similar:
        return Similar(student, other, percent, percent, files, lines, "a.py 1-9", "a.py 1-9")

    found = [
        of("ada", "bob", 85, ["a.py"]),
        of("ada", "eve", 97, ["a.py", "b.py", "c.py"]),
        of("eve", "bob", 81, ["a.py"]),
    ]
    found += [of("dan", "bob", 99, ["a.py"], lines=2), of("joe", "bob", 30, ["a.py"], lines=40)]
    assert words(found) == {
        "ada": "97 % as eve: 3 files (and 1 more)", "eve": "81 % as bob: a.py", "joe": "30 % as bob: a.py",
    }  # fmt: skip


# ---- the process that compares


def folders(tmp_path: Path, students: dict[str, Modules]) -> dict[str, Path]:
    return {
        student: written(tmp_path / student, {name: text.encode() for name, text in modules.items()})
        for student, modules in students.items()
    }


@pytest.mark.slow
def test_a_copy_of_the_courses_solution_is_told_from_the_files_that_were_read(tmp_path):
    ada = copy_of(solved(LAB1), released(LAB1))
    found = similar_in(find_lab("lab1"), folders(tmp_path, {"ada": ada, "bob": released(LAB1)}))
    assert [(pair.student, pair.similar_to) for pair in found if pair.student == "ada"] == [("ada", COURSE)]
    assert words(found)["ada"].endswith(f" % as {COURSE}: 6 files")


def test_a_comparison_that_fails_hangs_or_cannot_be_made_says_so(tmp_path, monkeypatch):
    ada = folders(tmp_path, {"ada": {"a.py": "x = 1\n"}})
    lab = find_lab("lab1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NotCompared, match="the process ended with 1"):
        similar_in(lab, ada)
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "hangs").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "hangs"))
    monkeypatch.setattr(similar, "SECONDS", 0.2)
    with pytest.raises(NotCompared, match=r"takes more than 0\.2 s"):
        similar_in(lab, ada)
    monkeypatch.setitem(sys.modules, "copydetect", None)
    with pytest.raises(NotCompared, match="copydetect is not installed"):
        similar_in(lab, ada)
