"""The check of exercise 4.4, ZeRO-1: the optimizer's state in shards."""

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
from utils.distributed import record_collectives

from . import tiny_models
from .gradients import judge_steps, judge_training
from .tiny_models import Reference, TinyTraining
from .waits import record_waits

_NUMBERS = {"sum": 1, "divided twice": 1, "own": 2, "own divided": 2, "gather": 3, "cover": 4, "zeros": 4, "made up": 7}
_STUCK = "every rank starts the same collectives in the same order, also a rank whose shard holds little or nothing"
_NO_GRADIENT = classic("a parameter has no gradient", 7)
#: What 4.5 says too of an exception; of ranks that wait in vain each says its own.
FAULTS = {"raised": {("NoneType", "parameter.grad."): _NO_GRADIENT, ("NoneType", "p.grad."): _NO_GRADIENT}}
UNWAITED = classic("a collective that has only been started has no result yet: wait for it", 11)

TOLERANCE, TRAINED = Tolerance(1e-4, 5e-6, of="element"), Tolerance(3e-4, 3e-5, of="element")


def play_step(
    answer: Mapping[str, Callable], training: TinyTraining, clip: float | None = None, **group: ProcessGroup
) -> dict:
    """One step of SGD."""
    tiny, rank = training.model(), dist.get_rank(group.get("group"))
    buckets = {} if clip is None else {"bucket_bytes": 400}
    optimizer = answer["Zero1Optimizer"](tiny.parameters(), torch.optim.SGD, lr=1.0, **buckets, **group)
    with record_collectives() as ledger, record_waits() as waits:
        tiny(*training.rows(0, rank)).backward()
        norm = None if clip is None else float(optimizer.clip_grad_norm(clip))
        optimizer.step()
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    return {
        "weights": tiny_models.weights(tiny), "kinds": kinds, "norm": norm, "pieces": _piece_problem(optimizer, rank),
        "unwaited": waits.missing(ledger.count()), "count": ledger.count(),
    }  # fmt: skip


def _piece_problem(optimizer: object, rank: int) -> tuple[str, str]:
    """What is wrong with the pieces of this rank's shards, where an answer has the lab's buckets, and its cause."""
    for bucket in getattr(optimizer, "buckets", ()):
        flat, covered = torch.arange(bucket.numel), 0
        parameters, shard = [view.flatten() for view in bucket.views(flat)], bucket.shard(flat, rank)
        for piece in bucket.pieces(rank):
            if not 0 <= piece.start <= piece.stop <= len(shard):
                told = f"{piece} of rank {rank} does not lie in its shard of {len(shard)} elements"
                return told, "start and stop count from the shard's beginning, and a piece begins and ends in the shard"
            here = shard[piece.start : piece.stop]
            there = parameters[piece.parameter][piece.offset : piece.offset + len(here)]
            if not torch.equal(here, there):
                ends = f"has {len(here)} elements, the parameter has {len(there)} from there on"
                starts = f"begins at element {int(here[0]) if len(here) else 0} of the flat tensor"
                starts += f", the parameter's element {piece.offset} is {int(there[0]) if len(there) else 'none'}"
                told = f"{piece} of rank {rank} {ends if len(here) != len(there) else starts}"
                cause = "start and stop count from the shard's beginning, offset from the parameter's"
                ends = "; a piece ends where its parameter does, and padding is in no piece"
                return told, cause + (ends if len(here) > len(there) else "")
            covered += len(here)
        inside = int((shard < bucket.numel - bucket.padding).sum())
        if covered != inside:
            told = f"rank {rank}'s pieces of a bucket hold {covered} elements, its shard has {inside} without padding"
            few = "the pieces do not cover the shard: of each parameter that lies in it a part is a piece"
            return told, few if covered < inside else "padding is in no piece, and no element in two"
    return "", ""


