"""What a rank does: every scenario of every answer, each answer in a process group of its own.

What a rank sees it notes in a file that outlives its process, and that the other ranks may read.
"""

from __future__ import annotations

import faulthandler
import importlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.distributed import calls, record_collectives
from utils.distributed.calls import Call

from .forbid_library_calls import forbid_library_calls
from .scenarios import RankObservation, RankScenario, fault_of

#: Seconds that a rank waits for another one in a collective, and that a scenario may take in all.
PATIENCE, SCENARIO_SECONDS = 6.0, 18.0
#: Seconds after which a rank that is done looks whether another one waits for it in vain.
LOOK_EVERY = 0.05


@dataclass(frozen=True)
class FunctionRef:
    """A function or class of a module, looked up where it is needed."""

    module: str
    name: str

    def find(self) -> Any:
        """The object itself."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


class OutsideGroup(RuntimeError):
    """A collective of other ranks than the group's."""


def run_all(answers: Sequence[dict[str, Any]], scenarios: Sequence[RankScenario], folder: str) -> None:
    """Run every scenario of every answer, up to an answer's first fault, and note in ``folder`` what is seen.

    Notes are pairs (number of the answer, name of the scenario) when a scenario begins, each collective before it is
    called, and triples with the :class:`RankObservation` when the scenario is over: what is seen before a process dies
    is not lost.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    with (
        open(Path(folder, f"stack-{rank}"), "w") as stack,
        open(Path(folder, f"seen-{rank}"), "wb", buffering=0) as notes,
        calls.unheard(),  # the launcher would end a job whose ranks disagree; the judges look at that themselves
        calls.listen(lambda call: notes.write(pickle.dumps(call))),
    ):
        for k, answer in enumerate(answers):
            for number, scenario in enumerate(scenarios):
                notes.write(pickle.dumps((k, scenario.name)))
                faulthandler.dump_traceback_later(SCENARIO_SECONDS, exit=True, file=stack)
                own = dist.PrefixStore(f"{k} {number}", store)
                _join(own, rank, world_size)
                observed = see(scenario, answer)
                all_well = _end_together(own, observed, folder, (k, scenario.name))
                faulthandler.cancel_dump_traceback_later()
                notes.write(pickle.dumps((k, scenario.name, observed)))
                if not all_well:
                    break  # what comes after the first fault says no more
            if dist.is_initialized() and (not all_well or k + 1 < len(answers)):
                dist.destroy_process_group()
    _join(dist.PrefixStore("end", store), rank, world_size)


def _join(store: dist.Store, rank: int, world_size: int) -> None:
    """Make a default group of all ranks unless there is one."""
    if not dist.is_initialized():
        patience = timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)


def see(scenario: RankScenario, answer: Mapping[str, Any]) -> RankObservation:
    """Play a scenario on this rank.

    Raises:
        NotImplementedError: a place is not filled, and this is the only rank: no other one waits for it.
    """
    observed = RankObservation()
    with record_collectives() as ledger, forbid_library_calls():
        try:
            functions = {name: ref.find() if isinstance(ref, FunctionRef) else ref for name, ref in answer.items()}
            observed.value = _play(scenario, functions)
        except Exception as error:
            if isinstance(error, NotImplementedError) and dist.get_world_size() == 1:
                raise
            observed.fault = fault_of(error)
    observed.entries = list(ledger.entries)
    return observed


def _play(scenario: RankScenario, answer: Mapping[str, Any]) -> Any:
    if not scenario.members:
        return scenario.play(answer, **scenario.arguments)
    group = dist.new_group(list(scenario.members))
    if dist.get_rank() not in scenario.members:
        return None
    with _within(scenario.members):
        return scenario.play(answer, group=group, **scenario.arguments)


@contextmanager
def _within(members: tuple[int, ...]) -> Iterator[None]:
    """In the block no collective reaches other ranks: these would be waited for in vain."""

    def look(call: Call) -> None:
        if call.members != members:
            ranks = ", ".join(map(str, call.members))
            raise OutsideGroup(f"{call.kind.replace('_', '-')} of {call.elements:,} elements by the ranks {ranks}")

    with calls.listen(look):
        yield


def _end_together(store: dist.Store, observed: RankObservation, folder: str, scenario: tuple[int, str]) -> bool:
    """Wait until all ranks are done with a scenario; whether no rank met with an exception.

    A rank stays in the group for the sake of slower ones, until all are done or one waits for this rank in vain: to
    leave frees one that does. Who waits in vain follows from what the ranks have called, however long they take. If
    any has left, all leave, and the next scenario begins with a new group.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if observed.fault is not None:
        store.set("fault", "")
    store.set(f"done {rank}", "")
    if store.add("done", 1) == world_size:  # the last: nobody leaves from now on
        store.compare_set("how", "", "stayed")
        store.set("end", "")
    while True:
        try:
            store.wait(["end"], timedelta(seconds=LOOK_EVERY))
            break
        except dist.DistError:
            mine = calls_in(list(notes_of(folder, rank)), scenario)
            busy = [other for other in range(world_size) if not store.check([f"done {other}"])]
            owed = any(is_owed(rank, mine, other, calls_in(list(notes_of(folder, other)), scenario)) for other in busy)
            if owed and dist.is_initialized() and store.compare_set("how", "", "left") == b"left":
                dist.destroy_process_group()
    if dist.is_initialized() and store.get("how") == b"left":
        dist.destroy_process_group()
    return not store.check(["fault"])


# ---- notes
def notes_of(folder: str | Path, rank: int) -> Iterator[tuple | Call]:
    """What a rank has noted, in order: a pair when a scenario begins, each call, a triple when the scenario is over."""
    try:
        with open(Path(folder, f"seen-{rank}"), "rb") as notes:
            while True:
                yield pickle.load(notes)
    except (FileNotFoundError, EOFError, pickle.UnpicklingError):
        return  # it ended before it began, or in the middle of a note


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
