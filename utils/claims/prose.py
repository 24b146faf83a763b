"""Numbers in prose: what a lecture's text states as measured or computed is held against its claim or record.

A comment right behind a number and its unit, which no reader sees, says what the number is:

    it is 3 %<!-- 1 - gap.forward.ratio --> behind, and the limit is 700 W<!-- given -->

The comment is an expression of :mod:`utils.claims.expressions`, in SI units, a fraction where the text prints ``%``.
Write a comparison such that it is positive only in the direction that the words state: "behind", "slower" and "less"
are ``1 - ratio``, "ahead", "faster" and "more" ``ratio - 1``. If it has several values, "7 to 17 %" are the least and
the greatest of them, "2 and 7 %" the only two, in that order, and "7 %" is each of them. Behind "within", "less than",
"below", "more than" and "above" the number is a bound, which must hold and be near; behind "some", "about" and the like
zeros at its end are no digits.

``given`` marks what is no result of the course: an assumption, a definition, a published figure.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from utils import records
from utils.claims.expressions import claim_values, evaluate, per_unit, tables
from utils.claims.ledger import notebook_paths
from utils.units import number

#: The comment of a prompt, whose answer :mod:`utils.predictions` holds against its own expression.
PROMPT = re.compile(r"<!--\s*(predict\s.*?)\s*-->", re.S)
_MASKED = re.compile(r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|`[^`\n]+`|^#[^\n]*|\]\([^)\n]*\)", re.S | re.M)
_NUMBER = r"(?<![\w.,-])[+−]?\d+(?:,\d{3})*(?:\.\d+)?(?![\d,]*\d)"
_UNIT = (
    r"(?:\s?(?:%|×|x\b(?!\s?\d))|\s(?:times|percent|cycles|[kMG]?Hz|W|[µnm]?s|[kKMGT]i?B|"
    r"[kMGTP]?(?:FLOPs?(?:/s)?|B/s)|tokens/s)(?![\w/]))"
)
_PRINTED = re.compile(
    rf"(?:(?P<first>{_NUMBER})(?P<join> to | and ))?(?P<last>{_NUMBER})(?P<unit>{_UNIT})?"
    r"\**(?:<!--\s*(?P<bound>.*?)\s*-->)?"
)
_NAMED = re.compile(
    r"(?:exercises?|sections?|equations?|corollary|figures?|tables?|version|Triton|CUDA|PyTorch|Python) $", re.I
)
_ROUGHLY = re.compile(r"\b(?:some|about|roughly|almost|nearly|around|a good) $", re.I)
_BOUNDS = (
    (re.compile(r"\b(?:more than|above) $", re.I), operator.gt),
    (re.compile(r"\b(?:less than|below|within) $", re.I), operator.lt),
)


def problems(
    notebooks: Iterable[Path | str] | None = None,
    claims: Mapping[str, Any] | None = None,
    load: Callable[[str], records.Record] = records.load,
) -> list[str]:
    """What is wrong with the numbers in the markdown of notebooks: one sentence each, naming notebook and cell.

    Found are numbers whose comment says another value, or that lack one and have a unit (%, times, x, percent, cycles,
    W; Hz, s, B, B/s, FLOP, FLOP/s with their prefixes) or a decimal point. Not found are numbers without a comment in
    words ("three times"), whole ones without such a unit ("24 registers"), those in headings, formulas, code and links,
    and those of the exercises, whose answers a cell of their own asserts.

    Args:
        notebooks: Files; by default all lectures.
        claims: id -> value in SI units; by default those of the lectures' stored outputs.
        load: Reads a record by its benchmark's name.
    """
    claims = claim_values() if claims is None else claims
    found = []
    for path in notebook_paths() if notebooks is None else map(Path, notebooks):
        shown: list[list[dict[str, Any]]] = []
        for index, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code":
                shown = [rows_of(cell), *shown]
            elif cell["cell_type"] == "markdown":
                where = f"notebook {path.stem.partition('_')[0]}, cell {index}"
                wrong = text_problems("".join(cell["source"]), claims, results_of(shown, load))
                found += [f"{where}: {problem}" for problem in wrong]
    return found


def rows_of(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the tables that a code cell's stored outputs show."""
    texts = ["".join(output.get("data", {}).get("text/plain", "")) for output in cell["outputs"]]
    return [row for text in texts for row in tables(text)]


def results_of(shown: list[list[dict[str, Any]]], load: Callable[[str], records.Record]) -> Callable[[str], Any]:
    """What an expression finds below ``benchmark:`` and ``table:``, given the rows of some cells, the nearest first."""
    return lambda benchmark: shown if benchmark == "table" else load(benchmark).results


def text_problems(text: str, claims: Mapping[str, Any], results: Callable[[str], Any]) -> list[str]:
    """What is wrong with the numbers of one Markdown text, see :func:`problems`."""
    text = PROMPT.sub("", text)
    masked = _MASKED.sub(lambda found: "\0" * len(found[0]), text)
    exercises = text.find("## Exercises") % (len(text) + 1)
    found, held = [], 0
    for printed in _PRINTED.finditer(masked):
        before, says = masked[: printed.start()], f"the text says {printed[0].partition('<!--')[0]}"
        if printed["bound"] is not None:
            held += 1
            if printed["bound"] != "given" and (wrong := _wrong(printed, before, claims, results)):
                found.append(f"{says}, {wrong}")
        elif printed.start() < exercises and (printed["unit"] or (_is_decimal(printed) and not _NAMED.search(before))):
            found.append(f"{says}, and no comment behind it names its claim or record, or marks it as given")
    if held != text.count("<!--"):
        found.append(f"{text.count('<!--')} comments, of which {held} stand right behind a number and its unit")
    return found


def _is_decimal(printed: re.Match[str]) -> bool:
    return "." in printed["last"] or "." in (printed["first"] or "")


def _wrong(printed: re.Match[str], before: str, claims: Mapping[str, Any], results: Callable[[str], Any]) -> str:
    """What the expression behind a number says instead of it, or an empty text."""
    expression, unit = printed["bound"], (printed["unit"] or "").strip()
    try:
        values = evaluate(expression, claims, results) * per_unit(unit)
    except ValueError as error:
        return f"{expression} cannot be computed: {error}"
    if _agree(printed, values, before):
        return ""
    shown = " and ".join(number(float(v), 3) for v in values) if len(values) <= 2 else ""
    return f"{expression} says {shown or f'{number(values.min(), 3)} to {number(values.max(), 3)}'} {unit}".rstrip()


def _agree(printed: re.Match[str], values: np.ndarray, before: str) -> bool:
    """Whether the number or the two that are printed are these values, to the digits that are printed."""
    if not printed["first"]:
        return all(_is(printed["last"], value, before) for value in values)
    if printed["join"] == " to ":
        values = np.array([values.min(), values.max()])[: len(values)]
    return len(values) == 2 and _is(printed["first"], values[0], before) and _is(printed["last"], values[1], before)


def _is(text: str, value: float, before: str) -> bool:
    stated = float(text.replace(",", "").replace("−", "-"))
    last_place = 10.0 ** -len(text.partition(".")[2])
    for words, holds in _BOUNDS:
        if words.search(before):
            return holds(value, stated) and abs(value - stated) <= max(last_place, 0.1 * abs(stated))
    if _ROUGHLY.search(before) and "." not in text:
        last_place = 10.0 ** (len(text) - len(text.rstrip("0")))  # "some 150": its zeros are no digits
    return abs(value - stated) <= 0.5 * last_place * (1 + 1e-9)
