"""The check of exercise 4.4, ZeRO-1: the optimizer's state in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.problem import Problem
from utils.distributed import record_collectives

from . import groups, hidden_zero, tiny_models
from .distributed_check import DistributedCheck, Judge, Part
from .gradients import judge_steps, judge_training
from .hidden_ranks import on_ranks
from .observations import RankObservation, RankScenario
from .scenario_runs import WORLD_SIZE

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
_NUMBERS = {"sum": 1, "divided twice": 1, "own": 2, "own divided": 2, "gather": 3, "cover": 4, "zeros": 4, "made up": 7}
_STUCK = "every rank starts the same collectives in the same order, also a rank whose shard holds little or nothing"
_PADDED = classic("N does not divide the elements: shards are of equal size, the last one is padded", 4)
RAISED = {
    "shape": _PADDED,
    "size": _PADDED,
    "divisible": _PADDED,
    "NoneType": classic("a parameter has no gradient", 7),
}


def play_step(
    answer: Mapping[str, Callable],
    seed: int,
    clip: float | None = None,
    rate: float = 1.0,
    group: ProcessGroup | None = None,
) -> dict:
    """One step of SGD."""
    tiny, rank = tiny_models.TinyModel(seed), dist.get_rank(group)
    among = {} if group is None else {"group": group}
    optimizer = answer["Zero1Optimizer"](tiny.parameters(), torch.optim.SGD, lr=rate, **among)
    with record_collectives() as ledger:
        tiny(*tiny_models.rows(seed, 0, rank)).backward()
        backward = ledger.elements("all_reduce") + ledger.elements("reduce_scatter")
        norm = None if clip is None else float(optimizer.clip_grad_norm(clip))
        optimizer.step()
    kinds = {kind: ledger.elements(kind) for kind in {entry.kind for entry in ledger.entries}}
    return {"weights": tiny_models.weights(tiny), "kinds": kinds, "norm": norm, "backward": backward}


def _play_training(answer: Mapping[str, Callable], seed: int, steps: int, users: tuple[int, ...]) -> dict:
    tiny, rank, recorded = (tiny_models.TinyModel(seed), dist.get_rank(), tiny_models.Recorded(torch.optim.AdamW))
    optimizer = answer["Zero1Optimizer"](tiny.parameters(), recorded.optimizer_class, bucket_bytes=400, **ADAMW)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = tiny(*tiny_models.rows(seed, step, rank), sometimes=rank in users)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "losses": losses, "weights": tiny_models.weights(tiny), "state": recorded.state_elements(),
        "stepped": recorded.stepped_elements(),
    }  # fmt: skip


def _play_bfloat16(answer: Mapping[str, Callable], seed: int, steps: int) -> dict:
    tiny, rank, recorded = (
        tiny_models.TinyModel(seed).bfloat16(),
        dist.get_rank(),
        tiny_models.Recorded(torch.optim.AdamW),
    )
    optimizer = answer["Zero1Optimizer"](tiny.parameters(), recorded.optimizer_class, lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        tiny(*tiny_models.rows(seed, step, rank, dtype=torch.bfloat16)).backward()
        optimizer.step()
    return {"weights": tiny_models.weights(tiny), "dtypes": recorded.state_dtypes()}


def judge_state(observations: Sequence[RankObservation], number: int) -> Problem | None:
    """Every rank's optimizer holds its shard alone: two moments an element."""
    psi = tiny_models.elements(tiny_models.TinyModel(0))
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
                classic(cause, number),
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


def _judge_step(seed: int) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny = tiny_models.TinyModel(seed)
        reference, psi = tiny_models.reference(tiny, seed, WORLD_SIZE), tiny_models.elements(tiny)
        problem = judge_steps([observed.value["weights"] for observed in observations], reference, _NUMBERS)
        return problem or judge_kinds(observations[0].value["kinds"], psi, {"all-reduce": 5, "volume": 5})

    return judge


def judge_clipped(seed: int, clip: float, number: int, ranks: int = WORLD_SIZE) -> Judge:
    """One step of SGD after clipping by the global norm."""

    def judge(observations: list[RankObservation]) -> Problem | None:
        reference = tiny_models.reference(tiny_models.TinyModel(seed), seed, ranks)
        norm = float(torch.stack([g.norm() for g in reference.mean.values() if g is not None]).norm())
        for rank, observed in enumerate(observations):
            got = observed.value["norm"]
            if abs(got - norm) > 1e-3 * norm:
                own = abs(got - norm) < 0.9 * norm and len({s.value["norm"] for s in observations}) > 1
                squares = abs(got - norm**2) < 1e-3 * norm**2
                cause = "each rank takes the norm of its own shard: the squares of all shards are to be added up"
                cause = cause if own else "squares are added, the root is taken at the end" if squares else ""
                if abs(got - norm * ranks) < 1e-3 * norm:
                    cause = "the gradient is a sum still: take the mean before its norm"
                cause = cause or "squared norms of the shards' mean gradients, all-reduced as one number, then the root"
                return Problem(
                    f"clip_grad_norm returns {got:.5g} on rank {rank}, the norm of the whole gradient is {norm:.5g}",
                    classic(cause, number),
                )
        scale = min(1.0, clip / norm)
        problem = judge_steps([observed.value["weights"] for observed in observations], reference, {}, scale=scale)
        if problem:
            cause = "the norm is right, but the gradients are not scaled by max_norm / norm, or only some are"
            return Problem(problem.headline, classic(cause, number), problem.details)
        return None

    return judge


