"""Predictions: a reader commits to an answer before a lecture shows its own.

A prompt is the last paragraph of a Markdown cell. It begins with ``**Predict.**``, asks for one quantity and gives
everything that is needed to compute it. A comment on the last line of the cell, which no reader sees, says what is
right:

    **Predict.** How many new maxima do you expect in a row of 8,192 scores?

    <!-- predict 05.maxima: 9.6 maxima = online.maxima.8192 -->

- The name is the notebook's number (``05``, ``lab3``), a dot and a word of its own.
- Behind it stand the answer and its unit, which the reader sees behind the box, and after " = " the expression of
  :mod:`utils.claims.expressions` that gives it: claims, fields of records, stored tables, arithmetic.
- A guess within a factor of 1.5 is right. ``3 accesses, exactly = 2 + 1`` is for counts, ``67 %, within 1.1 = 2/3`` for
  another factor.

A choice is a list of three or four items at the end of the prompt; the comment says which item is right:

    **Predict.** How long is that step?

    - 5 ms
    - 15 ms
    - 4.3 s

    <!-- predict 11.joins: choice 2 -->

What follows is held back until the reader commits, or asks for the answer without a guess: all cells up to the next
Markdown cell, and that cell. It is the answer: it computes the number in two to four sentences and names the likeliest
wrong answer and its cause. It has no heading and no further prompt; what goes on from there is a cell of its own.
In a lab (``lab3.tiles``) only that Markdown cell is held back: the code before it checks what a student writes.
``**Think.**`` is for a question without an answer that can be checked; nothing is held back behind it.

:func:`problems` holds all this. ``predict.js`` shows it, the same file on the site and in JupyterLab
(:mod:`utils.jupyterlab`); elsewhere a prompt is read as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from utils import records
from utils.claims import expressions
from utils.claims.prose import PROMPT as MARK
from utils.claims.prose import results_of, rows_of
from utils.units import number

FOLDER = Path(__file__).parent
_FORM = re.compile(
    r"predict (?P<name>\w+\.[a-z0-9-]+): (?:choice (?P<right>\d)|(?P<number>\d+(?:,\d{3})*(?:\.\d+)?)"
    r"(?: (?P<unit>[^=]+?))?(?:, (?:(?P<exactly>exactly)|within (?P<factor>\d+(?:\.\d+)?)))? = (?P<expression>\S.*))"
)
_PROMPT = re.compile(r"\*\*(?:Predict|Guess)\b(?!, )")
_LIST = re.compile(r"(?:^[-*] .*(?:\n|\Z)(?:^[ \t]+\S.*(?:\n|\Z))*)+\s*\Z", re.M)
_HEADING = re.compile(r"^#{1,6} ", re.M)
CHOICES = (3, 4)


@dataclass(frozen=True)
class Prediction:
    """A prompt.

    Attributes:
        name: ``"05.maxima"``, unique in the course.
        mark: The comment's text, which ``predict.js`` reads.
        cell, until: The prompt's cell and the cell of its answer.
        question: The prompt's paragraph in Markdown, without its first word and its choices.
        choices: The items of its list, in Markdown; empty where a number is asked for.
    """

    name: str
    mark: str
    cell: int
    until: int
    question: str
    choices: tuple[str, ...]

    @property
    def held(self) -> range:
        """The cells that are held back: all up to the answer, in a lab the answer alone."""
        return range(self.until if self.name.startswith("lab") else self.cell + 1, self.until + 1)


def predictions(cells: Sequence[Any]) -> list[Prediction]:
    """The prompts of a notebook's cells in order; what :func:`problems` finds is left out or taken as it stands."""
    found = []
    for k, cell in enumerate(cells):
        source = _text(cell)
        mark = MARK.search(source)
        if mark is None or not (form := _FORM.fullmatch(mark[1])) or not (prompts := list(_PROMPT.finditer(source))):
            continue
        asked = source[prompts[-1].start() : mark.start()].strip()
        listed = _LIST.search(asked) if form["right"] else None
        choices = re.split(r"^[-*] ", listed[0], flags=re.M)[1:] if listed else []
        question = asked[: listed.start()] if listed else asked
        until = next((n for n in range(k + 1, len(cells)) if cells[n]["cell_type"] == "markdown"), k)
        found.append(
            Prediction(
                name=form["name"],
                mark=mark[1],
                cell=k,
                until=until,
                question=re.sub(r"^\*\*Predict\.?\*\*\s*", "", question.strip()),
                choices=tuple(choice.strip() for choice in choices),
            )
        )
    return found


def _text(cell: Any) -> str:
    return "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""


