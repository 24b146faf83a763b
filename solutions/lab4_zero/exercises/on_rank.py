"""What a rank does: every scenario of every answer, each in a process group of its own, noted down as it is seen."""

from __future__ import annotations

import faulthandler
import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.distributed import calls, record_collectives

from .by_reference import from_references
from .forbid_library_calls import forbid_library_calls
from .notes import calls_in, is_owed, notes_of
from .observations import RankObservation, RankScenario, fault_of

#: Seconds that a rank waits for another one in a collective, and that a scenario may take in all.
PATIENCE, SCENARIO_SECONDS = 6.0, 18.0
#: Seconds after which a rank that is done looks whether another one waits for it in vain.
LOOK_EVERY = 0.05


def run_all(answers: Sequence[dict[str, Any]], scenarios: Sequence[RankScenario], folder: str) -> None:
    """Run every scenario of every answer, up to an answer's first fault, and note in ``folder`` what is seen.

    Notes are pairs (number of the answer, name of the scenario) when a scenario begins, each collective before it is
    called, and triples with the :class:`RankObservation` when the scenario is over: what is seen before a process dies
    is not lost.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
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
                own_store = dist.PrefixStore(f"{k} {number}", store)
                place = (folder, (k, scenario.name))
                observed, all_well = _in_a_fresh_group(own_store, rank, world_size, scenario, answer, place)
                faulthandler.cancel_dump_traceback_later()
                notes.write(pickle.dumps((k, scenario.name, observed)))
                if not all_well:
                    break  # what comes after the first fault says no more
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=world_size)


def _see(scenario: RankScenario, answer: dict[str, Any]) -> RankObservation:
    observed = RankObservation()
    with record_collectives() as ledger, forbid_library_calls():
        try:
            observed.value = scenario.play(from_references(answer), **scenario.arguments)
        except Exception as error:
            observed.fault = fault_of(error)
    observed.entries = list(ledger.entries)
    return observed


def _in_a_fresh_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    scenario: RankScenario,
    answer: dict[str, Any],
    place: tuple[str, tuple[int, str]],
) -> tuple[RankObservation, bool]:
    """Run a scenario in a new default group; also returns whether no rank met with an exception."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE))
    observed = _see(scenario, answer)
    if observed.fault is not None:
        store.set("fault", "")
    store.set(f"done {rank}", "")
    done = [f"done {other}" for other in range(world_size)]
    _stay(store, rank, done, *place)
    dist.destroy_process_group()
    store.wait(done, timedelta(seconds=SCENARIO_SECONDS))
    return observed, not store.check(["fault"])


def _stay(store: dist.Store, rank: int, done: list[str], folder: str, scenario: tuple[int, str]) -> None:
    """Stay in the group, for the sake of ranks that are slower, until all are done or one waits for this rank in vain.

    To leave frees one that does. Who waits in vain follows from what the ranks have called, however long they take.
    """
    while True:
        try:
            store.wait(done, timedelta(seconds=LOOK_EVERY))
            return
        except dist.DistError:
            mine = calls_in(list(notes_of(folder, rank)), scenario)
            busy = [other for other, name in enumerate(done) if not store.check([name])]
            if any(is_owed(rank, mine, other, calls_in(list(notes_of(folder, other)), scenario)) for other in busy):
                return
