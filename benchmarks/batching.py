"""Continuous against static batching where answers differ in length, and latencies as the load grows.

The model has the shape of Qwen3-0.6B and random weights in bf16; lab 5's engine serves at most 64 requests at a time,
and runs steps of up to 8 tokens per sequence as CUDA graphs.

- ``spreads``: 512 requests that all come at once, with answers of 128 tokens on average in each of them, but spread
  more and more: ``variation`` is the standard deviation over the mean. The two schedulers take turns over the same
  engine; static batching serves 64 requests until the last of them is finished. ``steps_ratio`` is static's steps over
  continuous batching's: what the ratio would be if every step took the same time.
- ``loads``: requests that come at random (a Poisson process), at rates from a quarter of ``capacity`` upward, the rate
  at which the most spread of these workloads was served when all its requests waited. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, serving_work
from benchmarks.decoding import SHAPE, random_model
from solutions.lab5_serving import ModelRunner
from utils import timing
from utils.record_schemas import NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import ModelConfig
from utils.serving.lengths import Draw, fixed, lognormal, poisson, uniform
from utils.serving.metrics import Report
from utils.serving.replay import replay_workload
from utils.serving.workload import Workload

MAX_BATCH, TOKEN_BUDGET, BLOCK_SIZE, REQUESTS = 64, 2048, 16, 512
PROMPTS, MEAN, LONGEST = (64, 192), 128, 1024
SCHEDULERS = ("continuous", "static")
#: Rates of arrival, as shares of the capacity.
LOADS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)
ROUNDS = 3
#: Room for tokens per sequence in the graphs of steps in which requests join; larger steps are launched from Python.
GRAPH_CHUNKS = (2, 4, 8)
LATENCIES = ("ttft", "tpot", "latency")


def spreads(mean: int = MEAN, longest: int = LONGEST) -> dict[str, Draw]:
    """Distributions of answers' lengths with one mean, each wider than the last."""
    return {
        "all equal": fixed(mean),
        "uniform, a quarter": uniform(mean - mean // 4, mean + mean // 4),
        "uniform, a half": uniform(mean - mean // 2, mean + mean // 2),
        "uniform, from 1": uniform(1, 2 * mean - 1),
        "lognormal": lognormal(mean, 1.0, longest=longest),
    }


def served(runner: ModelRunner, workload: Workload, scheduler: str, max_batch: int, token_budget: int) -> Report:
    """Play a workload in real time over a new engine.

    Raises:
        RuntimeError: a request did not get its answer.
    """
    engine = serving_work.engine_over(runner, scheduler=scheduler, max_batch=max_batch, token_budget=token_budget)
    with serving_work.undisturbed():
        report = replay_workload(engine, workload, progress=False)
    if len(report.completed) != len(report.requests) or report.output_tokens != workload.output_tokens:
        raise RuntimeError(f"{len(report.completed)} of {len(report.requests)} requests were answered in full")
    return report


def spread(
    name: str, workload: Workload, runner: ModelRunner, max_batch: int, token_budget: int, rounds: int
) -> dict[str, Any]:
    """One workload under both schedulers, which take turns."""
    reports: dict[str, list[Report]] = {scheduler: [] for scheduler in SCHEDULERS}
    for turn in range(rounds):
        for scheduler in SCHEDULERS if turn % 2 == 0 else reversed(SCHEDULERS):
            reports[scheduler].append(served(runner, workload, scheduler, max_batch, token_budget))
    timed = {s: timing.summarize([report.duration for report in each]) for s, each in reports.items()}
    return {
        "name": name,
        "mean": workload.output_tokens / len(workload),
        "variation": workload.variation,
        "longest": max(request.output_tokens for request in workload),
        "output_tokens": workload.output_tokens,
        **{
            scheduler: {
                **timed[scheduler].as_dict(),
                "tokens_per_second": workload.output_tokens / timed[scheduler].median,
                "steps": each[-1].steps,
                "slots": each[-1].utilisation["slots"],
            }
            for scheduler, each in reports.items()
        },
        **timing.ratio(timed["static"], timed["continuous"]).as_dict(),
        "steps_ratio": reports["static"][-1].steps / reports["continuous"][-1].steps,
    }


def load(share: float, rate: float, report: Report) -> dict[str, Any]:
    """What requests that came at ``rate`` a second saw."""
    return {
        "share": share,
        "rate": rate,
        "duration": report.duration,
        "request_rate": report.request_rate,
        "tokens_per_second": report.throughput,
        "slots": report.utilisation["slots"],
        **{metric: report.percentiles(metric) for metric in LATENCIES},
    }


#: A workload under one scheduler: its steps, and the mean share of the batch's places that were taken.
_SCHEDULED = {**TIMING, "tokens_per_second": POSITIVE, "steps": SIZE, "slots": POSITIVE}
SCHEMA = {
    "dtype": TEXT,
    **each(SIZE, "requests", "max_batch", "token_budget"),
    "prompts": [SIZE],
    "spreads": [
        {
            "name": TEXT,
            "mean": POSITIVE,
            "variation": NOT_NEGATIVE,
            "longest": SIZE,
            "output_tokens": SIZE,
            "continuous": _SCHEDULED,
            "static": _SCHEDULED,
            **RATIO,
            "steps_ratio": POSITIVE,
        }
    ],
    "capacity": POSITIVE,
    "loads": [
        {
            **each(POSITIVE, "share", "rate", "duration", "request_rate", "tokens_per_second", "slots"),
            "ttft": {str: POSITIVE},
            "tpot": {str: POSITIVE},
            "latency": {str: POSITIVE},
        }
    ],
}


def measure(
    quick: bool = False,
    config: ModelConfig = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    requests: int = REQUESTS,
    prompts: tuple[int, int] = PROMPTS,
    mean: int = MEAN,
    longest: int = LONGEST,
    max_batch: int = MAX_BATCH,
    token_budget: int = TOKEN_BUDGET,
    loads: Sequence[float] = LOADS,
    rounds: int = ROUNDS,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Both parts; ``quick`` takes two spreads, two loads, and one round.

    Args:
        settings: of the runner.
    """
    draws = spreads(mean, longest)
    if quick:
        draws, loads, rounds = {name: draws[name] for name in ("all equal", "lognormal")}, loads[1::4], 1
    torch.manual_seed(0)
    blocks = serving_work.blocks_for([(prompts[1], longest)] * max_batch, BLOCK_SIZE)
    runner = ModelRunner(
        random_model(config, dtype), blocks, BLOCK_SIZE, **{"graph_chunks": GRAPH_CHUNKS} | dict(settings or {})
    )
    runner.warm_up(max_batch, prompts[1] + longest)

    def workload(outputs: Draw, arrivals: Draw | None = None) -> Workload:
        return Workload.draw(
            requests, prompts=uniform(*prompts), outputs=outputs, tokens=config.vocab_size, arrivals=arrivals
        )

    widest = draws["lognormal"]
    served(runner, workload(widest), "continuous", max_batch, token_budget)  # compiles what graphs do not hold
    points = [spread(name, workload(draw), runner, max_batch, token_budget, rounds) for name, draw in draws.items()]
    capacity = requests / points[-1]["continuous"]["seconds"]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "requests": requests,
        "max_batch": max_batch,
        "token_budget": token_budget,
        "prompts": list(prompts),
        "spreads": points,
        "capacity": capacity,
        "loads": [
            load(
                share,
                share * capacity,
                served(runner, workload(widest, poisson(share * capacity)), "continuous", max_batch, token_budget),
            )
            for share in loads
        ],
    }


def table(results: Mapping[str, Any]) -> str:
    """One line a spread, one line a load."""
    rows = [
        [
            point["name"],
            f"{point['variation']:.2f}",
            f"{point['mean']:.0f}",
            point["longest"],
            *(f"{point[scheduler]['tokens_per_second']:,.0f}" for scheduler in SCHEDULERS),
            f"{point['ratio']:.2f}",
            f"{point['steps_ratio']:.2f}",
            *(f"{point[scheduler]['slots']:.0%}" for scheduler in SCHEDULERS),
        ]
        for point in results["spreads"]
    ]
    rates = ["continuous tokens/s", "static", "ratio", "of steps"]
    first = benchmark_cli.text_table(["answers", "variation", "mean", "longest", *rates, "slots", "static"], rows)
    rows = [
        [
            f"{point['share']:.2f}",
            f"{point['rate']:.1f}",
            f"{point['tokens_per_second']:,.0f}",
            *(f"{point[metric][p] * 1e3:.1f}" for metric in ("ttft", "tpot") for p in ("p50", "p90", "p99")),
        ]
        for point in results["loads"]
    ]
    headings = ["load", "requests/s", "tokens/s", "TTFT p50, ms", "p90", "p99", "TPOT p50, ms", "p90", "p99"]
    return f"{first}\n\ncapacity {results['capacity']:.1f} requests/s\n{benchmark_cli.text_table(headings, rows)}"


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("batching", measure, table, SCHEMA))
