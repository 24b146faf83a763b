"""Activation checkpointing of a stack of transformer layers: peak memory and time, by how many layers a segment holds.

A segment keeps only its input in the forward pass, and runs forward once more when the backward pass reaches it.
``peak_bytes`` is the most that a step has allocated beyond what was there before it (parameters, their gradients, the
input): activations, and a few temporary tensors. ``layer_bytes`` is what autograd saves in one layer, ``input_bytes``
its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import benchmark_cli
from benchmarks.operator_classes import EncoderLayer
from utils import runtime, timing
from utils.record_schemas import COUNT, RATIO, SIZE, TEXT, TIMING, each

SHAPE = {"batch": 32, "seq_len": 1024, "hidden": 1024, "heads": 16, "layers": 24}
QUICK_SHAPE = {"batch": 4, "seq_len": 512, "hidden": 1024, "heads": 16, "layers": 8}
#: Layers of a segment; 0 keeps everything.
SEGMENTS = (0, 1, 2, 3, 4, 6, 8, 12)
QUICK_SEGMENTS = (0, 1, 2, 4)


def saved_bytes(run: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of ``run``, without parameters; views of a tensor count once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        result = run()  # stays alive, so that no address is used twice
    del result
    return sum(kept.values())


def stack(shape: Mapping[str, int], dtype: torch.dtype = torch.bfloat16) -> tuple[nn.ModuleList, torch.Tensor]:
    """Layers without dropout, and an input (batch, seq_len, hidden) that needs a gradient."""
    torch.manual_seed(20261121)
    layers = nn.ModuleList(
        EncoderLayer(shape["hidden"], shape["heads"], fused_attention=True, dropout=0.0) for _ in range(shape["layers"])
    ).to(runtime.DEVICE, dtype)
    x = torch.randn(shape["batch"], shape["seq_len"], shape["hidden"], device=runtime.DEVICE).to(dtype)
    return layers, x.requires_grad_()


def forward(layers: nn.ModuleList, x: torch.Tensor, segment: int) -> torch.Tensor:
    """Run the layers, ``segment`` of them between two kept inputs; 0 keeps everything.

    Raises:
        ValueError: ``segment`` is negative.
    """
    if segment < 0:
        raise ValueError(f"segment must be a number of layers, or 0 to keep everything, got {segment}")
    if segment == 0:
        return nn.Sequential(*layers)(x)
    for first in range(0, len(layers), segment):
        group = nn.Sequential(*layers[first : first + segment])
        x = checkpoint(group, x, use_reentrant=False, preserve_rng_state=False)  # there is no dropout
    return x


def step(layers: nn.ModuleList, x: torch.Tensor, segment: int, dy: torch.Tensor) -> None:
    """Forward and backward pass; gradients are added to those that the parameters have."""
    forward(layers, x, segment).backward(dy)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that ``run`` has allocated on the GPU at a time, beyond those allocated before it."""
    run()
    torch.cuda.synchronize(runtime.DEVICE)
    before = torch.cuda.memory_allocated(runtime.DEVICE)
    torch.cuda.reset_peak_memory_stats(runtime.DEVICE)
    run()
    torch.cuda.synchronize(runtime.DEVICE)
    return torch.cuda.max_memory_allocated(runtime.DEVICE) - before


SCHEMA = {
    "dtype": TEXT,
    "shape": each(SIZE, "batch", "seq_len", "hidden", "heads", "layers"),
    "input_bytes": SIZE,
    "layer_bytes": SIZE,
    "variants": [{"segment": COUNT, "peak_bytes": SIZE, **TIMING, **RATIO}],
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False, shape: Mapping[str, int] | None = None, segments: Sequence[int] | None = None
) -> dict[str, Any]:
    """Peak memory and time of a step for each length of a segment; ``quick`` takes a smaller stack.

    Raises:
        RuntimeError: there is no GPU here.
    """
    shape = dict(shape or (QUICK_SHAPE if quick else SHAPE))
    segments = segments or (QUICK_SEGMENTS if quick else SEGMENTS)
    layers, x = stack(shape)
    dy = torch.randn_like(x)
    layer_bytes = saved_bytes(lambda: layers[0](x), list(layers.parameters()))
    calls = {str(segment): lambda segment=segment: step(layers, x, segment, dy) for segment in segments}
    peaks = {segment: peak_bytes(call) for segment, call in calls.items()}
    timed = timing.compare(calls, warmup=2, rounds=6 if quick else 12)
    return {
        "dtype": "bf16",
        "shape": shape,
        "input_bytes": x.nbytes,
        "layer_bytes": layer_bytes,
        "variants": [
            {
                "segment": segment,
                "peak_bytes": peaks[str(segment)],
                **timed[str(segment)].as_dict(),
                **timing.ratio(timed[str(segment)], timed[str(segments[0])]).as_dict(),
            }
            for segment in segments
        ],
    }


def table(results: dict[str, Any]) -> str:
    """One line a length of a segment."""
    rows = [
        [v["segment"] or "none", f"{v['peak_bytes'] / 1e9:.3f}", f"{v['seconds'] * 1e3:,.2f}", f"{v['ratio']:.3f}"]
        for v in results["variants"]
    ]
    sizes = f"a layer saves {results['layer_bytes'] / 1e6:.1f} MB, its input is {results['input_bytes'] / 1e6:.1f} MB"
    return sizes + "\n" + benchmark_cli.text_table(["layers a segment", "peak, GB", "ms", "of the time without"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("checkpointing", measure, table, SCHEMA))
