"""The check of exercise 4.5, ZeRO-2: gradients in shards, reduced as they appear and freed at once."""

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
from .optimizer_states import ADAMW, RAISED, judge_kinds, judge_state, weights_of
from .scenario_runs import WORLD_SIZE

_NUMBERS = {"sum": 2, "divided twice": 2, "own": 3, "own divided": 3, "gather": 4, "cover": 4, "zeros": 5, "made up": 8}
_STUCK = classic("a bucket waits for a parameter without gradient, or ranks start their buckets in another order", 6)
#: Of the wide model whose memory is looked at.
_WIDE = {"width": 16, "inner": 33, "layers": 4}
#: A bucket of its holds one of its matrices, of 2,112 bytes.
_SMALL_BUCKET = 1024
_REBOUND = classic(
    "self.gradients[k] is another tensor now than the optimizer's: write into it, with copy_, add_ or +=", 8
)


def _rebound(zero: object) -> bool:
    """Whether the optimizer holds other gradients than ``zero.gradients``, where an answer has both."""
    shards = getattr(getattr(zero, "sharded", None), "shards", ())
    pairs = zip(getattr(zero, "gradients", ()), shards)
    return any(mine is not getattr(shard, "gradient", mine) for mine, shard in pairs)


def _play_step(
    answer: Mapping[str, Callable],
    seed: int,
    users: tuple[int, ...] = (0, 1, 2),
    group: ProcessGroup | None = None,
) -> dict:
    """One step of SGD in buckets of 400 bytes."""
    rank, early, full = dist.get_rank(group), [], []
    tiny, among = tiny_models.TinyModel(seed + rank), {} if group is None else {"group": group}
    zero = answer["Zero2"](tiny, torch.optim.SGD, bucket_bytes=400, lr=1.0, **among)
    with record_collectives() as ledger:

        def watch(pass_: str) -> None:
            early.append(ledger.count("reduce_scatter"))
            full.append(_full_gradients(tiny))

        tiny.watch = watch
        zero(*tiny_models.rows(seed, 0, rank), sometimes=rank in users).backward()
        after = ledger.elements("reduce_scatter")
        left = _full_gradients(tiny)
        zero.step()
        tiny.watch = None
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    return {
        "weights": tiny_models.weights(tiny), "kinds": kinds, "early": early[-1], "full": full[-1], "left": left,
        "in_backward": after, "rebound": _rebound(zero),
    }  # fmt: skip


def _full_gradients(tiny: tiny_models.TinyModel) -> int:
    return sum(p.grad.numel() for p in tiny_models.trainable(tiny).values() if p.grad is not None)


def _play_memory(answer: Mapping[str, Callable], seed: int) -> dict:
    """What memory there is late in a backward pass, and what it leaves behind."""
    tiny = tiny_models.TinyModel(seed, **_WIDE)
    zero = answer["Zero2"](tiny, torch.optim.SGD, bucket_bytes=_SMALL_BUCKET, lr=1.0)
    rows = tiny_models.rows(seed, 0, dist.get_rank(), _WIDE["width"])
    memory, late = tiny_models.Memory(), [0]
    tiny.watch = lambda pass_: late.append(memory.grown()) if pass_ == "backward" else None
    zero(*rows, sometimes=True).backward()  # so that all buckets but the last get full on the way
    tiny.watch = None
    grown = memory.grown()
    memory.close()
    return {"grown": grown, "late": late[-1]}


def _play_training(
    answer: Mapping[str, Callable], seed: int, steps: int, users: tuple[int, ...], accumulation: int
) -> dict:
    tiny, rank, recorded = (tiny_models.TinyModel(seed), dist.get_rank(), tiny_models.Recorded(torch.optim.AdamW))
    zero = answer["Zero2"](tiny, recorded.optimizer_class, bucket_bytes=400, **ADAMW)
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            loss = zero(*tiny_models.rows(seed, step * accumulation + micro, rank), sometimes=rank in users)
            loss.backward()
            losses.append(float(loss.detach()))
        zero.step()
    return {
        "losses": losses, "weights": tiny_models.weights(tiny), "state": recorded.state_elements(),
        "stepped": recorded.stepped_elements(), "rebound": _rebound(zero),
    }  # fmt: skip


