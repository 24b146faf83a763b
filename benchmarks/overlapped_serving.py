"""The overlapped engine beside lab 5's at full load, and beside what the GPU's memory allows.

The work is that of :mod:`.serving_throughput`: a model of the shape of Qwen3-0.6B with random weights in bf16 serves
256 requests that all come at once, prompts of 100 to 1024 random tokens, 256 new tokens each, greedy. Both engines run
in turns. ``same`` counts the requests to which both gave the same tokens. ``bound_seconds`` is the least that the steps
can take: all weights and the keys and values of every sequence once a step, over the memory's bandwidth (``peak``: its
data sheet's, ``copy``: that of a copy in the same run).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import benchmark_cli, serving_compared, serving_work
from benchmarks.decoding import SHAPE, random_model
from benchmarks.serving_throughput import (
    BLOCK_SIZE,
    CHECKED,
    NEW_TOKENS,
    PROMPTS,
    REQUESTS,
    TOKEN_BUDGET,
    draw_prompts,
)
from solutions.lab5_serving import ModelRunner
from solutions.lab6_frontiers import OverlappedRunner
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, TEXT, each
from utils.serving import ModelConfig, SamplingParams

RUNS, QUICK_RUNS = 3, 1
RUNNERS = {"alternating": ModelRunner, "overlapped": OverlappedRunner}

SCHEMA = {
    "dtype": TEXT,
    **each(SIZE, "parameters", "requests", "prompt_tokens", "output_tokens", "token_budget", "blocks", "block_size"),
    "tokens": {"checked": SIZE, "equal": COUNT, "largest_gap": NOT_NEGATIVE},
    "same": COUNT,
    "bytes": SIZE,
    "bandwidth": {"peak": POSITIVE, "copy": POSITIVE},
    "bound_seconds": {"peak": POSITIVE, "copy": POSITIVE},
    "engines": {str: {**serving_compared.RESULT, "of_bound": {"peak": POSITIVE, "copy": POSITIVE}}},
    "gain": serving_compared.TIMES,
}


def measure(
    quick: bool = False,
    config: ModelConfig = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    requests: int = REQUESTS,
    lengths: tuple[int, int] = PROMPTS,
    new_tokens: int = NEW_TOKENS,
    token_budget: int = TOKEN_BUDGET,
    runs: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` runs each engine once. ``settings`` are the runners'."""
    runs = runs or (QUICK_RUNS if quick else RUNS)
    prompts = draw_prompts(requests, lengths, config.vocab_size)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    torch.manual_seed(0)
    model = random_model(config, dtype)
    blocks = serving_work.blocks_for([(len(prompt), new_tokens) for prompt in prompts], BLOCK_SIZE)
    engines = {}
    for name, kind in RUNNERS.items():
        runner = kind(model, blocks, BLOCK_SIZE, **(settings or {}))
        engines[name] = lambda runner=runner: serving_compared.engine_over(
            runner, max_batch=requests, token_budget=token_budget
        )
    served = serving_compared.served(engines, prompts, params, runs)
    outputs = {name: done[-1].outputs for name, done in served.items()}
    wide = serving_work.widened(model)
    agreement = serving_work.token_agreement(wide, prompts[:CHECKED], outputs["overlapped"][:CHECKED])
    del wide
    bytes_moved = serving_compared.moved(served["overlapped"][-1].steps, config, dtype.itemsize)
    bandwidth = serving_compared.bandwidths()
    bounds = {name: bytes_moved / rate for name, rate in bandwidth.items()}
    results = {}
    for name, make in engines.items():
        found = serving_compared.result(served[name], serving_compared.idle(make(), prompts, params))
        results[name] = found | {"of_bound": {by: bound / found["seconds"] for by, bound in bounds.items()}}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": config.parameters,
        "requests": requests,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": served["overlapped"][-1].tokens,
        "token_budget": token_budget,
        "blocks": blocks,
        "block_size": BLOCK_SIZE,
        "tokens": agreement,
        "same": sum(one == other for one, other in zip(*outputs.values(), strict=True)),
        "bytes": bytes_moved,
        "bandwidth": bandwidth,
        "bound_seconds": bounds,
        "engines": results,
        "gain": serving_compared.ratio(served["alternating"], served["overlapped"]),
    }


def table(results: Mapping[str, Any]) -> str:
    """What each engine reached, in a few lines."""
    tokens = results["tokens"]
    lines = [
        f"right: {tokens['equal']} of {tokens['checked']} tokens are float32's, the others within "
        f"{tokens['largest_gap']:.3f}; {results['same']} of {results['requests']} requests got the same tokens"
    ]
    for name, found in results["engines"].items():
        shares = ", ".join(f"{share:.1%} of the bound by {by}" for by, share in found["of_bound"].items())
        lines.append(f"{name}: {found['tokens_per_second']:,.0f} tokens/s ({found['seconds']:.3f} s), {shares}")
        if found["idle"]:
            lines.append(f"  {serving_compared.idle_shares(found['idle'])}")
    gain = results["gain"]
    return "\n".join(
        [*lines, f"overlap gains {gain['ratio']:.2f} times ({gain['ratio_low']:.2f} to {gain['ratio_high']:.2f})"]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("overlapped_serving", measure, table, SCHEMA))
