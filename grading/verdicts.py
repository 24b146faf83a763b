"""What became of each exercise, from what became of its check, in words that hold nothing hidden.

A check that runs on a hidden seed may fail with a text that shows hidden inputs, and a student's code may put them into
any error that it raises. So no text from a run with a hidden seed reaches a student. An exercise that fails is checked
once more in a fresh sandbox, with the seed that its notebook shows, and the message is taken from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grading.lab import Lab
from grading.results import Verdict

UNWRITTEN = re.compile(r"NotImplementedError: Lab \d+, exercise (?P<number>\d+\.\d+)\b")
HIDDEN_LINES = re.compile(r"^\s*reproduce:.*\n?|\s*\(seed \d+\)", re.MULTILINE)
ONLY_HIDDEN = (
    "It passes on the inputs that your notebook draws, and fails on others of the same kind. Change the seed in the "
    "check's cell and run it several times: one of the draws will show it."
)
LONGEST = 8000


def judge(lab: Lab, ran: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdict of each exercise from its check with a hidden seed; messages hold nothing that the check printed.

    Args:
        lab: the lab.
        ran: what became of each check (see :func:`grading.kernel.run_checks`), by exercise number.
        left_out: the verdict on what is written in each module that the handed out one stood in for, by file name.
    """
    instead = {number: verdict for name, verdict in left_out.items() for number in exercises_in(lab, name)}
    return {e.number: _verdict(e.number, ran, instead) for e in lab.exercises}


def _verdict(number: str, every: Mapping[str, Mapping[str, Any]], instead: Mapping[str, Verdict]) -> Verdict:
    ran = every[number]
    outcome, why, seconds = ran["outcome"], ran["why"], ran["seconds"]
    if outcome == "ok" and not ran.get("intact"):
        return Verdict("tampered", "Your code modified the checks or their libraries; this result is invalid.", seconds)
    if outcome == "ok":
        return Verdict("passed", "", seconds)
    if number in instead:
        return replace(instead[number], seconds=seconds)
    if outcome in ("timed out", "crashed"):
        return Verdict(
            outcome, _sentence(why if ran.get("imported", True) else f"on importing your modules: {why}"), seconds
        )
    unwritten = UNWRITTEN.match(why)
    if unwritten and unwritten["number"] in instead:
        return replace(instead[unwritten["number"]], seconds=seconds)
    if unwritten and unwritten["number"] == number:
        return Verdict("not attempted", "Nothing is written here yet.", seconds)
    if unwritten and unwritten["number"] in every:  # a number that is no exercise's could be a hidden one
        return Verdict("not attempted", f"It needs exercise {unwritten['number']}, which is not written yet.", seconds)
    return Verdict("failed", ONLY_HIDDEN, seconds)


def attempted(verdicts: Mapping[str, Verdict], left_out: Mapping[str, Verdict]) -> list[str]:
    """The exercises whose failure deserves a message from a run that shows nothing hidden.

    Where a module was left out, why it was is the message.
    """
    known = {verdict.message for verdict in left_out.values()}
    return [number for number, one in verdicts.items() if one.outcome == "failed" and one.message not in known]


def explain(verdicts: Mapping[str, Verdict], shown: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
    """Verdicts with the messages of a run with the released seeds, where it fails too."""
    explained = {}
    for number, ran in shown.items():
        if ran["outcome"] == "error":
            explained[number] = Verdict("failed", clean(ran["why"]), verdicts[number].seconds)
        elif ran["outcome"] != "ok":  # it fails in another way each time
            explained[number] = Verdict(ran["outcome"], _sentence(ran["why"]), verdicts[number].seconds)
    return explained


def clean(text: str) -> str:
    """A check's text without its seed; cut when it is longer than any check's."""
    text = HIDDEN_LINES.sub("", re.sub(r"^(CheckFailed|AssertionError): ", "", text)).strip()
    return text if len(text) <= LONGEST else text[:LONGEST] + " [cut]"


def not_graded(lab: Lab, why: str) -> dict[str, Verdict]:
    """A verdict for each exercise of a submission that cannot be read."""
    return {exercise.number: Verdict("not attempted", why) for exercise in lab.exercises}


def exercises_in(lab: Lab, module: str) -> list[str]:
    """The exercises that are written in a released module, by their numbers."""
    path = lab.released / module
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.findall(r'NotImplementedError\("Lab \d+, exercise (\d+\.\d+):', text)


def _sentence(text: str) -> str:
    return (text[:1].upper() + text[1:]).rstrip(".") + "."