def judge_waits(observations: Sequence[RankObservation], problem: Problem | None) -> Problem | None:
    """The same problem; that a collective has not been waited for is said first."""
    seen = observations[0].value
    if not seen["unwaited"]:
        return problem
    found = (problem.headline, *problem.details) if problem else ()
    return Problem(f"{seen['unwaited']} of {seen['count']} collectives are never waited for", UNWAITED, found)


def _play_training(answer: Mapping[str, Callable], training: TinyTraining, **steps: Any) -> dict:
    tiny, recorded = training.model(), tiny_models.Recorded(torch.optim.AdamW)
    optimizer = answer["Zero1Optimizer"](
        tiny.parameters(), recorded.optimizer_class, bucket_bytes=400, **tiny_models.ADAMW
    )
    losses = tiny_models.train(training, tiny, optimizer.step, optimizer.zero_grad, **steps)
    return {
        "losses": losses, "weights": tiny_models.weights(tiny), "state": recorded.state_elements(),
        "stepped": recorded.most_steps(),
    }  # fmt: skip


def _play_bfloat16(answer: Mapping[str, Callable], training: TinyTraining, steps: int) -> dict:
    """Steps smaller than what bfloat16 tells apart, and how far they bring the large weights."""
    tiny, rank = training.model().bfloat16(), dist.get_rank()
    start, recorded = tiny_models.weights(tiny), tiny_models.Recorded(torch.optim.AdamW)
    optimizer = answer["Zero1Optimizer"](tiny.parameters(), recorded.optimizer_class, lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        tiny(*training.rows(step, rank, dtype=torch.bfloat16)).backward()
        optimizer.step()
    weights = tiny_models.weights(tiny)
    tiny(*training.rows(steps, rank, dtype=torch.bfloat16)).backward()
    norm = optimizer.clip_grad_norm(1e9)
    return {
        "weights": weights, "dtypes": recorded.dtypes(), "moved": moved(start, weights, start),
        "norm": str(norm.dtype).removeprefix("torch."),
    }  # fmt: skip


def moved(
    start: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], size: Mapping[str, torch.Tensor]
) -> float:
    """The mean distance between two models' weights, of those that are large in ``size`` and have a gradient."""
    far = [(after[n].float() - start[n].float()).abs()[size[n].abs() > 0.5] for n in size if n not in _UNUSED]
    return torch.cat(far).mean().item()


