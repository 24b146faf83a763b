"""A student's feedback: one HTML page that holds everything it shows, made of the result alone.

What a submission made a check say is text and nothing more: it is escaped, its control characters are made visible,
and what is too long is cut with a note. The page asks for nothing from outside, and tells the browser to refuse any
script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

CSS = (Path(__file__).resolve().parent / "feedback.css").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

#: Characters of a message that are shown: from its beginning (what differs, and where) and from its end (the cause).
HEAD, TAIL = 6_000, 2_000
#: Lines of a message, and characters of a line.
LINES, WIDTH = 120, 600
#: Characters of a name, a title or a note, and how many notes.
NAME, NOTE, NOTES = 200, 2_000, 20


@dataclass(frozen=True)
class Outcome:
    """How an exercise ended, in the student's words: ``colour`` only repeats what ``symbol`` and ``words`` say."""

    symbol: str
    words: str
    colour: str
    advice: str = ""


#: Every outcome of a result's exercise; in ``advice``, ``{command}`` is what runs the lab's checks.
OUTCOMES: Mapping[str, Outcome] = {
    "passed": Outcome("✓", "passed", "good"),
    "failed": Outcome(
        "✗",
        "not right yet",
        "bad",
        "Read the message from the top: what differs, where, and the likely mistake. {command} runs the same check on "
        "your machine. If it passes there, your answer holds for the inputs that the notebook draws and not for all: "
        "the grader draws others. Change the seed in the check's cell, and try odd sizes, a single element and inputs "
        "that are not contiguous.",
    ),
    "not attempted": Outcome(
        "○",
        "not attempted",
        "idle",
        "The place in your file is as it was handed out. The notebook says what belongs there, and has a hint folded "
        "below the task. {command} shows your points at any time.",
    ),
    "refused": Outcome(
        "⊘",
        "refused",
        "stop",
        "The grader read your file and did not run it, for the reason above. A file is refused as a whole, so every "
        "exercise that is written in it is without points. Take out the lines that are named; no exercise needs them. "
        "If you think that one does, show the line to your instructor.",
    ),
    "timed out": Outcome(
        "◷",
        "timed out",
        "bad",
        "The check was stopped because it did not end. Look for a loop whose condition never becomes false, for work "
        "that grows faster than the input, and for ranks that wait for one another. {command} stops it in the same "
        "way on your machine.",
    ),
    "crashed": Outcome(
        "⚡",
        "crashed",
        "bad",
        "The process that ran your code ended before the check did. Usual causes are reads or writes outside of a "
        "tensor, memory without bound, and calls that end the process. In a kernel, look for a load or a store "
        "without a mask; `profile_kernel` finds accesses out of bounds and says which program made them. The other "
        "exercises were graded as if nothing had happened.",
    ),
    "tampered": Outcome(
        "⚠",
        "not counted",
        "stop",
        "While your code ran, something changed that the grading relies on: a check, or a library's function. Your "
        "answer may be right, but nothing can be concluded from a check that was changed. Look for assignments to what "
        "your own files do not define. If you do not see what is meant, ask your instructor, who can read the same "
        "message.",
    ),
}


def page(result: Mapping[str, Any]) -> str:
    """The feedback page of one submission, as text of an HTML file in UTF-8.

    Args:
        result: what ``LAB/results/STUDENT.json`` holds.

    Raises:
        ValueError: a format, a status or an outcome that this page does not know.
        KeyError: the result lacks a field.
    """
    require_known(result)
    exercises = result["exercises"]
    title, student = _name(result["title"]), _name(result["student"])
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="robots" content="noindex">',
        f"<title>{title} · {student}</title>",
        f"<style>\n{CSS}</style>",
        "</head>",
        "<body>",
        "<main>",
        "<header>",
        '<p class="course">Making LLMs Fast</p>',
        f"<h1>{title}</h1>",
        f'<p class="who">Feedback for <strong>{student}</strong></p>',
        "</header>",
        _score(result),
        _notes(result),
        _table(exercises),
        _details(result),
        _footer(result),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def require_known(result: Mapping[str, Any]) -> None:
    """Refuse a result that was made by another version of the grader.

    Raises:
        ValueError: a format, a status or an outcome that is not known here.
    """
    if result["format"] != 1:
        raise ValueError(f"expected a result of format 1, got {result['format']!r}: grade the submission again")
    if result["status"] not in ("graded", "unreadable"):
        raise ValueError(f"status must be 'graded' or 'unreadable', got {result['status']!r}")
    for exercise in result["exercises"]:
        if exercise["outcome"] not in OUTCOMES:
            raise ValueError(
                f"exercise {exercise['number']}: outcome must be one of {', '.join(OUTCOMES)}, got "
                f"{exercise['outcome']!r}"
            )


