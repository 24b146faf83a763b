"""Three facts on the home page, counted when the site is built."""

from __future__ import annotations

from html import escape
from pathlib import Path

from utils import records
from utils.checks.answers import answers_of
from utils.claims import ledger
from utils.units import number
from website.places import ROOT

FILE = "_generated/facts.html"


def wrong_answers() -> int:
    """Wrong answers, over all labs, each of which a test holds against the diagnosis that it must get."""
    labs = [notebook.stem for notebook in (ROOT / "solutions").glob("lab*/lab*.ipynb")]
    return sum(len(answers_of(f"solutions.{lab}.answers").wrong_answers) for lab in labs)


def facts() -> list[tuple[int, str, str, str]]:
    """(count, what is counted, what it means, page) of what the course can be held to."""
    measured = {benchmark: records.load(benchmark) for benchmark in records.benchmark_names()}
    devices = sorted({record.device for record in measured.values() if not record.device.startswith("CPU")})
    return [
        (
            len(ledger()), "claims",
            "Every figure that a lecture states is computed by the cell in front of you and held against what it "
            "should be. A cell whose claim fails stops.", "claims",
        ),
        (
            wrong_answers(), "wrong answers",
            "Each lab is tested against the mistakes that people make. A check names yours, the tile it is in, and the "
            "seed that shows it again.", "students",
        ),
        (
            len(measured), "recorded measurements",
            f"Made on {' and '.join(devices)}; each with date, versions and command. A test fails when the measured "
            "code has changed since.", "records/index",
        ),
    ]  # fmt: skip


def facts_html() -> str:
    """The three facts as HTML."""
    items = "".join(
        f'<li><p class="count"><b>{number(count)}</b> <a href="{page}.html">{what}</a></p><p>{escape(text)}</p></li>'
        for count, what, text, page in facts()
    )
    return f'<ul class="facts">{items}</ul>\n'


def write(source: Path) -> None:
    """Write the facts into the staged sources."""
    (source / FILE).parent.mkdir(parents=True, exist_ok=True)
    (source / FILE).write_text(facts_html(), encoding="utf-8")
