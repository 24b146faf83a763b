"""Which tiles, warps, stages and parts make the kernels over the paged cache fast: prints tables, records nothing.

``python -m benchmarks.paged_sweep`` compiles every configuration in several processes, then times each; the numbers
that it finds best stand in ``solutions/lab5_serving/tuning.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import paged_attention as bench
from solutions.lab5_serving import tuning
from solutions.lab5_serving.paged_decode import paged_attention_decode
from solutions.lab5_serving.paged_extend import paged_attention_extend
from utils import runtime

import triton  # isort: skip

#: (tokens of a tile, warps, stages)
DECODE = [
    (16, 1, 5), (16, 1, 9), (32, 1, 3), (32, 1, 5), (32, 1, 7), (64, 1, 5),
    (32, 2, 1), (32, 2, 3), (32, 2, 5), (32, 2, 7), (64, 2, 1), (64, 2, 3), (64, 2, 5), (64, 2, 7),
    (32, 4, 1), (32, 4, 2), (32, 4, 3), (32, 4, 5), (32, 4, 7),
    (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 4, 5), (64, 4, 7), (64, 8, 1), (64, 8, 3), (64, 8, 5),
    (128, 4, 1), (128, 4, 2), (128, 4, 3), (128, 4, 5), (128, 8, 1), (128, 8, 2), (128, 8, 3), (128, 8, 5),
]  # fmt: skip
#: (rows of a tile, tokens, warps, stages)
EXTEND = [
    (m, n, warps, stages)
    for m, warps in ((64, 4), (128, 4), (128, 8))
    for n in (32, 64, 128)
    for stages in (1, 2, 3, 5)
]
MANY_SPLITS = (1, 2, 3, 4, 8)
ONE_SPLITS = (1, 16, 24, 32, 33, 48, 64, 66, 96, 128)


def ms(call, rep: int = 25) -> float:
    return triton.testing.do_bench(call, warmup=8, rep=rep, return_mode="median")


def with_tile(name: str, tile: tuple[int, ...]) -> None:
    setattr(tuning, name, lambda head_dim, dtype, group, capability: tuning.Tile(*tile))


def head_major(given: bench.Inputs) -> bench.Inputs:
    """The same cache with the tokens of a head side by side in a block."""
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (given.k_cache, given.v_cache))
    return replace(given, k_cache=k, v_cache=v)


def ragged(sequences: int, longest: int) -> bench.Inputs:
    given = bench.inputs((sequences, longest))
    chance = torch.Generator().manual_seed(1)
    lengths = torch.randint(100, longest, (sequences,), generator=chance).int().to(runtime.DEVICE)
    return replace(given, context_lens=lengths)


def chunks(count: int, queries: int, context: int):
    """``count`` chunks of ``queries`` tokens, each the end of a context."""
    given = bench.inputs((count, context))
    q = torch.randn(count * queries, bench.HEADS, bench.HEAD_DIM, device=runtime.DEVICE, dtype=bench.DTYPE)
    starts = torch.arange(0, count * queries + 1, queries, dtype=torch.int32, device=runtime.DEVICE)
    return lambda: paged_attention_extend(
        q, given.k_cache, given.v_cache, given.block_tables, starts, given.context_lens
    )


def decode_lines(shapes: dict, splits: dict, deadline: float) -> list[dict]:
    found = []
    for tile in DECODE:
        with_tile("decode", (16, *tile))
        for name, given in shapes.items():
            nbytes = 2 * int(given.context_lens.sum()) * bench.KV_HEADS * bench.HEAD_DIM * 2
            for parts in splits[name]:
                if time.monotonic() > deadline:
                    return found
                try:
                    took = ms(functools.partial(given.attention, parts), 12 if parts == 1 and name == "one" else 25)
                except Exception as error:
                    print("refused", tile, str(error)[:80])
                    continue
                found.append({"kernel": "decode", "shape": name, "tile": tile, "parts": parts, "ms": took,
                              "tbs": nbytes / took / 1e9})  # fmt: skip
    return found


def compile_some(index: int, of: int) -> None:
    small = bench.inputs((2, 256))
    run = chunks(2, 64, 128)
    for tile in DECODE[index::of]:
        with_tile("decode", (16, *tile))
        for parts in (1, 2):
            with contextlib.suppress(Exception):
                small.attention(parts)
    for tile in EXTEND[index::of]:
        with_tile("extend", tile)
        with contextlib.suppress(Exception):
            run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    if options.compile:
        return compile_some(*options.compile)
    begin = time.monotonic()
    workers = min(14, os.cpu_count() or 1)
    children = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.paged_sweep", "--compile", str(i), str(workers)])
        for i in range(workers)
    ]
    for child in children:
        child.wait()
    print(f"compiled in {time.monotonic() - begin:.0f} s", torch.cuda.get_device_name(), triton.__version__)
    copy_bytes = bench.bytes_read(bench.BATCHED)
    copy = copy_bytes / ms(bench.copy_call(copy_bytes), 100) / 1e9
    print(f"copy {copy:.3f} TB/s")
    many, one = bench.inputs(bench.BATCHED), bench.inputs(bench.LONG)
    check(many)
    shapes = {"many": many, "many, head-major": head_major(many), "one": one, "ragged": ragged(64, 1280)}
    splits = {"many": MANY_SPLITS, "many, head-major": (1, 2, 4), "one": ONE_SPLITS, "ragged": (1, 2, 3, 4)}
    lines = decode_lines(shapes, splits, begin + options.seconds)
    for name in shapes:
        for parts in (None, 1) if name == "one" else (None,):
            chosen = [x for x in lines if x["shape"] == name and parts in (None, x["parts"])]
            print(f"-- {name}" + (" unsplit" if parts else ""))
            for x in sorted(chosen, key=lambda x: x["ms"])[: 14 if parts is None else 40]:
                print(f"{x['tile']!s:14} parts {x['parts']:3} {x['ms'] * 1e3:9.1f} us {x['tbs']:.3f} TB/s "
                      f"{x['tbs'] / copy:.3f}")  # fmt: skip
    calls = {"8 x 512": (8, 512, 512), "1 x 4096": (1, 4096, 4096), "4 x 128 of 1024": (4, 128, 1024)}
    for name, sizes in calls.items():
        run, found = chunks(*sizes), []
        for tile in EXTEND:
            with_tile("extend", tile)
            try:
                found.append((ms(run, 15), tile))
            except Exception as error:
                print("refused", tile, str(error)[:80])
        count, queries, context = sizes
        flops = 4 * bench.HEADS * bench.HEAD_DIM * count * sum(context - queries + i + 1 for i in range(queries))
        print(f"-- extend {name}")
        for took, tile in sorted(found)[:8]:
            print(f"{tile} {took * 1e3:.1f} us {flops / took / 1e9:.0f} TFLOP/s")
            lines.append({"kernel": "extend", "shape": name, "tile": tile, "ms": took})
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "paged_sweep.json").write_text(json.dumps({"copy_tbs": copy, "lines": lines}))
    print(f"done after {time.monotonic() - begin:.0f} s")


def check(given: bench.Inputs) -> None:
    """Ours beside PyTorch's on a small part, so that no wrong kernel is called fast."""
    few = replace(given, q=given.q[:2], block_tables=given.block_tables[:2], context_lens=given.context_lens[:2])
    right = few.gathered().float()
    for parts in (1, 4):
        error = (few.attention(parts).float() - right).norm() / right.norm()
        print(f"error beside PyTorch with {parts} parts: {error:.1e}")
        assert error < 1e-2
    lengths = torch.tensor([777, 8192], dtype=torch.int32, device=runtime.DEVICE)
    a, b = (
        paged_attention_decode(few.q, few.k_cache, few.v_cache, few.block_tables, lengths, num_splits=parts)
        for parts in (1, 7)
    )
    print(f"ragged, 1 part beside 7: {(a - b).abs().max():.1e}")


if __name__ == "__main__":
    main()
