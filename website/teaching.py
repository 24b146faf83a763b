"""Pieces of the pages for students and instructors: what README.md says already, and tables from the notebooks."""

from __future__ import annotations

import re
from pathlib import Path

from website.course import Lesson, hours, lessons, parts
from website.places import LECTURES, ROOT, launches, lectures, on_github, page_of

#: Name -> file, first words, and the words before which the piece ends ("" for the end of its section).
PIECES = {
    "laptop": ("README.md", "You need Python 3.11", "Teaching with it?"),
    "prove": ("README.md", "This proves the course sound", "**In a browser, nothing to install:**"),
    "browser": ("README.md", "**In a browser, nothing to install:**", ""),
    "hardware": ("README.md", "| | lectures | kernels | timings |", ""),
    "prerequisites": ("README.md", "Prerequisites: ", "\nHow the notebooks are written"),
    "commands": ("README.md", "| command | what it does |", ""),
    "grade": ("grading/README.md", "```\nmake labs", "| you want to | go to |"),
    "lecture": ("notebooks/README.md", "**Predict, derive, measure.**", "### What the tags of a cell mean"),
}
_MARKS = re.compile(r"^<!-- (for instructors|end) -->\n?", re.MULTILINE)  # for the students' copy of the course
_LINK = re.compile(r"(\[[^\]]*\])\(([^)#:]+)(#[^)]*)?\)")


def piece(name: str) -> str:
    """A piece of :data:`PIECES` as MyST for a page at the top of the site: links lead to pages, or into the repository.

    Raises:
        ValueError: the file no longer has the words that the piece begins or ends with.
    """
    place, first, last = PIECES[name]
    text = (ROOT / place).read_text(encoding="utf-8")
    start = text.find(first)
    end = text.find(last if last else "\n## ", start)
    if start < 0 or (last and end < 0):
        raise ValueError(f"{place} no longer has {(first if start < 0 else last)!r}, where the piece {name!r} is cut")
    cut = _MARKS.sub("", text[start : end if end >= 0 else None]).strip()
    cut = re.sub(r"^\| \|", "| you have |", cut)  # a column's head says something to those who hear it
    return on_site(cut, (ROOT / place).parent) + "\n"


def on_site(text: str, folder: Path) -> str:
    """Markdown whose links start in a folder of the repository, as MyST for a page at the top of the site."""
    return _LINK.sub(lambda m: f"{m[1]}({_target(folder, m[2], m[3] or '')})", text)


def _target(folder: Path, path: str, anchor: str) -> str:
    file = (folder / path).resolve()
    if not file.exists():
        raise ValueError(f"{folder.name}/README.md links to {path!r}, which is not there")
    if file == LECTURES / "CLAIMS.md":
        return "claims.md"
    if file.suffix == ".ipynb":
        return f"{page_of(file)}.ipynb{anchor}"
    return on_github(file, "tree" if file.is_dir() else "blob") + anchor


def hosts() -> str:
    """The places that open a notebook in a browser, as a list in MyST."""
    return "".join(f"- **{host.name}**: {host.note}.\n" for host in launches(lectures()[0]))


# ---- tables ----------------------------------------------------------------------------------------------------------


def _linked(lesson: Lesson) -> str:
    return f"[{lesson.name}]({lesson.page}.ipynb)"


def times_table() -> str:
    """Minutes of each part as a table in MyST: lectures, their exercises, the lab with its exercises and points."""
    rows = ["| part | lectures | their exercises | lab | in all |", "|---|---:|---:|---:|---:|"]
    for part in parts():
        read = [lesson for lesson in part.lessons if not lesson.is_lab]
        labs = [lesson for lesson in part.lessons if lesson.is_lab]
        rows.append(_time_row(part.label, read, labs))
    everything = lessons()
    rows.append(_time_row("**all**", [x for x in everything if not x.is_lab], [x for x in everything if x.is_lab]))
    return "\n".join(rows) + "\n"


def _time_row(name: str, read: list[Lesson], labs: list[Lesson]) -> str:
    sums = [sum(x.minutes for x in read), sum(x.exercise_minutes for x in read), sum(x.minutes for x in labs)]
    return "| " + " | ".join([name, *(hours(value) for value in [*sums, sum(sums)])]) + " |"


def points_table() -> str:
    """Labs with their exercises and points as a table in MyST."""
    rows = ["| lab | exercises | points of each | sum |", "|---|---:|---|---:|"]
    for lab in [lesson for lesson in lessons() if lesson.is_lab]:
        points = " · ".join(map(str, lab.points))
        rows.append(f"| {_linked(lab)} | {len(lab.points)} | {points} | {sum(lab.points)} |")
    return "\n".join(rows) + "\n"


def write(source: Path) -> None:
    """Write all pieces as ``_generated/NAME.txt`` into the staged sources."""
    folder = source / "_generated"
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: piece(name) for name in PIECES}
    made |= {
        "hosts": hosts(),
        "times": times_table(),
        "points": points_table(),
    }
    made["grading"] = f"[grading/README.md]({on_github(ROOT / 'grading' / 'README.md')})\n"
    for name, text in made.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
