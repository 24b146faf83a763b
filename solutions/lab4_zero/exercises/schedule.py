"""The check of exercise 4.8: the 1F1B order, alone and in a pipeline that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from utils import gpt
from utils.checks.attempt import attempt, tail
from utils.checks.core import Exercise, classic, draw_seed, fail, generator, passed
from utils.checks.hidden import Draw, Observation, Tolerance
from utils.checks.library_use import find_library_use
from utils.checks.problem import Problem
from utils.schedules import Action, Deadlock, from_orders, simulate

from .distributed_check import DistributedCheck
from .scenario_runs import run_on_ranks
from .scenarios import RankObservation, RankScenario


# ---- the order by itself
def order_problem(order: Callable, stages: int, micro_batches: int) -> Problem | None:
    """What is wrong with the orders of all stages of one pipeline, or None.

    Raises:
        NotImplementedError: a stub.
    """
    orders: list[list[Action]] = []
    for stage in range(stages):
        call = f"one_f_one_b_order({stage}, {stages}, {micro_batches})"
        made = attempt(order, {"stage": stage, "stages": stages, "micro_batches": micro_batches}, {})
        if made.late:
            return Problem(f"{call} did not return in time", "a loop that does not end")
        if made.error is not None:
            lines = tuple(tail(made.error))
            return Problem(f"{call} raised {type(made.error).__name__}: {made.error}", details=lines)
        if problem := _stage_problem(call, made.value, stage, stages, micro_batches):
            return problem
        orders.append([Action(action.kind, action.micro_batch) for action in made.value])
    return _pipeline_problem(orders, stages, micro_batches)


def _shown(actions: Sequence[Action]) -> str:
    return " ".join(f"{action.kind}{action.micro_batch}" for action in actions) or "nothing"


def _stage_problem(call: str, value: object, stage: int, stages: int, m: int) -> Problem | None:
    if not isinstance(value, (list, tuple)) or not all(hasattr(a, "kind") and hasattr(a, "micro_batch") for a in value):
        return Problem(f"{call} returned {value!r}", "a list of Action(kind, micro_batch) is expected, of kind F or B")
    shown = (f"{call}: {_shown(value)}",)
    for kind in "FB":
        found = [action.micro_batch for action in value if action.kind == kind]
        missing, more = (sorted(set(range(m)) - set(found)), sorted(set(found) - set(range(m))))
        if missing or more or len(found) != m:
            which = f"{kind}{missing[0]} is missing" if missing else f"{kind}{(more or found)[0]} does not belong"
            if not missing and not more:
                which = f"{kind} of a micro-batch comes twice"
            cause = classic("each micro-batch goes forward once and backward once, also where m is small", 4)
            return Problem(f"stage {stage} of {stages}, {m} micro-batches: {which}", cause, shown)
        if found != sorted(found):
            cause = classic("micro-batches go in ascending order, forward and backward: the oldest frees its memory", 5)
            return Problem(f"stage {stage} of {stages}: {kind}{found[0]} before {kind}{sorted(found)[0]}", cause, shown)
    done: set[int] = set()
    for action in value:
        if action.kind == "F":
            done.add(action.micro_batch)
        elif action.micro_batch not in done:
            cause = classic("a micro-batch goes backward after it has gone forward on the same stage", 4)
            return Problem(f"stage {stage} of {stages}: B{action.micro_batch} comes before its F", cause, shown)
    peak, most = peak_in_flight(value), min(stages - stage, m)
    if peak > most:
        gpipe = peak == m and [a.kind for a in value] == ["F"] * m + ["B"] * m
        constant = stage and peak == min(stages, m)
        cause = (
            "this is GPipe's order: all forward, then all backward" if gpipe
            else "every stage warms up as the first does: stage s needs stages - 1 - s forwards before it alternates"
            if constant else "one forward too many before the first backward: after stages - 1 - s of them, alternate"
        )  # fmt: skip
        number = 1 if gpipe else 2
        return Problem(
            f"stage {stage} of {stages} has {peak} micro-batches in flight, {most} are enough",
            classic(cause, number),
            shown,
        )
    return None


def peak_in_flight(order: Sequence[Action]) -> int:
    """The most micro-batches between their F and their B at once."""
    flying, peak = 0, 0
    for action in order:
        flying += 1 if action.kind == "F" else -1
        peak = max(peak, flying)
    return peak


def _pipeline_problem(orders: list[list[Action]], stages: int, m: int) -> Problem | None:
    shown = tuple(f"stage {stage}: {_shown(order)}" for stage, order in enumerate(orders))
    try:
        timeline = simulate(from_orders("yours", orders), forward=1, backward=2)
    except Deadlock as error:
        cause = classic("a stage waits for a micro-batch that the stage before it sends only after an answer", 3)
        return Problem(f"{stages} stages, {m} micro-batches: no stage can go on: {error}", cause, shown)
    best = 3 * (m + stages - 1)
    if timeline.makespan > best + 1e-9:
        cause = classic("too few forwards before the first backward: the later stages wait for work", 3)
        return Problem(
            f"{stages} stages, {m} micro-batches take {timeline.makespan:g} units of time, {best} are possible "
            "(forward 1, backward 2)",
            cause,
            shown,
        )
    return None


# ---- the order in a pipeline that runs
@dataclass(frozen=True)
class Batch:
    """A GPT and a step of it in micro-batches."""

    seed: int
    layers: int = 3
    micro_batches: int = 5

    @property
    def config(self) -> gpt.GPTConfig:
        """The sizes of the model."""
        return gpt.TINY.replace(layers=self.layers, hidden=10, heads=2, mlp_ratio=2, vocabulary=17, context=5)

    def model(self) -> gpt.GPT:
        """The whole model."""
        return gpt.GPT(self.config, seed=self.seed)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of six rows."""
        return gpt.batch(self.config, 6, seed=self.seed)


