"""Runs of the grader on a synthetic class: starting them, reading what they wrote, and seeing what they left behind."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from grading.lab import ROOT, Lab
from grading.sandbox import RUNTIME

MARK = Path("/tmp/mlf-hostile-was-here")
"""What hostile submissions would write outside of their folder."""

TOKEN = "MLF_SYNTHETIC_CLASS"
"""The variable by which a grader's processes are known: it holds the class's folder."""

PASSED_OVER = {".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".venv"}
"""Folders that Python, git and other tools write into while the grader runs."""


def grade(lab: Lab, submissions: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Start the grader, in a session of its own."""
    command = [sys.executable, "-m", "grading.grade", lab.name, "--submissions", str(submissions), "--out", str(out)]
    environment = os.environ | {"MLF_DEVICE": "cpu", "PYTHONPATH": str(ROOT), TOKEN: str(out.parent)}
    return subprocess.Popen(
        [*command, *more], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def results(lab: Lab, out: Path) -> dict[str, Any]:
    """The results that the grader wrote, by student."""
    folder = out / lab.name / "results"
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def scores(lab: Lab, out: Path) -> list[list[str]]:
    """The rows of ``grades.csv``."""
    with (out / lab.name / "grades.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def left_running(folder: Path) -> list[str]:
    """Processes of a grader that worked in ``folder``, and what their submissions started, that still run."""
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (place / "environ").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if f"{TOKEN}={folder}\0" in environment or str(folder) in line:
            found.append(f"process {place.name}: {line[:100]}")
    return found


def listing(folder: Path) -> dict[str, int]:
    """What lies in a folder of submissions, with its times of change."""
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


class Surroundings:
    """What lies beside a class: the course, file by file, and the folder for runtime files."""

    def __init__(self) -> None:
        """Look."""
        self.course = _files(ROOT)
        self.runtime = set(Path(RUNTIME).iterdir())

    def faults(self) -> list[str]:
        """What has changed since through a fault of the grader."""
        now = Surroundings()
        found = [
            f"left behind, by this or another grader on the machine: {path}"
            for path in sorted(now.runtime - self.runtime)
            if _is_ours(path)
        ]
        found += [f"written outside: {MARK}"] if MARK.exists() else []
        return found + [
            f"changed in the course: {path}"
            for path in sorted(now.course.keys() | self.course.keys())
            if now.course.get(path) != self.course.get(path)
        ]


def _is_ours(path: Path) -> bool:
    """Whether this is the folder of a grader or sandbox whose process has ended."""
    words = path.name.split("-")
    return words[0] == "mlf" and len(words) == 3 and words[1].isdigit() and not psutil.pid_exists(int(words[1]))


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in PASSED_OVER]
        for name in names:
            path = os.path.join(place, name)
            status = os.lstat(path)
            found[path] = status.st_size, status.st_mtime_ns
    return found
