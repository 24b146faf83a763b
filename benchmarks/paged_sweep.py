"""Second sweep: parts, merge, other head dimensions and dtypes, chunks, cache writes. Temporary."""

from __future__ import annotations

import argparse
import contextlib
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
from solutions.lab5_serving.cache_write import write_kv
from solutions.lab5_serving.merge import merge_parts
from solutions.lab5_serving.paged_extend import paged_attention_extend
from utils import runtime

import triton  # isort: skip

ORIGINAL = {name: getattr(tuning, name) for name in ("decode", "extend", "merge", "write")}
#: name -> (query heads, key heads, D, dtype)
MODELS = {
    "D64 g2": (16, 8, 64, torch.bfloat16),
    "D64 g8": (32, 4, 64, torch.bfloat16),
    "D128 g1": (8, 8, 128, torch.bfloat16),
    "D128 g4": (32, 8, 128, torch.bfloat16),
    "D256 g4": (16, 4, 256, torch.bfloat16),
    "fp32 D64": (16, 8, 64, torch.float32),
    "fp32 D128": (16, 8, 128, torch.float32),
    "fp32 D256": (8, 4, 256, torch.float32),
}
HALF = [(32, 2, 3), (32, 4, 2), (32, 4, 3), (32, 4, 5), (64, 2, 3), (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 4, 5),
        (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3)]  # fmt: skip
FULL = [(16, 2, 1), (16, 2, 2), (16, 4, 1), (16, 4, 2), (16, 4, 3), (32, 2, 1), (32, 4, 1), (32, 4, 2), (32, 4, 3),
        (32, 8, 2), (64, 4, 1), (64, 4, 2), (64, 8, 2)]  # fmt: skip
EXTEND = [(64, 32, 4, 2), (64, 32, 4, 5), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 2),
          (64, 128, 4, 3), (64, 128, 4, 5), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2),
          (128, 128, 8, 3), (128, 128, 8, 5), (128, 32, 4, 2), (32, 64, 4, 2), (32, 64, 4, 5), (16, 64, 4, 3),
          (16, 64, 4, 2)]  # fmt: skip
EXTEND_FULL = [(32, 32, 4, 1), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1), (16, 16, 4, 2), (32, 16, 4, 2),
               (64, 32, 8, 2), (32, 32, 8, 2)]  # fmt: skip
EXTEND_MODELS = ("D64 g2", "D128 g4", "D256 g4", "fp32 D64", "fp32 D128", "fp32 D256")
DEFAULT = (16, 8, 128, torch.bfloat16)
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def ms(call, rep=12):
    return triton.testing.do_bench(call, warmup=5, rep=rep, return_mode="median")


def model(heads, kv_heads, head_dim, dtype):
    bench.HEADS, bench.KV_HEADS, bench.HEAD_DIM, bench.DTYPE = heads, kv_heads, head_dim, dtype


def decode_tile(tile=None):
    tuning.decode = ORIGINAL["decode"] if tile is None else lambda D, dtype, group, cap: tuning.Tile(16, *tile)


def extend_tile(tile=None):
    tuning.extend = ORIGINAL["extend"] if tile is None else lambda D, dtype, group, cap: tuning.Tile(*tile)


def tiles_of(name):
    return FULL if name.startswith("fp32") else HALF


def extend_tiles_of(name):
    return EXTEND_FULL if name.startswith("fp32") else EXTEND


def chunks(given, counts):
    """Chunks of these many queries at the ends of the contexts."""
    q = torch.randn(sum(counts), bench.HEADS, bench.HEAD_DIM, device=runtime.DEVICE, dtype=bench.DTYPE)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(runtime.DEVICE)
    return lambda: paged_attention_extend(
        q, given.k_cache, given.v_cache, given.block_tables, starts, given.context_lens
    )


def mixed():
    given = bench.inputs((64, 1280))
    lengths = torch.randint(100, 1280, (64,), generator=torch.Generator().manual_seed(1))
    lengths[:2] = 600
    given = replace(given, context_lens=lengths.int().to(runtime.DEVICE))
    return chunks(given, [225, 225] + [1] * 62)


def compile_jobs():
    for name, sizes in MODELS.items():
        for tile in tiles_of(name):
            yield "decode", sizes, tile
        if name in EXTEND_MODELS:
            for tile in extend_tiles_of(name):
                yield "extend", sizes, tile
    for tile in EXTEND:
        yield "extend", DEFAULT, tile
    yield "decode", DEFAULT, None


def compile_some(index, of):
    for kind, sizes, tile in list(compile_jobs())[index::of]:
        model(*sizes)
        small = bench.inputs((2, 256))
        with contextlib.suppress(Exception):
            if kind == "decode":
                decode_tile(tile)
                small.attention(1)
                small.attention(2)
            else:
                extend_tile(tile)
                chunks(small, [64, 64])()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", nargs=2, type=int)
    options = parser.parse_args()
    if options.compile:
        return compile_some(*options.compile)
    begin = time.monotonic()
    workers = min(15, os.cpu_count() or 1)
    children = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.paged_sweep", "--compile", str(i), str(workers)])
        for i in range(workers)
    ]
    for child in children:
        child.wait()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    found = {}

    def keep():
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "paged_sweep2.json").write_text(json.dumps(found))

    for what in (merges, parts, writes, dims, extends):
        try:
            found[what.__name__] = what()
        except Exception as error:
            print(f"{what.__name__} failed: {error!r}"[:600])
        for name in ORIGINAL:
            setattr(tuning, name, ORIGINAL[name])
        model(*DEFAULT)
        keep()
        print(f"{what.__name__} done after {time.monotonic() - begin:.0f} s", flush=True)