def _judge_training(seed: int, steps: int, users: tuple[int, ...]) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        right = tiny_models.trained(seed, WORLD_SIZE, steps, torch.optim.AdamW, ADAMW, users)
        if problem := judge_state(observations, 6):
            return problem
        losses = [
            sum(step) / len(observations) for step in zip(*(s.value["losses"] for s in observations), strict=True)
        ]
        cause = classic("a gradient of an earlier step is still there, or moments sit at another place than before", 7)
        return judge_training(losses, [observed.value["weights"] for observed in observations], right, cause)

    return judge


def judge_bfloat16(seed: int, steps: int, number: int) -> Judge:
    """bfloat16 weights follow float32 masters: small steps add up."""

    def judge(observations: list[RankObservation]) -> Problem | None:
        tiny = tiny_models.TinyModel(seed).bfloat16()
        masters = {name: p.detach().float() for name, p in tiny_models.trainable(tiny).items() if name not in _UNUSED}
        master = [torch.nn.Parameter(value) for value in masters.values()]
        optimizer = torch.optim.AdamW(master, lr=1e-3)
        for step in range(steps):
            mean = tiny_models.reference(tiny, seed, WORLD_SIZE, step).mean
            for value, name in zip(master, masters, strict=True):
                value.grad = mean[name].float()
            optimizer.step()
            for value, name in zip(master, masters, strict=True):
                tiny_models.trainable(tiny)[name].data.copy_(value.detach())
        start = tiny_models.weights(tiny_models.TinyModel(seed).bfloat16())
        for rank, observed in enumerate(observations):
            if wide := _narrow_state(observed.value["dtypes"], rank, number):
                return wide
            got = {name: observed.value["weights"][name].float() for name in masters}
            large = {name: value.detach().abs() > 0.5 for name, value in zip(masters, master, strict=True)}
            moved, off, right = [
                torch.cat([(a[name].float() - b[name].float())[large[name]].abs() for name in masters]).mean().item()
                for a, b in (
                    (got, start),
                    (got, dict(zip(masters, master, strict=True))),
                    (tiny_models.weights(tiny), start),
                )
            ]
            if off > 0.25 * right + 1e-3:
                cause = "steps smaller than bfloat16's spacing are lost: they add up in a float32 master, of the shard"
                return Problem(
                    f"{steps} small steps move rank {rank}'s bfloat16 weights by {moved:.2g}, not by {right:.2g}",
                    classic(cause, number),
                )
        return None

    return judge


_UNUSED = ("unused", "spare.sometimes")


def _narrow_state(dtypes: set[torch.dtype], rank: int, number: int) -> Problem | None:
    narrow = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype != torch.float32]
    if not narrow:
        return None
    return Problem(
        f"rank {rank}'s optimizer steps {narrow[0]} tensors",
        classic("the optimizer gets the float32 master of the shard, and keeps its moments in float32", number),
    )


def _parts(seed: int) -> list[Part]:
    def part(title: str, play: Callable, judge: Judge, **arguments: object) -> Part:
        return Part(RankScenario(title, play, {"seed": seed, **arguments}), judge, _STUCK, RAISED)

    return [
        part("one step of SGD", play_step, _judge_step(seed)),
        part("five steps of AdamW", _play_training, _judge_training(seed, 5, (0, 2)), steps=5, users=(0, 2)),
        part("clipped by the norm", play_step, judge_clipped(seed, 0.5, 8), clip=0.5),
        part("bfloat16 weights", _play_bfloat16, judge_bfloat16(seed, 12, 9), steps=12),
        groups.group_part(play_step, judge_clipped(seed, 0.5, 8, ranks=2), 10, _STUCK, seed=seed, clip=0.5),
    ]


ZERO1 = Exercise(
    "4.4",
    "ZeRO-1",
    points=16,
    observe=on_ranks(hidden_zero.ZERO1),
    tolerance=hidden_zero.TOLERANCE,
    tolerances=hidden_zero.tolerances("Zero1Optimizer"),
)
CHECK = DistributedCheck(
    ZERO1,
    ("Zero1Optimizer",),
    _parts,
    "the same weights as one process, a third of the moments on each of three ranks, and no element sent twice",
)


@ZERO1.checked_by
def check_zero1(Zero1Optimizer: Callable, seed: int | None = None) -> None:
    """Exercise 4.4: an optimizer whose state is spread over the ranks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Zero1Optimizer, seed=seed)


def weights_of(observations: Sequence[RankObservation]) -> list[dict[str, Tensor]]:
    """The final weights of all ranks."""
    return [observed.value["weights"] for observed in observations]
