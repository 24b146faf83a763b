"""The check of exercise 4.3: data parallelism with buckets that are averaged while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Draw, Tolerance
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck, in_group
from utils.checks.ranks.scenarios import RankObservation, RankScenario
from utils.distributed import Entry, record_collectives
from utils.distributed.calls import Call

from . import tiny_models
from .gradients import SAYINGS, judge_gradients, judge_training
from .tiny_models import TinyTraining, added
from .waits import record_waits

_NUMBERS = {"sum": 1, "divided twice": 1, "mean of weights": 2, "last": 3, "own": 3, "own divided": 3, "missing": 4}
_NUMBERS |= {"made up": 4, "zeros": 3}
_STUCK_UNUSED = classic(
    "a rank waits for a collective that another has not started: look for a bucket that waits for a parameter without "
    "gradient (the end of the backward pass sends what is left), and for buckets in another order",
    4,
)
_STUCK = classic(
    "the ranks' all-reduces do not pair up: every rank starts the same buckets in the same order, full or not", 5
)
_FROZEN = "a frozen parameter has no gradient and takes no hook: leave out what requires no gradient"
_WAIT = classic(
    "an all-reduce is waited for before backward() returns: until then the gradient is not there, nor, with gloo, "
    "divided",
    10,
)


def _apart(called: Sequence[Sequence[Entry | Call]]) -> str:
    """Why the ranks' all-reduces differ, where their sizes tell."""
    sizes = [[e.elements for e in of_one if e.kind == "all_reduce" and e.dtype != "int32"] for of_one in called]
    longest = max(sizes, key=len)
    short = [of_one for of_one in sizes if len(of_one) < len(longest)]
    if short and all(of_one and of_one == longest[:-1] for of_one in short):
        return classic("a rank leaves out the last bucket: every rank sends every bucket, full or not", 3)
    return ""


# ---- what the ranks do
def _wrapped(
    answer: Mapping[str, Callable], training: TinyTraining, bucket_bytes: int = 400, **group: ProcessGroup
) -> tuple[tiny_models.TinyModel, Callable]:
    tiny = training.model(dist.get_rank(group.get("group")))  # only a broadcast can make the ranks equal
    return tiny, answer["DistributedDataParallel"](tiny, bucket_bytes=bucket_bytes, **group)


def _play_start(answer: Mapping[str, Callable], training: TinyTraining) -> dict:
    with record_collectives() as ledger, record_waits() as waits:
        tiny, _ = _wrapped(answer, training)
    state = tiny_models.weights(tiny) | {name: buffer.clone() for name, buffer in tiny.named_buffers()}
    return {"state": state, "count": ledger.count(), "unwaited": waits.missing(ledger.count())}


def _play_backward(
    answer: Mapping[str, Callable], training: TinyTraining, bucket_bytes: int, users: tuple[int, ...],
    used_first: bool = False, **group: ProcessGroup,
) -> dict:  # fmt: skip
    """One forward and backward pass."""
    tiny, parallel = _wrapped(answer, training, bucket_bytes, **group)
    tiny.used_first = used_first
    before, rank, early = tiny_models.weights(tiny), dist.get_rank(group.get("group")), {}
    with record_collectives() as ledger, record_waits() as waits:

        def watch(pass_: str) -> None:
            reduced = {"early": ledger.count("all_reduce"), "early elements": ledger.elements("all_reduce")}
            early.update(reduced | {"early waits": waits.count})

        tiny.watch = watch
        parallel(*training.rows(0, rank), sometimes=rank in users).backward()
        tiny.watch = None
    changed = [name for name, value in tiny_models.weights(tiny).items() if not torch.equal(value, before[name])]
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    return early | {
        "gradients": tiny_models.gradients(tiny), "changed": changed, "count": ledger.count("all_reduce"),
        "kinds": kinds, "unwaited": waits.missing(ledger.count()),
    }  # fmt: skip


def _play_training(answer: Mapping[str, Callable], training: TinyTraining, **steps: Any) -> dict:
    tiny, parallel = _wrapped(answer, training)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], **tiny_models.ADAMW)
    losses = tiny_models.train(training, parallel, optimizer.step, optimizer.zero_grad, **steps)
    return {"losses": losses, "weights": tiny_models.weights(tiny)}


def _play_accumulation(answer: Mapping[str, Callable], training: TinyTraining) -> dict:
    tiny, parallel = _wrapped(answer, training)
    with record_collectives() as ledger:
        with parallel.no_sync():
            parallel(*training.rows(0, dist.get_rank())).backward()
        quiet = ledger.count()
        parallel(*training.rows(1, dist.get_rank())).backward()
    return {"inside": quiet, "gradients": tiny_models.gradients(tiny)}


