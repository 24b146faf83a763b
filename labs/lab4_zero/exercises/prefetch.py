"""The check of exercise 4.10: ZeRO-3 that gathers the next block while one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Draw
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck, in_group
from utils.checks.ranks.scenarios import RankObservation, RankScenario
from utils.distributed import record_collectives

from .gradients import judge_steps, judge_training
from .optimizer_states import TOLERANCE, TRAINED, weights_of
from .parameter_shards import play_training, sharded_by, whole
from .tiny_models import TinyTraining
from .waits import record_gathers

LAYERS = 6
_STUCK = "every rank starts the same gathers in the same order"
_NOT_AHEAD = classic("the next block's gather starts before this block computes, in both passes", 1)
_AT_ONCE = classic("start() returns while the gather is under way; only the block that needs the weights waits", 2)
_TOO_EARLY = classic("wait for a block's gather before it computes", 3)
_EMPTY = classic("a weight is used while its memory is freed: gather before a block computes, in both passes", 3)
_CRASH = classic(
    "weights are used while they have no memory, or their memory is freed while a gather still writes there: wait for "
    "a block's gather before it computes",
    3,
)
_TOO_FAR = classic("one block ahead: the one that computes, and the one after it", 4)
_DIRECTION = classic(
    "the next block is k + 1 in the forward pass and k - 1 in the backward pass, and after the last there is none", 5
)
_RECOMPUTED = classic(
    "in the backward pass a checkpointed block first computes a second time: its weights stay for its own backward, "
    "and the next block is k - 1 then too",
    6,
)
_AGAIN = classic("what has memory is there, or on its way, and is not gathered once more", 7)
_KEPT = classic("a block's weights are freed after it has computed, in both passes", 8)


@dataclass
class Log:
    """What happened on a rank in a step, in order.

    Attributes:
        events: (what, block): "start" and "arrive" of a gather, "forward" and "backward" of a block's computation, and
            ("turn", -1) between the passes.
        held: for each event the blocks whose weights have memory.
    """

    events: list[tuple[str, int]] = field(default_factory=list)
    held: list[tuple[int, ...]] = field(default_factory=list)


@contextmanager
def _logged(blocks: Sequence[nn.Module], ranks: int) -> Iterator[tuple[Log, Callable[[], None]]]:
    """Note what happens to these blocks, no two of which have as many elements; and what notes the end of a pass."""
    log = Log()
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    of_size = {-(-size // ranks) * ranks: k for k, size in enumerate(sizes)}

    def note(what: str, k: int | None) -> None:
        if k is not None:
            log.events.append((what, k))
            has_memory = [block.up.weight.untyped_storage().nbytes() > 0 for block in blocks]
            log.held.append(tuple(j for j, held in enumerate(has_memory) if held))

    for k, block in enumerate(blocks):  # within the block, so after whatever its own hooks do
        block.up.register_forward_pre_hook(lambda *_, k=k: note("forward", k))
        block.down.register_full_backward_pre_hook(lambda *_, k=k: note("backward", k))
    with record_gathers(lambda what, elements: note(what, of_size.get(elements))):
        yield log, lambda: note("turn", -1)


def _play_step(answer: Mapping[str, Callable], training: TinyTraining, **group: ProcessGroup) -> dict[str, Any]:
    """One step of SGD."""
    rank, ranks = dist.get_rank(group.get("group")), dist.get_world_size(group.get("group"))
    tiny = training.model(rank)
    sharded = sharded_by(answer, tiny, **group)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    with record_collectives() as ledger, _logged(tiny.blocks, ranks) as (log, turn):
        loss = sharded(*training.rows(0, rank))
        forward = ledger.elements("all_gather")
        turn()
        loss.backward()
        turn()
    optimizer.step()
    sent = {
        "forward": forward,
        "gathered": ledger.elements("all_gather"),
        "scattered": ledger.elements("reduce_scatter"),
    }
    return {"weights": whole(sharded), "loss": float(loss.detach()), "log": log, **sent}


def _passes(log: Log) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The events of the forward pass, and those of the backward pass."""
    turn = log.events.index(("turn", -1))
    return log.events[:turn], log.events[turn + 1 : -1]


def _unready(log: Log) -> Problem | None:
    """A block that computes before its weights have arrived."""
    state: dict[int, str] = {}
    for what, k in log.events:
        if what in ("start", "arrive"):
            state[k] = what
        elif what in ("forward", "backward") and state.get(k) == "start":
            return Problem(f"block {k} computes ({what}) before its gather has been waited for", _TOO_EARLY)
    return None


def _out_of_turn(log: Log, checkpointed: bool) -> Problem | None:
    """The first that goes wrong of two: a block that is gathered although the pass has done with it, or memory of
    others than the block that computes and the next one."""
    name, done, held_before = "forward", set(), ()
    for (what, k), held in zip(log.events, log.held, strict=True):
        if what == "turn":
            if held:
                when = "between the passes" if name == "forward" else "after the backward pass"
                return Problem(f"the weights of {len(held)} blocks have memory {when}: {_listed(held)}", _KEPT)
            name, done = "backward", set()
        elif what == "start" and k in done:
            cause = _RECOMPUTED if checkpointed and name == "backward" else _DIRECTION
            if k in held_before:
                return Problem(f"block {k} is gathered again in the {name} pass, while it has its weights", _AGAIN)
            return Problem(f"block {k} is gathered again in the {name} pass, after it has computed ({name})", cause)
        elif what in ("forward", "backward"):
            if len(held) > 2:
                cause = _KEPT if done & set(held) else _TOO_FAR
                return Problem(
                    f"{len(held)} blocks have memory while block {k} computes ({name}): {_listed(held)}", cause
                )
            if what == name:
                done.add(k)
        held_before = held
    return None


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks))


