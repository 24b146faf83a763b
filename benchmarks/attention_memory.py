"""Time and peak memory of attention over the sequence length, forward alone and forward with backward (a ``step``).

One sequence of 16 heads in bf16, not causal. ``peak_bytes`` is the most that a call has allocated at a time beyond what
was there before it (q, k, v, and the gradient of the output): results and gradients are part of it. Eager attention is
measured as far as its N x N tensors fit, the others to N = 131,072; the longest are measured for memory only.

``published`` is the configuration of the FlashAttention paper's first figure (Dao et al. 2022, figure 2, left): GPT-2
medium, forward and backward in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from benchmarks.attention_implementations import IMPLEMENTATIONS, call, forward
from utils import runtime, timing
from utils.attention_math import (
    FLASH_BACKWARD_MATMULS,
    FORWARD_MATMULS,
    GPT2_MEDIUM,
    STANDARD_BACKWARD_MATMULS,
    AttentionShape,
    attention_flops,
)
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING, each

HEADS, HEAD_DIM = 16, 64
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
QUICK_SIZES = (512, 1024, 2048, 4096)
#: Lengths beyond this are not timed.
LONGEST_TIMED = 65536
WARM_UP = 256
PASSES = ("forward", "step")
#: Name -> way, causal, dropout of the published configuration. A Triton kernel with dropout is not part of the course.
PUBLISHED_WAYS: Mapping[str, tuple[str, bool, float]] = {
    "eager, mask and dropout": ("eager", True, 0.1),
    "eager, mask": ("eager", True, 0.0),
    "eager": ("eager", False, 0.0),
    "flash, mask and dropout": ("flash", True, 0.1),
    "flash, mask": ("flash", True, 0.0),
    "flash": ("flash", False, 0.0),
    "ours, mask": ("ours", True, 0.0),
    "ours": ("ours", False, 0.0),
}


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that one call has allocated on the GPU at a time, beyond those allocated before it."""
    torch.cuda.synchronize(runtime.DEVICE)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(runtime.DEVICE)
    torch.cuda.reset_peak_memory_stats(runtime.DEVICE)
    run()
    torch.cuda.synchronize(runtime.DEVICE)
    return torch.cuda.max_memory_allocated(runtime.DEVICE) - before