def is_marked(cells: Sequence[Any]) -> bool:
    """Whether any prompt of a notebook has its comment."""
    return any(MARK.search(_text(cell)) for cell in cells)


def problems(
    cells: Sequence[Any],
    prefix: str,
    claims: Mapping[str, Any],
    load: Callable[[str], records.Record] = records.load,
) -> list[str]:
    """What is wrong with the prompts of a notebook, a sentence each.

    Args:
        cells: The notebook's cells, with stored outputs.
        prefix: The notebook's number, with which the names of its prompts begin.
        claims: id -> value in SI units.
        load: Reads a record by its benchmark's name.
    """
    found: list[str] = []
    names: set[str] = set()
    rows = [rows_of(cell) if cell["cell_type"] == "code" else [] for cell in cells]
    for k, cell in enumerate(cells):
        source = _text(cell)
        prompts, marks = list(_PROMPT.finditer(source)), list(MARK.finditer(source))
        said: list[str] = []
        if len(marks) > 1:
            said.append("has more than one comment of a prompt; a cell ends with one prompt")
        elif marks:
            results = results_of([*rows[k:], *rows[:k]], load)
            said += _mark_problems(source, prompts, marks[0], prefix, claims, results)
            name = marks[0][1].split()[1].rstrip(":")
            if name in names:
                said.append(f"uses the name {name} a second time")
            names.add(name)
            said += _answer_problems(cells[k + 1 :])
        if len(prompts) > len(marks):
            said.append("has a prompt without its comment, <!-- predict NAME: ... -->; or should it be a **Think.**?")
        found += [f"cell {k}: {each}" for each in said]
    return found


def _mark_problems(
    source: str,
    prompts: Sequence[re.Match[str]],
    mark: re.Match[str],
    prefix: str,
    claims: Mapping[str, Any],
    results: Callable[[str], Any],
) -> list[str]:
    form = _FORM.fullmatch(mark[1])
    if form is None:
        return [
            f"{mark[0]!r} is neither 'NAME: NUMBER UNIT[, exactly | , within FACTOR] = EXPRESSION' nor 'NAME: choice N'"
        ]
    said = []
    if form["name"].split(".")[0] != prefix:
        said.append(f"the name {form['name']} must begin with {prefix}.")
    if source[mark.end() :].strip() or source[: mark.start()].rpartition("\n")[2].strip():
        said.append(f"the comment of {form['name']} must be a line of its own, the last one of its cell")
    if not prompts:
        return [*said, f"{form['name']} has no paragraph that begins with **Predict.**"]
    asked = source[prompts[-1].start() : mark.start()].strip()
    if form["right"]:
        listed = _LIST.search(asked)
        count = len(re.findall(r"^[-*] ", listed[0], flags=re.M)) if listed else 0
        if count not in CHOICES:
            said.append(f"{form['name']} has {count} choices at its end, not a list of three or four")
        elif not 1 <= int(form["right"]) <= count:
            said.append(f"{form['name']} has {count} choices, and choice {form['right']} is said to be right")
        return said
    if not 1 < float(form["factor"] or 1.5) <= 10:
        said.append(f"{form['name']}: a factor lies between 1 and 10")
    unit = form["unit"] or ""
    try:
        values = expressions.evaluate(form["expression"], claims, results) * expressions.per_unit(unit)
    except ValueError as error:
        return [*said, f"{form['name']}: {form['expression']} cannot be computed: {error}"]
    if not all(expressions.is_printed_as(value, form["number"]) for value in values):
        says = " and ".join(number(float(value), 6) for value in values)
        said.append(f"{form['name']} says {form['number']}, {form['expression']} says {says} {unit}".rstrip())
    return said


def _answer_problems(after: Sequence[Any]) -> list[str]:
    answer = next((_text(cell) for cell in after if cell["cell_type"] == "markdown"), None)
    if answer is None:
        return ["no Markdown cell follows the prompt and answers it"]
    said = []
    if _HEADING.search(re.sub(r"```.*?```", "", answer, flags=re.S)):
        said.append("the next Markdown cell answers the prompt and must not hold a heading; begin a new cell there")
    if _PROMPT.search(answer):
        said.append(
            "the next Markdown cell answers the prompt and must not hold another prompt; begin a new cell there"
        )
    return said


@cache
def script() -> str:
    """What a page needs to show prompts: how numbers are read and printed, and ``predict.js``."""
    numbers = (FOLDER.parent / "living" / "units.js").read_text(encoding="utf-8")
    return numbers + (FOLDER / "predict.js").read_text(encoding="utf-8")


@cache
def style() -> str:
    """How prompts look."""
    return (FOLDER / "predict.css").read_text(encoding="utf-8")
