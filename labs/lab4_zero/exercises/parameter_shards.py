"""The check of exercise 4.6, ZeRO-3: parameters in shards, gathered block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Draw
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck, in_group
from utils.checks.ranks.scenarios import RankObservation, RankScenario
from utils.distributed import calls, record_collectives

from . import tiny_models
from .gradients import judge_steps, judge_training
from .optimizer_states import TOLERANCE, TRAINED, judge_state, judge_waits, weights_of
from .tiny_models import TinyTraining
from .waits import record_waits

_NUMBERS = {"sum": 2, "divided twice": 2, "own": 3, "own divided": 3, "cover": 5, "zeros": 5, "made up": 5, "gather": 5}
_STUCK = "every rank gathers and reduces the same blocks in the same order"
_EMPTY = classic(
    "a weight is used while its memory is freed: gather before a block computes, in both passes, and wait", 4
)
_PADDED = classic("N does not divide the elements: every shard has the same size, the last one is padded with zeros", 5)
_STALE = classic(
    "the first step is right, a later one is not: look at what it leaves to the next. Weights that were gathered "
    "before the step are stale, so gather anew in each pass",
    8,
)
_NO_ROOM = classic("full has no memory when gradients are reduced: the mean goes into a tensor of its own", 4)
_NO_MEMORY = classic("full has no memory when it is to be filled: gather gives it memory first", 4)
_FREED = ("SIGSEGV", "storage of size 0", "setStorage")
_RAISED = {(words, "in reduce"): _NO_ROOM for words in _FREED} | {
    (words, "in gather"): _NO_MEMORY for words in _FREED[1:]
}
_RAISED |= dict.fromkeys(_FREED, _EMPTY)


def sharded_by(answer: Mapping[str, Callable], tiny: tiny_models.TinyModel, **group: ProcessGroup) -> Callable:
    return next(iter(answer.values()))(tiny, tiny_models.Block, **group)


def whole(sharded: Callable) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in sharded.state_dict().items()}
    state.pop("last.weight", None)  # tied to first.weight
    state.pop("scale", None)
    return state


def _play_step(
    answer: Mapping[str, Callable], training: TinyTraining, users: tuple[int, ...], **group: ProcessGroup
) -> dict:
    """One step of SGD; the ledger counts from the first forward pass."""
    rank = dist.get_rank(group.get("group"))
    tiny, left = training.model(rank), [0]

    def heard(call: calls.Call) -> None:
        if call.kind == "reduce_scatter":  # of a block that has let go of its gradients, while other blocks have none
            left.append(sum(p.grad.numel() for p in tiny.blocks.parameters() if p.grad is not None))

    sharded = sharded_by(answer, tiny, **group)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    kept = sum(p.numel() for p in sharded.parameters() if p.requires_grad)
    before = [p.detach().clone() for p in sharded.parameters()]
    with record_collectives() as ledger, record_waits() as waits, calls.listen(heard):
        loss = sharded(*training.rows(0, rank), sometimes=rank in users)
        forward = ledger.elements("all_gather")
        loss.backward()
        optimizer.step()
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    moved = any(not torch.equal(p, old) for p, old in zip(sharded.parameters(), before, strict=True))
    return {
        "weights": whole(sharded),
        "kinds": kinds,
        "kept": kept,
        "loss": float(loss.detach()),
        "forward": forward,
        "moved": moved,
        "unwaited": waits.missing(ledger.count()),
        "count": ledger.count(),
        "left": max(left),
    }


def _play_memory(answer: Mapping[str, Callable], training: TinyTraining) -> dict:
    """Bytes of the sharded model, and how many more there are in the two passes and after each."""
    tiny, rows = training.model(), training.rows(0, dist.get_rank())
    memory = tiny_models.Memory()
    sharded = sharded_by(answer, tiny)
    shards = memory.grown()
    grown = {"shards": 4 * training.psi + shards}
    tiny.watch = lambda pass_: grown.update({pass_: memory.grown() - shards})
    loss = sharded(*rows)
    grown["between"] = memory.grown() - shards
    loss.backward()
    tiny.watch = None
    grown["after"] = memory.grown() - shards
    memory.close()
    return grown


def play_training(answer: Mapping[str, Callable], training: TinyTraining, **steps: Any) -> dict:
    recorded, sharded = tiny_models.Recorded(torch.optim.AdamW), sharded_by(answer, training.model())
    trained = [p for p in sharded.parameters() if p.requires_grad]
    optimizer = recorded.optimizer_class(trained, **tiny_models.ADAMW)
    losses = tiny_models.train(training, sharded, optimizer.step, optimizer.zero_grad, **steps)
    return {"losses": losses, "weights": whole(sharded), "state": recorded.state_elements()}


def _judge_step(
    observations: Sequence[RankObservation], training: TinyTraining, users: tuple[int, ...]
) -> Problem | None:
    problem = judge_waits(observations, _judge_values(observations, training, users))
    left = observations[0].value["left"]
    if problem is None and left:
        cause = classic("once they are in the flat tensor, the parameters' own gradients are released", 1)
        return Problem(f"{left} elements of a block's full gradients are still there when they are reduced", cause)
    return problem


def _judge_values(
    observations: Sequence[RankObservation], training: TinyTraining, users: tuple[int, ...]
) -> Problem | None:
    reference, psi = training.reference(len(observations), users=users), training.psi
    for rank, observed in enumerate(observations):
        if abs(observed.value["loss"] - reference.losses[rank]) > 1e-4 * abs(reference.losses[rank]):
            cause = (
                "the blocks do not compute with the module's weights: shards out of order, of another rank, unfilled, "
                "or not gathered yet"
            )
            return Problem(
                f"rank {rank}'s first loss is {observed.value['loss']:.6g}, "
                f"one process has {reference.losses[rank]:.6g}",
                classic(cause, 5),
            )
    share = -(-psi // len(observations))
    for rank, observed in enumerate(observations):
        if observed.value["kept"] > share + 30:
            return Problem(
                f"rank {rank}'s parameters() have {observed.value['kept']:,} elements, its share is about {share:,}",
                classic("a rank keeps its shard of every unit, and nothing else between the steps", 1)
                if observed.value["kept"] == psi
                else classic(
                    "the pieces of a shard overlap, or reach beyond their parameters, or a unit is kept whole", 5
                ),
            )
        same = all(torch.equal(observed.value["weights"][name], reference.start[name]) for name in reference.mean)
        if observed.value["moved"] and same:
            return Problem(f"rank {rank}'s shards were stepped, the gathered weights are the old ones", _STALE)
    if problem := judge_steps(weights_of(observations), reference, _NUMBERS):
        return problem
    padding = len(observations) * (training.layers + 1)  # at most, of all units
    return _judge_kinds(observations[0].value["kinds"], psi, observations[0].value["forward"], padding)


def _judge_kinds(kinds: Mapping[str, int], psi: int, forward: int, padding: int) -> Problem | None:
    reduced, scattered, gathered = (kinds.get(kind, 0) for kind in ("all_reduce", "reduce_scatter", "all_gather"))
    if reduced > psi // 2:
        cause = classic("each rank needs the mean of its shard alone: a reduce-scatter sends half as much", 6)
        return Problem(f"{reduced:,} elements are all-reduced in a step, the model has {psi:,}", cause)
    if not psi <= scattered <= psi + padding:
        cause = classic("each unit's gradient is reduce-scattered once a backward pass", 6)
        return Problem(f"{scattered:,} elements are reduce-scattered in a step, expected {psi:,} and padding", cause)
    if forward < psi - 60 or gathered > 2 * (psi + padding):
        cause = classic("weights are gathered once in the forward pass and once in the backward pass: 2 Psi", 7)
        return Problem(f"{gathered:,} elements are all-gathered in a step, expected about {2 * psi:,}", cause)
    if gathered < 1.5 * psi:
        cause = classic("weights are gathered for the forward pass alone: they were kept for the backward pass", 1)
        return Problem(f"{gathered:,} elements are all-gathered in a step, expected about {2 * psi:,}", cause)
    return None


def _judge_memory(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    tiny = training.model()
    block, psi = 4 * sum(p.numel() for p in tiny.blocks[0].parameters()), 4 * training.psi
    share = psi // len(observations)
    slack = psi - block * len(tiny.blocks) + block  # the module's own unit, and activations
    limits = {"forward": (1, "while the last block computes"), "between": (1, "between the passes")}
    limits |= {"backward": (3, "late in the backward pass"), "after": (3, "after the backward pass")}
    for rank, observed in enumerate(observations):
        if observed.value["shards"] > share + block:
            cause = "a rank keeps a shard in memory of its own; the rest must be freed, a view keeps all of it"
            return Problem(
                f"rank {rank} has {observed.value['shards']:,} bytes of weights between the passes, its share is "
                f"{share:,}",
                classic(cause, 1),
            )
    for name, (blocks, when) in limits.items():
        for rank, observed in enumerate(observations):
            grown = observed.value[name]
            if grown > blocks * block + slack:
                return Problem(
                    f"rank {rank} holds {grown:,} bytes beyond its shards {when}: {grown / block:.1f} blocks",
                    classic("a block's weights are freed after it has computed, in both passes", 1),
                )
    return None


def judge_sharded_training(
    observations: Sequence[RankObservation], training: TinyTraining, accumulation: int = 1, **steps: Any
) -> Problem | None:
    cause = _STALE
    if accumulation > 1:
        cause = classic(
            "one backward pass per step trains well, two do not: the second must add to the gradient of the first", 9
        )
    return judge_state(observations, training, 1) or judge_training(
        observations, training, cause, accumulation=accumulation, **steps
    )


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    training = TinyTraining.drawn(seed, draw)

    def scenario(name: str, play: Callable, judge: Callable, *values: str, **arguments: Any) -> RankScenario:
        arguments = {"training": training, **arguments}
        return RankScenario(name, play, judge, arguments, stuck=_STUCK, raised=_RAISED, sizes=_PADDED, values=values)

    step, trained = (
        (_play_step, _judge_step, "loss", "weights"),
        (play_training, judge_sharded_training, "losses", "weights"),
    )
    alone = scenario("a parameter that rank 1 alone uses", *step, users=(1,))
    return [
        scenario("one step of SGD", *step, users=(0, 1, 2)),
        alone,
        scenario("five steps of AdamW", *trained, steps=5, users=(0, 2)),
        scenario("two backward passes a step", *trained, steps=2, users=(0, 1, 2), accumulation=2),
        scenario("memory", _play_memory, _judge_memory, training=TinyTraining(seed, 16, 33, 6)),
        in_group(alone, 10),
    ]


ZERO3 = Exercise(
    "4.6",
    "ZeRO-3",
    points=12,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=TOLERANCE,
    tolerances={"Zero3, five steps": TRAINED, "Zero3, two backward passes": TRAINED},
)
CHECK = DistributedCheck(
    ZERO3,
    _scenarios,
    "the same training, with a third of everything on each rank; the price is one more Psi of traffic",
)


@ZERO3.checked_by
def check_zero3(Zero3: Callable, seed: int | None = None) -> None:
    """Exercise 4.6: a module of which each rank keeps a shard.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Zero3, seed=seed)
