"""A class's gradebook in nbgrader's formgrader, in JupyterLab, as an instructor's browser shows it."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grading import gradebook, outputs
from grading.lab import ROOT, Lab, find_lab
from grading.results import Verdict, result, write_folder

#: Student -> how many of the lab's first exercises passed.
CLASS = {"ada": 10, "alan": 0, "grace": 4}
MESSAGE = "exercise 1.7 (sectors): 3 of 9 cases differ <b>here</b>"

pytestmark = pytest.mark.slow


class Server:
    """JupyterLab in a folder, as the guide starts it; nothing of the user's own settings is read."""

    def __init__(self, folder: Path, private: Path, *arguments: str) -> None:
        self.token, self.data = secrets.token_hex(16), private / "data"
        own = {f"JUPYTER_{name}_DIR": str(private / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        own["JUPYTER_PATH"] = str(private / "share" / "jupyter")
        environment = os.environ | own | {"PYTHONPATH": str(ROOT), "JUPYTER_TOKEN": self.token, "HOME": str(private)}
        root = ["--allow-root"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--port=0", "--ip=127.0.0.1", *root, *arguments],
            cwd=folder,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        watchdog = threading.Timer(90, self.process.kill)  # a server that never says where it is must not hold the test
        watchdog.start()
        self.log: list[str] = []
        self.url = ""
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab", line):
                self.url = found[1]
                break
        watchdog.cancel()
        assert self.url, "the server gave no address:\n" + "".join(self.log)
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def lab() -> Lab:
    return find_lab("lab1")


@pytest.fixture(scope="module")
def folder_of_grades(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make grade` leaves for three students: gradebook, nbgrader's copies of the submissions, configuration."""
    out = tmp_path_factory.mktemp("grades")
    gradebook.register(out / "gradebook.db", lab)
    outputs.write_config(out)
    for student, passed in CLASS.items():
        write_folder(outputs.submitted_path(out, lab, student), {"waves.py": b"x = 1\n"} if passed else {})
    gradebook.enter(out, lab, {student: made(lab, student, passed) for student, passed in CLASS.items()})
    return out


def made(lab: Lab, student: str, passed: int) -> dict[str, Any]:
    """The result of a student whose first exercises passed."""
    verdicts = {
        exercise.number: Verdict("passed") if index < passed else Verdict("failed", MESSAGE)
        for index, exercise in enumerate(lab.exercises)
    }
    return result(lab, student, "digest", verdicts)


class Tab:
    """A tab of the instructor's browser that remembers everything that went wrong in it."""

    def __init__(self, page: Any, server: Server) -> None:
        self.page, self.server = page, server
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("response", lambda r: self.wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        page.goto(f"{server.url}/login?token={server.token}")
        self.wrong.clear()

    def open(self, path: str, until: str) -> None:
        self.page.goto(self.server.url + path)
        self.page.wait_for_selector(until, timeout=30_000)

    def rows(self) -> list[list[str]]:
        """The cells of the table that is shown, row by row."""
        every = [[cell.strip() for cell in row.split("\t")] for row in self.page.locator("tbody tr").all_inner_texts()]
        return [row for row in every if any(row)]

    def errors(self) -> list[str]:
        """What went wrong, but for MathJax: nbgrader's pages fetch it from the network, which a test must not need."""
        mathjax = ("MathJax is not defined", "Failed to load resource: net::ERR_")
        return [text for text in self.wrong if not text.startswith(mathjax)]


@pytest.fixture(scope="module")
def tab(browser: Any, folder_of_grades: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    server = Server(folder_of_grades, tmp_path_factory.mktemp("private"))
    try:
        yield Tab(browser.new_page(viewport={"width": 1300, "height": 900}), server)
    finally:
        server.stop()


def test_the_nbgrader_menu_of_jupyterlab_opens_the_formgrader(tab: Tab):
    tab.open("/lab", ".lm-MenuBar-itemLabel:text-is('Nbgrader')")
    tab.page.click(".lm-MenuBar-itemLabel:text-is('Nbgrader')")
    tab.page.click(".lm-Menu-itemLabel:text-is('Formgrader')")
    frame = tab.page.frame_locator("iframe")
    frame.locator("td:has-text('lab1_roofline')").first.wait_for(timeout=30_000)
    assert tab.errors() == []


def test_the_submissions_are_counted(tab: Tab, lab: Lab):
    tab.open("/formgrader/manage_assignments", f"td:has-text('{lab.name}')")
    (row,) = [row for row in tab.rows() if row[0] == lab.name]
    assert str(len(CLASS)) in row, row
    assert tab.errors() == []


def test_every_student_is_there_with_the_score(tab: Tab, lab: Lab):
    tab.open(f"/formgrader/manage_submissions/{lab.name}", "td:has-text('grace')")
    shown = {row[1]: (row[3], row[4]) for row in tab.rows()}
    assert shown == {"ada": ("graded", "100 / 100"), "alan": ("graded", "0 / 100"), "grace": ("graded", "35 / 100")}
    assert tab.errors() == []


def test_a_submission_has_a_score_for_each_exercise_and_shows_the_checks_message(tab: Tab, lab: Lab):
    tab.open(f"/formgrader/gradebook/{lab.name}/{lab.name}", "td:has-text('35 / 100')")
    tab.page.click("tr:has(td:text-is('35 / 100')) a:has-text('Submission #')")
    tab.page.wait_for_selector("input.score")
    tab.page.wait_for_function("document.querySelector('#check-1-10').placeholder !== ''")
    given = {
        field.get_attribute("id"): field.get_attribute("placeholder") for field in tab.page.locator("input.score").all()
    }
    points = {e.grade_id: e.points if index < CLASS["grace"] else 0 for index, e in enumerate(lab.exercises)}
    assert {name: float(text) for name, text in given.items()} == points
    assert tab.page.get_by_text(MESSAGE).count() == len(lab.exercises) - CLASS["grace"]
    assert tab.errors() == []


def test_a_score_that_the_instructor_enters_is_kept_when_the_class_is_graded_again(
    tab: Tab, lab: Lab, folder_of_grades: Path
):
    tab.open(f"/formgrader/gradebook/{lab.name}/{lab.name}", "td:has-text('0 / 100')")
    tab.page.click("tr:has(td:text-is('0 / 100')) a:has-text('Submission #')")
    tab.page.wait_for_selector("#check-1-1[placeholder]")  # shown when the page has the scores and listens to the field
    with tab.page.expect_response(lambda response: "/api/grade/" in response.url and response.request.method == "PUT"):
        tab.page.fill("#check-1-1", "3")
        tab.page.press("#check-1-1", "Tab")
    gradebook.enter(folder_of_grades, lab, {"alan": made(lab, "alan", 0)})
    tab.open(f"/formgrader/manage_submissions/{lab.name}", "td:has-text('grace')")
    assert {row[1]: row[4] for row in tab.rows()}["alan"] == "3 / 100"
    assert tab.errors() == []
