"""What a rank does: every scene of every answer, each in a process group of its own, noted down as it is seen."""

from __future__ import annotations

import faulthandler
import pickle
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.checks.lab4.carried import arrived
from utils.checks.lab4.sights import Scene, Sight, fault_of
from utils.distributed import calls, record_collectives

#: Seconds that a rank waits for another one in a collective, and that a scene may take in all.
PATIENCE, SCENE_SECONDS = 6.0, 18.0
#: Seconds that a rank which is done stays in the group for the others' sake.
GRACE = 1.0


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
                sight, all_well = _in_a_fresh_group(own_store, rank, world_size, scene, answer)
                faulthandler.cancel_dump_traceback_later()
                notes.write(pickle.dumps((k, scene.name, sight)))
                if not all_well:
                    break  # what comes after the first fault says no more
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=world_size)


def _see(scene: Scene, answer: dict[str, Any]) -> Sight:
    sight = Sight()
    with record_collectives() as ledger:
        try:
            sight.value = scene.play(arrived(answer), **scene.arguments)
        except Exception as error:
            sight.fault = fault_of(error)
    sight.entries = list(ledger.entries)
    return sight


def _in_a_fresh_group(
    store: dist.Store, rank: int, world_size: int, scene: Scene, answer: dict[str, Any]
) -> tuple[Sight, bool]:
    """Play a scene in a new default group; also returns whether no rank met with an exception.

    A rank that is done waits a moment for the others before it leaves the group: leaving frees those that wait for it
    in vain.
    """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE))
    sight = _see(scene, answer)
    if sight.fault is not None:
        store.set("fault", "")
    store.set(f"done {rank}", "")
    done = [f"done {other}" for other in range(world_size)]
    with suppress(dist.DistError):  # too late for the others
        store.wait(done, timedelta(seconds=GRACE))
    dist.destroy_process_group()
    store.wait(done, timedelta(seconds=SCENE_SECONDS))
    return sight, not store.check(["fault"])