def _play_two_at_once(answer: Mapping[str, Callable], training: TinyTraining) -> dict:
    """Two forward passes, then their backward passes."""
    tiny, parallel = _wrapped(answer, training)
    losses = [parallel(*training.rows(step, dist.get_rank())) for step in (0, 1)]
    with record_collectives() as ledger, record_waits() as waits:
        for loss in losses:
            loss.backward()
    again = 0 if waits.futures else waits.count - ledger.count()
    return {"again": again, "gradients": tiny_models.gradients(tiny)}


# ---- what is right
def _judge_start(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    tiny, seen = training.model(), observations[0].value
    if seen["unwaited"]:
        cause = classic("a rank's state is rank 0's once its broadcasts have been waited for", 7)
        return Problem(f"{seen['unwaited']} of {seen['count']} broadcasts are never waited for", cause)
    right = tiny_models.weights(tiny) | dict(tiny.named_buffers())
    for rank, observed in enumerate(observations):
        bad = [name for name, value in right.items() if not torch.equal(observed.value["state"][name], value)]
        if not bad:
            continue
        headline = f"rank {rank} does not start with rank 0's {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}"
        if bad == ["shift"]:
            cause = (
                "a buffer that is not persistent computes too, and state_dict() leaves it out: module.buffers() has it"
            )
        elif set(bad) == {"scale", "shift"}:
            cause = "buffers are part of a module's state too: broadcast them beside the parameters"
        elif bad == ["frozen"]:
            cause = "a frozen parameter is not trained, but it computes: it must be rank 0's as well"
        elif rank == 0:
            cause = "rank 0 is the one whose weights the others take"
        else:
            cause = "ranks that start apart stay apart, whatever they average: broadcast rank 0's state first"
        return Problem(headline, classic(cause, 7))
    return None


def _judge_backward(
    observations: Sequence[RankObservation], training: TinyTraining, bucket_bytes: int, users: tuple[int, ...],
    used_first: bool = False,
) -> Problem | None:  # fmt: skip
    tiny, seen = training.model(), observations[0].value
    tiny.used_first = used_first
    reference = training.reference(len(observations), users=users, model=tiny)
    if seen["changed"]:
        return Problem(
            f"the backward pass changes the weights themselves ({seen['changed'][0]})",
            classic("a hook is handed the parameter: what is averaged is parameter.grad", 2),
        )
    names, sent = list(reference.mean), seen["kinds"].get("all_reduce", 0) >= training.psi
    last = () if sent else names[: len(names) // 2]
    problem = judge_gradients([each.value["gradients"] for each in observations], reference, _NUMBERS, last)
    if seen["unwaited"]:
        told = f"{seen['unwaited']} of {seen['count']} all-reduces are never waited for"
        found = (problem.headline, *problem.details) if problem else ()
        return Problem(told, _WAIT, found)
    if problem and SAYINGS["own"] in problem.cause and sent:
        cause = (
            "every bucket was sent, but before this gradient was there: a bucket is full when no gradient is missing; "
            "or a copy of it was averaged"
        )
        return replace(problem, cause=classic(cause, 8))
    problem = problem or _judge_traffic(seen, training.psi, len(names))
    if problem or bucket_bytes > 4 * training.psi:
        return problem
    return _judge_overlap(seen, bucket_bytes, len(users) == len(observations), used_first)


def _judge_overlap(seen: Mapping[str, Any], bucket_bytes: int, all_use: bool, used_first: bool) -> Problem | None:
    """Several buckets, the first sent while the backward pass goes on, and none waited for meanwhile."""
    if seen["count"] < 3:
        cause = "a bucket is closed once it holds bucket_bytes"
        return Problem(f"{seen['count']} all-reduces for buckets of {bucket_bytes} bytes", classic(cause, 8))
    if all_use and seen["early"] == 0:
        return Problem(
            "no all-reduce has started when the backward pass reaches the first layer",
            classic("each bucket starts as soon as it is full, while earlier layers still compute", 8),
        )
    if seen["early waits"]:
        return Problem(
            f"{seen['early waits']} of {seen['early']} all-reduces have been waited for when the backward pass "
            "reaches the first layer",
            classic("the backward pass stands still while it waits: wait for all of them at its end", 8),
        )
    if all_use and used_first and seen["early elements"] < seen["kinds"]["all_reduce"] // 2:
        return Problem(
            f"{seen['early elements']} of {seen['kinds']['all_reduce']} elements have been sent when the last "
            "gradient of the first bucket is there, although the buckets after it were full",
            classic("a bucket that gets full may be followed by full ones: go on while the next misses nothing", 8),
        )
    return None


def _judge_traffic(seen: dict, psi: int, parameters: int) -> Problem | None:
    """Psi elements in all-reduces, not one for each parameter, and nothing else."""
    others = {kind: n for kind, n in seen["kinds"].items() if kind != "all_reduce" and n > psi // 2}
    if others:
        kind = next(iter(others))
        cause = classic("every gradient travels once, in an all-reduce of its bucket", 6)
        return Problem(f"{kind} moves {others[kind]:,} elements in a step", cause)
    sent = seen["kinds"].get("all_reduce", 0)
    if sent > psi + 2 * parameters:
        cause = classic("a bucket is sent twice, or buckets hold parameters twice: Psi elements are enough", 8)
        return Problem(f"{sent:,} elements are all-reduced, the model has {psi:,}", cause)
    if seen["count"] > parameters:
        cause = classic("a bucket's gradients lie in one flat tensor, and one all-reduce averages them all", 6)
        return Problem(f"{seen['count']} all-reduces for {parameters} parameters: gradients travel in buckets", cause)
    return None


def _judge_training(observations: Sequence[RankObservation], training: TinyTraining, **steps: Any) -> Problem | None:
    cause = classic("gradients of this step meet gradients of an earlier one: what is kept between steps?", 9)
    return judge_training(observations, training, cause, **steps)


def _judge_accumulation(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    if observations[0].value["inside"]:
        return Problem(
            f"{observations[0].value['inside']} collectives are called inside no_sync()",
            classic("passes in no_sync add to the rank's own gradient, and send nothing", 9),
        )
    problem = _judge_sum(observations, training)
    if problem and not problem.cause:
        cause = classic("the pass after no_sync averages the sum of both passes, not its own part alone", 9)
        return replace(problem, cause=cause)
    return problem


def _judge_sum(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    """The gradients of two passes, added up."""
    first, second = (training.reference(len(observations), step) for step in (0, 1))
    local = [{name: added(a[name], b[name]) for name in a} for a, b in zip(first.local, second.local, strict=True)]
    mean = {name: added(first.mean[name], second.mean[name]) for name in first.mean}
    found = [observed.value["gradients"] for observed in observations]
    return judge_gradients(found, tiny_models.Reference(first.start, local, mean, []), _NUMBERS)


def _judge_two_at_once(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    problem, again = _judge_sum(observations, training), observations[0].value["again"]
    if problem and again > 0:
        cause = "an average that has been waited for is forgotten: waited for once more, its sum is divided once more"
        told = f"{again} averages of the first backward pass are waited for again in the second"
        return replace(problem, cause=classic(cause, 9), details=(*problem.details, told))
    return problem


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    crash = dict.fromkeys(("doesn't require", "does not require", "requires_grad"), _FROZEN)
    training = TinyTraining.drawn(seed, draw)

    def scenario(
        name: str, play: Callable, judge: Callable, *values: str, stuck: str = _STUCK, **arguments: Any
    ) -> RankScenario:
        arguments = {"training": training, **arguments}
        return RankScenario(name, play, judge, arguments, stuck=stuck, raised=crash, apart=_apart, values=values)

    def backward(name: str, bucket_bytes: int, *users: int, stuck: str = _STUCK, **arguments: Any) -> RankScenario:
        given = {"bucket_bytes": bucket_bytes, "users": users, **arguments}
        return scenario(name, _play_backward, _judge_backward, "gradients", stuck=stuck, **given)

    alone = backward("a parameter that rank 1 alone uses", 400, 1)
    found = [
        scenario("the same start", _play_start, _judge_start, "state"),
        backward("one large bucket", 2**20, 0, 1, 2, stuck=_STUCK_UNUSED),
        backward("buckets of 400 bytes", 400, 0, 1, 2, stuck=_STUCK_UNUSED),
        alone,
        backward("a first bucket that gets full late", 200, 0, 1, 2, used_first=True),
        scenario("two forward passes, then two backward ones", _play_two_at_once, _judge_two_at_once, "gradients"),
        scenario("accumulation with no_sync", _play_accumulation, _judge_accumulation, "gradients"),
        scenario("five steps of AdamW", _play_training, _judge_training, "losses", "weights", steps=5, users=(0, 2)),
        in_group(alone, 11),
    ]
    return found + [backward("a first bucket that one rank fills", 200, 1, used_first=True)] * (draw is not None)


DATA_PARALLEL = Exercise(
    "4.3",
    "data parallelism",
    points=14,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=Tolerance(1e-4, 2e-6, of="element"),
    tolerances={"DistributedDataParallel, five steps": Tolerance(3e-4, 3e-5, of="element")},
)
CHECK = DistributedCheck(
    DATA_PARALLEL,
    _scenarios,
    "the gradients are those of one process with the whole batch; Psi elements were all-reduced, most of them early",
)


@DATA_PARALLEL.checked_by
def check_distributed_data_parallel(DistributedDataParallel: Callable, seed: int | None = None) -> None:
    """Exercise 4.3: a module whose gradients are the mean over all ranks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(DistributedDataParallel, seed=seed)
