"""A token with a cache and without one, and a decode step over batch and context, beside what it must read.

The model has the shape of Qwen3-0.6B and random weights, bf16. Nothing of a serving engine is here: the cache is one
reserved tensor, every sequence of a batch is as long as the others, and attention is PyTorch's own. The query heads
that share a key head stand in one matrix of H/G rows, so that keys and values are read once.

- ``contexts``: the next token of one sequence of ``context`` tokens, computed from all of them (``recomputed``) and
  from the last one and a cache of the others (``cached``).
- ``steps``: a decode step of ``batch`` sequences of ``context`` tokens each; ``bytes`` are the weights once and every
  sequence's cache once, ``flops`` two a weight and token and four a cached number pair of attention.
- ``launched``: the step of one sequence launched from Python kernel by kernel.

All others are replayed as CUDA graphs, so that their time is the GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import benchmark_cli, operator_classes
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import Decoder, ModelConfig, attend_causally
from utils.serving.model import rotary_frequencies

#: Qwen3-0.6B (its config.json), with as many positions as are measured.
SHAPE = ModelConfig(
    family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
    num_kv_heads=8, head_dim=128, max_seq_len=16384, rope_theta=1e6, qk_norm=True, tied_head=True,
)  # fmt: skip
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEP_CONTEXTS = (128, 1024, 4096)
#: Bytes of keys and values that a step may have: what fits beside the weights and PyTorch's own.
LARGEST_CACHE = 40e9


class Slots:
    """The cache of a batch in which every sequence has ``context`` tokens; the last of them is the step's own."""

    def __init__(self, config: ModelConfig, batch: int, context: int, dtype: torch.dtype) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, context, config.head_dim)
        self.keys, self.values = (torch.randn(shape, device=runtime.DEVICE, dtype=dtype) for _ in range(2))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What one query a sequence (B, 1, H, D) sees; ``k`` and ``v`` (B, 1, G, D) become the last slot."""
        keys, values = self.keys[layer], self.values[layer]  # (B, G, N, D)
        keys[:, :, -1], values[:, :, -1] = k[:, 0], v[:, 0]
        packed = q[:, 0].unflatten(1, (keys.shape[1], -1))  # (B, G, H / G, D): they share their keys
        return F.scaled_dot_product_attention(packed, keys, values).flatten(1, 2).unsqueeze(1)


def random_model(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """A model with weights drawn at random, small enough that nothing overflows."""
    with torch.device(runtime.DEVICE):
        model = Decoder(config).to(dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.normal_(std=0.02)
    model.frequencies = rotary_frequencies(config).to(runtime.DEVICE)  # float32 whatever the weights are
    return model


def replayed(step: Callable[[], object]) -> Callable[[], object]:
    """``step`` as one CUDA graph. The graph knows addresses only, so whoever holds it here holds the step's tensors."""
    replay = operator_classes.replayed(step)

    def again() -> object:
        replay()
        return step

    return again


def next_tokens(model: Decoder, tokens: Tensor, positions: Tensor, attend: Callable) -> Tensor:
    """The likeliest token after each sequence of ``tokens`` (B, N), (B,)."""
    return model.logits(model.hidden(tokens, positions, attend)[:, -1]).argmax(-1)


def decode_step(model: Decoder, batch: int, context: int) -> Callable[[], Tensor]:
    """A function that computes the next token of ``batch`` sequences of ``context`` tokens from a cache."""
    cache = Slots(model.config, batch, context, model.dtype)
    tokens = torch.randint(model.config.vocab_size, (batch, 1), device=runtime.DEVICE)
    positions = torch.full_like(tokens, context - 1)
    return lambda: next_tokens(model, tokens, positions, cache)


def whole_pass(model: Decoder, context: int) -> Callable[[], Tensor]:
    """A function that computes the next token of one sequence from all of its ``context`` tokens."""
    tokens = torch.randint(model.config.vocab_size, (1, context), device=runtime.DEVICE)
    positions = torch.arange(context, device=runtime.DEVICE).unsqueeze(0)
    return lambda: next_tokens(model, tokens, positions, attend_causally)


