"""The frame of the course: what a fresh machine is told, and what its files promise each other."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, requires

import pytest
from conftest import LONGEST
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from utils.notebooks import ROOT


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line and line[0] != "#")


def wanted() -> list[Requirement]:
    """What a student's runtime, an instructor and the tests ask for, but for the course itself."""
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] not in "#-"]
    with open(ROOT / "pyproject.toml", "rb") as file:
        for extra in tomllib.load(file)["project"]["optional-dependencies"].values():
            lines += [line for line in extra if not line.startswith("making-llms-fast")]
    return [Requirement(line) for line in lines]


def test_help_is_the_default_target_and_names_every_command():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("lab", "test", "check", "labs", "site", "notebooks", "measure", "test-compat"):
        assert re.search(rf"(?m)^  {target} ", shown), shown


def test_the_files_that_come_first_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / f"test_{name}.py").exists()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_every_tested_version_is_pinned_and_within_its_range():
    for requirement in wanted():
        version = pins()[requirement.name]
        assert requirement.specifier.contains(version), f"{requirement} does not admit the tested {version}"


def test_all_that_is_installed_with_them_is_pinned_too():
    """An unpinned requirement of a requirement is whatever version an index offers that day."""
    ahead, seen = wanted(), set()
    while ahead:
        requirement = ahead.pop()
        name = canonicalize_name(requirement.name)
        entry = (name, frozenset(requirement.extras))
        if entry in seen or name.startswith(("nvidia-", "cuda-")):  # a CUDA build of PyTorch pins its libraries itself
            continue
        seen.add(entry)
        try:
            texts = requires(name) or []
        except PackageNotFoundError:  # not made for this system: no pin of it is needed here
            continue
        for text in texts:
            need = Requirement(text)
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                ahead.append(need)
    missing = {name for name, _ in seen} - pins().keys()
    assert not missing, f"constraints.txt does not pin {sorted(missing)}"


def test_every_pin_admits_the_oldest_python_that_the_course_admits():
    """A distribution's Python is the first of its minor version more often than the newest."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        oldest = tomllib.load(file)["project"]["requires-python"].removeprefix(">=") + ".0"
    refusing = {}
    for each in distributions():
        admitted = each.metadata.get("Requires-Python") or ""
        if canonicalize_name(each.name) in pins() and not SpecifierSet(admitted).contains(oldest):
            refusing[each.name] = admitted
    assert not refusing, f"not for Python {oldest}: {refusing}"


def test_installing_the_course_alone_never_touches_a_runtimes_torch():
    assert [r for r in requires("making-llms-fast") or [] if "extra" not in r] == []
    assert (ROOT / "requirements.txt").read_text().rstrip().endswith("-e .")


def test_ci_runs_what_an_instructor_runs_on_every_supported_python():
    run = ROOT / ".ci" / "run"
    assert "make test" in run.read_text()
    assert os.access(run, os.X_OK)
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert 'python: ["3.11", "3.12", "3.13", "3.14"]' in workflow
    assert "make test PYTHON=python" in workflow


#: A few tests that need Chromium, or bubblewrap.
WITH_PROGRAMS = (
    "living.py::test_it_starts_in_a_page_that_has_nothing_else",
    "predictions.py::test_without_scripts_the_answer_is_a_fold",
    "grading_sandbox.py::test_nothing_is_left_running_and_no_folder_is_left",
    "grading_traps.py::test_the_students_modules_are_graded_and_not_the_solutions",
)


@pytest.mark.slow
def test_what_is_skipped_without_chromium_and_bubblewrap_is_said_in_one_line_with_the_command_that_installs_them():
    tests = [f"tests/test_{name}" for name in WITH_PROGRAMS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | {"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert line.endswith("chromium and bubblewrap not found: apt install chromium bubblewrap"), line
    assert int(re.search(r"\[(\d+)\]", line)[1]) >= len(tests) and "passed" not in done.stdout


def test_the_dev_container_opens_the_course():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert "make lab" in container["postAttachCommand"]
    assert container["forwardPorts"] == [8888]


@pytest.mark.parametrize("document", ["README.md", "AGENTS.md", "CHANGELOG.md", "notebooks/README.md"])
def test_links_in_the_documents_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", path.read_text()):
        assert (path.parent / target.split("#")[0]).exists(), f"{document} links to {target}"
