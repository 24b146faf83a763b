"""The check of exercise 4.5, ZeRO-2: gradients in shards, reduced as they appear and freed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from .optimizer_states import FAULTS, TOLERANCE, TRAINED, judge_kinds, judge_state, judge_waits, weights_of
from .tiny_models import TinyTraining
from .waits import WaitLog, record_waits

#: As in zero2.py.
IN_FLIGHT = 1
_NUMBERS = {"sum": 2, "divided twice": 2, "own": 3, "own divided": 3, "gather": 4, "cover": 4, "zeros": 5, "made up": 8}
_NUMBERS |= {"added to itself": 9}
_STUCK = classic(
    "a rank waits for a collective that another has not started: look for a bucket that waits for a parameter without "
    "gradient, and for buckets in another order",
    6,
)
#: A bucket of the wide model holds one of its matrices, of 2,112 bytes.
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
    answer: Mapping[str, Callable], training: TinyTraining, users: tuple[int, ...], **group: ProcessGroup
) -> dict:
    """One step of SGD in buckets of 400 bytes."""
    rank, seen = dist.get_rank(group.get("group")), {}
    tiny = training.model(rank)
    zero = answer["Zero2"](tiny, torch.optim.SGD, bucket_bytes=400, lr=1.0, **group)
    with record_collectives() as ledger, record_waits() as waits:

        def watch(pass_: str) -> None:
            seen.update({"early": ledger.count("reduce_scatter"), "full": _full_gradients(tiny)})

        tiny.watch = watch
        loss = zero(*training.rows(0, rank), sometimes=rank in users)
        with _under_way(zero, waits) as most:
            loss.backward()
        seen |= {"in_backward": ledger.elements("reduce_scatter"), "left": _full_gradients(tiny), "under way": most}
        zero.step()
        tiny.watch = None
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    seen |= {"weights": tiny_models.weights(tiny), "kinds": kinds, "rebound": _rebound(zero)}
    return seen | {"unwaited": waits.missing(ledger.count()), "count": ledger.count()}


@contextmanager
def _under_way(zero: object, waits: WaitLog) -> Iterator[dict[str, int]]:
    """The most reduce-scatters under way when another one starts ("sent"), and when a new flat tensor is made ("made",
    where an answer has the lab's buckets)."""
    most, started, before = {"sent": 0, "made": 0}, 0, waits.count

    def look(what: str) -> None:
        if not waits.futures:
            most[what] = max(most[what], started - (waits.count - before))

    def heard(call: calls.Call) -> None:
        nonlocal started
        if call.kind == "reduce_scatter":
            look("sent")
            started += 1

    with ExitStack() as stack:
        stack.enter_context(calls.listen(heard))
        if buckets := getattr(zero, "buckets", ()):
            kind, make = type(buckets[0]), type(buckets[0]).new_flat
            kind.new_flat = lambda bucket: (look("made"), make(bucket))[1]
            stack.callback(setattr, kind, "new_flat", make)
        yield most


def _full_gradients(tiny: tiny_models.TinyModel) -> int:
    return sum(p.grad.numel() for p in tiny_models.trainable(tiny).values() if p.grad is not None)


def _play_memory(answer: Mapping[str, Callable], training: TinyTraining) -> dict:
    """What memory there is late in a backward pass, and what it leaves behind."""
    tiny = training.model()
    zero = answer["Zero2"](tiny, torch.optim.SGD, bucket_bytes=_SMALL_BUCKET, lr=1.0)
    rows = training.rows(0, dist.get_rank())
    memory, late = tiny_models.Memory(), [0]
    tiny.watch = lambda pass_: late.append(memory.grown()) if pass_ == "backward" else None
    zero(*rows, sometimes=True).backward()  # so that all buckets but the last get full on the way
    tiny.watch = None
    grown = memory.grown()
    memory.close()
    return {"grown": grown, "late": late[-1]}


def _play_training(answer: Mapping[str, Callable], training: TinyTraining, **steps: Any) -> dict:
    tiny, recorded = training.model(), tiny_models.Recorded(torch.optim.AdamW)
    zero = answer["Zero2"](tiny, recorded.optimizer_class, bucket_bytes=400, **tiny_models.ADAMW)
    losses = tiny_models.train(training, zero, zero.step, **steps)
    return {
        "losses": losses, "weights": tiny_models.weights(tiny), "state": recorded.state_elements(),
        "rebound": _rebound(zero),
    }  # fmt: skip


def _judge_step(
    observations: Sequence[RankObservation], training: TinyTraining, users: tuple[int, ...]
) -> Problem | None:
    seen, psi, all_use = observations[0].value, training.psi, len(users) == len(observations)
    numbers = {"all-reduce": 1, "volume": 1}
    if seen["kinds"].get("all_reduce", 0) > psi // 2:
        return judge_kinds(seen["kinds"], psi, numbers)
    problem = judge_steps(weights_of(observations), training.reference(len(observations), users=users), _NUMBERS)
    problem = _or_rebound(problem, observations) or judge_kinds(seen["kinds"], psi, numbers)
    if problem := judge_waits(observations, problem):
        return problem
    if seen["in_backward"] < psi or (not seen["early"] and all_use):
        when = "after it" if seen["in_backward"] < psi else "when the first layer is reached"
        return Problem(
            f"gradients are still unreduced in the backward pass: a reduce-scatter starts only {when}",
            classic("a bucket goes out as soon as it is full: kept until the end, all of Psi exists at once", 7),
        )
    if seen["left"] or (seen["full"] > psi // 2 and all_use):
        many = seen["left"] or seen["full"]
        when = "after" if seen["left"] else "towards the end of"
        return Problem(
            f"{many:,} of {psi:,} elements of full gradients exist {when} the backward pass",
            classic("a full gradient that is in its bucket is freed at once: parameter.grad = None", 7),
        )
    return _judge_under_way(seen["under way"])


def _judge_under_way(most: Mapping[str, int]) -> Problem | None:
    """A bucket is taken before the next one gets memory: one is under way while one fills."""
    for what, when in {"sent": "another one is sent", "made": "a new flat tensor is made"}.items():
        if most[what] > IN_FLIGHT - 1:
            cause = "before a new flat tensor is made, take the oldest until fewer than IN_FLIGHT are under way"
            return Problem(f"{most[what]} buckets are under way when {when}, {IN_FLIGHT - 1} may be", classic(cause, 7))
    return None


def _or_rebound(problem: Problem | None, observations: Sequence[RankObservation]) -> Problem | None:
    """The same problem; its cause is the tensor that the optimizer does not see, if there is one."""
    if problem is None or not any(observed.value["rebound"] for observed in observations):
        return problem
    return replace(problem, cause=_REBOUND)


def _judge_memory(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    psi, ranks = training.psi, len(observations)
    for rank, observed in enumerate(observations):
        if observed.value["grown"] > 4 * psi * 0.6:
            return Problem(
                f"rank {rank} holds {observed.value['grown']:,} bytes more after a backward pass; all gradients "
                f"are {4 * psi:,}, a shard of them {4 * -(-psi // ranks):,}",
                classic("a flat bucket that has been reduced is still referred to: keep the shard alone", 7),
            )
        if observed.value["late"] > 4 * psi * 0.6:
            cause = "buckets wait for one another: before a new flat tensor is made, take the oldest until fewer "
            return Problem(
                f"rank {rank} holds {observed.value['late']:,} bytes more late in the backward pass; all gradients "
                f"are {4 * psi:,}, two buckets and a shard of all about {4 * psi // ranks + 2 * 2112:,}",
                classic(cause + "than IN_FLIGHT are under way", 7),
            )
    return None


def _judge_training(
    observations: Sequence[RankObservation], training: TinyTraining, accumulation: int = 1, **steps: Any
) -> Problem | None:
    cause = (
        "one backward pass per step trains well, two do not: the second must add to the shard of the first"
        if accumulation > 1
        else "the first step is right, a later one is not, so look at what it leaves to the next: a gradient that the "
        "shard still holds, or moments of other elements"
    )
    if problem := judge_state(observations, training):
        return problem
    problem = judge_training(observations, training, classic(cause, 8), accumulation=accumulation, **steps)
    return _or_rebound(problem, observations)


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    training = TinyTraining.drawn(seed, draw)

    def scenario(name: str, play: Callable, judge: Callable, *values: str, **arguments: Any) -> RankScenario:
        arguments = {"training": training, **arguments}
        return RankScenario(name, play, judge, arguments, stuck=_STUCK, values=values, **FAULTS)

    alone = scenario("a parameter that rank 1 alone uses", _play_step, _judge_step, "weights", users=(1,))
    trained = (_play_training, _judge_training, "losses", "weights")
    return [
        scenario("one step of SGD", _play_step, _judge_step, "weights", users=(0, 1, 2)),
        alone,
        scenario("memory after a backward pass", _play_memory, _judge_memory, training=TinyTraining(seed, 16, 33, 4)),
        scenario("four steps of AdamW", *trained, steps=4, users=(0, 2)),
        scenario("two backward passes a step", *trained, steps=2, users=(0, 1, 2), accumulation=2),
        in_group(alone, 10),
    ]


ZERO2 = Exercise(
    "4.5",
    "ZeRO-2",
    points=10,
    builds_on=("4.3", "4.4"),
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=TOLERANCE,
    tolerances={"Zero2, four steps": TRAINED, "Zero2, two backward passes": TRAINED},
)
CHECK = DistributedCheck(
    ZERO2, _scenarios, "as many elements travel as in ZeRO-1; what is gone is the memory of full gradients"
)


@ZERO2.checked_by
def check_zero2(Zero2: Callable, seed: int | None = None) -> None:
    """Exercise 4.5: gradients reduced to shards as they appear.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Zero2, seed=seed)
