"""The instructor's guide is right: a test does what it says, from adding an exercise to filling in Canvas's table."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from grading.class_folder import find_submissions
from grading.lab import ROOT, find_lab

GUIDE = (ROOT / "grading" / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^\*\*`(?P<path>[^`]+)`\*\*,? ?(?P<how>.*)$", re.MULTILINE)
#: What `make` does, without setting an environment up, and without testing all that has nothing to do with the guide.
COMMANDS = {
    "make notebooks NOTEBOOKS=": "-m utils.notebooks execute ",
    "make labs": "-m grading.release",
    "rm ": "-c 'import sys, pathlib; pathlib.Path(sys.argv[1]).unlink()' ",
    "make check": "-m pytest -q -p no:cacheprovider tests/test_exercises.py -k '1.11 or copi or lab1'",
    "python ": "",
}


@dataclass(frozen=True)
class Block:
    """A block of code in the guide: in which section, what kind of code, and what the line above says to do with it."""

    section: str
    kind: str
    path: str
    how: str
    text: str


def blocks(guide: str = GUIDE) -> list[Block]:
    found, section, path, how = [], "", "", ""
    code = list(BLOCK.finditer(guide))
    prose = [*re.finditer(r"^## (?P<section>.+)$", guide, re.MULTILINE), *TITLE.finditer(guide)]
    prose = [mark for mark in prose if not any(block.start() < mark.start() < block.end() for block in code)]
    marks = [*prose, *code]
    for mark in sorted(marks, key=lambda mark: mark.start()):
        part = mark.groupdict()
        if "section" in part:
            section, path, how = part["section"], "", ""
        elif "path" in part:
            path, how = part["path"], part["how"]
        else:
            found.append(Block(section, part["kind"], path, how, part["text"]))
    return found


def of(section: str) -> list[Block]:
    return [block for block in blocks() if block.section.startswith(section)]


def follow(block: Block, course: Path) -> None:
    """Do with a block what the guide says."""
    path = course / block.path
    if block.kind == "sh":
        for line in block.text.splitlines():
            run(course, line)
    elif block.kind == "diff":
        lines = block.text.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        before = path.read_text(encoding="utf-8")
        assert before.count(f"\n{old}\n") == 1, f"{block.path} does not hold once:\n{old}"
        path.write_text(before.replace(f"\n{old}\n", f"\n{new}\n"), encoding="utf-8")
    elif block.how.startswith("a new file"):
        assert not path.exists(), f"{block.path} is not new"
        path.write_text(block.text, encoding="utf-8")
    else:
        assert block.how == "at the end:", f"what is to be done with {block.path}?"
        path.write_text(path.read_text(encoding="utf-8") + "\n\n" + block.text, encoding="utf-8")


def run(course: Path, line: str) -> str:
    """Run a command of the guide in the course; what it prints. A stub that has no points ends with 1, as it must."""
    start = next(start for start in COMMANDS if line.startswith(start))
    rest = COMMANDS[start] + line.removeprefix(start)
    environment = os.environ | {"PYTHONPATH": str(course), "MLF_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        f"{sys.executable} {rest}", shell=True, cwd=course, env=environment, capture_output=True, text=True, timeout=200
    )
    expected = 1 if line.endswith("--exercise 1.11") else 0
    assert ran.returncode == expected, f"{line}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the guide needs of the repository, with lab 1 only."""
    copy = tmp_path_factory.mktemp("course")
    ignored = shutil.ignore_patterns("__pycache__", "models", "training", "lab[2-9]*", "synthetic_cohort*", "hostile")
    for folder in ("solutions", "utils", "grading", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for block in of("Add an exercise"):
        if "make notebooks" not in block.text:
            follow(block, copy)
    return copy


def steps() -> list[str]:
    """The commands of the last step."""
    return next(block.text for block in of("Add an exercise") if "make notebooks" in block.text).splitlines()


@pytest.mark.thorough
def test_a_newcomer_adds_an_exercise_as_the_guide_says(course: Path):
    remove, notebooks, labs, check, stub, solved = steps()
    run(course, remove)
    run(course, notebooks)
    run(course, labs)
    assert "passed" in run(course, check)
    assert "1.11 the time of a copy" in run(course, stub) and "○ not attempted" in run(course, stub)
    assert "5 of 5 points" in run(course, solved)


@pytest.mark.slow
def test_an_exercise_is_four_files(course: Path):
    written = {
        str(path.relative_to(course))
        for folder in ("solutions", "utils", "grading", "tests")
        for path in (course / folder).rglob("*")
        if path.suffix in (".py", ".ipynb", ".md", ".toml") and path.read_bytes() != _before(path.relative_to(course))
    }
    lab = "solutions/lab1_roofline"
    assert written == {
        f"{lab}/copying.py", f"{lab}/exercises/copying.py", f"{lab}/answers/copying.py", f"{lab}/lab1_roofline.ipynb",
    }  # fmt: skip


def _before(path: Path) -> bytes | None:
    return (ROOT / path).read_bytes() if (ROOT / path).is_file() else None


@pytest.mark.slow
def test_what_is_released_of_the_new_exercise_holds_no_solution(course: Path):
    run(course, "make labs")
    released = (course / "labs/lab1_roofline/copying.py").read_text(encoding="utf-8")
    assert 'raise NotImplementedError("Lab 1, exercise 1.11: the time of a copy")' in released
    assert "2 * num_bytes" not in released and "SOLUTION" not in released
    notebook = json.loads((course / "labs/lab1_roofline/lab1_roofline.ipynb").read_text(encoding="utf-8"))
    (cell,) = (cell for cell in notebook["cells"] if cell["id"] == "check-1-11")
    assert cell["source"] == ["check_copy(copy_seconds, seed=111)"] and cell["outputs"] == []


@pytest.mark.slow
def test_the_grader_knows_the_new_exercise_and_its_points(course: Path):
    run(course, "make labs")
    lab = find_lab("lab1", course)
    assert lab.exercise("1.11").title == "the time of a copy" and lab.exercise("1.11").points == 5
    assert lab.max_score == 105 and len(lab.exercises) == 11


@pytest.mark.thorough
@pytest.mark.sandbox
def test_the_class_grader_grades_the_new_exercise(course: Path, tmp_path: Path):
    run(course, "make labs")
    shutil.copytree(course / "labs/lab1_roofline", tmp_path / "in" / "ada")
    shutil.copy(course / "solutions/lab1_roofline/copying.py", tmp_path / "in" / "ada")
    run(course, f"python -m grading.grade lab1 --submissions {tmp_path}/in --out {tmp_path}/grades --jobs 1")
    with open(tmp_path / "grades/lab1_roofline/grades.csv", newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["student"], row["score"], row["max_score"], row["1.11"]) == ("ada", "5", "105", "5")
    result = json.loads((tmp_path / "grades/lab1_roofline/results/ada.json").read_text(encoding="utf-8"))
    assert [e["outcome"] for e in result["exercises"]] == ["not attempted"] * 10 + ["passed"]


@pytest.mark.slow
def test_nbgraders_own_release_writes_nothing_over_the_labs(course: Path):
    run(course, "make labs")
    files = {path: path.read_bytes() for path in (course / "labs/lab1_roofline").iterdir() if path.is_file()}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", "lab1_roofline", "--force"]
    environment = os.environ | {"PYTHONPATH": str(course), "PATH": path}
    ran = subprocess.run(command, cwd=course / "grading", env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0 and "No notebooks were matched" in ran.stderr
    assert {path: path.read_bytes() for path in (course / "labs/lab1_roofline").iterdir() if path.is_file()} == files


@pytest.mark.thorough
def test_a_lab_goes_through_nbgraders_exchange_and_back_by_the_guides_commands(tmp_path: Path):
    """Without the environment on the path, as the commands name it: nbgrader calls a program of it by its bare name."""
    section = GUIDE.split("### On a JupyterHub\n")[1].split("\n### ")[0]
    release, collect = (line for line in section.splitlines() if line.startswith("../.venv/bin/nbgrader "))
    environment = os.environ | {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "JUPYTERHUB_USER": "ada"}

    def nbgrader(command: str, folder: Path) -> None:
        words = shlex.split(command.removeprefix("../.venv/bin/nbgrader "))
        here = [f"--CourseDirectory.root={tmp_path}", f"--db=sqlite:///{tmp_path}/gradebook.db"]
        program = [sys.executable, "-m", "nbgrader", *words, f"--Exchange.root={tmp_path}/exchange", *here]
        ran = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr

    (tmp_path / "home").mkdir()
    nbgrader(release, ROOT / "grading")
    nbgrader("fetch_assignment lab2_triton_kernels --course=ID", tmp_path / "home")
    (tmp_path / "home" / "lab2_triton_kernels" / "gelu.py").write_text("# mine\n")
    nbgrader("submit lab2_triton_kernels --course=ID", tmp_path / "home")
    nbgrader(collect, ROOT / "grading")
    found = find_submissions(tmp_path / "submitted", find_lab("lab2"))
    (student,) = found.handed_in
    assert found.ungraded == [] and found.times[student].when is not None
    (taken,) = (path for _, path in found.handed_in[student].paths)
    assert (taken / "lab2_triton_kernels" / "gelu.py").read_text() == "# mine\n"


def test_grades_go_into_canvass_table_by_the_guides_command(tmp_path: Path):
    (command,) = (line.strip() for line in GUIDE.splitlines() if "-m grading.export " in line)
    program, *words = shlex.split(command.replace("grades/lab2_triton_kernels/", ""))
    (tmp_path / "grades.csv").write_text("student,score,max_score,2.1,status\nada,85,100,10,graded\n")
    canvas = f'Student,ID,SIS Login ID,Section,{words[-1]}\n    Points Possible,,,,100\n"Lovelace, Ada",9,ada,1,\n'
    (tmp_path / "exported.csv").write_text(canvas, encoding="utf-8-sig")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, check=True)
    assert program == ".venv/bin/python"
    assert (tmp_path / "exported-import.csv").read_text() == canvas.replace("1,\n", "1,85\n")


def test_every_option_and_file_that_the_guide_names_is_there():
    told = (ROOT / "grading" / "grade.py").read_text(encoding="utf-8")
    for option in re.findall(r"`[\"']?(--[\w-]+)", GUIDE.split("## Grade")[1].split("## Correct")[0]):
        assert f'"{option}"' in told, option
    for name in re.findall(r"\(`(\w+\.py)`\)", GUIDE):
        assert (ROOT / "grading" / name).is_file(), name
    makefile = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "instructor.mk"))
    for target in re.findall(r"(?:`|^)make ([\w-]+)", GUIDE, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_every_section_that_the_guide_links_to_is_in_it():
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^##+ (.+)$", GUIDE, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([\w-]+)\)", GUIDE))
    assert links and links <= headings
