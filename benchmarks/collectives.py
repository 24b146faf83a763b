"""How fast the ring collectives of lab 4 and NCCL's move messages of 8 KiB to 512 MiB between 2 and 4 GPUs.

The bandwidth is that of the *bus*: what each rank sends by the ring algorithm, over the time; whatever the collective
and the number of ranks, it can be compared with the links'. A message is the full tensor, in bf16: what an all-reduce
reduces, what a reduce-scatter takes, what an all-gather gives. The reductions form means, which stay finite however
often they are repeated. Calls follow one another as in a program, the host's share in their time included,
``calls_a_lap`` of them in one lap, by interleaved rounds; before they are timed, ours and NCCL's results are compared
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import benchmark_cli, ranks
from benchmarks.sustained import repeated
from solutions.lab4_zero.async_collectives import all_gather, all_reduce_mean, reduce_scatter_mean
from solutions.lab4_zero.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from utils import distributed, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING
from utils.transformer_math import ring_volume

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
#: Bytes of the full tensor.
SIZES = tuple(2**k for k in range(13, 30, 2))
#: A lap moves about this many bytes, in at most MOST_CALLS calls.
LAP_BYTES, MOST_CALLS = 2**27, 20
WARMUP, ROUNDS = 2, 10
OURS, NCCL = "ours", "nccl"


def functions(kind: str, size: int) -> dict[str, Callable[[], Tensor]]:
    """Lab 4's and the backend's collective on a tensor of ``size`` bytes; each call returns its result.

    The values are small whole numbers: sums and means of them by up to 4 ranks are exact in bf16, in any order.
    """
    world_size, rank, device = dist.get_world_size(), dist.get_rank(), distributed.device()
    generator = torch.Generator().manual_seed(rank)
    few = torch.randint(8, (1024,), generator=generator)
    n = size // 2
    whole = few.repeat(-(-n // 1024))[:n].to(device, torch.bfloat16)
    shard = whole.chunk(world_size)[rank].clone()
    result = torch.empty_like(whole)
    result_shard = torch.empty_like(shard)
    if kind == "all_reduce":
        ours, theirs = whole.clone(), whole.clone()
        return {
            OURS: lambda: ring_all_reduce(ours, op="mean"),
            NCCL: lambda: all_reduce_mean(theirs).wait(),
        }
    if kind == "reduce_scatter":
        return {
            OURS: lambda: ring_reduce_scatter(whole, op="mean"),
            NCCL: lambda: reduce_scatter_mean(result_shard, whole).wait(),
        }
    return {OURS: lambda: ring_all_gather(shard), NCCL: lambda: all_gather(result, shard).wait()}


def on_rank(sizes: Sequence[int], warmup: int, rounds: int) -> list[dict[str, Any]]:
    """Samples of each kind and size on this rank, in seconds a call.

    Raises:
        AssertionError: ours and the backend's results differ.
    """
    found = []
    for kind in KINDS:
        for size in sizes:
            ranks.note(f"{kind} of {size} bytes")
            pair = functions(kind, size)
            torch.testing.assert_close(pair[OURS](), pair[NCCL](), rtol=0, atol=0)
            calls = max(1, min(MOST_CALLS, LAP_BYTES // size))
            laps = {name: repeated(call, calls) for name, call in pair.items()}
            samples = ranks.compare(laps, warmup=warmup, rounds=rounds)
            per_call = {name: tuple(s / calls for s in lap) for name, lap in samples.items()}
            found.append({"kind": kind, "size": size, "calls": calls, "samples": per_call})
    return found


def point(world_size: int, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One kind and size of the record, from what each rank found."""
    first = of_ranks[0]
    timed = ranks.slowest([found["samples"] for found in of_ranks])
    sent = ring_volume(first["kind"], first["size"], world_size)
    return {
        "world_size": world_size,
        "kind": first["kind"],
        "bytes": first["size"],
        "sent_bytes": sent,
        "calls_a_lap": first["calls"],
        "timed": {name: {**t.as_dict(), "bus_bytes_per_second": sent / t.median} for name, t in timed.items()},
        **timing.ratio(timed[OURS], timed[NCCL]).as_dict(),
    }


SCHEMA = {
    "dtype": TEXT,
    "points": [
        {
            "world_size": SIZE,
            "kind": TEXT,
            "bytes": SIZE,
            "sent_bytes": POSITIVE,
            "calls_a_lap": SIZE,
            "timed": {str: {**TIMING, "bus_bytes_per_second": POSITIVE}},
            **RATIO,
        }
    ],
}


def measure(
    quick: bool = False,
    world_sizes: Sequence[int] | None = None,
    sizes: Sequence[int] = SIZES,
    warmup: int = WARMUP,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """All kinds and sizes on each world size; ``quick`` takes every third size and few rounds.

    Args:
        world_sizes: by default those that this machine has GPUs for.
        sizes: bytes of the full tensor, multiples of 2 world_size.
    """
    sizes, rounds = (tuple(sizes)[::3], min(rounds, 4)) if quick else (sizes, rounds)
    points = []
    for world_size in world_sizes or ranks.world_sizes():
        answers = ranks.launch(on_rank, tuple(sizes), warmup, rounds, world_size=world_size)
        points += [point(world_size, of_ranks) for of_ranks in zip(*answers, strict=True)]
    return {"dtype": "bf16", "points": points}


def table(results: Mapping[str, Any]) -> str:
    """One line a message: bus bandwidth of ours and NCCL's, and how many times longer ours takes."""
    rows = [
        [
            f"{p['world_size']} x {p['kind']}",
            f"{p['bytes'] / 2**20:g}",
            *(f"{p['timed'][name]['bus_bytes_per_second'] / 1e9:.2f}" for name in (OURS, NCCL)),
            *(f"{p['timed'][name]['seconds'] * 1e6:.0f}" for name in (OURS, NCCL)),
            f"{p['ratio']:.2f}",
        ]
        for p in results["points"]
    ]
    return benchmark_cli.text_table(["N x kind", "MiB", "ours GB/s", "nccl", "ours us", "nccl", "ratio"], rows)


if __name__ == "__main__":
    raise SystemExit(ranks.run("collectives", measure, table, SCHEMA))