def step_cost(config: ModelConfig, batch: int, context: int, element_size: int = 2) -> tuple[int, int]:
    """FLOPs and least bytes of a decode step: what lecture 10 derives.

    A tied embedding is read once, as the head. Of the cache each sequence's own is read once.
    """
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    flops = batch * (2 * config.parameters + attention)
    return flops, element_size * config.parameters + batch * context * config.kv_bytes_per_token(element_size)


SCHEMA = {
    "dtype": TEXT,
    "model": {"name": TEXT, **each(SIZE, "parameters", "layers", "cache_bytes_per_token")},
    "contexts": [{"context": SIZE, "cached": TIMING, "recomputed": TIMING, **RATIO}],
    "steps": [
        {
            **each(SIZE, "batch", "context", "flops", "bytes"),
            **TIMING,
            "bytes_per_second": POSITIVE,
            "tokens_per_second": POSITIVE,
        }
    ],
    "launched": {"batch": SIZE, "context": SIZE, **TIMING},
}


@benchmark_cli.quiet()
@torch.no_grad()
def measure(
    quick: bool = False,
    config: ModelConfig = SHAPE,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    step_contexts: Sequence[int] = STEP_CONTEXTS,
    rounds: int = 25,
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` takes few sizes.

    Raises:
        RuntimeError: there is no GPU here.
    """
    if quick:
        contexts, batches, step_contexts, rounds = contexts[:3], batches[:3], step_contexts[:2], 8
    torch.manual_seed(0)
    model = random_model(config, torch.bfloat16)
    launched = timing.measure(decode_step(model, 1, step_contexts[0]), rounds=rounds, flush_l2=False)
    alone = []
    for context in contexts:
        calls = {"cached": decode_step(model, 1, context), "recomputed": whole_pass(model, context)}
        timed = timing.compare({name: replayed(call) for name, call in calls.items()}, rounds=rounds)
        alone.append(
            {
                "context": context,
                **{name: timed[name].as_dict() for name in calls},
                **timing.ratio(timed["recomputed"], timed["cached"]).as_dict(),
            }
        )
    steps = []
    for context in step_contexts:
        for batch in batches:
            if batch * context * config.kv_bytes_per_token(2) > LARGEST_CACHE:
                continue
            flops, moved = step_cost(config, batch, context)
            timed_step = timing.measure(replayed(decode_step(model, batch, context)), rounds=rounds)
            steps.append(
                {"batch": batch, "context": context, "flops": flops, "bytes": moved, **timed_step.as_dict(),
                 "bytes_per_second": moved / timed_step.median, "tokens_per_second": batch / timed_step.median}
            )  # fmt: skip
    model_sizes = {"name": "Qwen3-0.6B shape", "parameters": config.parameters, "layers": config.num_layers}
    return {
        "dtype": "bf16",
        "model": model_sizes | {"cache_bytes_per_token": config.kv_bytes_per_token(2)},
        "contexts": alone,
        "steps": steps,
        "launched": {"batch": 1, "context": step_contexts[0], **launched.as_dict()},
    }


def table(results: dict[str, Any]) -> str:
    """One line a context, then one a step."""
    alone = [
        [f"{p['context']:,}", f"{p['cached']['seconds'] * 1e3:.3f}", f"{p['recomputed']['seconds'] * 1e3:.3f}",
         f"{p['ratio']:.1f}"]
        for p in results["contexts"]
    ]  # fmt: skip
    steps = [
        [f"{p['context']:,} x {p['batch']}", f"{p['seconds'] * 1e3:.3f}", f"{p['tokens_per_second']:,.0f}",
         f"{p['bytes_per_second'] / 1e12:.2f}"]
        for p in results["steps"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            benchmark_cli.text_table(["context", "cached ms", "recomputed ms", "x"], alone),
            benchmark_cli.text_table(["context x batch", "ms", "tokens/s", "TB/s"], steps),
            f"one sequence launched from Python: {results['launched']['seconds'] * 1e3:.3f} ms",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("decoding", measure, table, SCHEMA))
