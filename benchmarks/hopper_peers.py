"""FlashAttention-3 and FlashAttention-4 beside the capstone's attention, lab 3's and PyTorch's, bf16, on a Hopper GPU.

Both are packages of FlashAttention's authors, and the course does not need them. Whichever is installed takes part:

* ``fa3``, in CUDA C++ for Hopper: the module ``flash_attn_interface`` of the package ``flash-attn-3``
* ``fa4``, in CuTe's Python for Hopper and Blackwell: ``flash_attn.cute`` of the package ``flash-attn-4``

**Right first.** Ragged cases of each head_dim and mask are held against float64 by lab 3's rule. Who is wrong is not
timed at that head_dim.

**Then timed.** The shapes of :mod:`benchmarks.hopper_attention`, each direction, as it measures them. The packages
get views (batch, seq_len, heads, head_dim) of everybody's inputs, which costs no copy. They keep their defaults: in
the backward pass dQ is summed in the order in which its parts arrive, as ``ours, fast`` does it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import attention_entry, attention_speed, benchmark_cli, hopper_attention, hopper_implementations
from benchmarks.attention_speed import DIRECTIONS, Attention, Shape
from benchmarks.hopper_implementations import FAST, OURS, WORKERS
from benchmarks.thermal_warmup import thermal_warmup
from utils.record_schemas import SIZE, TEXT

#: Package and module by name.
PACKAGES = {"fa3": ("flash-attn-3", "flash_attn_interface"), "fa4": ("flash-attn-4", "flash_attn.cute")}
DTYPE = "bf16"
#: (batch, query heads, key heads, queries, keys), none of the lengths a multiple of a tile.
CASES = ((1, 2, 2, 1023, 1023), (2, 2, 2, 113, 203))
EFFORT = hopper_attention.Effort(rounds=4, lap_seconds=0.04, warm_seconds=0.5)


def installed() -> tuple[dict[str, Attention], dict[str, str]]:
    """Attention by name, of the packages that are installed; and why one that is installed cannot be imported."""
    found, broken = {}, {}
    for name, (_, module) in PACKAGES.items():
        try:
            found[name] = by_head(importlib.import_module(module).flash_attn_func)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                broken[name] = attention_entry.said(error)
        except Exception as error:  # a library that is missing, or one of another version
            broken[name] = attention_entry.said(error)
    return found, broken


def by_head(function: Callable[..., Any]) -> Attention:
    """``function`` of q, k, v (batch, seq_len, heads, head_dim), which may return more than o, for (B, H, N, D)."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        result = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return attention


def version(package: str) -> str:
    """Of an installed package, ``unknown`` where it does not say."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check(name: str, attention: Attention, head_dims: Sequence[int], cases: Sequence[tuple] = CASES) -> int:
    """Hold output and gradients of each case, head_dim and mask against float64 by lab 3's rule; return how many.

    Raises:
        EntryError: a call fails, or a result is wrong: the message says in which case and by how much.
    """

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: None) -> torch.Tensor:
        return attention(q, k, v, causal)

    function.__name__ = name
    tried = [(d, (*sizes, causal)) for d in head_dims for causal in (False, True) for sizes in cases]
    dtype = hopper_implementations.DTYPES[DTYPE]
    for seed, (head_dim, sizes) in enumerate(tried):
        attention_entry.try_case(function, False, (*sizes, None, "contiguous"), head_dim, dtype, True, seed)
    return len(tried)


SCHEMA = {
    "packages": {str: TEXT},
    "cases": {str: SIZE},
    "points": hopper_attention.SCHEMA["points"],
    "unavailable": {str: TEXT},
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    cases: Sequence[tuple] = CASES,
    effort: hopper_attention.Effort = EFFORT,
    workers: int = WORKERS,
) -> dict[str, Any]:
    """The packages' versions, how many cases each had right, and every shape in both directions.

    Args:
        quick: Three shapes only.
        cases: Ragged cases, as :data:`CASES`.
        workers: Processes that compile; 0 to compile while measuring.

    Raises:
        RuntimeError: there is no GPU here, it is not one of Hopper's, or neither package can be used.
    """
    hopper_implementations.need_hopper()
    shapes = shapes or (hopper_attention.SHAPES[1::4] if quick else hopper_attention.SHAPES)
    packages, unavailable = installed()
    head_dims = sorted({shape[3] for shape in shapes})
    right: dict[str, int] = {}
    peers: dict[int, dict[str, Attention]] = {head_dim: {} for head_dim in head_dims}
    if packages and workers:
        hopper_implementations.compile_first(shapes, [DTYPE], min(workers, os.cpu_count() or 1))
    for name, attention in packages.items():
        for head_dim in head_dims:
            try:
                right[name] = right.get(name, 0) + check(name, attention, [head_dim], cases)
                peers[head_dim][name] = attention
            except attention_entry.EntryError as error:
                unavailable[f"{name}, D {head_dim}"] = str(error)
    if not right:
        why = "".join(f"; {name}: {reason}" for name, reason in unavailable.items())
        raise RuntimeError(f"neither flash-attn-3 nor flash-attn-4 can be used (pip install 'flash-attn-4[cu13]'){why}")
    points = []
    for shape in shapes:
        attentions = hopper_implementations.functions() | peers[shape[3]]
        found, missing = hopper_implementations.calls(shape, hopper_implementations.DTYPES[DTYPE], attentions)
        unavailable |= missing
        thermal_warmup(found["both", OURS], effort.warm_seconds)
        points += [hopper_attention.point(shape, DTYPE, direction, found, effort) for direction in DIRECTIONS]
        print(f"{attention_speed.name_of(points[-1])}: done", flush=True)
    return {
        "packages": {name: version(PACKAGES[name][0]) for name in right},
        "cases": right,
        "points": points,
        "unavailable": unavailable,
    }


def table(results: Mapping[str, Any]) -> str:
    """One line a shape and direction: TFLOP/s of each, and how the capstone's two modes compare with the packages."""
    items, packages = results["points"], results["packages"]
    names = list(dict.fromkeys(name for item in items for name in item["timed"]))
    modes = [(over, name) for over in ("ours_over", "fast_over") for name in packages]
    rows = []
    for item in items:
        rates = [f"{t['flops_per_second'] / 1e12:.0f}" if t else "" for t in map(item["timed"].get, names)]
        ratios = [f"{item[over][name]['ratio']:.3f}" if name in item[over] else "" for over, name in modes]
        rows.append([attention_speed.name_of(item), *rates, *ratios])
    headings = [f"{OURS if over == 'ours_over' else FAST} x {name}" for over, name in modes]
    lines = [
        f"{name} is {PACKAGES[name][0]} {said}, right in {results['cases'][name]} ragged cases"
        for name, said in packages.items()
    ]
    lines += [f"{name}: {reason}" for name, reason in results["unavailable"].items()]
    return "\n".join([benchmark_cli.text_table(["TFLOP/s", *names, *headings], rows), *lines])


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("hopper_peers", measure, table, SCHEMA))
