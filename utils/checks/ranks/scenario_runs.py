"""Runs a student's answer on several ranks, scenario after scenario, and brings back what each rank saw.

All scenarios of a check, or of many answers, share one launch. Each answer gets a process group of its own, so that one
that fails does not disturb the next.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.checks.attempt import TooLong, deadline
from utils.checks.student_files import is_library
from utils.distributed import DistributedError, launch, start_ahead
from utils.distributed.calls import Call

from .gathers import gathered_at_once
from .on_rank import PATIENCE, SCENARIO_SECONDS, FunctionRef, calls_in, notes_of, run_all, see
from .scenarios import Fault, RankObservation, RankScenario, ScenarioRun, short_name

#: Seconds that all scenarios of one answer may take.
LAUNCH_SECONDS = 55.0
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def get_ready() -> None:
    """Start what the ranks are forked from, and meanwhile import here what a judge's first optimizer would import."""
    start_ahead()
    import torch._dynamo  # noqa: F401


def run_single_rank(answer: Mapping[str, Callable], scenario: RankScenario) -> RankObservation:
    """Run a scenario here, as the only rank of a group: a stub or a slip shows at once, without starting a process.

    Raises:
        NotImplementedError: a place is not filled; its own message.
    """
    before = {name: os.environ.get(name) for name in _LOOPBACK}
    os.environ.update({name: value for name, value in _LOOPBACK.items() if os.path.exists(f"/sys/class/net/{value}")})
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with deadline(SCENARIO_SECONDS), gathered_at_once():
            return see(scenario, answer)
    except TooLong:
        return RankObservation(fault=Fault("TooLong", f"it did not end in {SCENARIO_SECONDS:.0f} s", (), True))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def run_on_ranks(
    answers: Sequence[Mapping[str, Callable]], scenarios: Sequence[RankScenario], patience: float = PATIENCE
) -> list[ScenarioRun]:
    """Run all scenarios of each answer; those of so many ranks share one launch.

    Args:
        answers: functions by name.
        scenarios: what is played, in this order.
        patience: seconds that the first answer's ranks wait for one another.

    Returns:
        What was seen of each answer. If a process dies or does not come back, that is the end of the answer that it
        played; the answers after it get a launch of their own.
    """
    if not answers or not scenarios:
        return [ScenarioRun({}) for _ in answers]
    world_size = scenarios[0].ranks
    alike = next((k for k, scenario in enumerate(scenarios) if scenario.ranks != world_size), len(scenarios))
    if alike < len(scenarios):
        played = run_on_ranks(answers, scenarios[:alike], patience)
        unhurt = [k for k, seen in enumerate(played) if not seen.end and not seen.met_a_fault()]
        more = run_on_ranks([answers[k] for k in unhurt], scenarios[alike:], patience)
        for k, seen in zip(unhurt, more, strict=True):
            played[k] = played[k].then(seen)
        return played
    with tempfile.TemporaryDirectory(prefix="scenarios-") as folder:
        carried = [{name: _by_reference(value) for name, value in answer.items()} for answer in answers]
        seconds = LAUNCH_SECONDS + 2 * (len(answers) - 1) * len(scenarios)
        try:
            with redirect_stderr(StringIO()):  # what a process writes that dies; the check says it in fewer words
                launch(
                    run_all, carried, list(scenarios), folder, world_size=world_size, backend="gloo", timeout=seconds,
                    collective_timeout=patience,
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


def _by_reference(value: Any) -> Any:
    """``value`` as it travels to the ranks: its name if it belongs to a file, itself if it was typed into a notebook.

    A notebook that reloads its modules may hold a class whose module has a newer one of that name: the ranks take the
    newer one, which is what the file says.
    """
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name or getattr(sys.modules.get(module), "__file__", None) is None:
        return value
    return FunctionRef(module, name)


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
