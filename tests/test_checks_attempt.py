"""A student's function is stopped when its time is over, but not in the middle of an import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from utils.checks import attempt
from utils.checks.attempt import TooLong, deadline

ROOT = Path(__file__).resolve().parent.parent
#: A module whose import goes on for a while after it has imported a part of its package.
SLOW = """
import time
import slow_package.part
end = time.monotonic() + 0.5
while time.monotonic() < end:
    pass
"""


def package(folder: Path, source: str) -> None:
    (folder / "slow_package").mkdir()
    (folder / "slow_package" / "__init__.py").write_text(source)
    (folder / "slow_package" / "part.py").write_text("")


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("slow_package")]:
        del sys.modules[name]


def endless() -> None:
    while True:
        pass


def test_an_import_is_not_cut_short_and_what_follows_it_is(tmp_path):
    package(tmp_path, SLOW)
    with pytest.raises(TooLong), deadline(0.1):
        importlib.import_module("slow_package")
        endless()
    assert hasattr(sys.modules["slow_package"], "part")


def test_an_import_that_does_not_end_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "IMPORT_SECONDS", 0.2)
    package(tmp_path, "while True: pass")
    with pytest.raises(TooLong), deadline(0.1):
        importlib.import_module("slow_package")


def test_what_runs_while_a_file_is_imported_is_stopped_in_time(tmp_path):
    lines = [
        "from utils.checks import attempt",
        "attempt.IMPORT_SECONDS = float('inf')",
        "try:",
        "    with attempt.deadline(0.1):",
        "        while True: pass",
        "except attempt.TooLong:",
        "    print('stopped')",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import script"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "stopped\n"
