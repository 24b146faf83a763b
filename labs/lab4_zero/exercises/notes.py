"""What a rank notes while a scenario runs: in a file that outlives its process, and that the other ranks may read."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from utils.distributed.calls import Call


def notes_of(folder: str | Path, rank: int) -> Iterator[tuple | Call]:
    """What a rank has noted, in order: a pair when a scenario begins, each call, a triple when the scenario is over."""
    try:
        with open(Path(folder, f"seen-{rank}"), "rb") as notes:
            while True:
                yield pickle.load(notes)
    except (FileNotFoundError, EOFError, pickle.UnpicklingError):
        return  # it ended before it began, or in the middle of a word


def calls_in(notes: Sequence[tuple | Call], scenario: tuple[int, str]) -> list[Call]:
    """The collectives that a rank has called in a scenario (number of the answer, name)."""
    begun = notes.index(scenario) if scenario in notes else len(notes)
    return [note for note in notes[begun:] if isinstance(note, Call)]


def is_owed(rank: int, mine: Sequence[Call], other: int, theirs: Sequence[Call]) -> bool:
    """Whether ``other`` has called what can end only with a call of ``rank``, which has made ``mine`` and no more.

    A collective, if it is a later one in its group than the last of ``rank``; a message, if ``rank`` has not called its
    counterpart.
    """
    answered = Counter(call.members for call in mine if call.kind not in ("send", "recv"))
    asked = Counter(call.members for call in theirs if call.kind not in ("send", "recv") and rank in call.members)
    if asked - answered:
        return True
    opposite = {"send": "recv", "recv": "send"}
    answered = Counter(opposite[call.kind] for call in mine if call.kind in opposite and call.peer in (other, None))
    asked = Counter(call.kind for call in theirs if call.kind in opposite and call.peer == rank)
    return bool(asked - answered)