def _judge_step(seed: int, users: tuple[int, ...] = (0, 1, 2), ranks: int = WORLD_SIZE) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny, seen = tiny_models.TinyModel(seed), observations[0].value
        reference, psi = (tiny_models.reference(tiny, seed, ranks, sometimes=users), tiny_models.elements(tiny))
        if seen["kinds"].get("all_reduce", 0) > psi // 2:
            return judge_kinds(seen["kinds"], psi, {"all-reduce": 1, "volume": 1})
        if problem := judge_steps(weights_of(observations), reference, _NUMBERS):
            return _or_rebound(problem, observations)
        if problem := judge_kinds(seen["kinds"], psi, {"all-reduce": 1, "volume": 1}):
            return problem
        if seen["in_backward"] < psi or (not seen["early"] and users == (0, 1, 2)):
            when = "after it" if seen["in_backward"] < psi else "when the first layer is reached"
            return Problem(
                f"gradients are still unreduced in the backward pass: a reduce-scatter starts only {when}",
                classic("a bucket goes out as soon as it is full: kept until the end, all of Psi exists at once", 7),
            )
        if seen["left"] or (seen["full"] > psi // 2 and users == (0, 1, 2)):
            many = seen["left"] or seen["full"]
            when = "after" if seen["left"] else "towards the end of"
            return Problem(
                f"{many:,} of {psi:,} elements of full gradients exist {when} the backward pass",
                classic("a full gradient that is in its bucket is freed at once: parameter.grad = None", 7),
            )
        return None

    return judge


def _or_rebound(problem: Problem | None, observations: list[RankObservation]) -> Problem | None:
    """The same problem; its cause is the tensor that the optimizer does not see, if there is one."""
    if problem is None or not any(observed.value["rebound"] for observed in observations):
        return problem
    return Problem(problem.headline, _REBOUND, problem.details)


def _judge_memory(seed: int) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        psi = tiny_models.elements(tiny_models.TinyModel(seed, **_WIDE))
        for rank, observed in enumerate(observations):
            if observed.value["grown"] > 4 * psi * 0.6:
                return Problem(
                    f"rank {rank} holds {observed.value['grown']:,} bytes more after a backward pass; all gradients "
                    f"are {4 * psi:,}, a shard of them {4 * -(-psi // WORLD_SIZE):,}",
                    classic("a flat bucket that has been reduced is still referred to: keep the shard alone", 7),
                )
            if observed.value["late"] > 4 * psi * 0.6:
                cause = "buckets wait for one another: before a new flat tensor is made, take the oldest until fewer "
                return Problem(
                    f"rank {rank} holds {observed.value['late']:,} bytes more late in the backward pass; all gradients "
                    f"are {4 * psi:,}, two buckets and a shard of all about {4 * psi // WORLD_SIZE + 2 * 2112:,}",
                    classic(cause + "than IN_FLIGHT are under way", 7),
                )
        return None

    return judge


def _judge_training(seed: int, steps: int, users: tuple[int, ...], accumulation: int) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        right = tiny_models.trained(seed, WORLD_SIZE, steps, torch.optim.AdamW, ADAMW, users, accumulation=accumulation)
        if problem := judge_state(observations, 9):
            return problem
        losses = [
            sum(step) / len(observations) for step in zip(*(s.value["losses"] for s in observations), strict=True)
        ]
        cause = (
            "a second backward pass before the step adds to the shard of the first"
            if accumulation > 1
            else "the shard still holds the gradient of the step before: a new step starts from nothing"
        )
        problem = judge_training(losses, weights_of(observations), right, classic(cause, 8))
        return _or_rebound(problem, observations)

    return judge


def _parts(seed: int) -> list[Part]:
    def part(title: str, play: Callable, judge: Judge, **arguments: object) -> Part:
        return Part(RankScenario(title, play, {"seed": seed, **arguments}), judge, _STUCK, RAISED)

    return [
        part("one step of SGD", _play_step, _judge_step(seed)),
        part("a parameter that rank 1 alone uses", _play_step, _judge_step(seed, (1,)), users=(1,)),
        part("memory after a backward pass", _play_memory, _judge_memory(seed)),
        part("four steps of AdamW", _play_training, _judge_training(seed, 4, (0, 2), 1), steps=4, users=(0, 2),
             accumulation=1),
        part("two backward passes a step", _play_training, _judge_training(seed, 2, (0, 1, 2), 2), steps=2,
             users=(0, 1, 2), accumulation=2),
        groups.group_part(_play_step, _judge_step(seed, (1,), ranks=2), 10, _STUCK, seed=seed, users=(1,)),
    ]  # fmt: skip


ZERO2 = Exercise(
    "4.5",
    "ZeRO-2",
    points=12,
    builds_on=("4.3", "4.4"),
    observe=on_ranks(hidden_zero.ZERO2),
    tolerance=hidden_zero.TOLERANCE,
    tolerances=hidden_zero.tolerances("Zero2"),
)
CHECK = DistributedCheck(
    ZERO2,
    ("Zero2",),
    _parts,
    "as many elements travel as in ZeRO-1; what is gone is the memory of full gradients",
)


@ZERO2.checked_by
def check_zero2(Zero2: Callable, seed: int | None = None) -> None:
    """Exercise 4.5: gradients reduced to shards as they appear.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Zero2, seed=seed)
