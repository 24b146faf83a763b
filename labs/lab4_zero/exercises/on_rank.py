"""What a rank does: every scene of every answer, each in a process group of its own, noted down as it is seen."""

from __future__ import annotations

import faulthandler
import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.distributed import calls, record_collectives

from .barred import barred
from .carried import arrived
from .notes import calls_in, is_owed, notes_of
from .sights import Scene, Sight, fault_of

#: Seconds that a rank waits for another one in a collective, and that a scene may take in all.
PATIENCE, SCENE_SECONDS = 6.0, 18.0
#: Seconds after which a rank that is done looks whether another one waits for it in vain.
LOOK_EVERY = 0.05


def play_all(answers: Sequence[dict[str, Any]], scenes: Sequence[Scene], folder: str) -> None:
    """Play every scene of every answer, up to an answer's first fault, and note in ``folder`` what is seen.

    Notes are pairs (number of the answer, name of the scene) when a scene begins, each collective before it is called,
    and triples with the :class:`Sight` when the scene is over: what is seen before a process dies is not lost.
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
            for number, scene in enumerate(scenes):
                notes.write(pickle.dumps((k, scene.name)))
                faulthandler.dump_traceback_later(SCENE_SECONDS, exit=True, file=stack)
                own_store = dist.PrefixStore(f"{k} {number}", store)
                place = (folder, (k, scene.name))
                sight, all_well = _in_a_fresh_group(own_store, rank, world_size, scene, answer, place)
                faulthandler.cancel_dump_traceback_later()
                notes.write(pickle.dumps((k, scene.name, sight)))
                if not all_well:
                    break  # what comes after the first fault says no more
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=world_size)


def _see(scene: Scene, answer: dict[str, Any]) -> Sight:
    sight = Sight()
    with record_collectives() as ledger, barred():
        try:
            sight.value = scene.play(arrived(answer), **scene.arguments)
        except Exception as error:
            sight.fault = fault_of(error)
    sight.entries = list(ledger.entries)
    return sight


def _in_a_fresh_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    scene: Scene,
    answer: dict[str, Any],
    place: tuple[str, tuple[int, str]],
) -> tuple[Sight, bool]:
    """Play a scene in a new default group; also returns whether no rank met with an exception."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE))
    sight = _see(scene, answer)
    if sight.fault is not None:
        store.set("fault", "")
    store.set(f"done {rank}", "")
    done = [f"done {other}" for other in range(world_size)]
    _stay(store, rank, done, *place)
    dist.destroy_process_group()
    store.wait(done, timedelta(seconds=SCENE_SECONDS))
    return sight, not store.check(["fault"])


def _stay(store: dist.Store, rank: int, done: list[str], folder: str, scene: tuple[int, str]) -> None:
    """Stay in the group, for the sake of ranks that are slower, until all are done or one waits for this rank in vain.

    To leave frees one that does. Who waits in vain follows from what the ranks have called, however long they take.
    """
    while True:
        try:
            store.wait(done, timedelta(seconds=LOOK_EVERY))
            return
        except dist.DistError:
            mine = calls_in(list(notes_of(folder, rank)), scene)
            busy = [other for other, name in enumerate(done) if not store.check([name])]
            if any(is_owed(rank, mine, other, calls_in(list(notes_of(folder, other)), scene)) for other in busy):
                return
