"""The students' copy of the course: what is in it, what is not, and a term in it, from the check to the grade."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from grading_runs import grade, results
from lab_answers import LABS, answers, edited
from lab_places import write_lab
from test_release import solution_lines

from grading import submit
from grading.archives import MAX_FILE
from grading.lab import ROOT, find_lab
from grading.policy.paths import own_of
from grading.policy.tables import BARE_MEMORY
from grading.student_copy import FOR_INSTRUCTORS, NAME, PACKED, _for_students, main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The students' copy, written out."""
    out = tmp_path_factory.mktemp("out")
    assert main([str(out)]) == 0
    return out / NAME


@pytest.fixture(scope="module")
def files(copy: Path) -> dict[str, bytes]:
    """The students' copy, as it is packed: tests work in the folder."""
    with zipfile.ZipFile(copy.parent / f"{NAME}.zip") as packed:
        return {name.removeprefix(f"{NAME}/"): packed.read(name) for name in packed.namelist()}


def ran(folder: Path, *command: str) -> str:
    """What a command of the copy prints; its Python finds no other copy of the course, wherever it is installed."""
    environment = os.environ | {"MLF_DEVICE": "cpu", "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run([sys.executable, "-S", *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout


def packed(files: dict[str, bytes]) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(files[PACKED])) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# ---- what is in it ----
def test_nothing_that_decides_on_a_grade_is_in_it(files):
    for part in ("tests", "website", "grading/scenarios", "grading/mutation", ".github", ".ci"):
        assert not [name for name in files if name.startswith(f"{part}/")], part
    for name in (
        "instructor.mk",
        "grading/README.md",
        "grading/grade.py",
        "grading/seeds.py",
        "grading/student_copy.py",
    ):
        assert (ROOT / name).is_file() and name not in files, name
    assert not [name for name in files if "answers" in Path(name).parts or Path(name).name == "seeds.json"]


def test_no_line_of_a_solution_can_be_read_in_it_and_only_labs_that_lectures_run_are_packed(files):
    lines = {line.encode() for found in solution_lines().values() for line in found}
    assert len(lines) > 30
    readable = b"\n".join(
        content for name, content in files.items() if name.startswith(("labs/", "grading/")) or name == PACKED
    )
    marked = [name for name, content in files.items() if re.search(rb"### BEGIN SOLUTION \d", content)]
    assert marked == ["grading/strip.py"], "it explains the marker"
    there = [line for line in lines if line in readable]  # soon searched, and mostly none
    assert not [line for line in there if re.search(rb"(?<!\w)" + re.escape(line), readable)]
    inside = packed(files)
    assert {name.split("/")[0][:4] for name in inside} == {"lab2", "lab3", "lab4", "lab5", "lab6"}
    assert all(name.count("/") == 1 for name in inside), "neither checks nor answers"
    assert not [name for name in files if name.startswith("solutions/lab")]


@pytest.mark.thorough
def test_the_same_source_gives_the_same_bytes_and_work_is_not_overwritten(tmp_path, files, copy, capsys):
    assert {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()} >= files.keys()
    assert main([str(tmp_path)]) == 0 == main([str(tmp_path)])
    assert (tmp_path / f"{NAME}.zip").read_bytes() == (copy.parent / f"{NAME}.zip").read_bytes()
    (tmp_path / NAME / "README.md").write_text("mine")
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "was worked in" in capsys.readouterr().err and (tmp_path / NAME / "README.md").read_text() == "mine"


def test_its_documents_name_only_targets_and_files_that_are_there(files):
    targets = re.findall(r"^([a-z-]+):", files["Makefile"].decode(), re.MULTILINE)
    for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "notebooks/README.md", ".devcontainer/devcontainer.json"):
        text = files[name].decode()
        assert set(re.findall(r"[`\"\n]make ([a-z-]+)", text)) <= set(targets), name
        for link in re.findall(r"\]\((?!https?://|#)([^)\s#]+)", text):
            assert os.path.normpath(Path(name).parent / link) in files, f"{name} links to {link}"
        assert FOR_INSTRUCTORS.search((ROOT / name).read_text()) or name.startswith(".")


def test_a_part_for_instructors_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"README\.md: a part for instructors"):
        _for_students("a\n<!-- for instructors -->\nb\n", "README.md")


def test_make_offers_what_works_there(copy):
    shown = subprocess.run(["make", "help"], cwd=copy, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  ([a-z-]+)", shown, re.MULTILINE) == [
        "help",
        "lab",
        "runtime",
        "check-lab",
        "submit",
        "clean",
    ]