def merges():
    lines = []
    for S, P in ((1, 16), (1, 48), (8, 8), (64, 4)):
        outputs = torch.randn(S, 16, P, 128, device=runtime.DEVICE)
        lses = torch.randn(S, 16, P, device=runtime.DEVICE)
        row = []
        for n in (2, 4, 8, 16, 32, 64):
            for warps in (1, 2, 4, 8):
                tuning.merge = lambda parts, width, n=n, warps=warps: tuning.Tile(1, n, warps, 1)
                row.append((ms(lambda: merge_parts(outputs, lses, dtype=torch.bfloat16), 8) * 1e3, n, warps))  # noqa: B023
        lines += [(S, P, *x) for x in row]
        print(f"merge {S} x {P}:", ", ".join(f"n{n} w{w} {t:.1f}" for t, n, w in sorted(row)[:10]))
    return lines


def parts():
    lines = []
    for batch in (1, 2, 4, 8, 16, 32, 48, 64, 100):
        for context in (256, 512, 1024, 2048, 4096, 8192, 16384, 65536):
            if batch * context > 64 * 8192:
                continue
            given = bench.inputs((batch, context))
            row = [
                (p, ms(lambda: given.attention(p), 8) * 1e3)  # noqa: B023
                for p in PARTS
                if p * 64 <= context or p == 1
            ]
            best = min(t for _, t in row)
            lines.append((batch, context, row))
            print(f"parts {batch} x {context}: best {best:.1f} us; "
                  + " ".join(f"{p}:{t / best:.2f}" for p, t in row))  # fmt: skip
    return lines


def writes():
    lines = []
    for T in (1, 64, 512, 4096):
        k, v = (torch.randn(T, 8, 128, device=runtime.DEVICE).bfloat16() for _ in range(2))
        caches = [torch.zeros(4096, 16, 8, 128, device=runtime.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        slots = torch.randperm(4096 * 16, device=runtime.DEVICE)[:T]
        row = []
        for n in (1, 2, 4, 8):
            for warps in (1, 2, 4):
                tuning.write = lambda heads, width, n=n, warps=warps: tuning.Tile(1, n, warps, 1)
                row.append((ms(lambda: write_kv(k, v, *caches, slots), 8) * 1e3, n, warps))  # noqa: B023
        lines += [(T, *x) for x in row]
        print(f"write {T}:", ", ".join(f"n{n} w{w} {t:.1f}" for t, n, w in sorted(row)[:6]))
    return lines


def dims():
    lines = []
    for name, sizes in MODELS.items():
        model(*sizes)
        many, one = bench.inputs((32, 8192)), bench.inputs((1, 32768))
        wanted = 3 * 132 // bench.KV_HEADS
        print(f"-- {name}")
        row = []
        for tile in tiles_of(name):
            decode_tile(tile)
            try:
                times = [ms(lambda: many.attention(1)), ms(lambda: many.attention(2)),  # noqa: B023
                         ms(lambda: one.attention(wanted), 8)]  # noqa: B023  # fmt: skip
            except Exception as error:
                print("refused", tile, str(error)[:70])
                continue
            row.append((min(times[0], times[1]), tile, times))
        for _, tile, times in sorted(row)[:6]:
            rates = [bench.bytes_read(s) / t / 1e9 for s, t in zip(((32, 8192),) * 2 + ((1, 32768),), times)]
            print(tile, " ".join(f"{t * 1e3:.1f} us {r:.2f} TB/s;" for t, r in zip(times, rates)))
        lines += [(name, tile, times) for _, tile, times in row]
        del many, one
    return lines


def extends():
    lines = []
    for name in ("default", *EXTEND_MODELS):
        model(*(DEFAULT if name == "default" else MODELS[name]))
        cases = {
            "8 x 512": chunks(bench.inputs((8, 512)), [512] * 8),
            "1 x 4096": chunks(bench.inputs((1, 4096)), [4096]),
            "4 x 128 of 1024": chunks(bench.inputs((4, 1024)), [128] * 4),
            "mixed": mixed(),
        }
        print(f"-- extend {name}: " + ", ".join(cases))
        row = []
        for tile in extend_tiles_of(name):
            extend_tile(tile)
            try:
                row.append((tile, [ms(call, 8) * 1e3 for call in cases.values()]))
            except Exception as error:
                print("refused", tile, str(error)[:70])
        best = [min(times[i] for _, times in row) for i in range(len(cases))]
        for tile, times in sorted(row, key=lambda x: sum(t / b for t, b in zip(x[1], best)))[:8]:
            print(tile, " ".join(f"{t:.1f}" for t in times))
        lines += [(name, *x) for x in row]
    return lines


if __name__ == "__main__":
    main()
