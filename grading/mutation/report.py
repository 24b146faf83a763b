"""What became of an exercise's mutants, as a page to be read: ``solutions/LAB/answers/mutants/3.1.md``.

A mutant that nothing tells from the solution is either **equivalent**, with the reason in the lab's
``equivalent.toml``, or **survived**: a hole in the check.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from grading.lab import ROOT
from grading.mutation.run import SEEDS, WIDE, Result
from grading.mutation.run import count as mutants_in_all

#: What may become of a mutant, in the order of the table's columns.
FATES = {
    "check": "caught by the check",
    "error": "raises an error of Python's",
    "timeout": "does not end, or fills the memory",
    "hidden": "caught by hidden cases",
    "equivalent": "equivalent",
    "wide": "caught by other seeds only",
    "survived": "survived",
}
CLASSIC = re.compile(r'"classic wrong answers" (\d+)')


def equivalents(lab: str) -> dict[tuple[str, str, str], str]:
    """Place, line and what became of it -> why the mutant does what the solution does.

    Raises:
        ValueError: an entry without a reason, or two for one mutant.
    """
    path = ROOT / "solutions" / lab / "answers" / "equivalent.toml"
    found: dict[tuple[str, str, str], str] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"] if path.is_file() else ():
        key = entry["place"], entry["before"], entry["after"]
        if not entry["reason"].strip() or key in found:
            raise ValueError(f"{path}: {key} has no reason, or stands there twice")
        found[key] = entry["reason"]
    return found


def fate(result: Result, known: dict[tuple[str, str, str], str]) -> str:
    """A key of :data:`FATES`."""
    told = result.place, result.before, result.after
    return "equivalent" if result.fate == "survived" and told in known else result.fate


def page(lab: str, number: str, results: Sequence[Result]) -> str:
    """The report on an exercise in Markdown: counts, survivors, equivalents, and each mutant that was caught."""
    known = equivalents(lab)
    found = sorted(results, key=lambda result: (result.file, result.line))
    count = Counter(fate(result, known) for result in found)
    real = len(found) - count["equivalent"]
    score = (real - count["wide"] - count["survived"]) / real
    total = mutants_in_all(lab, number)
    classic = sum(bool(CLASSIC.search(result.said)) for result in found)
    lines = [
        f"# Mutants of exercise {number}", "",
        f"The solution with one small mistake in it{_drawn(len(found), total)}, against the check and the hidden "
        f"cases (seeds {', '.join(map(str, SEEDS))}). What passes there meets {len(WIDE)} more seeds. Written by "
        "`make mutate`.",
        "",
        "| | mutants |", "|---|---:|", *(f"| {words} | {count[name]} |" for name, words in FATES.items()),
        f"| **all** | **{len(found)}** |", f"| score: caught, of those that are not equivalent | {score:.1%} |",
        f"| told a classic number | {classic} |",
    ]  # fmt: skip
    for title, wanted in (("Survivors", ("survived", "wide")), ("Equivalent", ("equivalent",))):
        lines += ["", f"## {title}", ""]
        some = [result for result in found if fate(result, known) in wanted]
        lines += [_line(r) + _because(known.get((r.place, r.before, r.after), "")) for r in some] or ["None."]
    return "\n".join([*lines, "", "## Caught", "", *_caught(found, known)]) + "\n"


def _drawn(taken: int, total: int) -> str:
    return "" if taken == total else f" ({taken} of {total:,} mutants, drawn at random)"


def _line(result: Result) -> str:
    return f"- {result.place} ({result.operator}): `{_code(result.before)}` → `{_code(result.after)}`"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _code(text: str) -> str:
    return text.replace("`", "'") or "nothing"


def _caught(found: Sequence[Result], known: dict[tuple[str, str, str], str]) -> Iterable[str]:
    """A line for each mutant that was caught: the message's headline, and its cause (the last detail if it has none).

    The cause is the last line before the one that says how to reproduce: :func:`utils.checks.core.message`.
    """
    for result in found:
        if fate(result, known) in ("check", "error", "timeout", "hidden"):
            headline, *told = result.said.split("\n") if result.said else [FATES[result.fate]]
            last = [_code(line.strip())[:200] for line in told if not line.startswith("  reproduce: ")][-1:]
            yield f"{_line(result)}: {result.fate}: {_code(headline)[:160]}" + "".join(f" ({line})" for line in last)


def write(lab: str, number: str, results: Sequence[Result]) -> Path:
    """Write the page of an exercise; where it is."""
    path = ROOT / "solutions" / lab / "answers" / "mutants" / f"{number}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(lab, number, results), encoding="utf-8")
    return path
