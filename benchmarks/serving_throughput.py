"""Lab 5's engine at full load beside ``transformers``' ``generate_batch``, and beside what its memory allows.

A model of the shape of Qwen3-0.6B with random weights in bf16 serves 256 requests that all come at once: prompts of 100
to 1024 random tokens, 256 new tokens each, greedy, no end of text. Logits and tokens are first held against the same
model in float32. Then ours runs five times, of which the median counts; its cache is given back, so that theirs has as
much memory, and theirs runs twice, of which the quicker counts.

``bound_seconds`` is the least that the steps which really were done can take: all weights once a step, the keys and
values of every sequence once a step, over the memory's bandwidth (``peak``: its data sheet's, ``copy``: that of a copy
in the same run). ``steps`` are those of one run, ``kernels`` what the GPU does in a decode step of all requests.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, serving_peer, serving_work, trace
from benchmarks.decoding import SHAPE, random_model
from solutions.lab5_serving import ModelRunner
from utils import hardware, runtime, timing
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import ModelConfig, SamplingParams

REQUESTS, PROMPTS, NEW_TOKENS = 256, (100, 1024), 256
TOKEN_BUDGET, BLOCK_SIZE = 8192, 16
#: Runs of ours, and then of theirs, which by then has the GPU's memory to itself.
RUNS, QUICK_RUNS = (5, 2), (3, 0)
#: Requests that are compared with float32.
CHECKED = 6
#: What a kernel of a decode step belongs to, by a part of its name; the first that fits.
KINDS = (
    ("attention", ("paged_decode", "paged_extend", "merge_parts", "merge_kernel")),
    ("between the products", ("rms_norm", "rotate_and_store", "silu_and_multiply")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "splitK", "cublas")),
)


def draw_prompts(requests: int, lengths: tuple[int, int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random tokens; lengths are uniform, both ends included."""
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.randint(lengths[0], lengths[1] + 1, (requests,), generator=chance).tolist()
    return [torch.randint(vocabulary, (size,), generator=chance).tolist() for size in sizes]


def kind_of(kernel: str) -> str:
    """Which of ``KINDS`` a kernel is, or ``"sampling and copies"``."""
    for kind, parts in KINDS:
        if any(part in kernel for part in parts):
            return kind
    return "sampling and copies"


def decode_kernels(engine: Any, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any]:
    """What the GPU does in a decode step of all requests, in seconds by kind, and by the kernels that take longest."""
    for prompt in prompts:
        engine.add(prompt, params)
    while any(not request.output for request in engine.requests.values()):
        engine.step()
    for _ in range(3):
        engine.step()
    (kernels,) = trace.kernels_of([engine.step])
    for id in list(engine.requests):
        engine.abort(id)
    engine.step()
    kinds: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    for kernel in kernels:
        kinds[kind_of(kernel.name)] = kinds.get(kind_of(kernel.name), 0.0) + kernel.seconds
        names.setdefault(trace.short_name(kernel.name, 60), []).append(kernel.seconds)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "launches": len(kernels),
        "seconds": kinds,
        "longest": [{"name": name, "launches": len(each), "seconds": sum(each)} for name, each in longest],
    }


SCHEMA = {
    "dtype": TEXT,
    "model": each(SIZE, "parameters", "layers", "cache_bytes_per_token"),
    **each(SIZE, "requests", "prompt_tokens", "output_tokens", "token_budget", "blocks", "block_size"),
    "logits": each(NOT_NEGATIVE, "prefill_error", "decode_error", "torch_error", "allowed"),
    "tokens": {"checked": SIZE, "equal": COUNT, "largest_gap": NOT_NEGATIVE},
    "ours": {**TIMING, "tokens_per_second": POSITIVE},
    "bytes": SIZE,
    "bandwidth": {"peak": POSITIVE, "copy": POSITIVE},
    "bound_seconds": {"peak": POSITIVE, "copy": POSITIVE},
    "of_bound": {"peak": POSITIVE, "copy": POSITIVE},
    "decode": {"steps": SIZE, "seconds": POSITIVE, "bytes_per_second": POSITIVE},
    "mixed": {"steps": SIZE, "seconds": POSITIVE},
    "steps": [{"sequences": SIZE, "tokens": SIZE, "seconds": POSITIVE, "bytes": SIZE}],
    "theirs": {"version": TEXT, **TIMING, "tokens_per_second": POSITIVE, "same_first_token": COUNT, **RATIO},
    "kernels": {
        "launches": SIZE,
        "seconds": {str: POSITIVE},
        "longest": [{"name": TEXT, "launches": SIZE, "seconds": POSITIVE}],
    },
}


