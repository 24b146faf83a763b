"""Course plans for instructors: ``grading/TEACHING.md`` and its page on the site, made from ``website/plans.toml``.

``python -m website.plans`` writes ``grading/TEACHING.md``. Titles, points and minutes come from the notebooks, and
every sum is computed. What is written down is which sections and exercises are in which week, and the share of each
section in its lecture's minutes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from website.course import Lesson, hours, lessons, minutes_of
from website.places import PREREQUISITES, ROOT, WEBSITE
from website.teaching import on_site

PLANS = WEBSITE / "plans.toml"
PAGE = ROOT / "grading" / "TEACHING.md"
#: The times of a week or half-day, with the words for them.
TIMES = {"before": "Read before", "class": "In class", "after": "Afterwards"}
_EXERCISE = re.compile(r"^## Exercise (?P<number>\d+\.\d+): (?P<title>.+)$", re.M)
_STATED = re.compile(r"^> Difficulty .* · (?P<minutes>\d+) minutes · (?P<points>\d+) points", re.M)


@dataclass(frozen=True)
class Item:
    """Something to read or to do: a section ("01:4"), a lecture's own exercises ("01:exercises"), a lab's one ("1.7").

    Attributes:
        key: as it is written in the plans, one section at a time.
        lesson: key of its lecture or lab; "00" for the prerequisites.
        title: with its number, as it is in the notebook.
        minutes: of a reader.
        points: of an exercise of a lab, otherwise 0.
    """

    key: str
    lesson: str
    title: str
    minutes: int
    points: int = 0


@dataclass(frozen=True)
class Unit:
    """A week or half-day: its topic, what is done in class in words, and the items of each of :data:`TIMES`."""

    topic: str
    does: str
    items: dict[str, tuple[Item, ...]]

    def minutes(self, time: str | None = None) -> int:
        """Minutes of one of the times, or of all."""
        return sum(item.minutes for name, found in self.items.items() for item in found if time in (None, name))


@dataclass(frozen=True)
class Plan:
    """A plan: its title, the word for a unit ("Week"), what it is for, its units, and reasons.

    ``reasons``: keys of lessons with blanks between -> why what is left out of them is not needed.
    """

    title: str
    unit: str
    about: str
    units: tuple[Unit, ...]
    reasons: dict[str, str]

    def items(self) -> list[Item]:
        """All items in the order of the plan."""
        return [item for unit in self.units for time in TIMES for item in unit.items[time]]

    def left_out(self) -> dict[str, list[Item]]:
        """Key of a lesson -> its items that the plan has not, for the lessons that have some."""
        taken = {item.key for item in self.items()}
        missing = [item for item in every_item().values() if item.key not in taken]
        return {
            key: [item for item in missing if item.lesson == key] for key in dict.fromkeys(x.lesson for x in missing)
        }


def _texts(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@cache
def _written() -> dict:
    return tomllib.loads(PLANS.read_text(encoding="utf-8"))


def _path(lesson: Lesson) -> Path:
    name = lesson.page.rpartition("/")[2]
    return ROOT / (f"labs/{name}/{name}.ipynb" if lesson.is_lab else f"{lesson.page}.ipynb")


@cache
def every_item() -> dict[str, Item]:
    """Everything that a plan can hold, by its key, in reading order.

    Raises:
        ValueError: ``plans.toml`` has not one number of minutes for each section of a lecture, or they do not add up to
            those that the lecture states; or an exercise does not say its minutes and points.
    """
    found = [Item("00", "00", "all questions", minutes_of(_texts(PREREQUISITES))[0])]
    for lesson in lessons():
        found += _exercises(lesson) if lesson.is_lab else _sections(lesson)
    return {item.key: item for item in found}


def _sections(lesson: Lesson) -> list[Item]:
    titles = re.findall(r"(?m)^## (\d+\. .+)$", _texts(_path(lesson)))
    shares = _written()["minutes"].get(lesson.key, [])
    if len(titles) != len(shares) or sum(shares) != lesson.minutes:
        raise ValueError(
            f"plans.toml gives {len(shares)} sections of {lesson.key} {sum(shares)} minutes; the lecture has "
            f"{len(titles)} sections and states {lesson.minutes} minutes"
        )
    found = [
        Item(f"{lesson.key}:{title.partition('.')[0]}", lesson.key, title, minutes)
        for title, minutes in zip(titles, shares, strict=True)
    ]
    return [*found, Item(f"{lesson.key}:exercises", lesson.key, "its exercises", lesson.exercise_minutes)]


def _exercises(lesson: Lesson) -> list[Item]:
    found = []
    for part in re.split(r"(?m)^(?=## )", _texts(_path(lesson))):
        if heading := _EXERCISE.match(part):
            stated = _STATED.search(part)
            if not stated:
                raise ValueError(f"exercise {heading['number']} does not say its minutes and points below its heading")
            title = f"{heading['number']} {heading['title']}"
            found.append(Item(heading["number"], lesson.key, title, int(stated["minutes"]), int(stated["points"])))
    return found


def items_of(text: str) -> list[Item]:
    """The items that a line of a plan names: "01:4-6,8", "01:exercises", "1.7" or "00".

    Raises:
        ValueError: there is no such section or exercise.
    """
    lesson, _, rest = text.partition(":")
    keys = [text]
    if rest and rest != "exercises":
        spans = [span.partition("-") for span in rest.split(",")]
        keys = [f"{lesson}:{n}" for first, _, last in spans for n in range(int(first), int(last or first) + 1)]
    if unknown := [key for key in keys if key not in every_item()]:
        raise ValueError(f"plans.toml names {text!r}, and the course has no {unknown[0]!r}")
    return [every_item()[key] for key in keys]


def plan_of(written: dict) -> Plan:
    """A plan as ``plans.toml`` has it.

    Raises:
        ValueError: it names what is not there, or something twice; or the reasons are not those of the lessons of which
            something is left out.
    """
    units = tuple(
        Unit(
            unit["topic"],
            unit["does"],
            {time: tuple(i for x in unit.get(time, []) for i in items_of(x)) for time in TIMES},
        )
        for unit in written["units"]
    )
    plan = Plan(written["title"], written["unit"], written["about"], units, written["left_out"])
    keys = [item.key for item in plan.items()]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{plan.title!r} has {twice[0]} twice")
    if wrong := set(plan.left_out()) ^ {key for keys in plan.reasons for key in keys.split()}:
        raise ValueError(
            f"{plan.title!r} must give a reason for each lesson that it leaves out in part, and no other: {wrong}"
        )
    return plan


def plans() -> list[Plan]:
    """The plans in the order of ``plans.toml``."""
    return [plan_of(written) for written in _written()["plans"]]


# ---- as Markdown -----------------------------------------------------------------------------------------------------


def page() -> str:
    """The page for instructors as Markdown; its links start in ``grading/``."""
    parts = [_written()["head"].strip(), *map(_plan_text, plans()), _written()["foot"].strip(), _sections_table()]
    return "\n\n".join(parts) + "\n"


def _plan_text(plan: Plan) -> str:
    rows = [
        f"| {plan.unit.lower()} | topic | before | in class | afterwards | in all |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for number, unit in enumerate(plan.units, start=1):
        rows.append(_row(str(number), unit.topic, [*map(unit.minutes, TIMES), unit.minutes()]))
    sums = [sum(unit.minutes(time) for unit in plan.units) for time in (*TIMES, None)]
    rows.append(_row("", "**all**", sums))
    longest = hours(max(unit.minutes("class") for unit in plan.units))
    parts = [f"## {plan.title}", plan.about.strip().replace("{class}", longest), "\n".join(rows), _points(plan)]
    parts += [_unit_text(plan, number, unit) for number, unit in enumerate(plan.units, start=1)]
    return "\n\n".join(
        [*parts, "**Left out, and why nothing later in the plan needs it:**", "\n".join(_left_out(plan))]
    )


def _row(number: str, topic: str, minutes: Sequence[int]) -> str:
    return f"| {number} | {topic} | {' | '.join(hours(value) if value else '' for value in minutes)} |"


def _points(plan: Plan) -> str:
    labs = [lesson for lesson in lessons() if lesson.is_lab]
    taken = {lab.key: sum(item.points for item in plan.items() if item.lesson == lab.key) for lab in labs}
    said = [f"{taken[lab.key]} of {sum(lab.points)} in {_linked(lab.key)}" for lab in labs if taken[lab.key]]
    return f"Points of the exercises in this plan: {', '.join(said)}."


def _unit_text(plan: Plan, number: int, unit: Unit) -> str:
    lines = [f"**{plan.unit} {number}. {unit.topic}** ({hours(unit.minutes())})", ""]
    for time, words in TIMES.items():
        items = unit.items[time]
        keys = dict.fromkeys(item.lesson for item in items)
        parts = [_named(key, [item for item in items if item.lesson == key]) for key in keys]
        if time == "class":
            parts.append(unit.does)
        if items:
            lines.append(f"- {words} ({hours(unit.minutes(time))}): {_sentences(parts)}")
    return "\n".join(lines)


def _linked(key: str) -> str:
    if key == "00":
        return "[00 Prerequisites](../notebooks/00_prerequisites.ipynb)"
    lesson = next(lesson for lesson in lessons() if lesson.key == key)
    return f"[{lesson.name}](../{_path(lesson).relative_to(ROOT).as_posix()})"


def _named(key: str, items: Sequence[Item]) -> str:
    """A lesson with these items of it: "01 The GPU model: 1. Why GPUs exist; 2. Latency and throughput"."""
    if list(items) == [item for item in every_item().values() if item.lesson == key]:
        return f"all of {_linked(key)}"
    titles = [f"{item.title} ({item.points} points)" if item.points else item.title for item in items]
    return f"{_linked(key)}: {'; '.join(titles)}"


def _left_out(plan: Plan) -> list[str]:
    """A line for each reason: what it is a reason for, how long that takes, and the reason."""
    left = plan.left_out()
    lines = []
    for keys, reason in plan.reasons.items():
        named = _sentences([_named(key, left[key]) for key in keys.split()])
        spent = sum(item.minutes for key in keys.split() for item in left[key])
        lines.append(f"- {named} *Why* ({hours(spent)}): {reason.strip()}")
    return lines


def _sentences(parts: Sequence[str]) -> str:
    """Parts as sentences: each begins with a capital and ends with a full stop or the question mark that it has."""
    return " ".join(part[0].upper() + part[1:] + ("" if part.endswith(("?", ".")) else ".") for part in parts)


def _sections_table() -> str:
    rows = ["| lecture | minutes of its sections | its exercises |", "|---|---|---:|"]
    for lesson in lessons():
        if not lesson.is_lab:
            parts = [item for item in every_item().values() if item.lesson == lesson.key]
            shares = " · ".join(f"{item.key.partition(':')[2]}: {item.minutes}" for item in parts[:-1])
            rows.append(f"| {_linked(lesson.key)}, {lesson.minutes} | {shares} | {lesson.exercise_minutes} |")
    return "\n".join(rows)


def write(source: Path) -> None:
    """Write the page into the folder of the site's sources."""
    (source / "plans.md").write_text(on_site(page(), PAGE.parent), encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(
        f"{PAGE.relative_to(ROOT)}: "
        + ", ".join(f"{p.title}, {hours(sum(u.minutes() for u in p.units))}" for p in plans())
    )