def _play(answer: Mapping[str, Callable], batch: Batch) -> dict[str, Any]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = answer["split_gpt"](batch.model(), stages)[rank]
    pipeline = answer["Pipeline"](stage, schedule=answer["one_f_one_b_order"])
    loss = pipeline.step(*batch.rows(), micro_batches=batch.micro_batches)
    gradients = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
    return {"loss": None if loss is None else float(loss), "gradients": gradients, "peak": pipeline.peak_in_flight}


def _judge(observations: Sequence[RankObservation], batch: Batch) -> Problem | None:
    model = batch.model()
    loss = model(*batch.rows())
    loss.backward()
    right = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    got = observations[-1].value["loss"]
    if got is None or abs(got - loss.item()) > 1e-5 * abs(loss.item()):
        return Problem(f"the pipeline's loss is {got}, one process has {loss.item():.6g}")
    for rank, observed in enumerate(observations):
        for name, gradient in observed.value["gradients"].items():
            if not torch.allclose(gradient, right[name], rtol=1e-4, atol=1e-6):
                worst = (gradient - right[name]).abs().max().item()
                return Problem(f"stage {rank}: the gradient of {name} differs from one process by {worst:.2g}")
        most = min(len(observations) - rank, batch.micro_batches)
        if observed.value["peak"] != most:
            return Problem(f"stage {rank} held {observed.value['peak']} micro-batches at once, expected {most}")
    return None


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    batches = {"a GPT in three stages": Batch(seed)}
    if draw is not None:
        batches = {
            f"Pipeline of {m} micro-batches": Batch(seed, draw.between(3, 4), m) for m in (2, draw.between(4, 6))
        }
    stuck, values = classic("the orders of two neighbours do not fit together", 3), ("loss", "gradients", "peak")
    return [
        RankScenario(name, _play, _judge, {"batch": batch}, stuck=stuck, same_calls=False, values=values)
        for name, batch in batches.items()
    ]


def pipelines_tried(seed: int, draw: Draw | None = None) -> list[tuple[int, int]]:
    """Pipelines (stages, micro-batches) that are looked at: one stage, one micro-batch, fewer than stages, many."""
    random = generator(seed)
    found = [(4, 8), (3, 3), (4, 2), (1, 3), (5, 1), (2, 7), (3, 40), (random.randint(3, 6), random.randint(5, 12))]
    return found + [(draw.between(2, 9), draw.between(1, 15)) for _ in range(8)] if draw else found


def observe_orders(package: ModuleType, seed: int) -> dict[str, Observation]:
    """The actions of every stage of hidden pipelines."""
    orders = [
        [[f"{a.kind}{a.micro_batch}" for a in package.one_f_one_b_order(stage, stages, m)] for stage in range(stages)]
        for stages, m in pipelines_tried(seed, Draw(seed, "4.8 orders"))
    ]
    return {"one_f_one_b_order": orders}


SCHEDULE = Exercise(
    "4.8",
    "1F1B schedule",
    points=8,
    observe=lambda package, seed: observe_orders(package, seed) | CHECK.observe(package, seed),
    tolerance=Tolerance(1e-4, 1e-7),
)
CHECK = DistributedCheck(
    SCHEDULE, _scenarios, "the bubble is GPipe's; in flight are at most as many micro-batches as stages are left"
)


@SCHEDULE.checked_by
def check_schedule(
    one_f_one_b_order: Callable, Pipeline: Callable, split_gpt: Callable, seed: int | None = None
) -> None:
    """Exercise 4.8: in which order a stage works under 1F1B.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    if found := find_library_use([one_f_one_b_order]):
        cause = "the exercise is to derive the order; compare with utils.schedules afterwards"
        fail(SCHEDULE, f"the answer uses a built-in, {found[0]}", cause=cause)
    tried = pipelines_tried(seed)
    for stages, micro_batches in tried:
        if problem := order_problem(one_f_one_b_order, stages, micro_batches):
            where = f"seed {seed}, {stages} stages, {micro_batches} micro-batches"
            fail(SCHEDULE, problem.headline, problem.details, problem.cause, where)
    answer = {"one_f_one_b_order": one_f_one_b_order, "Pipeline": Pipeline, "split_gpt": split_gpt}
    scenarios = _scenarios(seed)
    (run,) = run_on_ranks([answer], scenarios)
    CHECK.judge(run, scenarios, seed)
    passed(SCHEDULE, CHECK.notice, seed, len(tried) + len(scenarios))