def test_lectures_run_the_packed_code_with_its_kernels(copy):
    told = ran(
        copy,
        "-c",
        "import torch, solutions.lab4_zero, solutions.lab5_serving.attention_torch\n"
        "import solutions.lab3_flash_attention as lab\n"
        "q = torch.ones(1, 1, 16, 16)\nprint(lab.__file__, lab.flash_attention(q, q, q).sum().item())",
    )
    assert told.split() == [str(copy / PACKED / "lab3_flash_attention" / "__init__.py"), "256.0"]


@pytest.mark.parametrize("name", LABS)
def test_the_policy_allows_in_the_copy_what_the_grader_allows(name, copy):
    """The copy does not know what only a solution uses."""
    here, there = own_of(find_lab(name)), own_of(find_lab(name, copy))
    assert there.utils == here.utils and there.attributes & BARE_MEMORY == here.attributes & BARE_MEMORY


# ---- what is handed in ----
def test_a_submission_says_what_is_in_it_what_is_not_written_and_what_is_not_python(copy, capsys):
    folder = copy / "labs" / "lab7_capstone"
    before = (folder / "consumer.py").read_bytes()
    assert submit.main(["lab7"], root=copy) == 0
    told = capsys.readouterr().out
    assert "no module of yours" in told and "not written yet: 7.1\n" in told
    (folder / "consumer.py").write_text("def f(:\n")
    assert submit.main(["lab7"], root=copy) == 0
    told = capsys.readouterr().out
    assert "consumer.py of yours" in told and "warning: consumer.py, line 1: not Python" in told
    archive = copy / "submit" / "lab7_capstone.zip"
    assert re.search(r"submit/lab7_capstone\.zip, 4 files, \d+ KiB", told)
    with zipfile.ZipFile(archive) as written:
        wanted = {path.name for path in folder.iterdir() if path.is_file()}
        assert set(written.namelist()) == {f"labs/lab7_capstone/{name}" for name in wanted}
    kept = archive.read_bytes()
    (folder / "consumer.py").write_text("#" * (MAX_FILE + 1))
    with pytest.raises(SystemExit):
        submit.main(["lab7"], root=copy)
    assert "the grader would not take consumer.py\n" in capsys.readouterr().err and archive.read_bytes() == kept
    (folder / "consumer.py").write_bytes(before)


def test_a_voluntary_exercise_that_is_not_written_is_told_apart(copy, capsys):
    assert submit.main(["lab5"], root=copy) == 0
    told = capsys.readouterr().out
    assert "not written yet: 5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7\nvoluntary, and not written: 5.8, 5.9\n" in told


# ---- a term ----
def points(printed: str) -> dict[str, float]:
    """The points of each exercise in check-lab's table."""
    return {n: float(p) for n, p in re.findall(r"^(\d\.\d+) .*?([\d.]+) / \d+", printed, re.MULTILINE)}


def goes_through_a_term(copy: Path, folder: Path, names: Iterable[str]) -> None:
    """Answers, some of them wrong, are checked and packed in the copy, and graded by the full course alike."""
    for name in names:
        number = find_lab(name).name.split("_")[0]
        wrong = next(w for w in answers(name).wrong_answers if not w.functions)
        unwritten = list(edited(name))[-1]
        filled = {**answers(name).right, **wrong.filled(edited(name))}
        filled.pop(unwritten if len(edited(name)) > 1 else "", None)
        write_lab(name, folder / name, filled)
        for path in (folder / name).glob("*.py"):
            (copy / "labs" / name / path.name).write_bytes(path.read_bytes())
        seen = points(ran(copy, "-m", "grading.check_lab", number))
        assert seen[wrong.exercise] == 0 and (len(seen) == 1 or any(seen.values()))
        ran(copy, "-m", "grading.submit", number)
        handed_in = folder / f"{number}-handed-in"
        (handed_in / "ada").mkdir(parents=True)
        (handed_in / "ada" / f"{name}.zip").write_bytes((copy / "submit" / f"{name}.zip").read_bytes())
        process = grade(find_lab(name), handed_in, folder / "grades", "--no-sandbox")
        assert process.wait(590) == 0, process.stdout.read()
        found = results(find_lab(name), folder / "grades")["ada"]["exercises"]
        assert {e["number"]: e["score"] for e in found if e["max_score"]} == seen, name


def test_a_lab_goes_from_the_copy_to_the_grade_with_the_same_points(copy, tmp_path):
    goes_through_a_term(copy, tmp_path, LABS[-1:])


@pytest.mark.thorough
def test_every_lab_goes_from_the_copy_to_the_grade_with_the_same_points(copy, tmp_path):
    goes_through_a_term(copy, tmp_path, LABS[:-1])