def is_left(exercise: Mapping[str, Any]) -> bool:
    """Whether it is a voluntary exercise, without points, that was not attempted: there is nothing to tell about it."""
    return not exercise["max_score"] and exercise["outcome"] == "not attempted" and "automatic" not in exercise


def worth(exercise: Mapping[str, Any]) -> str:
    """The points of an exercise of a result in words: ``7.5 of 10 points``, or ``voluntary``."""
    if not exercise["max_score"] and not exercise["score"]:
        return "voluntary"
    return f"{points(exercise['score'])} of {points(exercise['max_score'])} points"


def points(value: float) -> str:
    """A number of points as people write it: ``10``, ``7.5``."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ---- text of a stranger ----
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
#: Control characters other than newline and tab, what turns the direction of text, and halves of characters.
UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def plain(text: str) -> str:
    """``text`` without terminal colours, and with a visible mark where a character would act instead of being read."""
    text = ANSI.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text)


def shortened(text: str) -> str:
    """A message that a page can show: :func:`plain`, and cut where it is too long, with a note of how much."""
    if len(text) > HEAD + TAIL or text.count("\n") >= LINES:
        head = "\n".join(text[:HEAD].split("\n")[: LINES // 2])
        rest = text[len(head) :]
        tail = "\n".join(rest[-TAIL:].split("\n")[-(LINES // 2) :])
        text = f"{head}\n\n{_left_out(len(rest) - len(tail))}\n\n{tail}"
    return "\n".join(_narrowed(line) for line in plain(text).split("\n"))


def _narrowed(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH]} {_left_out(len(line) - WIDTH)}"


def _left_out(count: int) -> str:
    return f"[... {count:,} characters are left out here ...]"


def _name(text: object) -> str:
    """A short text of one line, escaped."""
    text = str(text)
    line = " ".join(plain(text[: NAME + 1]).split())
    return escape(line if len(text) <= NAME else line[:NAME] + " …")


def _code(text: str) -> str:
    """Escaped prose in which `words` are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


# ---- the parts of the page ----
def _score(result: Mapping[str, Any]) -> str:
    exercises, score, most = result["exercises"], points(result["score"]), points(result["max_score"])
    tried = [exercise for exercise in exercises if not is_left(exercise)]
    passed = sum(exercise["outcome"] == "passed" for exercise in tried)
    if result["status"] == "unreadable":
        said = "The submission could not be read, so no exercise was graded. The notes below say why."
    elif passed == len(tried):
        said = "Every exercise passed."
    else:
        said = f"{passed} of {len(tried)} exercises passed."
    strip = "".join(
        f'<span style="flex:{exercise["max_score"]:g}"><i style="width:{_percent(exercise)}%"></i></span>'
        for exercise in exercises
    )
    return (
        '<section class="card score" aria-label="Score">\n'
        f'<p class="total">{score} <small>of {most} points</small></p>\n'
        f'<div class="strip" aria-hidden="true">{strip}</div>\n'
        f"<p>{said}</p>\n{_term(result)}</section>"
    )


def _term(result: Mapping[str, Any]) -> str:
    """What due date, lateness and the instructor's decisions have to do with the score."""
    return "".join(f"<p>{escape(plain(text))}</p>\n" for text in result.get("term", {}).get("said", ()))


def _percent(exercise: Mapping[str, Any]) -> str:
    share = exercise["score"] / exercise["max_score"] if exercise["max_score"] else 0.0
    return f"{100 * min(1.0, max(0.0, share)):.4g}"


def _notes(result: Mapping[str, Any]) -> str:
    notes = result["notes"]
    if not notes:
        return ""
    shown = [plain(note[:NOTE]) + (" […]" if len(note) > NOTE else "") for note in notes[:NOTES]]
    if len(notes) > NOTES:
        shown.append(f"… and {len(notes) - NOTES:,} more notes")
    items = "\n".join(f"<li>{escape(note)}</li>" for note in shown)
    return f'<h2>Notes</h2>\n<div class="card"><ul class="notes">\n{items}\n</ul></div>'


