"""`make test-compat`: the versions that its environment gets, and the table that it keeps."""

import datetime
import os
import platform
import subprocess
import sys

import pytest

from tests import compatibility
from tests.compatibility import Counts
from utils.notebooks import ROOT

pytestmark = pytest.mark.slow  # it runs pytest

HEAD = "# Versions\n\n| Python | ... |\n|---|---|\n"
TODAY = datetime.date(2026, 11, 28)
TESTS = "def test_right(): pass\n"
SKIPS = "import pytest\ndef test_skipped(): pytest.skip('why')\n@pytest.mark.xfail\ndef test_known(): assert 0\n"
FAILS = (
    "import pytest\ndef test_wrong(): assert 0\n@pytest.fixture\ndef broken(): 1 / 0\ndef test_error(broken): pass\n"
)


def report(folder, source):
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--junitxml=it.xml"]
    subprocess.run([*command, "test_it.py"], cwd=folder, capture_output=True)
    return folder / "it.xml"


def test_a_report_is_counted_as_pytest_counts(tmp_path):
    assert compatibility.count(report(tmp_path, TESTS + SKIPS + FAILS)) == Counts(
        passed=1, failed=2, skipped=2, files=1
    )
    assert compatibility.count(report(tmp_path, "import nothing_of_this_name")) == Counts(0, 1, 0, 1)


def rows(text):
    return [line for line in text.splitlines() if line.startswith("| 3.")]


def test_a_row_replaces_the_one_for_the_same_versions_and_tests_and_no_other():
    first = compatibility.row("not thorough", Counts(3210, 0, 2, 9), Counts(900, 1, 0, 20), TODAY)
    assert first.startswith(f"| {platform.python_version()} | ") and "| 2026-11-28 | `not thorough` |" in first
    assert first.endswith(
        "| 3,210 passed, 0 failed, 2 skipped in 9 files | 900 passed, 1 failed, 0 skipped in 20 files |"
    )
    text = compatibility.renewed(HEAD, first)
    assert text == HEAD + first + "\n"
    others = [
        "| 3.9.1 | 2.11.0 | 3.6.0 | 2026-01-01 | `not thorough` | old | old |",
        "| 3.14.1 | 2.11.0 | 3.6.0 | 2026-01-01 | `not thorough` | older Triton | old |",
        "| 3.14.1 | 2.11.0 | 3.10.0 | 2026-01-01 | `not thorough` | newer Triton | old |",
        "| 3.14.1 | 2.11.0 | 3.10.0 | 2026-01-01 | `slow` | other tests | old |",
    ]
    text = HEAD
    for each in reversed(others):
        text = compatibility.renewed(text, each)
    assert text == HEAD + "\n".join(others) + "\n"
    newer = others[1].replace("3.14.1", "3.14.8").replace("old", "new")
    text = compatibility.renewed(text, newer)
    assert rows(text) == [others[0], newer, *others[2:]]


@pytest.mark.parametrize(
    ("tests", "cells", "status"),
    [
        (TESTS, TESTS, 0),
        (TESTS, FAILS, 1),
        pytest.param(FAILS + TESTS, TESTS, 1, marks=pytest.mark.thorough),
        pytest.param(TESTS, "", 1, marks=pytest.mark.thorough),
        (TESTS, None, 1),
    ],
)
def test_a_failure_or_a_run_of_nothing_is_a_failure(tmp_path, monkeypatch, capsys, tests, cells, status):
    table = tmp_path / "COMPATIBILITY.md"
    table.write_text(HEAD)
    monkeypatch.setattr(compatibility, "TABLE", table)
    paths = [tmp_path / name / "it.xml" for name in ("tests", "cells")]
    for path, source in zip(paths, (tests, cells), strict=True):
        path.parent.mkdir()
        if source is not None:
            report(path.parent, source)
    assert compatibility.main("not slow", *map(str, paths)) == status
    printed = capsys.readouterr().out
    if cells is None:
        assert f"pytest wrote no {paths[1]}" in printed and table.read_text() == HEAD
    else:
        assert rows(table.read_text()) == [printed.strip()]


def test_only_the_versions_asked_for_differ_from_the_pins():
    shown = subprocess.run(
        ["make", "-n", "test-compat", "PYTHON=python3.12", "TORCH=2.11.0", "TRITON=3.6.0"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},  # of a make that runs this
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    command = next(line for line in shown.splitlines() if line.startswith("sed "))
    pins = (ROOT / "constraints.txt").read_text()
    made = subprocess.run(command.split(" > ")[0], shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    differ = set(made.splitlines()) ^ set(pins.splitlines())
    assert {line for line in differ if line in made.splitlines()} == {"torch==2.11.0", "triton==3.6.0"}
    assert {line.split("==")[0] for line in differ} == {"torch", "triton", "setuptools"}
    assert ".venv-python3.12-torch-2.11.0-triton-3.6.0/bin/python -m tests.compatibility" in shown
    assert f"-c {command.split(' > ')[1]} -r requirements.txt" in shown
