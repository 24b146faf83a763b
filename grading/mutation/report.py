"""What became of a lab's mutants, as a page that an instructor reads: ``solutions/LAB/answers/mutants.md``.

A mutant that nothing tells from the solution is either **equivalent**, with the reason in ``equivalent.toml`` beside
the page, or **survived**: a hole in the check.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from grading.lab import ROOT
from grading.mutation.run import SEEDS, WIDE, Result

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


def page(lab: str, results: Sequence[Result]) -> str:
    """The report in Markdown: a table by exercise, the survivors, the equivalents, and each mutant that was caught."""
    known = equivalents(lab)
    by_exercise: dict[str, list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda r: ([int(n) for n in r.place.split(":")[0].split(".")], r.file, r.line)):
        by_exercise[result.place.split(":")[0]].append(result)
    lines = [
        f"# Mutants of {lab}", "",
        f"Each solution with one small mistake in it, against the exercise's check and hidden cases (seeds "
        f"{', '.join(map(str, SEEDS))}). What passes there meets {len(WIDE)} more seeds. Written by `make mutate`.", "",
        f"| exercise | mutants | {' | '.join(FATES.values())} | score | told a classic number |",
        "|" + "---:|" * (len(FATES) + 4),
    ]  # fmt: skip
    for number, found in by_exercise.items():
        count = Counter(fate(result, known) for result in found)
        real = len(found) - count["equivalent"]
        score = (real - count["wide"] - count["survived"]) / real
        classic = sum(bool(CLASSIC.search(result.said)) for result in found)
        cells = [number, str(len(found)), *(str(count[name]) for name in FATES), f"{score:.1%}", str(classic)]
        lines.append(f"| {' | '.join(cells)} |")
    for title, wanted in (("Survivors", ("survived", "wide")), ("Equivalent", ("equivalent",))):
        lines += ["", f"## {title}", ""]
        found = [result for result in results if fate(result, known) in wanted]
        lines += [_line(r) + _because(known.get((r.place, r.before, r.after), "")) for r in found] or ["None."]
    return "\n".join([*lines, *_caught(by_exercise, known)]) + "\n"


def _line(result: Result) -> str:
    return f"- {result.place} ({result.operator}): `{_code(result.before)}` → `{_code(result.after)}`"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _code(text: str) -> str:
    return text.replace("`", "'") or "nothing"


def _caught(by_exercise: dict[str, list[Result]], known: dict[tuple[str, str, str], str]) -> Iterable[str]:
    for number, found in by_exercise.items():
        yield from ("", f"## Caught: {number}", "")
        for result in found:
            if fate(result, known) in ("check", "error", "timeout", "hidden"):
                headline = result.said.split("\n")[0] if result.said else FATES[result.fate]
                numbers = "".join(f" [classic {n}]" for n in CLASSIC.findall(result.said))
                yield f"{_line(result)}: {result.fate}: {_code(headline)[:160]}{numbers}"


def write(lab: str, results: Sequence[Result]) -> Path:
    """Write the page; where it is."""
    path = ROOT / "solutions" / lab / "answers" / "mutants.md"
    path.write_text(page(lab, results), encoding="utf-8")
    return path
