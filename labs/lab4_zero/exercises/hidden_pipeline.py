"""Hidden scenarios of exercise 4.8: the 1F1B orders of many pipelines, and one that runs."""

from __future__ import annotations

from types import ModuleType

import torch.distributed as dist

from utils import gpt
from utils.checks.hidden import Draw, Observation

from .hidden_ranks import RankResult, on_ranks


def one_f_one_b(package: ModuleType, seed: int) -> dict[str, Observation]:
    """Orders of every stage of many pipelines; then a GPT in three stages."""
    return orders(package, seed) | on_ranks((pipeline,))(package, seed)


def orders(package: ModuleType, seed: int) -> dict[str, Observation]:
    """The actions of each stage, for few micro-batches and many."""
    draw = Draw(seed, "4.8")
    pipelines = [(4, 8), (3, 3), (5, 2), (1, 3), (6, 1), (3, 40)]
    pipelines += [(draw.between(2, 9), draw.between(1, 15)) for _ in range(8)]
    return {
        "one_f_one_b_order": [
            [[_written(action) for action in package.one_f_one_b_order(stage, stages, m)] for stage in range(stages)]
            for stages, m in pipelines
        ]
    }


def _written(action: object) -> str:
    """``"F3"``."""
    return f"{action.kind}{action.micro_batch}"


def pipeline(package: ModuleType, seed: int) -> RankResult:
    """On each rank: losses and gradients of its stage, with many micro-batches and with few."""
    draw, rank, seen = Draw(seed, "4.8 pipeline"), dist.get_rank(), {}
    for what, micro_batches in (("many", draw.between(4, 6)), ("few", 2)):
        config = gpt.TINY.replace(layers=draw.between(3, 4), hidden=8, heads=2, mlp_ratio=2, vocabulary=13, context=5)
        stage = package.split_gpt(gpt.GPT(config, seed=draw.between(0, 10**6)), dist.get_world_size())[rank]
        running = package.Pipeline(stage, schedule=package.one_f_one_b_order)
        batch = gpt.batch(config, 6, seed=draw.between(0, 10**6))
        loss = running.step(*batch, micro_batches=micro_batches)
        name = f"Pipeline with {what} micro-batches"
        seen[f"{name}: loss"] = None if loss is None else float(loss)
        seen[f"{name}: gradients"] = [None if p.grad is None else p.grad.clone() for p in stage.parameters()]
        seen[f"{name}: most in flight"] = running.peak_in_flight
    return seen
