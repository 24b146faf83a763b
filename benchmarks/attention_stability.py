"""How far attention lands from float64: standard and flash, bf16 and fp16, by tile and by what is kept in 16 bits.

The arithmetic of both algorithms is carried out in float32, and what an implementation would keep in 16 bits is rounded
after each operation. So one difference at a time can be studied:

- ``standard``: scores and probabilities are tensors in memory. Softmax ``torch``: scores are rounded because they are
  written, the softmax computes in float32 inside (as eager PyTorch does). ``low``: every step of the softmax is rounded
  too. ``fp32``: scores stay in float32.
- ``flash``: tiles of keys with a running maximum, sum and output. Softmax ``fp32``: these stay in float32, as in every
  kernel in use. ``low``: scores, weights, sum, output and their rescaling are rounded after every operation, as in the
  study of Golden et al. (2024). ``scores``, ``sum``, ``output``: only this one is.

In all of them the probabilities are rounded before the second product, since the tensor cores take 16-bit operands, and
so is the result. Beside these, the implementations that are in use: PyTorch's eager operators and flash backend, and
lab 3's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention_implementations, benchmark_cli
from utils import runtime
from utils.record_schemas import COUNT, POSITIVE, SIZE, TEXT

HEADS, HEAD_DIM = 4, 64
SIZES = (1024, 4096, 16384)
TILES = (16, 32, 64, 128, 256, 512, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: ``outliers``: one element in a thousand has a standard deviation of 10 more (Shah et al. 2024, section 4.3).
INPUTS = ("normal", "outliers")
STANDARD = ("torch", "low", "fp32")
#: Softmax of flash -> what is rounded after each operation.
ROUNDED: Mapping[str, frozenset[str]] = {
    "fp32": frozenset(),
    "low": frozenset({"scores", "weights", "sum", "output"}),
    "scores": frozenset({"scores"}),
    "sum": frozenset({"sum"}),
    "output": frozenset({"output"}),
}
IN_USE = ("eager", "ours", "flash")
SEED = 20260706


def inputs(kind: str, seq_len: int, dtype: torch.dtype, heads: int = HEADS, head_dim: int = HEAD_DIM) -> list[Tensor]:
    """q, k and v (1, heads, seq_len, head_dim) in ``dtype``, the same on every machine.

    Raises:
        ValueError: ``kind`` is none of :data:`INPUTS`.
    """
    if kind not in INPUTS:
        raise ValueError(f"inputs must be one of {', '.join(INPUTS)}, got {kind!r}")
    chance = torch.Generator().manual_seed(SEED)
    shape, found = (1, heads, seq_len, head_dim), []
    for _ in range(3):
        x = torch.randn(shape, generator=chance)
        if kind == "outliers":
            x += 10 * torch.randn(shape, generator=chance) * (torch.rand(shape, generator=chance) < 1e-3)
        found.append(x.to(dtype).to(runtime.DEVICE))
    return found


def exact(q: Tensor, k: Tensor, v: Tensor, rows: int = 2048) -> Tensor:
    """Attention of the given inputs in float64, (1, H, N, D), some rows at a time."""
    q, k, v = (x.double() for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    return torch.cat([torch.softmax(part @ k.mT * scale, -1) @ v for part in q.split(rows, 2)], 2)


def standard(q: Tensor, k: Tensor, v: Tensor, softmax: str, rows: int = 4096) -> Tensor:
    """Standard attention in the inputs' dtype, with a ``softmax`` of :data:`STANDARD`."""
    dtype = q.dtype
    q, k, v = (x.float() for x in (q, k, v))
    return torch.cat([_standard(part, k, v, softmax, dtype) for part in q.split(rows, 2)], 2)


def _standard(q: Tensor, k: Tensor, v: Tensor, softmax: str, dtype: torch.dtype) -> Tensor:
    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    scale = 1 / math.sqrt(q.shape[-1])
    if softmax == "fp32":
        p = torch.softmax(q @ k.mT * scale, -1)
    else:
        scores = rounded(rounded(q @ k.mT) * scale)
        if softmax == "torch":
            p = torch.softmax(scores, -1)
        else:
            weights = rounded(torch.exp(rounded(scores - scores.amax(-1, keepdim=True))))
            p = weights / rounded(weights.sum(-1, keepdim=True))
    return rounded(rounded(p) @ v)