def _gathered_twice(log: Log, checkpointed: bool) -> Problem | None:
    """A block that is gathered more than once in a pass, or not at all."""
    if not any(event[0] == "start" for events in _passes(log) for event in events):
        return Problem("no block is gathered", "an all-gather of the block's weights is to start, and to stay pending")
    for name, events in zip(("forward", "backward"), _passes(log), strict=True):
        for k in range(LAYERS):
            starts = [place for place, event in enumerate(events) if event == ("start", k)]
            if len(starts) > 1:
                again = checkpointed and name == "backward" and ("forward", k) in events[: starts[-1]]
                cause = _RECOMPUTED if again else _AGAIN
                return Problem(f"block {k} is gathered {len(starts)} times in the {name} pass", cause)
            if not starts:
                return Problem(f"block {k} is not gathered in the {name} pass: its weights were kept", _KEPT)
    return None


def _not_ahead(log: Log) -> Problem | None:
    """A gather that starts too late, or that is waited for too early, to run while the block before computes."""
    forward, backward = _passes(log)
    steps = [("forward", forward, k, k - 1) for k in range(1, LAYERS)]
    steps += [("backward", backward, k, k + 1) for k in reversed(range(LAYERS - 1))]
    for name, events, k, before in steps:
        computes = [place for place, event in enumerate(events) if event in (("forward", before), ("backward", before))]
        order = f"block {before} computes first, then block {k}"
        if events.index(("start", k)) > computes[0]:
            return Problem(
                f"{name} pass: block {k}'s gather starts after block {before} has computed", _NOT_AHEAD, (order,)
            )
        if events.index(("arrive", k)) < computes[0]:
            return Problem(f"{name} pass: block {k} is waited for before block {before} computes", _AT_ONCE, (order,))
    return None


def _judge_step(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    checkpointed, psi, ranks = training.checkpointed, training.psi, len(observations)
    reference = training.reference(ranks)
    for rank, observed in enumerate(observations):
        seen, log = observed.value, observed.value["log"]
        if problem := _unready(log) or _out_of_turn(log, checkpointed):
            return replace(problem, headline=f"rank {rank}: {problem.headline}")
        if abs(seen["loss"] - reference.losses[rank]) > 1e-4 * abs(reference.losses[rank]):
            return Problem(
                f"rank {rank}'s first loss is {seen['loss']:.6g}, one process has {reference.losses[rank]:.6g}"
            )
        if problem := _gathered_twice(log, checkpointed):
            return replace(problem, headline=f"rank {rank}: {problem.headline}")
    if problem := judge_steps(weights_of(observations), reference, {}):
        return problem
    padding = ranks * (LAYERS + 1)
    expected = {"forward": psi, "gathered": 2 * psi, "scattered": psi}
    for what, elements in expected.items():
        sent = observations[0].value[what]
        if not elements <= sent <= elements + 2 * padding:
            kind = "reduce-scattered" if what == "scattered" else "all-gathered"
            when = " in the forward pass" if what == "forward" else ""
            cause = _AGAIN if what != "scattered" and sent > elements else ""
            return Problem(f"{sent:,} elements are {kind}{when}, expected {elements:,} and padding", cause)
    for rank, observed in enumerate(observations):
        if problem := _not_ahead(observed.value["log"]):
            return replace(problem, headline=f"rank {rank}, {problem.headline}")
    return None


def _judge_training(observations: Sequence[RankObservation], training: TinyTraining, **steps: Any) -> Problem | None:
    return judge_training(observations, training, **steps)


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    usual = TinyTraining.drawn(seed, draw)
    training = replace(usual, layers=LAYERS, growth=1)
    checkpointed = replace(training, checkpointed=True)

    def scenario(name: str, training: TinyTraining, *how: Any, empty: str = _EMPTY, **arguments: Any) -> RankScenario:
        play, judge, *values = how
        raised = {"SIGSEGV": _CRASH} | dict.fromkeys(("storage of size 0", "setStorage"), empty)
        arguments = {"training": training, **arguments}
        return RankScenario(name, play, judge, arguments, stuck=_STUCK, raised=raised, values=tuple(values))

    step = (_play_step, _judge_step, "loss", "weights")
    trained = (play_training, _judge_training, "losses", "weights")
    plain = scenario("six blocks", training, *step)
    return [
        plain,
        scenario("six checkpointed blocks", checkpointed, *step, empty=_RECOMPUTED),
        scenario("two backward passes a step", checkpointed, *trained, steps=2, users=(0, 1, 2), accumulation=2),
        in_group(plain, 9),
    ]


PREFETCH = Exercise(
    "4.10",
    "ZeRO-3 with prefetch",
    points=10,
    builds_on=("4.6",),
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=TOLERANCE,
    tolerances={"PrefetchZero3, two backward passes": TRAINED},
)
CHECK = DistributedCheck(
    PREFETCH,
    _scenarios,
    "each gather starts before the block before computes and is waited for after; 2 Psi, as before",
)


@PREFETCH.checked_by
def check_prefetch(PrefetchZero3: Callable, seed: int | None = None) -> None:
    """Exercise 4.10: ZeRO-3 that gathers one block ahead.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(PrefetchZero3, seed=seed)
