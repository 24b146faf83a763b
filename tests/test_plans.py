"""The plans for instructors: they name what is there, their sums add up, and nothing comes before what it needs."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator

import pytest
from lab_places import ROOT

from website import course, plans
from website.prose import reading_minutes

WRITTEN = plans._written()
#: "Exercise 3.8 needs 3.4 to 3.7", in the opening of a lab.
NEEDS = re.compile(r"(\d\.\d+) (?:needs|uses what you write in|what you write in) (\d\.\d+)(?: (to|and) (\d\.\d+))?")
LESSONS = {lesson.key: lesson for lesson in course.lessons()}


@pytest.fixture(params=plans.plans(), ids=lambda plan: plan.title.partition(":")[0])
def plan(request) -> plans.Plan:
    return request.param


def order(plan: plans.Plan) -> dict[str, int]:
    """Item -> the unit in which it is."""
    return {
        item.key: number for number, unit in enumerate(plan.units) for found in unit.items.values() for item in found
    }


# ---- what is named is there ----------------------------------------------------------------------------------------


def test_the_page_is_what_the_plans_and_the_notebooks_say():
    assert plans.PAGE.read_text(encoding="utf-8") == plans.page(), "python -m website.plans writes it again"


def test_there_are_a_term_half_a_term_and_a_workshop():
    assert [(len(plan.units), plan.unit) for plan in plans.plans()] == [(14, "Week"), (7, "Week"), (4, "Half-day")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: plan["units"][0]["class"].append("01:12"), "names '01:12', and the course has no '01:12'"),
        (lambda plan: plan["units"][0]["after"].append("1.99"), "has no '1.99'"),
        (lambda plan: plan["units"][1]["class"].append("01:5"), "has 01:5 twice"),
        (lambda plan: plan["units"][0]["after"].remove("1.7"), "must give a reason for each lesson.*lab1"),
        (lambda plan: plan["left_out"].update({"01": "why not"}), "must give a reason for each lesson.*01"),
    ],
)
def test_a_plan_that_names_what_is_not_there_or_leaves_out_without_a_reason_is_refused(change, says):
    written = copy.deepcopy(WRITTEN["plans"][0])
    change(written)
    with pytest.raises(ValueError, match=says):
        plans.plan_of(written)


def test_minutes_that_are_not_the_lectures_are_refused(monkeypatch):
    changed = copy.deepcopy(WRITTEN)
    changed["minutes"]["02"][0] += 5
    monkeypatch.setattr(plans, "_written", lambda: changed)
    with pytest.raises(
        ValueError, match="gives 8 sections of 02 155 minutes; the lecture has 8 sections and states 150"
    ):
        plans._sections(LESSONS["02"])


# ---- minutes -------------------------------------------------------------------------------------------------------


def test_the_minutes_are_those_of_the_lectures_openings_and_of_the_table_of_lectures():
    readme = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    table = {
        row[1].removeprefix("then "): int(row[2])
        for row in re.finditer(r"(?m)^\| .*?\| (.+?) \|.*\| (\d+) \|$", readme)
    }
    for lesson in course.lessons():
        items = [item for item in plans.every_item().values() if item.lesson == lesson.key]
        (stated,) = (
            minutes
            for link, minutes in table.items()
            if f"/{plans._path(lesson).name})" in f"/{link}".replace("(", "/")
        )
        counted = [item for item in items if item.points or not lesson.is_lab]  # voluntary exercises are extra
        spent = sum(item.minutes for item in counted if not item.key.endswith(":exercises"))
        assert spent == stated, lesson.name
        if not lesson.is_lab:
            assert spent == lesson.minutes and items[-1].minutes == lesson.exercise_minutes
        else:
            assert [item.points for item in counted] == list(lesson.points)


@pytest.mark.parametrize("key", WRITTEN["minutes"])
def test_the_minutes_of_a_section_are_near_its_share_of_the_lectures_length(key):
    """Text and formulas as the site counts them, and some time for open code, for a figure, for a cell to write in."""
    lengths: list[float] = [0.0]
    for cell in json.loads(plans._path(LESSONS[key]).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            first, *rest = re.split(r"(?m)^(?=## )", source)
            lengths[-1] += length(first)
            for section in rest:
                lengths.append(length(section))
                if section.startswith(("## Exercises", "## Sources")):
                    lengths.append(0.0)
        else:
            lengths[-1] += code_minutes(cell, source)
    sections = lengths[1 : 1 + len(WRITTEN["minutes"][key])]
    share = LESSONS[key].minutes / sum(sections)
    for number, (minutes, one) in enumerate(zip(WRITTEN["minutes"][key], sections, strict=True), start=1):
        assert abs(minutes - share * one) <= max(8, 0.35 * minutes), (
            f"{key}, section {number}: {share * one:.0f} minutes"
        )


def length(text: str) -> float:
    return reading_minutes([text], 0) + text.count("**Predict")


def code_minutes(cell: dict, source: str) -> float:
    if "setup" in cell["metadata"].get("tags", []):
        return 0
    lines = 0 if cell["metadata"].get("jupyter", {}).get("source_hidden") else len(source.split("\n"))
    figures = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
    return 0.15 * lines + 0.7 * figures + 6 * ("write-here" in cell["metadata"].get("tags", []))


def minutes_in(text: str) -> int:
    """Minutes of "75 min", "3 h", "2 h 45" or nothing."""
    found = re.fullmatch(r"(?:(\d+) h)?(?: (\d\d))?|(\d+) min", text)
    return int(found[3] or 0) or 60 * int(found[1] or 0) + int(found[2] or 0)


def test_the_sums_on_the_page_are_those_of_the_minutes_that_the_notebooks_state(plan):
    """Read from the page again: each line's minutes are those of what it names, each row adds up, and each column."""
    part = plans.page().partition(f"## {plan.title}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ][2:]
    table = [[minutes_in(cell) for cell in row[2:]] for row in rows]
    assert all(sum(row[:-1]) == row[-1] for row in table)
    assert [sum(column) for column in zip(*table[:-1], strict=True)] == table[-1]
    for number, unit in enumerate(plan.units):
        text = (
            part.partition(f"**{plan.unit} {number + 1}. ")[2].partition(f"\n**{plan.unit} ")[0].partition("**Left")[0]
        )
        for column, (time, words) in enumerate(plans.TIMES.items()):
            line = re.search(rf"(?m)^- {words} \((.+?)\): (.*)$", text)
            named = list(named_in(line[2])) if line else []
            assert sorted(named) == sorted(item.key for item in unit.items[time])
            spent = sum(plans.every_item()[key].minutes for key in named)
            assert spent == table[number][column] == (minutes_in(line[1]) if line else 0)


def named_in(line: str) -> Iterator[str]:
    """The items that a line of the page names, found by the titles in the notebooks."""
    for lesson, rest in re.findall(r"\[((?:Lab )?\d+) [^\]]*\]\([^)]*\)(.*?)(?=(?:All of )?\[(?:Lab )?\d+ |$)", line):
        key = lesson.replace("Lab ", "lab")
        for item in plans.every_item().values():
            if item.lesson == key and (rest.startswith(".") or re.search(rf"(?<![\d.]){re.escape(item.title)}", rest)):
                yield item.key


# ---- what is left out, and what comes before what ------------------------------------------------------------------


def test_what_is_left_out_and_what_is_not_make_the_whole_course(plan):
    left = [item.key for items in plan.left_out().values() for item in items]
    assert sorted([*left, *(item.key for item in plan.items())]) == sorted(plans.every_item())
    assert all(len(reason) > 30 for reason in plan.reasons.values())


def test_an_exercise_comes_with_or_after_the_section_that_it_practises_and_soon(plan):
    assert set(WRITTEN["practises"]) == {key for key in plans.every_item() if re.fullmatch(r"\d\.\d+", key)}
    unit = order(plan)
    for exercise, sections in WRITTEN["practises"].items():
        if exercise in unit:
            practised = [unit.get(item.key) for item in plans.items_of(sections)]
            assert None not in practised, f"{exercise} practises {sections}, which is left out"
            assert 0 <= unit[exercise] - max(practised) <= 2, (
                f"{exercise} in unit {unit[exercise] + 1}, {sections} in {practised}"
            )


def test_an_exercise_comes_with_or_after_the_exercises_that_it_needs(plan):
    unit, pairs = order(plan), list(needed_exercises())
    assert {("3.4", "3.3"), ("3.8", "3.6"), ("4.10", "4.6"), ("1.6", "1.4"), ("5.7", "5.6"), ("2.8", "2.7")} <= set(
        pairs
    )
    for exercise, needed in pairs:
        if exercise in unit:
            assert unit.get(needed, 99) <= unit[exercise], f"{exercise} needs {needed}"


def test_a_lab_is_due_after_the_last_of_its_exercises(plan):
    unit, due = order(plan), {}
    for number, one in enumerate(plan.units):
        if found := re.search(r"Lab (\d) is due( in the week after)?", one.does):
            due[found[1]] = number + bool(found[2])
    assert set(due) == ({key[0] for key in unit if re.fullmatch(r"\d\.\d+", key)} if plan.unit == "Week" else set())
    for key, number in unit.items():
        if re.fullmatch(r"\d\.\d+", key) and plan.unit == "Week":
            assert number < due[key[0]], (
                f"lab {key[0]} is due in week {due[key[0]] + 1}, and {key} is in week {number + 1}"
            )


def needed_exercises() -> Iterator[tuple[str, str]]:
    """Exercise and one that it needs or uses, as the openings of the labs say."""
    for lesson in course.lessons():
        if lesson.is_lab:
            line = re.search(r"\*\*Time\*\*: (.*)", plans._texts(plans._path(lesson)))[1]
            for exercise, first, join, last in NEEDS.findall(line):
                needed = (
                    [first, last]
                    if join == "and"
                    else [key for key in WRITTEN["practises"] if between(first, key, last)]
                )
                yield from ((exercise, key) for key in needed)
            for exercise in re.findall(r"(\d\.\d+) needs all of them", line):
                yield from (
                    (exercise, key) for key in WRITTEN["practises"] if key[0] == exercise[0] and key != exercise
                )


def between(first: str, key: str, last: str) -> bool:
    """Whether an exercise is from the first to the last, or is the first if there is no last."""
    low, middle, high = (tuple(map(int, number.split("."))) for number in (first, key, last or first))
    return low <= middle <= high


def test_a_lecture_is_begun_after_the_lectures_that_it_names_as_known(plan):
    first: dict[str, int] = {}
    for position, item in enumerate(plan.items()):
        first.setdefault(item.lesson, position)
    for key in first:
        for needed in [] if key == "00" else LESSONS[key].needs:
            assert key.startswith("lab") or first.get(needed, 99) < first[key], f"{key} needs {needed}"


def test_a_section_that_a_text_of_the_plan_names_is_read_before(plan):
    """Texts that name a section of an earlier lecture: "notebook 04, section 7". What comes later may be left out."""
    unit, found = order(plan), 0
    for key, named in named_sections():
        if key in unit and named < key:
            found += 1
            assert unit.get(named, 99) <= unit[key], f"{key} names {named}"
    assert found >= 2


def named_sections() -> Iterator[tuple[str, str]]:
    """Section of a lecture (its first for the opening) and the section of another lecture that it names."""
    for lesson in course.lessons():
        if not lesson.is_lab:
            for position, part in enumerate(re.split(r"(?m)^(?=## \d+\. )", plans._texts(plans._path(lesson)))):
                flat = " ".join(part.partition("\n## Exercises")[0].split())
                for a, b in re.findall(r"(?:notebook|lecture) (\d\d), section (\d+)", flat):
                    yield f"{lesson.key}:{max(position, 1)}", f"{a}:{b}"


def test_sections_of_a_lecture_are_read_in_their_order_except_the_tricks_which_stand_alone(plan):
    for key in LESSONS:
        numbers = [int(i.key[3:]) for i in plan.items() if i.lesson == key and re.fullmatch(r"\d\d:\d+", i.key)]
        assert numbers == sorted(numbers) or key == "03", key