def judge_state(observations: Sequence[RankObservation], training: TinyTraining, number: int = 0) -> Problem | None:
    """Every rank's optimizer holds its shard alone: two moments per element."""
    psi = training.psi
    share = -(-psi // len(observations))
    for rank, observed in enumerate(observations):
        state = observed.value["state"]
        if state > 2 * (share + 24):
            whole = state >= 2 * (psi - 8)
            cause = (
                "this rank keeps the moments of all parameters: the optimizer is to see its shard only"
                if whole else "shards are a part in N, rounded up"
            )  # fmt: skip
            return Problem(
                f"rank {rank}'s optimizer keeps {state:,} elements of state, its shard has {2 * share:,}",
                classic(cause, number) if number else cause,
            )
    return None


def judge_kinds(kinds: Mapping[str, int], psi: int, numbers: Mapping[str, int], slack: int = 60) -> Problem | None:
    """A step reduce-scatters the gradients and gathers the weights: Psi elements each, and no all-reduce of them."""
    reduced, scattered, gathered = (kinds.get(kind, 0) for kind in ("all_reduce", "reduce_scatter", "all_gather"))
    if reduced > psi // 2:
        return Problem(
            f"{reduced:,} elements are all-reduced in a step, the model has {psi:,}",
            classic(
                "a rank needs the mean of its shard alone: an all-reduce sends 2 Psi where a reduce-scatter sends Psi",
                numbers["all-reduce"],
            ),
        )
    wanted = {"reduce_scatter": scattered, "all_gather": gathered}
    for kind, moved in wanted.items():
        if not psi <= moved <= psi + slack:
            what = "gradients" if kind == "reduce_scatter" else "weights"
            others = {k: n for k, n in kinds.items() if k not in ("all_reduce", *wanted) and n}
            cause = f"a step moves all {what} once by {kind.replace('_', '-')}: {psi:,} elements and the padding"
            return Problem(
                f"{moved:,} elements go through {kind} in a step, expected {psi:,} and a little padding",
                classic(cause, numbers["volume"]),
                (f"instead there are {others}",) if others else (),
            )
    return None


def weights_of(observations: Sequence[RankObservation]) -> list[dict[str, torch.Tensor]]:
    """The final weights of all ranks."""
    return [observed.value["weights"] for observed in observations]


def _judge_step(observations: Sequence[RankObservation], training: TinyTraining) -> Problem | None:
    problem = judge_steps(weights_of(observations), training.reference(len(observations)), _NUMBERS)
    problem = problem or judge_kinds(observations[0].value["kinds"], training.psi, {"all-reduce": 5, "volume": 5})
    problem = judge_waits(observations, problem)
    told, cause = next((o.value["pieces"] for o in observations if o.value["pieces"][0]), ("", ""))
    if told and not observations[0].value["unwaited"]:
        return Problem(told, classic(cause, 4), (problem.headline, *problem.details) if problem else ())
    return problem


def _judge_clipped(observations: Sequence[RankObservation], training: TinyTraining, clip: float) -> Problem | None:
    """One step of SGD after clipping by the global norm."""
    ranks = len(observations)
    reference = training.reference(ranks)
    norm = float(torch.stack([g.norm() for g in reference.mean.values() if g is not None]).norm())
    for rank, observed in enumerate(observations):
        got = observed.value["norm"]
        if abs(got - norm) > 1e-3 * norm:
            own = abs(sum(s.value["norm"] ** 2 for s in observations) - norm**2) < 1e-3 * norm**2
            squares = abs(got - norm**2) < 1e-3 * norm**2
            cause = "each rank takes the norm of its own shard: the squares of all shards are to be added up"
            cause = cause if own else "squares are added, the root is taken at the end" if squares else ""
            if abs(got - norm * ranks) < 1e-3 * norm:
                cause = "the gradient is a sum still: take the mean before its norm"
            cause = cause or (
                "squared norms of the shards' mean gradients, all-reduced as one number, then the root; or a shard's "
                "gradient is not the mean: zeros belong where a parameter has no gradient"
            )
            return Problem(
                f"clip_grad_norm returns {got:.5g} on rank {rank}, the norm of the whole gradient is {norm:.5g}",
                classic(cause, 8),
            )
    scale = min(1.0, clip / norm)
    problem = judge_steps(weights_of(observations), reference, {}, scale=scale)
    if problem and _other_scale(weights_of(observations), reference, scale):
        cause = "the norm is right, but the gradients are not scaled by max_norm / norm, or only some are"
        return Problem(problem.headline, classic(cause, 8), problem.details)
    return problem


def _other_scale(after: Sequence[Mapping[str, torch.Tensor]], reference: Reference, scale: float) -> bool:
    """Whether each parameter's step is a multiple of its gradient: one and the same, or the right one or 1."""
    steps = [
        ((reference.start[name] - of[name]).double().flatten(), mean.double().flatten())
        for of in after
        for name, mean in reference.mean.items()
        if mean is not None
    ]
    taken, means = (torch.cat(parts) for parts in zip(*steps, strict=True))
    factor = taken.dot(means) / means.dot(means)
    close = [torch.isclose(taken, k * means, rtol=1e-3, atol=1e-5) for k in (factor, scale, 1.0)]
    return bool(close[0].all() or (close[1] | close[2]).all())


def _judge_training(
    observations: Sequence[RankObservation], training: TinyTraining, steps: int, users: tuple[int, ...]
) -> Problem | None:
    cause = classic(
        "the first step is right, a later one is not, so look at what it leaves to the next: a gradient that is still "
        "there, or moments of other elements",
        7,
    )
    problem = judge_state(observations, training)
    problem = problem or judge_training(observations, training, cause, steps=steps, users=users, numbers=_NUMBERS)
    most = max(observed.value["stepped"] for observed in observations)
    if problem and most > steps:
        cause = "the optimizer steps every piece that has a gradient, also those that it has stepped already"
        told = f"in {steps} steps the optimizer has stepped a piece {most} times"
        return replace(problem, cause=classic(cause, 6), details=(*problem.details, told))
    return problem


def _judge_bfloat16(observations: Sequence[RankObservation], training: TinyTraining, steps: int) -> Problem | None:
    """bfloat16 weights follow float32 masters: small steps add up."""
    tiny = training.model().bfloat16()
    start = tiny_models.weights(tiny)
    masters = {name: p.detach().float() for name, p in tiny_models.trainable(tiny).items() if name not in _UNUSED}
    master = {name: torch.nn.Parameter(value) for name, value in masters.items()}
    optimizer = torch.optim.AdamW(master.values(), lr=1e-3)
    for step in range(steps):
        mean = training.reference(len(observations), step, model=tiny).mean
        for name, value in master.items():
            value.grad = mean[name].float()
        optimizer.step()
        for name, value in master.items():
            tiny_models.trainable(tiny)[name].data.copy_(value.detach())
    size = {name: value.detach() for name, value in master.items()}
    right = moved(start, tiny_models.weights(tiny), size)
    for rank, observed in enumerate(observations):
        if narrow := [dtype for dtype in observed.value["dtypes"] if dtype != "float32"]:
            return Problem(
                f"rank {rank}'s optimizer steps {narrow[0]} tensors",
                classic("the optimizer gets the float32 master of the shard, and keeps its moments in float32", 9),
            )
        if moved(size, observed.value["weights"], size) > 0.25 * right + 1e-3:
            cause = "small steps add up in a float32 master of the shard, and the bfloat16 weights are copied from it"
            far = moved(start, observed.value["weights"], size)
            return Problem(
                f"{steps} small steps move rank {rank}'s bfloat16 weights by {far:.2g}, not by {right:.2g}",
                classic(cause, 9) if far < right / 2 else "",
            )
        if observed.value["norm"] != "float32":
            cause = classic("squares of 16-bit gradients are added up in float32, or the sum keeps 8 bits", 8)
            return Problem(f"the norm of bfloat16 gradients is a {observed.value['norm']}, expected float32", cause)
    return None


_UNUSED = ("unused", "spare.sometimes")


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    training = TinyTraining.drawn(seed, draw)

    def scenario(name: str, play: Callable, judge: Callable, *values: str, **arguments: Any) -> RankScenario:
        arguments = {"training": training, **arguments}
        return RankScenario(name, play, judge, arguments, stuck=_STUCK, values=values, **FAULTS)

    clipped = scenario("clipped by the norm", play_step, _judge_clipped, "norm", "weights", clip=0.5)
    found = [
        scenario("one step of SGD", play_step, _judge_step, "weights"),
        scenario("five steps of AdamW", _play_training, _judge_training, "losses", "weights", steps=5, users=(0, 2)),
        clipped,
        scenario("bfloat16 weights", _play_bfloat16, _judge_bfloat16, "moved", "dtypes", steps=12),
        in_group(clipped, 10),
    ]
    return found + [replace(clipped, name="no clipping needed", arguments={"training": training, "clip": 1e4})] * (
        draw is not None
    )


ZERO1 = Exercise(
    "4.4",
    "ZeRO-1",
    points=14,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=TOLERANCE,
    tolerances={"Zero1Optimizer, five steps": TRAINED, "Zero1Optimizer, bfloat16 weights: moved": Tolerance(0.15)},
)
CHECK = DistributedCheck(
    ZERO1,
    _scenarios,
    "the same weights as one process, a third of the moments on each of three ranks, and no element sent twice",
)


@ZERO1.checked_by
def check_zero1(Zero1Optimizer: Callable, seed: int | None = None) -> None:
    """Exercise 4.4: an optimizer whose state is spread over the ranks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Zero1Optimizer, seed=seed)