def tensors(shape: AttentionShape, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v that require gradients, and a gradient of the output, (B, H, N, D)."""
    size = (shape.batch, shape.heads, shape.seq_len, shape.head_dim)
    q, k, v, do = (torch.randn(size, device=runtime.DEVICE, dtype=dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)] + [do]


def step_flops(shape: AttentionShape, step: bool) -> int:
    """Operations that the algorithm needs, without recomputation: 2 products forward, 4 backward."""
    return attention_flops(shape, FORWARD_MATMULS + (STANDARD_BACKWARD_MATMULS if step else 0))


def rounds_at(seq_len: int, quick: bool) -> int:
    """Fewer rounds where a call takes longer."""
    return 4 if quick else 3 if seq_len > 32768 else 6 if seq_len > 8192 else 20


SCHEMA = {
    "dtype": TEXT,
    "shape": each(SIZE, "batch", "heads", "head_dim"),
    "memory": [{"way": TEXT, "pass": TEXT, "seq_len": SIZE, "peak_bytes": SIZE}],
    "times": [{"way": TEXT, "pass": TEXT, "seq_len": SIZE, **TIMING, "flops_per_second": POSITIVE}],
    "refused": {str: TEXT},
    "published": {
        "shape": each(SIZE, "batch", "heads", "seq_len", "head_dim"),
        "dtype": TEXT,
        "ways": [{"name": TEXT, "peak_bytes": SIZE, "flops": SIZE, **TIMING, **RATIO}],
    },
}


def measure(
    quick: bool = False,
    sizes: Sequence[int] | None = None,
    ways: Sequence[str] = IMPLEMENTATIONS,
    shape: AttentionShape | None = None,
    published: Mapping[str, tuple[str, bool, float]] = PUBLISHED_WAYS,
) -> dict[str, Any]:
    """Memory and time of each way, length and pass, and the published configuration (``shape`` replaces its size).

    Raises:
        RuntimeError: there is no GPU here.
    """
    memory, times = [], []
    refused: dict[str, str] = {}
    _warm_up(ways)
    for n in sizes or (QUICK_SIZES if quick else SIZES):
        here = AttentionShape(1, HEADS, n, HEAD_DIM)
        q, k, v, do = tensors(here, torch.bfloat16)
        for name in PASSES:
            step = name == "step"
            calls = {}
            for way in ways:
                if any(key.startswith(f"{way}, {name}") for key in refused):
                    continue  # a shorter sequence did not fit
                run = call(forward(way), q, k, v, do, step)
                try:
                    peak = peak_bytes(run)
                except torch.cuda.OutOfMemoryError as error:
                    refused[f"{way}, {name}, N = {n}"] = str(error).splitlines()[0][:160]
                    continue
                memory.append({"way": way, "pass": name, "seq_len": n, "peak_bytes": peak})
                calls[way] = run
            if n <= LONGEST_TIMED:
                timed = timing.compare(calls, warmup=1, rounds=rounds_at(n, quick))
                flops = step_flops(here, step)
                times += [
                    {"way": way, "pass": name, "seq_len": n, **t.as_dict(), "flops_per_second": flops / t.median}
                    for way, t in timed.items()
                ]
        del q, k, v, do, calls, run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "dtype": "bf16",
        "shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM},
        "memory": memory,
        "times": times,
        "refused": refused,
        "published": as_published(shape or GPT2_MEDIUM, published, quick),
    }


def _warm_up(ways: Sequence[str]) -> None:
    """Compile kernels and let libraries allocate what they keep, so that no measured peak includes it."""
    q, k, v, do = tensors(AttentionShape(1, HEADS, WARM_UP, HEAD_DIM), torch.bfloat16)
    for way in ways:
        for step in (False, True):
            call(forward(way), q, k, v, do, step)()


def as_published(
    shape: AttentionShape, ways: Mapping[str, tuple[str, bool, float]], quick: bool = False
) -> dict[str, Any]:
    """Forward and backward of the published configuration; ``ratio`` is the first way's time over this one's."""
    q, k, v, do = tensors(shape, torch.float16)
    calls = {name: call(forward(*options), q, k, v, do, True) for name, options in ways.items()}
    for run in calls.values():
        run()
    peaks = {name: peak_bytes(run) for name, run in calls.items()}
    timed = timing.compare(calls, warmup=1, rounds=4 if quick else 15)
    first = next(iter(ways))
    found = []
    for name, (way, causal, _) in ways.items():
        backward = STANDARD_BACKWARD_MATMULS if way == "eager" else FLASH_BACKWARD_MATMULS
        found.append(
            {
                "name": name,
                "peak_bytes": peaks[name],
                "flops": attention_flops(shape, FORWARD_MATMULS + backward, causal=causal and way != "eager"),
                **timed[name].as_dict(),
                **timing.ratio(timed[first], timed[name]).as_dict(),
            }
        )
    sizes = {"batch": shape.batch, "heads": shape.heads, "seq_len": shape.seq_len, "head_dim": shape.head_dim}
    return {"shape": sizes, "dtype": "fp16", "ways": found}


def table(results: Mapping[str, Any]) -> str:
    """Milliseconds and peak of each length, and the published row."""
    ways = list(dict.fromkeys(point["way"] for point in results["memory"]))
    texts = []
    for name in PASSES:
        peaks = {(p["seq_len"], p["way"]): p["peak_bytes"] for p in results["memory"] if p["pass"] == name}
        took = {(p["seq_len"], p["way"]): p["seconds"] for p in results["times"] if p["pass"] == name}
        rows = []
        for n in dict.fromkeys(key[0] for key in peaks):
            cells = []
            for way in ways:
                ms = f"{took[n, way] * 1e3:,.2f} ms" if (n, way) in took else "-"
                cells.append(f"{ms} {peaks[n, way] / 1e6:,.0f} MB" if (n, way) in peaks else "-")
            rows.append([n, *cells])
        texts.append(f"{name}\n" + benchmark_cli.text_table(["N", *ways], rows))
    rows = [
        [w["name"], f"{w['seconds'] * 1e3:.2f}", f"{w['ratio']:.2f}", f"{w['peak_bytes'] / 1e9:.2f}"]
        for w in results["published"]["ways"]
    ]
    texts.append("published configuration\n" + benchmark_cli.text_table(["way", "ms", "faster", "peak, GB"], rows))
    texts += [f"{key}: {why}" for key, why in results["refused"].items()]
    return "\n\n".join(texts)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_memory", measure, table, SCHEMA))
