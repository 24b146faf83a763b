"""Requests with a common beginning: its keys and values read once per request, or once for all of them.

A model of the shape of Qwen3-0.6B with random weights in bf16 serves 256 requests that all come at once. They begin
with the same 2,048 tokens, which are in the prefix cache already; each has 16 to 128 tokens of its own and gets 256 new
ones, greedy. Lab 5's runner reads the beginning once per request and step, lab 6's once per step; both run in lab 5's
engine and in the overlapped one, in turns. ``bytes`` are the least that the decode steps read either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import benchmark_cli, serving_compared, serving_work
from benchmarks.decoding import SHAPE, random_model
from benchmarks.serving_throughput import BLOCK_SIZE, TOKEN_BUDGET, draw_prompts
from solutions.lab5_serving import ModelRunner
from solutions.lab6_frontiers import OverlappedRunner, SharedPrefixRunner, kv_bytes_read
from solutions.lab6_frontiers.serve import OverlappedSharedPrefixRunner
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, TEXT, each
from utils.serving import ModelConfig, SamplingParams

REQUESTS, COMMON, OWN, NEW_TOKENS = 256, 2048, (16, 128), 256
#: Requests that are compared with float32.
CHECKED = 4
RUNS, QUICK_RUNS = 2, 1
RUNNERS = {
    "separately": ModelRunner,
    "once": SharedPrefixRunner,
    "separately, overlapped": OverlappedRunner,
    "once, overlapped": OverlappedSharedPrefixRunner,
}
#: Of an agreement with float32 (:func:`.serving_work.token_agreement`).
AGREEMENT = {"checked": SIZE, "equal": COUNT, "largest_gap": NOT_NEGATIVE}

SCHEMA = {
    "dtype": TEXT,
    **each(SIZE, "parameters", "requests", "common_tokens", "own_tokens", "output_tokens", "blocks", "block_size"),
    "tokens": {"separately": AGREEMENT, "once": AGREEMENT},
    "same": COUNT,
    "bytes": {"separately": SIZE, "once": SIZE},
    "bandwidth": {"peak": POSITIVE, "copy": POSITIVE},
    "shared_steps": SIZE,
    "engines": {str: serving_compared.RESULT},
    "gain": {"alternating": serving_compared.TIMES, "overlapped": serving_compared.TIMES},
}


def measure(
    quick: bool = False,
    config: ModelConfig = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    requests: int = REQUESTS,
    common: int = COMMON,
    own: tuple[int, int] = OWN,
    new_tokens: int = NEW_TOKENS,
    token_budget: int = TOKEN_BUDGET,
    runs: int | None = None,
    settings: Mapping[str, Any] | None = None,
    min_saved: int | None = None,
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` runs each engine once.

    Args:
        settings: of the runners.
        min_saved: of the runners that read the beginning once, instead of their own.
    """
    runs = runs or (QUICK_RUNS if quick else RUNS)
    (beginning,) = draw_prompts(1, (common, common), config.vocab_size, seed=1)
    prompts = [beginning + tokens for tokens in draw_prompts(requests, own, config.vocab_size)]
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    torch.manual_seed(0)
    model = random_model(config, dtype)
    lengths = [(len(prompt) - common, new_tokens) for prompt in prompts]
    blocks = serving_work.blocks_for([*lengths, (common, new_tokens)], BLOCK_SIZE)
    runners = {}
    for name, kind in RUNNERS.items():
        sharing = {"min_saved": min_saved} if min_saved is not None and issubclass(kind, SharedPrefixRunner) else {}
        runners[name] = kind(model, blocks, BLOCK_SIZE, **(settings or {}), **sharing)
    engines = {
        name: lambda runner=runner: serving_compared.engine_over(
            runner, max_batch=requests, token_budget=token_budget, prefix_caching=True
        )
        for name, runner in runners.items()
    }

    def keep_beginning(engine: Any) -> None:
        engine.generate([beginning], SamplingParams(max_new_tokens=1, ignore_eos=True))

    served = serving_compared.served(engines, prompts, params, runs, keep_beginning)
    outputs = {name: done[-1].outputs for name, done in served.items()}
    wide = serving_work.widened(model)
    agreement = {
        name: serving_work.token_agreement(wide, prompts[:CHECKED], outputs[name][:CHECKED])
        for name in ("separately", "once")
    }
    del wide
    results = {}
    for name, make in engines.items():
        engine = make()
        keep_beginning(engine)
        results[name] = serving_compared.result(served[name], serving_compared.idle(engine, prompts, params))
    decode = [step for step in served["once"][-1].steps if all(count == 1 for _, _, count in step.chunks)]
    per_token = config.kv_bytes_per_token(dtype.itemsize)
    read = {
        name: sum(
            config.parameters * dtype.itemsize
            + kv_bytes_read(common, [first + 1 - common for _, first, _ in step.chunks], per_token, reads)
            for step in decode
        )
        for name, reads in (("separately", None), ("once", 1))
    }
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": config.parameters,
        "requests": requests,
        "common_tokens": common,
        "own_tokens": sum(len(prompt) - common for prompt in prompts),
        "output_tokens": served["once"][-1].tokens,
        "blocks": blocks,
        "block_size": BLOCK_SIZE,
        "tokens": agreement,
        "same": sum(one == other for one, other in zip(outputs["separately"], outputs["once"], strict=True)),
        "bytes": read,
        "bandwidth": serving_compared.bandwidths(),
        "shared_steps": runners["once"].shared_steps,
        "engines": results,
        "gain": {
            "alternating": serving_compared.ratio(served["separately"], served["once"]),
            "overlapped": serving_compared.ratio(served["separately, overlapped"], served["once, overlapped"]),
        },
    }


def table(results: Mapping[str, Any]) -> str:
    """What each engine reached, in a few lines."""
    lines = [
        f"right, {name}: {found['equal']} of {found['checked']} tokens are float32's, the others within "
        f"{found['largest_gap']:.3f}"
        for name, found in results["tokens"].items()
    ]
    lines.append(f"{results['same']} of {results['requests']} requests got the same tokens both ways")
    for name, found in results["engines"].items():
        lines.append(f"{name}: {found['tokens_per_second']:,.0f} tokens/s ({found['seconds']:.3f} s)")
        if found["idle"]:
            lines.append(f"  {serving_compared.idle_shares(found['idle'])}")
    fewer = results["bytes"]["separately"] / results["bytes"]["once"]
    lines.append(f"bytes of the decode steps, separately over once: {fewer:.2f}")
    lines += [f"read once, {name}: {gain['ratio']:.2f} times as fast" for name, gain in results["gain"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("shared_prefix", measure, table, SCHEMA))