def _table(exercises: Sequence[Mapping[str, Any]]) -> str:
    if not exercises:
        return ""
    largest = max(exercise["max_score"] for exercise in exercises) or 1
    rows = "\n".join(_row(index, exercise, largest) for index, exercise in enumerate(exercises))
    return (
        "<h2>Exercises</h2>\n"
        '<div class="card table"><table role="table">\n<caption>Points and outcome of each exercise</caption>\n'
        '<thead><tr role="row"><th scope="col">Exercise</th><th scope="col" class="points">Points</th>'
        '<th scope="col" class="bars"><span class="unseen">Share of the points</span></th>'
        f'<th scope="col">Outcome</th></tr></thead>\n<tbody role="rowgroup">\n{rows}\n</tbody>\n</table></div>'
    )


def _row(index: int, exercise: Mapping[str, Any], largest: float) -> str:
    outcome = OUTCOMES[exercise["outcome"]]
    words = outcome.words
    name = f'<span class="number">{_name(exercise["number"])}</span>{_name(exercise["title"])}'
    if "automatic" in exercise:
        words += ", points given by hand"
    if _is_explained(exercise):
        words = f'<a class="{outcome.colour}" href="#exercise-{index + 1}">{words}</a>'
    width = f"{100 * exercise['max_score'] / largest:.4g}"
    return (
        f'<tr role="row"><th scope="row" role="rowheader">{name}</th>'
        f'<td role="cell" class="points">{_share(exercise)}</td>'
        f'<td role="cell" class="bars"><span class="bar" aria-hidden="true" style="width:{width}%">'
        f'<i style="width:{_percent(exercise)}%"></i></span></td>'
        f'<td role="cell" class="outcome {outcome.colour}"><b aria-hidden="true">{outcome.symbol}</b>{words}</td></tr>'
    )


def _share(exercise: Mapping[str, Any]) -> str:
    if (said := worth(exercise)) == "voluntary":
        return f"<span>{said}</span>"
    return f"{points(exercise['score'])} <span>/ {points(exercise['max_score'])}</span>"


def _is_explained(exercise: Mapping[str, Any]) -> bool:
    if is_left(exercise):
        return False
    return exercise["outcome"] != "passed" or bool(exercise["message"].strip()) or "automatic" in exercise


def _details(result: Mapping[str, Any]) -> str:
    explained = [(index, e) for index, e in enumerate(result["exercises"]) if _is_explained(e)]
    if not explained or result["status"] == "unreadable":
        return ""
    command = f"`make check-lab LAB={_short(result['lab'])}`"
    return "\n".join(["<h2>What to do next</h2>", *(_detail(index, e, command) for index, e in explained)])


def _short(lab: str) -> str:
    """``lab2`` for ``lab2_triton_kernels``."""
    return lab.split("_")[0]


def _detail(index: int, exercise: Mapping[str, Any], command: str) -> str:
    outcome = OUTCOMES[exercise["outcome"]]
    said = f"{worth(exercise)}{by_hand(exercise)}"
    lines = [
        f'<section class="card exercise of-{outcome.colour}" id="exercise-{index + 1}">',
        f'<h3><span class="number">{_name(exercise["number"])}</span>{_name(exercise["title"])}</h3>',
        f'<p class="verdict outcome {outcome.colour}"><b aria-hidden="true">{outcome.symbol}</b>{outcome.words}'
        f' <span class="small">· {said}</span></p>',
    ]
    if message := shortened(exercise["message"]).strip("\n"):
        lines.append(f"<pre>{escape(message)}</pre>")
    if outcome.advice:
        lines.append(f'<p class="next">{_code(outcome.advice.format(command=command))}</p>')
    return "\n".join([*lines, "</section>"])


def by_hand(exercise: Mapping[str, Any]) -> str:
    """What to add to the points of an exercise that a person corrected; empty if nobody did."""
    return f", given by hand (automatic: {points(exercise['automatic'])})" if "automatic" in exercise else ""


def _footer(result: Mapping[str, Any]) -> str:
    graded, digest = str(result["graded"])[:40], str(result["digest"])[:80]
    try:
        moment = datetime.fromisoformat(graded)
        said = f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".strip()
    except ValueError:
        said = graded
    return (
        "<footer>\n"
        f'<p>Graded <time datetime="{escape(graded)}">{escape(said)}</time> in {result["seconds"]:.0f} s, on inputs '
        "that were drawn for this grading and are not shown.</p>\n"
        f'<p>Submission <code title="{escape(digest)}">{escape(digest[:12])}</code>. Something looks wrong? Write to '
        "your instructor with this code.</p>\n</footer>"
    )