def flash(q: Tensor, k: Tensor, v: Tensor, tile: int, softmax: str) -> Tensor:
    """FlashAttention over tiles of ``tile`` keys in the inputs' dtype, with a ``softmax`` of :data:`ROUNDED`."""
    dtype, names = q.dtype, ROUNDED[softmax]
    q, k, v = (x.float() for x in (q, k, v))

    def rounded(x: Tensor, what: str) -> Tensor:
        return x.to(dtype).float() if what in names else x

    scale = 1 / math.sqrt(q.shape[-1])
    m = torch.full((*q.shape[:-1], 1), -math.inf, device=q.device)
    d, o = torch.zeros_like(m), torch.zeros_like(q)
    for keys, values in zip(k.split(tile, 2), v.split(tile, 2), strict=True):
        s = rounded(rounded(q @ keys.mT, "scores") * scale, "scores")
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        rescale = rounded(torch.exp(rounded(m - new, "weights")), "weights")
        p = rounded(torch.exp(rounded(s - new, "weights")), "weights")
        d = rounded(rounded(d * rescale, "sum") + rounded(p.sum(-1, keepdim=True), "sum"), "sum")
        product = rounded(p.to(dtype).float() @ values, "output")
        o = rounded(rounded(o * rescale, "output") + product, "output")
        m = new
    return (o / d).to(dtype).float()


def methods(tiles: Sequence[int], in_use: Sequence[str]) -> list[tuple[str, str, int, Callable[..., Tensor]]]:
    """(method, softmax, tile, function of q, k, v) of all that is compared; tile 0 where there is none."""
    found = [("standard", s, 0, lambda q, k, v, s=s: standard(q, k, v, s)) for s in STANDARD]
    for tile in tiles:
        found += [("flash", s, tile, lambda q, k, v, t=tile, s=s: flash(q, k, v, t, s)) for s in ROUNDED]
    found += [(way, "in use", 0, attention_implementations.forward(way)) for way in in_use]
    return found


SCHEMA = {
    "heads": SIZE,
    "head_dim": SIZE,
    "points": [
        {
            "inputs": TEXT,
            "dtype": TEXT,
            "seq_len": SIZE,
            "method": TEXT,
            "softmax": TEXT,
            "tile": COUNT,
            "rms": POSITIVE,
            "largest": POSITIVE,
        }
    ],
    "rounded_result": [{"inputs": TEXT, "dtype": TEXT, "seq_len": SIZE, "rms": POSITIVE}],
}


def measure(
    quick: bool = False,
    sizes: Sequence[int] | None = None,
    tiles: Sequence[int] = TILES,
    in_use: Sequence[str] = IN_USE,
    kinds: Sequence[str] = INPUTS,
) -> dict[str, Any]:
    """Deviation of every method from float64; ``quick`` takes one size. Works on a CPU too, slowly."""
    points, floors = [], []
    for kind in kinds:
        for n in sizes or (SIZES[:1] if quick else SIZES):
            for name, dtype in DTYPES.items():
                q, k, v = inputs(kind, n, dtype)
                right = exact(q, k, v)
                where = {"inputs": kind, "dtype": name, "seq_len": n}
                floors.append({**where, "rms": deviation(right.to(dtype), right)["rms"]})
                for method, softmax, tile, function in methods([t for t in tiles if t <= n], in_use):
                    with torch.no_grad():
                        found = deviation(function(q, k, v), right)
                    points.append({**where, "method": method, "softmax": softmax, "tile": tile, **found})
    return {"heads": HEADS, "head_dim": HEAD_DIM, "points": points, "rounded_result": floors}


def deviation(found: Tensor, right: Tensor) -> dict[str, float]:
    """Root mean square and largest absolute difference."""
    difference = found.double() - right
    return {"rms": float(difference.square().mean().sqrt()), "largest": float(difference.abs().max())}


def pick(results: Mapping[str, Any], **wanted: object) -> list[dict[str, Any]]:
    """The recorded points with these values, such as ``method="flash", softmax="low", dtype="bf16"``."""
    return [point for point in results["points"] if all(point[key] == value for key, value in wanted.items())]


def table(results: Mapping[str, Any]) -> str:
    """RMS deviation over that of standard attention as PyTorch computes it; flash at its smallest and largest tile."""
    rows = []
    for floor in results["rounded_result"]:
        where = {key: floor[key] for key in ("inputs", "dtype", "seq_len")}
        here = pick(results, **where)
        base = pick(results, **where, method="standard", softmax="torch")[0]["rms"]
        tiles = sorted({point["tile"] for point in here if point["tile"]})
        for point in here:
            if point["tile"] in (0, tiles[0], tiles[-1]):
                name = f"{point['method']}, {point['softmax']}" + (f", tile {point['tile']}" if point["tile"] else "")
                rows.append([*where.values(), name, f"{point['rms']:.2e}", f"{point['rms'] / base:.2f}"])
    return benchmark_cli.text_table(["inputs", "dtype", "N", "method", "rms", "over standard"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_stability", measure, table, SCHEMA))
