"""The check of exercise 4.3: data parallelism with buckets that are averaged while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Tolerance
from utils.checks.problem import Problem
from utils.distributed import Entry, record_collectives
from utils.distributed.calls import Call

from . import groups, hidden_data_parallel, tiny_models
from .distributed_check import DistributedCheck, Part
from .gradients import judge_gradients, judge_training
from .hidden_ranks import on_ranks
from .observations import RankObservation, RankScenario
from .scenario_runs import WORLD_SIZE
from .wait_recorder import record_waits

_NUMBERS = {"sum": 1, "divided twice": 1, "mean of weights": 2, "last": 3, "own": 3, "own divided": 3, "missing": 4}
_NUMBERS |= {"made up": 4, "zeros": 3}
_STUCK_UNUSED = classic(
    "a bucket waits for a parameter that has no gradient in this pass: the end of the backward pass sends what is left",
    4,
)
_STUCK = classic(
    "the ranks' all-reduces do not pair up: every rank starts the same buckets in the same order, full or not", 5
)
_ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
_FROZEN = classic("a frozen parameter has no gradient and takes no hook: leave out what requires no gradient", 6)


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


def _wrapped(
    answer: Mapping[str, Callable], seed: int, bucket_bytes: int, group: ProcessGroup | None = None
) -> tuple[tiny_models.TinyModel, Callable]:
    tiny = tiny_models.TinyModel(seed + dist.get_rank(group))  # only a broadcast can make the ranks equal
    among = {} if group is None else {"group": group}
    return tiny, answer["DistributedDataParallel"](tiny, bucket_bytes=bucket_bytes, **among)


def _play_start(answer: Mapping[str, Callable], seed: int) -> dict[str, Tensor]:
    tiny, _ = _wrapped(answer, seed, 400)
    return tiny_models.weights(tiny) | {name: buffer.clone() for name, buffer in tiny.named_buffers()}


def _play_backward(
    answer: Mapping[str, Callable],
    seed: int,
    bucket_bytes: int,
    users: tuple[int, ...],
    used_first: bool = False,
    group: ProcessGroup | None = None,
) -> dict:
    """One forward and backward pass."""
    tiny, parallel = _wrapped(answer, seed, bucket_bytes, group)
    tiny.used_first = used_first
    before, rank, early = tiny_models.weights(tiny), dist.get_rank(group), {}
    with record_collectives() as ledger, record_waits() as waits:

        def watch(pass_: str) -> None:
            reduced = {"early": ledger.count("all_reduce"), "early elements": ledger.elements("all_reduce")}
            early.update(reduced | {"early waits": waits.count})

        tiny.watch = watch
        x, y = tiny_models.rows(seed, 0, rank)
        loss = parallel(x, y, sometimes=rank in users)
        forward = ledger.elements("all_reduce")
        loss.backward()
        tiny.watch = None
    changed = [name for name, value in tiny_models.weights(tiny).items() if not torch.equal(value, before[name])]
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    return early | {
        "gradients": tiny_models.gradients(tiny), "changed": changed, "count": ledger.count("all_reduce"),
        "kinds": kinds, "forward": forward, "unwaited": 0 if waits.futures else max(0, ledger.count() - waits.count),
    }  # fmt: skip


def _play_training(answer: Mapping[str, Callable], seed: int, steps: int, users: tuple[int, ...]) -> tuple:
    tiny, parallel = _wrapped(answer, seed, 400)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], **_ADAMW)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = parallel(*tiny_models.rows(seed, step, dist.get_rank()), sometimes=dist.get_rank() in users)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, tiny_models.weights(tiny)


def _play_accumulation(answer: Mapping[str, Callable], seed: int) -> tuple:
    tiny, parallel = _wrapped(answer, seed, 400)
    with record_collectives() as ledger:
        with parallel.no_sync():
            parallel(*tiny_models.rows(seed, 0, dist.get_rank())).backward()
        quiet = ledger.count()
        parallel(*tiny_models.rows(seed, 1, dist.get_rank())).backward()
    return quiet, tiny_models.gradients(tiny)


def _judge_start(seed: int) -> Callable[[list[RankObservation]], Problem | None]:
    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny = tiny_models.TinyModel(seed)
        right = tiny_models.weights(tiny) | dict(tiny.named_buffers())
        for rank, observed in enumerate(observations):
            bad = [name for name, value in right.items() if not torch.equal(observed.value[name], value)]
            if not bad:
                continue
            headline = f"rank {rank} does not start with rank 0's {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}"
            if bad == ["scale"]:
                cause = "buffers are part of a module's state too: broadcast them beside the parameters"
            elif bad == ["frozen"]:
                cause = "a frozen parameter is not trained, but it computes: it must be rank 0's as well"
            elif rank == 0:
                cause = "rank 0 is the one whose weights the others take"
            else:
                cause = "ranks that start apart stay apart, whatever they average: broadcast rank 0's state first"
            return Problem(headline, classic(cause, 7))
        return None

    return judge


def _judge_backward(
    seed: int, users: tuple[int, ...], several: bool, used_first: bool = False, ranks: int = WORLD_SIZE
) -> Callable[[list[RankObservation]], Problem | None]:
    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny = tiny_models.TinyModel(seed)
        tiny.used_first = used_first
        reference = tiny_models.reference(tiny, seed, ranks, sometimes=users)
        seen = observations[0].value
        if seen["changed"]:
            return Problem(
                f"the backward pass changes the weights themselves ({seen['changed'][0]})",
                classic("a hook is handed the parameter: what is averaged is parameter.grad", 2),
            )
        names = list(reference.mean)
        problem = judge_gradients(
            [s.value["gradients"] for s in observations], reference, _NUMBERS, names[: len(names) // 2]
        )
        if seen["unwaited"]:
            told = f"{seen['unwaited']} of {seen['count']} all-reduces are never waited for"
            found = (problem.headline, *problem.details) if problem else ()
            return Problem(told, _WAIT, found)
        return (
            problem
            or _judge_traffic(seen, tiny_models.elements(tiny), len(names))
            or (_judge_overlap(seen) if several else None)
        )

    def _judge_overlap(seen: dict) -> Problem | None:
        if seen["count"] < 3:
            cause = "a bucket is closed once it holds bucket_bytes"
            return Problem(f"{seen['count']} all-reduces for buckets of 400 bytes", classic(cause, 8))
        if len(users) == ranks and seen["early"] == 0:
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
        if used_first and seen["early elements"] < seen["kinds"]["all_reduce"] // 2:
            return Problem(
                f"{seen['early elements']} of {seen['kinds']['all_reduce']} elements have been sent when the last "
                "gradient of the first bucket is there, although the buckets after it were full",
                classic("a bucket that gets full may be followed by full ones: go on while the next misses nothing", 8),
            )
        return None

    return judge


def _judge_traffic(seen: dict, psi: int, parameters: int) -> Problem | None:
    """Psi elements in all-reduces, not one for each parameter, and nothing else."""
    others = {kind: n for kind, n in seen["kinds"].items() if kind != "all_reduce" and n > psi // 2}
    if others:
        kind = next(iter(others))
        cause = "every gradient travels once, in an all-reduce of its bucket"
        return Problem(f"{kind} moves {others[kind]:,} elements in a step", cause)
    sent = seen["kinds"].get("all_reduce", 0)
    if sent > psi + 2 * parameters:
        cause = classic("a bucket is sent twice, or buckets hold parameters twice: Psi elements are enough", 8)
        return Problem(f"{sent:,} elements are all-reduced, the model has {psi:,}", cause)
    if seen["count"] > parameters:
        return Problem(f"{seen['count']} all-reduces for {parameters} parameters: gradients travel in buckets")
    return None


def _judge_training(seed: int, steps: int, users: tuple[int, ...]) -> Callable[[list[RankObservation]], Problem | None]:
    def judge(observations: list[RankObservation]) -> Problem | None:
        right = tiny_models.trained(seed, WORLD_SIZE, steps, torch.optim.AdamW, _ADAMW, users)
        losses = [
            sum(step) / len(observations)
            for step in zip(*(observed.value[0] for observed in observations), strict=True)
        ]
        cause = classic("gradients of this step meet gradients of an earlier one: what is kept between steps?", 9)
        return judge_training(losses, [observed.value[1] for observed in observations], right, cause)

    return judge


def _judge_accumulation(seed: int) -> Callable[[list[RankObservation]], Problem | None]:
    def judge(observations: list[RankObservation]) -> Problem | None:
        if observations[0].value[0]:
            return Problem(
                f"{observations[0].value[0]} collectives are called inside no_sync()",
                classic("passes in no_sync add to the rank's own gradient, and send nothing", 9),
            )
        tiny = tiny_models.TinyModel(seed)
        two = [tiny_models.reference(tiny, seed, WORLD_SIZE, step) for step in (0, 1)]

        def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
            return first if second is None else second if first is None else first + second

        local = [{name: both(a[name], b[name]) for name in a} for a, b in zip(two[0].local, two[1].local, strict=True)]
        mean = {name: both(two[0].mean[name], two[1].mean[name]) for name in two[0].mean}
        problem = judge_gradients(
            [observed.value[1] for observed in observations],
            tiny_models.Reference(two[0].start, local, mean, []),
            _NUMBERS,
        )
        if problem and not problem.cause:
            cause = classic("the pass after no_sync averages the sum of both passes, not its own part alone", 9)
            return Problem(problem.headline, cause, problem.details)
        return problem

    return judge


def _parts(seed: int) -> list[Part]:
    crash = {"NoneType": _FROZEN, "doesn't require": _FROZEN, "does not require": _FROZEN, "requires_grad": _FROZEN}

    def part(title: str, play: Callable, judge: Callable, stuck: str = _STUCK, **arguments: object) -> Part:
        return Part(RankScenario(title, play, {"seed": seed, **arguments}), judge, stuck, crash, apart=_apart)

    return [
        part("the same start", _play_start, _judge_start(seed)),
        part("one large bucket", _play_backward, _judge_backward(seed, (0, 1, 2), False), _STUCK_UNUSED,
             bucket_bytes=2**20, users=(0, 1, 2)),
        part("buckets of 400 bytes", _play_backward, _judge_backward(seed, (0, 1, 2), True), _STUCK_UNUSED,
             bucket_bytes=400, users=(0, 1, 2)),
        part("a parameter that rank 1 alone uses", _play_backward, _judge_backward(seed, (1,), True), bucket_bytes=400,
             users=(1,)),
        part("a first bucket that gets full late", _play_backward, _judge_backward(seed, (0, 1, 2), True, True),
             bucket_bytes=200, users=(0, 1, 2), used_first=True),
        part("accumulation with no_sync", _play_accumulation, _judge_accumulation(seed)),
        part("five steps of AdamW", _play_training, _judge_training(seed, 5, (0, 2)), steps=5, users=(0, 2)),
        groups.group_part(_play_backward, _judge_backward(seed, (1,), True, ranks=2), 11, _STUCK, seed=seed,
                          bucket_bytes=400, users=(1,)),
    ]  # fmt: skip


DATA_PARALLEL = Exercise(
    "4.3",
    "data parallelism",
    points=16,
    observe=on_ranks(hidden_data_parallel.PARTS),
    tolerance=Tolerance(1e-4, 2e-6, of="element"),
    tolerances={"DistributedDataParallel, trained": Tolerance(3e-4, 3e-5, of="element")},
)
CHECK = DistributedCheck(
    DATA_PARALLEL,
    ("DistributedDataParallel",),
    _parts,
    "the gradients are those of one process with the whole batch; Psi elements were all-reduced, most of them early",
)


@DATA_PARALLEL.checked_by
def check_distributed_data_parallel(DistributedDataParallel: Callable, seed: int | None = None) -> None:
    """Exercise 4.3: a module whose gradients are the mean over all ranks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(DistributedDataParallel, seed=seed)