def measure(
    quick: bool = False,
    config: ModelConfig = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    requests: int = REQUESTS,
    lengths: tuple[int, int] = PROMPTS,
    new_tokens: int = NEW_TOKENS,
    token_budget: int = TOKEN_BUDGET,
    runs: tuple[int, int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All runs; ``quick`` leaves transformers out.

    Args:
        runs: of ours and of theirs.
        settings: of the runner.
    """
    runs = runs or (QUICK_RUNS if quick else RUNS)
    prompts = draw_prompts(requests, lengths, config.vocab_size)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    torch.manual_seed(0)
    model = random_model(config, dtype)
    blocks = serving_work.blocks_for([(len(prompt), new_tokens) for prompt in prompts], BLOCK_SIZE)
    runner = ModelRunner(model, blocks, BLOCK_SIZE, **(settings or {}))
    runner.warm_up(requests, lengths[1] + new_tokens)

    def engine() -> Any:
        return serving_work.engine_over(runner, max_batch=requests, token_budget=token_budget)

    wide = serving_work.widened(model)
    errors = serving_work.logits_errors(runner, wide, prompts[:CHECKED])
    warm = serving_work.serve(engine(), prompts, params)
    agreement = serving_work.token_agreement(wide, prompts[:CHECKED], warm.outputs[:CHECKED])
    serving_work.assert_right(errors, agreement)
    del wide
    kernels = decode_kernels(engine(), prompts, params) if runtime.HAS_GPU else None
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(runs[0]):
        run = serving_work.serve(engine(), prompts, params)
        seconds["ours"].append(run.seconds)
    runner, same = None, None
    if runs[1]:
        gc.collect()
        theirs = serving_peer.peer_of(model)
        serving_peer.generate(theirs, prompts[:4], 4)  # compiles and loads what it needs
        for _ in range(runs[1]):
            outputs, took = serving_peer.generate(theirs, prompts, new_tokens)
            seconds["theirs"].append(took)
            same = sum(mine[0] == other[0] for mine, other in zip(run.outputs, outputs, strict=True))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "model": {
            "parameters": config.parameters,
            "layers": config.num_layers,
            "cache_bytes_per_token": config.kv_bytes_per_token(dtype.itemsize),
        },
        "requests": requests,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": run.tokens,
        "token_budget": token_budget,
        "blocks": blocks,
        "block_size": BLOCK_SIZE,
        "logits": errors,
        "tokens": agreement,
        **rates(run, seconds, config, dtype.itemsize),
        "theirs": peer_results(seconds, run.tokens, same) if seconds["theirs"] else None,
        "kernels": kernels,
    }


def rates(run: Any, seconds: Mapping[str, Sequence[float]], config: ModelConfig, element_size: int) -> dict[str, Any]:
    """Our runs, their steps, and the bound of these steps."""
    ours = timing.summarize(seconds["ours"])
    steps = [
        {
            "sequences": len(step.chunks),
            "tokens": sum(count for _, _, count in step.chunks),
            "seconds": step.end - step.start,
            "bytes": serving_work.step_bytes(step, config, element_size),
        }
        for step in run.steps
    ]
    moved = sum(step["bytes"] for step in steps)
    gpu = hardware.this_gpu() or hardware.gpu("H100")
    copied = serving_work.copy_bandwidth() if runtime.HAS_GPU else gpu.memory_bandwidth
    bandwidth = {"peak": gpu.memory_bandwidth, "copy": copied}
    bounds = {name: moved / rate for name, rate in bandwidth.items()}
    decode = [step for step in steps if step["tokens"] == step["sequences"]]
    decode_seconds = sum(step["seconds"] for step in decode)
    mixed = [step for step in steps if step["tokens"] != step["sequences"]]
    return {
        "ours": {**ours.as_dict(), "tokens_per_second": run.tokens / ours.median},
        "bytes": moved,
        "bandwidth": bandwidth,
        "bound_seconds": bounds,
        "of_bound": {name: bound / ours.median for name, bound in bounds.items()},
        "decode": {
            "steps": len(decode),
            "seconds": decode_seconds,
            "bytes_per_second": sum(step["bytes"] for step in decode) / decode_seconds,
        },
        "mixed": {"steps": len(mixed), "seconds": sum(step["seconds"] for step in mixed)},
        "steps": steps,
    }


def peer_results(seconds: Mapping[str, Sequence[float]], tokens: int, same: int | None) -> dict[str, Any]:
    """Their runs, the quickest for the rate, and how many times as fast ours are."""
    ours, theirs = seconds["ours"], seconds["theirs"]
    median = timing.summarize(ours).median
    return {
        "version": serving_peer.version(),
        **timing.summarize(theirs).as_dict(),
        "tokens_per_second": tokens / min(theirs),
        "same_first_token": same,
        "ratio": min(theirs) / median,
        "ratio_low": min(theirs) / max(ours),
        "ratio_high": max(theirs) / min(ours),
    }


def table(results: Mapping[str, Any]) -> str:
    """What was reached, in a few lines."""
    ours, bandwidth = results["ours"], results["bandwidth"]
    errors, tokens, decode = results["logits"], results["tokens"], results["decode"]
    mixed = results["mixed"]
    lines = [
        f"right: logits off by {errors['prefill_error']:.1e} (prefill) and {errors['decode_error']:.1e} (decode), "
        f"plain PyTorch's by {errors['torch_error']:.1e}; {tokens['equal']} of {tokens['checked']} tokens are "
        f"float32's, the others within {tokens['largest_gap']:.3f}",
        f"ours: {ours['tokens_per_second']:,.0f} tokens/s ({ours['seconds']:.3f} s, {len(results['steps'])} steps), "
        + ", ".join(
            f"{results['of_bound'][name]:.1%} of the bound by {name} ({rate / 1e12:.2f} TB/s, "
            f"{results['output_tokens'] / results['bound_seconds'][name]:,.0f} tokens/s)"
            for name, rate in bandwidth.items()
        ),
        f"steps with prompts: {mixed['steps']}, {mixed['seconds']:.3f} s; decode steps: {decode['steps']}, "
        f"{decode['seconds'] / max(1, decode['steps']) * 1e3:.2f} ms each, "
        f"{decode['bytes_per_second'] / 1e12:.2f} TB/s",
    ]
    if results["theirs"]:
        theirs = results["theirs"]
        lines.append(
            f"transformers {theirs['version']}: {theirs['tokens_per_second']:,.0f} tokens/s; ours is "
            f"{theirs['ratio']:.1f} times as fast; {theirs['same_first_token']} of {results['requests']} first tokens "
            "are the same"
        )
    if results["kernels"]:
        kernels = results["kernels"]
        lines.append(f"a decode step: {kernels['launches']} launches, {sum(kernels['seconds'].values()) * 1e3:.2f} ms")
        lines += [f"  {kind:22s} {seconds * 1e3:7.3f} ms" for kind, seconds in kernels["seconds"].items()]
        lines += [f"    {k['launches']:4d} x {k['name']}: {k['seconds'] * 1e3:.3f} ms" for k in kernels["longest"]]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("serving_throughput", measure, table, SCHEMA))
