"""Runs a student's answer on several ranks, scenario after scenario, and brings back what each rank saw.

Each scenario gets a process group of its own, so that one that fails, or that leaves a message behind, does not disturb
the next: all scenarios of a check, or of many answers, share one launch.
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

from .by_reference import answer_to_references
from .forbid_library_calls import forbid_library_calls
from .notes import calls_in, notes_of
from .observations import Fault, RankObservation, RankScenario, ScenarioRun, fault_of, short_name
from .on_rank import PATIENCE, SCENARIO_SECONDS, run_all

WORLD_SIZE = 3
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def run_single_rank(answer: Mapping[str, Callable], scenario: RankScenario) -> RankObservation:
    """Run a scenario here, as the only rank of a group: a stub or a slip shows at once, without starting a process."""
    observed = RankObservation()
    before = {name: os.environ.get(name) for name in _LOOPBACK}
    os.environ.update({name: value for name, value in _LOOPBACK.items() if os.path.exists(f"/sys/class/net/{value}")})
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with record_collectives() as ledger:
            observed.entries = ledger.entries
            with deadline(SCENARIO_SECONDS), forbid_library_calls():
                observed.value = scenario.play(dict(answer), **scenario.arguments)
    except NotImplementedError:
        raise
    except TooLong:
        observed.fault = Fault("TooLong", f"it did not end in {SCENARIO_SECONDS:.0f} s", (), True)
    except Exception as error:
        observed.fault = fault_of(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return observed


def run_on_ranks(answers: Sequence[Mapping[str, Callable]], scenarios: Sequence[RankScenario]) -> list[ScenarioRun]:
    """Run all scenarios of each answer; those of so many ranks share one launch.

    Returns:
        What was seen of each answer. If a process dies or does not come back, that is the end of the answer that it
        played; the answers after it get a launch of their own.
    """
    if not answers or not scenarios:
        return [ScenarioRun({}) for _ in answers]
    world_size = scenarios[0].ranks
    alike = next((k for k, scenario in enumerate(scenarios) if scenario.ranks != world_size), len(scenarios))
    if alike < len(scenarios):
        played = run_on_ranks(answers, scenarios[:alike])
        unhurt = [k for k, seen in enumerate(played) if not seen.end and not seen.met_a_fault()]
        more = run_on_ranks([answers[k] for k in unhurt], scenarios[alike:])
        for k, seen in zip(unhurt, more, strict=True):
            played[k] = played[k].then(seen)
        return played
    with tempfile.TemporaryDirectory(prefix="scenarios-") as folder:
        carried = [answer_to_references(answer) for answer in answers]
        seconds = 30 + SCENARIO_SECONDS + 2 * len(answers) * len(scenarios)
        try:
            with redirect_stderr(StringIO()):  # what a process writes that dies; the check says it in fewer words
                launch(
                    run_all, carried, list(scenarios), folder, world_size=world_size, backend="gloo", timeout=seconds,
                    collective_timeout=PATIENCE,
                )  # fmt: skip
        except DistributedError as error:
            notes = [list(notes_of(folder, rank)) for rank in range(world_size)]
            begun = max((note[:2] for of_rank in notes for note in of_rank if isinstance(note, tuple)), default=(0, ""))
            done = [_seen(notes, k) for k in range(begun[0] + 1)]
            done[-1].end, done[-1].where = _ending(error, Path(folder), world_size)
            done[-1].scenario = next((s.name for s in scenarios if s.name not in done[-1].observations), "")
            done[-1].called = [calls_in(of_rank, (begun[0], done[-1].scenario)) for of_rank in notes]
            return done + run_on_ranks(answers[begun[0] + 1 :], scenarios)
        notes = [list(notes_of(folder, rank)) for rank in range(world_size)]
        return [_seen(notes, k) for k in range(len(answers))]


def _seen(notes: Sequence[Sequence[tuple | Call]], answer: int) -> ScenarioRun:
    """All scenarios of an answer that every rank has seen to its end."""
    of_rank = [
        {note[1]: note[2] for note in of_one if isinstance(note, tuple) and len(note) == 3 and note[0] == answer}
        for of_one in notes
    ]
    everywhere = [name for name in of_rank[0] if all(name in seen for seen in of_rank)]
    return ScenarioRun({name: [seen[name] for seen in of_rank] for name in everywhere})


def _ending(error: DistributedError, folder: Path, world_size: int) -> tuple[str, tuple[str, ...]]:
    """What ended a job whose processes did not come back, and the student's lines in which one of them was."""
    for rank in range(world_size):
        stack = Path(folder, f"stack-{rank}")
        if stack.exists() and (where := _students_frames(stack.read_text())):
            return f"rank {rank} did not end in {SCENARIO_SECONDS:.0f} s", where
    said = f"{error}\n{error.traceback}"
    return str(error).strip().split("\n")[0], _students_frames(said)


def _students_frames(text: str) -> tuple[str, ...]:
    """The student's lines in what ``faulthandler`` wrote, the innermost last."""
    frames = [line.split('"') for line in text.splitlines() if 'File "' in line]
    mine = [f"{short_name(frame[1])}{frame[2]}" for frame in frames if not is_library(frame[1])]
    return tuple(mine[:3][::-1])
