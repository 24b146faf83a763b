"""Decode attention over a paged cache: its bandwidth beside a copy's, and long contexts whole and in parts, bf16.

The heads of Qwen3-0.6B: 16 of queries, 8 of keys and values, D = 128; blocks of 16 tokens, in random order. Every byte
of the keys and values is read once, so what there is to reach is the bandwidth of the memory. ``batched`` is many
sequences beside a copy of as many bytes, and beside PyTorch, which gathers the blocks into one tensor first. ``long``
is one sequence, for which a program a key head is far too few: unsplit, and in the parts that the kernel chooses.
``points`` sweeps the context of one sequence and ``by_splits`` the number of parts.

A time is that of one call, the kernel that merges the parts included, with the L2 cache flushed before it; all that is
compared takes turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import benchmark_cli, blocked_stream
from benchmarks.thermal_warmup import thermal_warmup
from solutions.lab5_serving import tuning
from solutions.lab5_serving.paged_decode import paged_attention_decode
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
DTYPE = torch.bfloat16
#: (sequences, tokens of each)
Shape = tuple[int, int]
BATCHED: Shape = (64, 8192)
LONG: Shape = (1, 65536)
CONTEXTS = tuple(1 << power for power in range(9, 18))
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS = 25


@dataclass(frozen=True)
class Inputs:
    """A step of decode: a query a sequence, and a cache whose blocks belong to the sequences in random order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    context: int

    def attention(self, num_splits: int | None = None) -> torch.Tensor:
        """Ours, (S, H, D)."""
        return paged_attention_decode(
            self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens, num_splits=num_splits
        )

    def gathered(self) -> torch.Tensor:
        """PyTorch's attention on a gathered copy of the blocks, (S, H, D); all contexts have the same length."""
        blocks = (cache[self.block_tables].flatten(1, 2) for cache in (self.k_cache, self.v_cache))
        k, v = (x[:, : self.context].transpose(1, 2) for x in blocks)  # (S, G, context, D)
        return F.scaled_dot_product_attention(self.q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)


def inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Random values; every block of the cache is in use, once."""
    sequences, context = shape
    blocks = -(-context // BLOCK_SIZE)
    chance = torch.Generator(runtime.DEVICE).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=chance, device=runtime.DEVICE, dtype=DTYPE)

    order = torch.randperm(sequences * blocks, generator=chance, device=runtime.DEVICE)
    cache = (sequences * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return Inputs(
        normal(sequences, HEADS, HEAD_DIM),
        normal(*cache),
        normal(*cache),
        order.view(sequences, blocks).int(),
        torch.full((sequences,), context, dtype=torch.int32, device=runtime.DEVICE),
        context,
    )


def bytes_read(shape: Shape) -> int:
    """Bytes of the keys and values of one layer, each read once: what a step must move, but for queries and results."""
    sequences, context = shape
    return 2 * sequences * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def chosen_splits(shape: Shape) -> int:
    """Parts that the kernel takes by itself."""
    sequences, context = shape
    longest = -(-context // BLOCK_SIZE) * BLOCK_SIZE
    return tuning.splits(sequences * KV_HEADS, longest, tuning.multiprocessors(runtime.DEVICE))


def copy_call(nbytes: int) -> Callable[[], object]:
    """A copy on the GPU that reads and writes ``nbytes`` in all."""
    source = torch.randint(0, 256, (nbytes // 2,), dtype=torch.uint8, device=runtime.DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def compare(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, timing.Timing]:
    """Times of calls that take turns."""
    return timing.compare(calls, warmup=3, rounds=rounds, stopwatch=blocked_stream.stopwatch())


def rated(timed: timing.Timing, nbytes: int) -> dict[str, float | int]:
    """A timing for the record, with the bytes that were needed over the time."""
    return {**timed.as_dict(), "bytes_per_second": nbytes / timed.median}


def batched(shape: Shape, rounds: int) -> dict[str, Any]:
    """Ours beside a copy and beside PyTorch."""
    given, nbytes = inputs(shape), bytes_read(shape)
    calls = {"ours": given.attention, "copy": copy_call(nbytes), "gathered": given.gathered}
    thermal_warmup(calls["ours"], runtime.pick(cpu=0, gpu=1))
    timed = compare(calls, rounds)
    return {
        "batch": shape[0],
        "context": shape[1],
        "bytes": nbytes,
        "splits": chosen_splits(shape),
        "timed": {name: rated(t, nbytes) for name, t in timed.items()},
        "of_copy": timing.ratio(timed["copy"], timed["ours"]).as_dict(),
        "over_gathered": timing.ratio(timed["gathered"], timed["ours"]).as_dict(),
    }


def split_and_unsplit(shape: Shape, rounds: int) -> dict[str, Any]:
    """The parts that the kernel chooses beside one part."""
    given, nbytes = inputs(shape), bytes_read(shape)
    timed = compare({"split": given.attention, "unsplit": lambda: given.attention(1)}, rounds)
    return {
        "batch": shape[0],
        "context": shape[1],
        "bytes": nbytes,
        "splits": chosen_splits(shape),
        "timed": {name: rated(t, nbytes) for name, t in timed.items()},
        **timing.ratio(timed["unsplit"], timed["split"]).as_dict(),
    }


def by_splits(shape: Shape, splits: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The same contexts in more and more parts."""
    given, nbytes = inputs(shape), bytes_read(shape)
    timed = compare({str(parts): lambda parts=parts: given.attention(parts) for parts in splits}, rounds)
    return [{"splits": parts, **rated(timed[str(parts)], nbytes)} for parts in splits]


