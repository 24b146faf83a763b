"""Lab 5's engine over weights of 4 bits and a cache of 8, beside itself in bf16, at full load.

The work is that of :mod:`.serving_throughput`: a model of the shape of Qwen3-0.6B with random weights serves 256
requests that all come at once, prompts of 100 to 1024 random tokens, 256 new tokens each, greedy. All engines run in
turns. ``gain`` is in tokens per second over the engine of the same kind in bf16. Logits are held against a float32
model of the same rounded weights, so that ``errors`` are those of the kernels and of the cache in fp8.
"""

from __future__ import annotations

import gc
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
from solutions.lab6_frontiers import LowBitRunner, OverlappedRunner
from utils.record_schemas import NOT_NEGATIVE, SIZE, TEXT, each
from utils.serving import Decoder, ModelConfig, SamplingParams


class OverlappedLowBitRunner(OverlappedRunner, LowBitRunner):
    """Both: few bits, and newest tokens that come from the device."""


RUNS, QUICK_RUNS = 2, 1
LOW = {"weights": "int4", "cache": "fp8"}
#: What each engine's runner is, and its bits.
RUNNERS: Mapping[str, tuple[type[ModelRunner], Mapping[str, str]]] = {
    "bf16": (ModelRunner, {}),
    "int4 weights": (LowBitRunner, {"weights": "int4"}),
    "fp8 cache": (LowBitRunner, {"cache": "fp8"}),
    "int4 and fp8": (LowBitRunner, LOW),
    "bf16, overlapped": (OverlappedRunner, {}),
    "int4 and fp8, overlapped": (OverlappedLowBitRunner, LOW),
}
#: A cache of e4m3 rounds each number by up to 1/16; averaged over many tokens, logits are off by much less.
ALLOWED = 0.15

SCHEMA = {
    "dtype": TEXT,
    **each(SIZE, "parameters", "requests", "prompt_tokens", "output_tokens", "token_budget", "blocks", "block_size"),
    "errors": {str: each(NOT_NEGATIVE, "prefill_error", "decode_error", "torch_error", "allowed")},
    "engines": {str: serving_compared.RESULT},
    "gain": {str: serving_compared.TIMES},
}


def rounded(model: Decoder) -> Decoder:
    """A runner's model in float32, with the weights that it multiplies by."""
    with torch.device("meta"):
        wide = Decoder(model.config)
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not isinstance(module.weight, torch.Tensor):
            weights[f"{name}.weight"] = module.weight.packed.dequantize().float()
    if model.config.tied_head:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    wide.load_state_dict(weights, assign=True)
    if model.config.tied_head:
        wide.lm_head.weight = wide.embed_tokens.weight
    wide.frequencies = model.frequencies
    return wide.eval().requires_grad_(False)


def errors(runner: ModelRunner, prompts: list[list[int]]) -> dict[str, float]:
    """How far a runner's logits are from those of its own weights in float32, |x - x32| / |x32|.

    Raises:
        AssertionError: further than allowed.
    """
    found = serving_work.logits_errors(runner, rounded(runner.model), prompts)
    if getattr(runner, "cache", None) == "fp8":
        found["allowed"] = max(ALLOWED, found["allowed"])
    for kind in ("prefill_error", "decode_error"):
        if not found[kind] <= found["allowed"]:
            raise AssertionError(f"{kind} of the logits is {found[kind]:.2e}, allowed {found['allowed']:.2e}")
    return found


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
    names: tuple[str, ...] = tuple(RUNNERS),
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` runs each engine once. ``settings`` are the runners'."""
    runs = runs or (QUICK_RUNS if quick else RUNS)
    prompts = draw_prompts(requests, lengths, config.vocab_size)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    torch.manual_seed(0)
    model = random_model(config, dtype)
    blocks = serving_work.blocks_for([(len(prompt), new_tokens) for prompt in prompts], BLOCK_SIZE)
    engines, found_errors = {}, {}
    for name in names:
        kind, bits = RUNNERS[name]
        runner = kind(model, blocks, BLOCK_SIZE, **bits, **(settings or {}))
        found_errors[name] = errors(runner, prompts[:CHECKED])
        gc.collect()
        engines[name] = lambda runner=runner: serving_compared.engine_over(
            runner, max_batch=requests, token_budget=token_budget
        )
    served = serving_compared.served(engines, prompts, params, runs)
    results = {
        name: serving_compared.result(served[name], serving_compared.idle(make(), prompts, params))
        for name, make in engines.items()
    }
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": config.parameters,
        "requests": requests,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": served[names[0]][-1].tokens,
        "token_budget": token_budget,
        "blocks": blocks,
        "block_size": BLOCK_SIZE,
        "errors": found_errors,
        "engines": results,
        "gain": {
            name: serving_compared.ratio(served["bf16" + ", overlapped" * name.endswith(", overlapped")], served[name])
            for name in names
            if not name.startswith("bf16")
        },
    }


def table(results: Mapping[str, Any]) -> str:
    """What each engine reached, in a few lines."""
    lines = []
    for name, found in results["engines"].items():
        off = results["errors"][name]
        lines.append(
            f"{name}: {found['tokens_per_second']:,.0f} tokens/s ({found['seconds']:.3f} s); logits off by "
            f"{off['prefill_error']:.1e} (prefill) and {off['decode_error']:.1e} (decode), PyTorch's by "
            f"{off['torch_error']:.1e}"
        )
        if found["idle"]:
            lines.append(f"  {serving_compared.idle_shares(found['idle'])}")
    lines += [f"{name}: {gain['ratio']:.2f} times bf16's tokens per second" for name, gain in results["gain"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("low_bit_serving", measure, table, SCHEMA))
