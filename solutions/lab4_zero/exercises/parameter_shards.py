"""The check of exercise 4.6, ZeRO-3: parameters in shards, gathered block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.problem import Problem
from utils.distributed import record_collectives

from . import groups, hidden_zero, tiny_models
from .distributed_check import DistributedCheck, Judge, Part
from .gradients import judge_steps, judge_training
from .hidden_ranks import on_ranks
from .observations import RankObservation, RankScenario
from .optimizer_states import ADAMW, judge_state, weights_of
from .scenario_runs import WORLD_SIZE

_NUMBERS = {"sum": 2, "divided twice": 2, "own": 3, "own divided": 3, "cover": 5, "zeros": 5, "made up": 5, "gather": 5}
_STUCK = "every rank gathers and reduces the same blocks in the same order"
_EMPTY = classic(
    "a weight is used while its memory is freed: gather before a block computes, in both passes, and wait", 4
)
_PADDED = classic("N does not divide the elements: every shard has the same size, the last one is padded with zeros", 5)
_STALE = classic("weights that were gathered before the step are stale: gather anew in each pass", 8)
_RAISED = {
    "SIGSEGV": _EMPTY,
    "out of bounds": _EMPTY,
    "storage": _EMPTY,
    "setStorage": _EMPTY,
    "shape": _PADDED,
    "size": _PADDED,
}
_WIDE = {"width": 16, "inner": 33, "layers": 6}


def _sharded(answer: Mapping[str, Callable], tiny: tiny_models.TinyModel, **among: ProcessGroup) -> Callable:
    return answer["Zero3"](tiny, tiny_models.Block, **among)


def _whole(sharded: Callable) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in sharded.state_dict().items()}
    state.pop("last.weight", None)  # tied to first.weight
    state.pop("scale", None)
    return state


def _play_step(
    answer: Mapping[str, Callable], seed: int, users: tuple[int, ...] = (0, 1, 2), group: ProcessGroup | None = None
) -> dict:
    """One step of SGD; the ledger counts from the first forward pass."""
    rank, among = dist.get_rank(group), {} if group is None else {"group": group}
    sharded = _sharded(answer, tiny_models.TinyModel(seed + rank), **among)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    kept = sum(p.numel() for p in sharded.parameters() if p.requires_grad)
    before = [p.detach().clone() for p in sharded.parameters()]
    with record_collectives() as ledger:
        loss = sharded(*tiny_models.rows(seed, 0, rank), sometimes=rank in users)
        forward = ledger.elements("all_gather")
        loss.backward()
        optimizer.step()
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    moved = any(not torch.equal(p, old) for p, old in zip(sharded.parameters(), before, strict=True))
    return {
        "weights": _whole(sharded),
        "kinds": kinds,
        "kept": kept,
        "loss": float(loss.detach()),
        "forward": forward,
        "moved": moved,
    }


def _play_memory(answer: Mapping[str, Callable], seed: int) -> dict:
    """Bytes of the sharded model, and how many more there are in the two passes and after each."""
    tiny = tiny_models.TinyModel(seed, **_WIDE)
    rows = tiny_models.rows(seed, 0, dist.get_rank(), _WIDE["width"])
    memory = tiny_models.Memory()
    sharded = _sharded(answer, tiny)
    shards = memory.grown()
    grown = {"shards": 4 * tiny_models.elements(tiny) + shards}
    tiny.watch = lambda pass_: grown.update({pass_: memory.grown() - shards})
    loss = sharded(*rows)
    grown["between"] = memory.grown() - shards
    loss.backward()
    tiny.watch = None
    grown["after"] = memory.grown() - shards
    memory.close()
    return grown


def _play_training(
    answer: Mapping[str, Callable], seed: int, steps: int, users: tuple[int, ...], accumulation: int = 1
) -> dict:
    """Steps of AdamW, each after so many backward passes."""
    rank, recorded, losses = dist.get_rank(), tiny_models.Recorded(torch.optim.AdamW), []
    sharded = _sharded(answer, tiny_models.TinyModel(seed))
    optimizer = recorded.optimizer_class([p for p in sharded.parameters() if p.requires_grad], **ADAMW)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            loss = sharded(*tiny_models.rows(seed, step * accumulation + micro, rank), sometimes=rank in users)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return {
        "losses": losses, "weights": _whole(sharded), "state": recorded.state_elements(),
        "stepped": recorded.stepped_elements(),
    }  # fmt: skip


def _judge_step(seed: int, users: tuple[int, ...] = (0, 1, 2), ranks: int = WORLD_SIZE) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny = tiny_models.TinyModel(seed)
        reference, psi = (tiny_models.reference(tiny, seed, ranks, sometimes=users), tiny_models.elements(tiny))
        for rank, observed in enumerate(observations):
            if abs(observed.value["loss"] - reference.losses[rank]) > 1e-4 * abs(reference.losses[rank]):
                cause = (
                    "the gathered weights are not those of the module: shards out of order, of another rank, unfilled"
                )
                return Problem(
                    f"rank {rank}'s first loss is {observed.value['loss']:.6g}, "
                    f"one process has {reference.losses[rank]:.6g}",
                    classic(cause, 5),
                )
        share = -(-psi // ranks)
        for rank, observed in enumerate(observations):
            if observed.value["kept"] > share + 30:
                return Problem(
                    f"rank {rank}'s parameters() have {observed.value['kept']:,} elements, its share is about "
                    f"{share:,}",
                    classic("a rank keeps its shard of every unit, and nothing else between the steps", 1),
                )
            same = all(torch.equal(observed.value["weights"][name], reference.start[name]) for name in reference.mean)
            if observed.value["moved"] and same:
                return Problem(f"rank {rank}'s shards were stepped, the gathered weights are the old ones", _STALE)
        if problem := judge_steps(weights_of(observations), reference, _NUMBERS):
            return problem
        return _judge_kinds(observations[0].value["kinds"], psi, observations[0].value["forward"])

    return judge


def _judge_kinds(kinds: Mapping[str, int], psi: int, forward: int) -> Problem | None:
    reduced, scattered, gathered = (kinds.get(kind, 0) for kind in ("all_reduce", "reduce_scatter", "all_gather"))
    if reduced > psi // 2:
        cause = classic("each rank needs the mean of its shard alone: a reduce-scatter sends half as much", 6)
        return Problem(f"{reduced:,} elements are all-reduced in a step, the model has {psi:,}", cause)
    if not psi <= scattered <= psi + 60:
        cause = classic("each unit's gradient is reduce-scattered once a backward pass", 6)
        return Problem(f"{scattered:,} elements are reduce-scattered in a step, expected {psi:,} and padding", cause)
    if forward < psi - 60 or gathered > 2 * psi + 100:
        cause = classic("weights are gathered once in the forward pass and once in the backward pass: 2 Psi", 7)
        return Problem(f"{gathered:,} elements are all-gathered in a step, expected about {2 * psi:,}", cause)
    if gathered < 1.5 * psi:
        cause = classic("weights are gathered for the forward pass alone: they were kept for the backward pass", 1)
        return Problem(f"{gathered:,} elements are all-gathered in a step, expected about {2 * psi:,}", cause)
    return None


def _judge_memory(seed: int) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny = tiny_models.TinyModel(seed, **_WIDE)
        block = 4 * sum(p.numel() for p in tiny.blocks[0].parameters())
        psi = 4 * tiny_models.elements(tiny)
        share = psi // WORLD_SIZE
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

    return judge


def _judge_training(seed: int, steps: int, users: tuple[int, ...], accumulation: int = 1) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        right = tiny_models.trained(seed, WORLD_SIZE, steps, torch.optim.AdamW, ADAMW, users, accumulation=accumulation)
        if problem := judge_state(observations, 1):
            return problem
        losses = [
            sum(step) / len(observations) for step in zip(*(s.value["losses"] for s in observations), strict=True)
        ]
        cause = (
            classic("a second backward pass before the step adds to the gradient of the first", 9)
            if accumulation > 1
            else _STALE
        )
        return judge_training(losses, weights_of(observations), right, cause)

    return judge


def _parts(seed: int) -> list[Part]:
    def part(title: str, play: Callable, judge: Judge, **arguments: object) -> Part:
        return Part(RankScenario(title, play, {"seed": seed, **arguments}), judge, _STUCK, _RAISED)

    return [
        part("one step of SGD", _play_step, _judge_step(seed)),
        part("a parameter that rank 1 alone uses", _play_step, _judge_step(seed, (1,)), users=(1,)),
        part("five steps of AdamW", _play_training, _judge_training(seed, 5, (0, 2)), steps=5, users=(0, 2)),
        part("two backward passes a step", _play_training, _judge_training(seed, 2, (0, 1, 2), 2), steps=2,
             users=(0, 1, 2), accumulation=2),
        part("memory", _play_memory, _judge_memory(seed)),
        groups.group_part(_play_step, _judge_step(seed, (1,), ranks=2), 10, _STUCK, seed=seed, users=(1,)),
    ]  # fmt: skip


ZERO3 = Exercise(
    "4.6",
    "ZeRO-3",
    points=16,
    observe=on_ranks(hidden_zero.ZERO3),
    tolerance=hidden_zero.TOLERANCE,
    tolerances=hidden_zero.tolerances("Zero3"),
)
CHECK = DistributedCheck(
    ZERO3,
    ("Zero3",),
    _parts,
    "the same training, with a third of everything on each rank; the price is one more Psi of traffic",
)


@ZERO3.checked_by
def check_zero3(Zero3: Callable, seed: int | None = None) -> None:
    """Exercise 4.6: a module of which each rank keeps a shard.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Zero3, seed=seed)
