"""Plays a student's answer on several ranks, scene after scene, and brings back what each rank saw.

Each scene gets a process group of its own, so that one that fails, or that leaves a message behind, does not disturb
the next: all scenes of a check, or of many answers, share one launch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch.distributed as dist

from utils.checks.attempt import TooLong, deadline
from utils.checks.forbid import is_library
from utils.distributed import DistributedError, launch, record_collectives
from utils.distributed.calls import Call

from .barred import barred
from .carried import carried_answer
from .notes import calls_in, notes_of
from .on_rank import PATIENCE, SCENE_SECONDS, play_all
from .sights import Fault, Played, Scene, Sight, fault_of, short_name

WORLD_SIZE = 3
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def play_alone(answer: Mapping[str, Callable], scene: Scene) -> Sight:
    """Play a scene here, as the only rank of a group: a stub or a slip shows at once, without starting a process."""
    sight = Sight()
    before = {name: os.environ.get(name) for name in _LOOPBACK}
    os.environ.update({name: value for name, value in _LOOPBACK.items() if os.path.exists(f"/sys/class/net/{value}")})
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with record_collectives() as ledger:
            sight.entries = ledger.entries
            with deadline(SCENE_SECONDS), barred():
                sight.value = scene.play(dict(answer), **scene.arguments)
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


def play_on_ranks(answers: Sequence[Mapping[str, Callable]], scenes: Sequence[Scene]) -> list[Played]:
    """Play all scenes of each answer; those of so many ranks share one launch.

    Returns:
        What was seen of each answer. If a process dies or does not come back, that is the end of the answer that it
        played; the answers after it get a launch of their own.
    """
    if not answers or not scenes:
        return [Played({}) for _ in answers]
    world_size = scenes[0].ranks
    alike = next((k for k, scene in enumerate(scenes) if scene.ranks != world_size), len(scenes))
    if alike < len(scenes):
        played = play_on_ranks(answers, scenes[:alike])
        unhurt = [k for k, seen in enumerate(played) if not seen.end and not seen.met_a_fault()]
        more = play_on_ranks([answers[k] for k in unhurt], scenes[alike:])
        for k, seen in zip(unhurt, more, strict=True):
            played[k] = played[k].then(seen)
        return played
    with tempfile.TemporaryDirectory(prefix="scenes-") as folder:
        carried = [carried_answer(answer) for answer in answers]
        seconds = 30 + SCENE_SECONDS + 2 * len(answers) * len(scenes)
        try:
            with redirect_stderr(StringIO()):  # what a process writes that dies; the check says it in fewer words
                launch(
                    play_all, carried, list(scenes), folder, world_size=world_size, backend="gloo", timeout=seconds,
                    collective_timeout=PATIENCE,
                )  # fmt: skip
        except DistributedError as error:
            notes = [list(notes_of(folder, rank)) for rank in range(world_size)]
            begun = max((note[:2] for of_rank in notes for note in of_rank if isinstance(note, tuple)), default=(0, ""))
            done = [_seen(notes, k) for k in range(begun[0] + 1)]
            done[-1].end, done[-1].where = _ending(error, Path(folder), world_size)
            done[-1].scene = next((s.name for s in scenes if s.name not in done[-1].sights), "")
            done[-1].called = [calls_in(of_rank, (begun[0], done[-1].scene)) for of_rank in notes]
            return done + play_on_ranks(answers[begun[0] + 1 :], scenes)
        notes = [list(notes_of(folder, rank)) for rank in range(world_size)]
        return [_seen(notes, k) for k in range(len(answers))]


def _seen(notes: Sequence[Sequence[tuple | Call]], answer: int) -> Played:
    """All scenes of an answer that every rank has seen to its end."""
    of_rank = [
        {note[1]: note[2] for note in of_one if isinstance(note, tuple) and len(note) == 3 and note[0] == answer}
        for of_one in notes
    ]
    everywhere = [name for name in of_rank[0] if all(name in seen for seen in of_rank)]
    return Played({name: [seen[name] for seen in of_rank] for name in everywhere})


def _ending(error: DistributedError, folder: Path, world_size: int) -> tuple[str, tuple[str, ...]]:
    """What ended a job whose processes did not come back, and the student's lines in which one of them was."""
    for rank in range(world_size):
        stack = Path(folder, f"stack-{rank}")
        if stack.exists() and (where := _students_frames(stack.read_text())):
            return f"rank {rank} did not end in {SCENE_SECONDS:.0f} s", where
    said = f"{error}\n{error.traceback}"
    return str(error).strip().split("\n")[0], _students_frames(said)


def _students_frames(text: str) -> tuple[str, ...]:
    """The student's lines in what ``faulthandler`` wrote, the innermost last."""
    frames = [line.split('"') for line in text.splitlines() if 'File "' in line]
    mine = [f"{short_name(frame[1])}{frame[2]}" for frame in frames if not is_library(frame[1])]
    return tuple(mine[:3][::-1])
