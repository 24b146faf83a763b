"""Plays a student's answer on several ranks, scene after scene, and brings back what each rank saw.

Each scene gets a process group of its own, so that one that fails, or that leaves a message behind, does not disturb
the next: all scenes of a check, or of many answers, share one launch.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.attempt import TooLong, deadline
from utils.checks.lab4.carried import arrived, carried_answer
from utils.distributed import DistributedError, Entry, calls, launch, record_collectives

WORLD_SIZE = 3
#: Seconds that a rank waits for another one in a collective, and that a scene may take in all.
PATIENCE, SCENE_SECONDS = 6.0, 25.0
#: Seconds that a rank which is done stays in the group for the others' sake.
GRACE = 1.0
_LATE = ("Timed out", "timed out", "Connection closed", "Connection reset", "Broken pipe", "preamble", "Socket")
_PORT_OF_ONE = {"GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Scene:
    """One thing to try: ``play(answer, **arguments)`` runs on each rank; ``answer`` holds the student's functions."""

    name: str
    play: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """An exception on a rank.

    ``late`` says that the rank waited for others in vain; ``where`` are the student's own lines, the innermost last.
    """

    type: str
    text: str
    where: tuple[str, ...]
    late: bool


@dataclass
class Sight:
    """What one rank saw of one scene: what ``play`` returned, every collective, and an exception if there was one."""

    value: Any = None
    entries: list[Entry] = field(default_factory=list)
    fault: Fault | None = None

    def count(self, *kinds: str) -> int:
        """How many collectives of these kinds this rank called (of all kinds if none is named)."""
        return sum(entry.kind in kinds for entry in self.entries) if kinds else len(self.entries)

    def elements(self, *kinds: str) -> int:
        """Elements of the full tensors of these kinds of collectives."""
        return sum(entry.elements for entry in self.entries if entry.kind in kinds)

    def kinds(self) -> list[str]:
        """The kinds that were called, most elements first."""
        return sorted({entry.kind for entry in self.entries}, key=lambda kind: -self.elements(kind))


@dataclass
class Played:
    """All scenes of one answer: by name, what each rank saw; ``end`` is what ended the job before its time, if so."""

    sights: dict[str, list[Sight]]
    end: str = ""
    where: tuple[str, ...] = ()
    scene: str = ""


def is_students(file: str) -> bool:
    """Whether a source file is neither the library's nor PyTorch's nor Python's."""
    return not (file.startswith(_NOT_STUDENTS) or "site-packages" in file or "dist-packages" in file)


_NOT_STUDENTS = (
    str(Path(__file__).resolve().parents[2]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(os.__file__).parent) + os.sep,
    "<frozen",
)


def fault_of(error: BaseException) -> Fault:
    """An exception as it is told: its kind, the student's lines that led to it, and whether others came too late."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_students(f.filename)]
    lines = tuple(f"{_file(f.filename)}, line {f.lineno}, in {f.name}: {f.line}" for f in frames[-3:])
    text = str(error).split("\n")[0][:300]
    late = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LATE)
    return Fault(type(error).__name__, text, lines, late)


def _file(name: str) -> str:
    return "a cell" if name.startswith("<") or "ipykernel" in name else Path(name).name


def play_alone(answer: Mapping[str, Callable], scene: Scene) -> Sight:
    """Play a scene here, as the only rank of a group: a stub or a slip shows at once, without starting a process."""
    sight = Sight()
    before = {name: os.environ.get(name) for name in _PORT_OF_ONE}
    os.environ.update(
        {name: value for name, value in _PORT_OF_ONE.items() if os.path.exists(f"/sys/class/net/{value}")}
    )
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with deadline(SCENE_SECONDS), record_collectives() as ledger:
            sight.value = scene.play(dict(answer), **scene.arguments)
        sight.entries = list(ledger.entries)
    except NotImplementedError:
        raise
    except TooLong:
        sight.fault = Fault("TooLong", f"it did not end in {SCENE_SECONDS:.0f} s", (), True)
    except Exception as error:
        sight.fault = fault_of(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return sight


def play_on_ranks(
    answers: Sequence[Mapping[str, Callable]], scenes: Sequence[Scene], world_size: int = WORLD_SIZE
) -> list[Played]:
    """Play all scenes of each answer on ``world_size`` ranks of one launch.

    Returns:
        What was seen of each answer. If a process died or did not come back, the answers are played one by one again,
        so that each has its own end.
    """
    with tempfile.TemporaryDirectory(prefix="scenes-") as folder:
        carried = [carried_answer(answer) for answer in answers]
        seconds = 30 + SCENE_SECONDS * min(2, len(answers)) + 2 * len(answers) * len(scenes)
        try:
            seen = launch(
                _rank, carried, list(scenes), folder, world_size=world_size, backend="gloo", timeout=seconds,
                collective_timeout=PATIENCE,
            )  # fmt: skip
        except DistributedError as error:
            if len(answers) > 1:
                return [played for answer in answers for played in play_on_ranks([answer], scenes, world_size)]
            return [_ended(error, Path(folder), world_size)]
    return [Played({name: [of_rank[k][name] for of_rank in seen] for name in seen[0][k]}) for k in range(len(answers))]


def _ended(error: DistributedError, folder: Path, world_size: int) -> Played:
    """What can be said of a job whose processes did not come back."""
    notes = {path.name: path.read_text() for path in folder.iterdir() if path.stat().st_size}
    scene = max((notes.get(f"scene-{rank}", "") for rank in range(world_size)), key=len)
    for rank in range(world_size):
        lines = [
            line.strip() for line in notes.get(f"stack-{rank}", "").splitlines() if line.strip().startswith("File")
        ]
        mine = [line for line in lines if is_students(line.split('"')[1])]
        if mine:
            where = tuple(f"{_file(line.split(chr(34))[1])}{line.split(chr(34))[2]}" for line in mine[:3][::-1])
            return Played({}, f"rank {rank} did not end in {SCENE_SECONDS:.0f} s", where, scene)
    return Played({}, str(error).strip().split("\n")[0], (), scene)


def _rank(answers: list[dict[str, Any]], scenes: list[Scene], folder: str) -> list[dict[str, Sight]]:
    """Body of a rank: every scene of every answer, each in a process group of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    with calls.unheard():  # the launcher would end a job whose ranks disagree; the judges look at that themselves
        seen = _all_answers(answers, scenes, Path(folder), store, rank, world_size)
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=world_size)
    return seen


def _all_answers(
    answers: list[dict[str, Any]], scenes: list[Scene], folder: Path, store: dist.Store, rank: int, world_size: int
) -> list[dict[str, Sight]]:
    with open(Path(folder, f"stack-{rank}"), "w") as stack, open(Path(folder, f"scene-{rank}"), "w") as current:
        seen = []
        for k, answer in enumerate(answers):
            seen.append({})
            for number, scene in enumerate(scenes):
                current.seek(0)
                current.truncate()
                current.write(scene.name)
                current.flush()
                faulthandler.dump_traceback_later(SCENE_SECONDS, exit=True, file=stack)
                sight, all_well = _in_a_fresh_group(
                    dist.PrefixStore(f"{k} {number}", store), rank, world_size, scene, answer
                )
                faulthandler.cancel_dump_traceback_later()
                seen[-1][scene.name] = sight
                if not all_well:
                    break  # what comes after the first fault says no more
    return seen


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
    limit = time.monotonic() + GRACE
    while time.monotonic() < limit and not store.check(done):
        time.sleep(0.002)
    dist.destroy_process_group()
    store.wait(done, timedelta(seconds=SCENE_SECONDS))
    return sight, not store.check(["fault"])
