"""The same training step with the model cut instead of the batch: tensor and pipeline parallelism, and a grid of both.

A GPT of 1.4 billion parameters, 8 rows of 1024 tokens for each GPU in one batch, bf16 with fp32 master weights and
AdamW, on 2 and 4 GPUs; data parallelism of the same batch stands beside it. Pipelines run the batch in p, 2p, 4p and 8p
micro-batches (p stages) in the orders of GPipe and of 1F1B. Steps are timed by interleaved rounds, each as long as on
the slowest rank; for each rank the peak of allocated memory, its share of the parameters and, by the log, the
elements that it sends are there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import benchmark_cli, ranks
from benchmarks.ranks import ADAMW
from solutions.lab4_zero.distributed_data_parallel import DistributedDataParallel
from solutions.lab4_zero.mesh import parallel_mesh, share_of_batch, tensor_data_parallel_gpt
from solutions.lab4_zero.pipeline import Pipeline
from solutions.lab4_zero.pipeline_stages import split_gpt
from solutions.lab4_zero.precision import MasterWeightOptimizer
from solutions.lab4_zero.tensor_parallel_gpt import tensor_parallel_gpt
from utils import distributed, gpt, timing
from utils.record_schemas import NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each

CONFIG = gpt.GPT_1_4B
ROWS = 8
#: Micro-batches for each stage of a pipeline.
MICRO_BATCHES_A_STAGE = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b")
WARMUP, ROUNDS = 1, 5
DATA = "data"

Step = Callable[[], object]
Batch = tuple[torch.Tensor, torch.Tensor]


def name_of(way: Mapping[str, Any]) -> str:
    """A point in words, the same within one world size: ``"1f1b, 8 micro-batches"``."""
    if way["schedule"] != "none":
        return f"{way['schedule']}, {way['micro_batches']} micro-batches"
    return " x ".join(kind for kind in ("tensor", "data") if way[kind] > 1)


def ways(world_size: int, micro_batches_a_stage: Sequence[int] = MICRO_BATCHES_A_STAGE) -> list[dict[str, Any]]:
    """What is compared on so many ranks: sizes of the grid, and the schedule and micro-batches of pipelines."""
    plain = {"tensor": 1, "data": 1, "pipeline": 1, "schedule": "none", "micro_batches": 1}
    found = [plain | {"data": world_size}, plain | {"tensor": world_size}]
    if world_size % 2 == 0 and world_size > 2:
        found.append(plain | {"tensor": 2, "data": world_size // 2})
    return found + [
        plain | {"pipeline": world_size, "schedule": schedule, "micro_batches": many * world_size}
        for many in micro_batches_a_stage
        for schedule in SCHEDULES
    ]


class Built:
    """The models of this rank, each made once: a pipeline's two orders share its stage."""

    def __init__(self, config: gpt.GPTConfig, batch: Batch) -> None:
        self.config, self.batch, self.device = config, batch, distributed.device()
        self._stage: torch.nn.Module | None = None
        self._trained: MasterWeightOptimizer | None = None
        self._pipelines: dict[str, Pipeline] = {}

    def _model(self) -> gpt.GPT:
        return gpt.GPT(self.config, device=self.device, dtype=torch.bfloat16)

    def of(self, way: Mapping[str, Any]) -> tuple[Step, torch.nn.Module, Pipeline | None]:
        """The step of one way, the module that it trains and, of a pipeline, the pipeline."""
        if way["pipeline"] > 1:
            return self._pipeline(way)
        if way["tensor"] == 1:
            module = DistributedDataParallel(self._model())
            rows, weight = [part.chunk(way["data"])[dist.get_rank()] for part in self.batch], 1.0
        elif way["data"] == 1:
            module = tensor_parallel_gpt(self._model())
            rows, weight = list(self.batch), 1.0
        else:
            mesh = parallel_mesh(tensor=way["tensor"], data=way["data"])
            module = tensor_data_parallel_gpt(self._model(), mesh)
            tokens, targets, weight = share_of_batch(mesh, *self.batch)
            rows = [tokens, targets]
        optimizer = MasterWeightOptimizer(module.parameters(), torch.optim.AdamW, **ADAMW)

        def step() -> None:
            (module(*rows) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, module, None

    def _pipeline(self, way: Mapping[str, Any]) -> tuple[Step, torch.nn.Module, Pipeline]:
        if self._stage is None:
            self._stage = split_gpt(self._model(), way["pipeline"])[dist.get_rank()]
            self._trained = MasterWeightOptimizer(self._stage.parameters(), torch.optim.AdamW, **ADAMW)
        schedule = way["schedule"]
        if schedule not in self._pipelines:
            self._pipelines[schedule] = Pipeline(self._stage, schedule=schedule)
        pipeline = self._pipelines[schedule]

        def step() -> None:
            pipeline.step(*self.batch, way["micro_batches"])
            self._trained.step()
            self._trained.zero_grad()

        return step, self._stage, pipeline


def on_rank(
    config: gpt.GPTConfig, rows: int, micro_batches_a_stage: Sequence[int], warmup: int, rounds: int
) -> list[dict[str, Any]]:
    """Samples, memory and messages of each way on this rank."""
    ranks.settle()
    batch = gpt.batch(config, rows * dist.get_world_size(), device=distributed.device())
    built = Built(config, batch)
    chosen = ways(dist.get_world_size(), micro_batches_a_stage)
    base = 0
    steps, facts = {}, []
    for k, way in enumerate(chosen):
        if way["pipeline"] == 1 or chosen[k - 1]["pipeline"] == 1:  # all pipelines train one stage
            base = ranks.allocated()
        step, module, pipeline = built.of(way)
        step()
        peak = ranks.peak(step, base, repeats=1)
        with distributed.record_collectives() as log:
            step()
        steps[name_of(way)] = step
        ranks.note(f"{name_of(way)}: peak {peak / 1e9:.2f} GB")
        facts.append(
            {
                "parameters": sum(p.numel() for p in module.parameters()),
                "peak": peak,
                "in flight": pipeline.peak_in_flight if pipeline else 1,
                "collectives": ranks.counted(log),
                "sent": log.volume(),
            }
        )
    samples = ranks.compare(steps, warmup=warmup, rounds=rounds)
    return [{**fact, "samples": {"step": samples[name_of(way)]}} for way, fact in zip(chosen, facts, strict=True)]


def points_of(
    world_size: int, micro_batches_a_stage: Sequence[int], tokens: int, of_ranks: Sequence[Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The points of one world size, from what each rank found; ``tokens`` of the whole batch."""
    found = []
    first: timing.Timing | None = None
    for way, facts in zip(ways(world_size, micro_batches_a_stage), zip(*of_ranks, strict=True), strict=True):
        timed = ranks.slowest([fact["samples"] for fact in facts])["step"]
        first = first or timed  # data parallelism
        found.append(
            {
                "world_size": world_size,
                **way,
                **timed.as_dict(),
                "tokens_per_second": tokens / timed.median,
                **timing.ratio(timed, first).as_dict(),
                "parameters": [fact["parameters"] for fact in facts],
                "peak_bytes": [fact["peak"] for fact in facts],
                "in_flight": [fact["in flight"] for fact in facts],
                "sent_elements": [fact["sent"] for fact in facts],
                "collectives": facts[0]["collectives"],
            }
        )
    return found


SCHEMA = {
    "dtype": TEXT,
    "model": ranks.GPT_LAYOUT,
    "rows": SIZE,
    "points": [
        {
            **each(SIZE, "world_size", "tensor", "data", "pipeline"),
            "schedule": TEXT,
            "micro_batches": SIZE,
            **TIMING,
            "tokens_per_second": POSITIVE,
            **RATIO,
            "parameters": [SIZE],
            "peak_bytes": [SIZE],
            "in_flight": [SIZE],
            "sent_elements": [NOT_NEGATIVE],
            "collectives": ranks.COLLECTIVES_LAYOUT,
        }
    ],
}


def measure(
    quick: bool = False,
    world_sizes: Sequence[int] | None = None,
    config: gpt.GPTConfig = CONFIG,
    rows: int = ROWS,
    micro_batches_a_stage: Sequence[int] = MICRO_BATCHES_A_STAGE,
    warmup: int = WARMUP,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """All ways on each world size; ``quick`` takes two numbers of micro-batches and few rounds.

    Args:
        world_sizes: by default those that this machine has GPUs for.
        rows: rows of the batch for each rank.
    """
    if quick:
        micro_batches_a_stage, rounds = tuple(micro_batches_a_stage)[:2], min(rounds, 3)
    points = []
    for world_size in world_sizes or ranks.world_sizes():
        many = tuple(micro_batches_a_stage)
        answers = ranks.launch(on_rank, config, rows, many, warmup, rounds, world_size=world_size)
        points += points_of(world_size, many, rows * world_size * config.context, answers)
    return {
        "dtype": "bf16",
        "model": {
            "parameters": sum(p.numel() for p in gpt.GPT(config, device="meta").parameters()),
            **{name: getattr(config, name) for name in ("layers", "heads", "hidden", "vocabulary", "context")},
        },
        "rows": rows,
        "points": points,
    }


def table(results: Mapping[str, Any]) -> str:
    """One line a way: time, rate, time over data parallelism's, the most and the least memory of a rank."""
    rows = [
        [
            f"{p['world_size']} x {name_of(p)}",
            f"{p['seconds'] * 1e3:.1f}",
            f"{p['tokens_per_second'] / 1e3:.1f}",
            f"{p['ratio']:.3f}",
            "/".join(f"{size / 1e9:.1f}" for size in p["peak_bytes"]),
            "/".join(str(many) for many in p["in_flight"]),
            f"{max(p['sent_elements']) / 1e6:.1f}",
        ]
        for p in results["points"]
    ]
    headings = ["N x way", "ms a step", "k tokens/s", "x data", "peak GB by rank", "in flight", "M elements sent"]
    return benchmark_cli.text_table(headings, rows)


if __name__ == "__main__":
    raise SystemExit(ranks.run("model_parallel", measure, table, SCHEMA))