#: Decode attention of a few sequences, in parts and in one.
_SPLIT = {
    **each(SIZE, "batch", "context", "bytes", "splits"),
    "timed": {str: {**TIMING, "bytes_per_second": POSITIVE}},
    **RATIO,
}
SCHEMA = {
    "dtype": TEXT,
    "shape": each(SIZE, "heads", "kv_heads", "head_dim", "block_size"),
    "batched": {
        **each(SIZE, "batch", "context", "bytes", "splits"),
        "timed": {str: {**TIMING, "bytes_per_second": POSITIVE}},
        "of_copy": RATIO,
        "over_gathered": RATIO,
    },
    "long": _SPLIT,
    "points": [_SPLIT],
    "by_splits": [{"splits": SIZE, **TIMING, "bytes_per_second": POSITIVE}],
}


def measure(
    quick: bool = False,
    many: Shape = BATCHED,
    long: Shape = LONG,
    contexts: Sequence[int] | None = None,
    splits: Sequence[int] = SPLITS,
    rounds: int | None = None,
) -> dict[str, Any]:
    """All of it; ``quick`` sweeps three contexts in few rounds.

    Raises:
        RuntimeError: there is no GPU here.
    """
    contexts = contexts or (CONTEXTS[::4] if quick else CONTEXTS)
    rounds = rounds or (9 if quick else ROUNDS)
    return {
        "dtype": "bf16",
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE},
        "batched": batched(many, rounds),
        "long": split_and_unsplit(long, rounds),
        "points": [split_and_unsplit((1, context), rounds) for context in contexts],
        "by_splits": by_splits(long, splits, rounds),
    }


def table(results: Mapping[str, Any]) -> str:
    """The batched step, then one line a context."""
    many = results["batched"]
    lines = [
        f"{many['batch']} x {many['context']} tokens, {many['splits']} parts: "
        + ", ".join(f"{name} {t['bytes_per_second'] / 1e12:.2f} TB/s" for name, t in many["timed"].items())
        + f"; {many['of_copy']['ratio']:.3f} of the copy, {many['over_gathered']['ratio']:.1f} x gathered"
    ]
    rows = [
        [
            f"{item['batch']} x {item['context']}",
            item["splits"],
            *(f"{item['timed'][name]['seconds'] * 1e6:,.1f}" for name in ("split", "unsplit")),
            f"{item['timed']['split']['bytes_per_second'] / 1e12:.2f}",
            f"{item['ratio']:.2f}",
        ]
        for item in (*results["points"], results["long"])
    ]
    lines.append(benchmark_cli.text_table(["tokens", "parts", "split, us", "unsplit, us", "TB/s", "faster"], rows))
    lines.append(
        "parts, us: " + ", ".join(f"{item['splits']} {item['seconds'] * 1e6:,.1f}" for item in results["by_splits"])
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("paged_attention", measure, table, SCHEMA))
