"""Recorded kernels as points under a roofline: what lectures 02, 03 and 06 measured, from `utils.records`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from utils import operators, records
from utils.hardware import GPUS
from utils.records import Record

#: Kinds of the record of operators whose arithmetic runs in their own format, on tensor cores where it has those.
_CONTRACTIONS = ("matmul", "batched_matmul", "flash_attention", "eager_attention")
#: Those kinds as `utils.operators` calls them, where the record's sizes are its arguments.
_SAME = {"dot": "dot_product", "add": "add", "relu": "relu", "gelu": "gelu", "softmax": "softmax",
         "layer_norm": "layer_norm", "matmul": "matmul"}  # fmt: skip


def _point(record: Record, name: str, size: str, unit: str, flops: int, moved: int, seconds: float) -> dict[str, Any]:
    """A kernel of ``flops`` operations that moves at least ``moved`` bytes."""
    return {
        "name": name, "size": size, "unit": unit, "intensity": flops / moved, "flopsPerSecond": flops / seconds,
        "seconds": seconds, "gpu": next(each for each in GPUS if each in record.device.split()),
        "device": record.device, "date": record.date, "record": record.benchmark,
    }  # fmt: skip


def _sizes(**sizes: int) -> str:
    return " x ".join(f"{size:,}" for size in sizes.values())


def _named(params: dict[str, int]) -> dict[str, int]:
    """Sizes by the names of the figure's fields."""
    return {"elements" if name == "n" else name: value for name, value in params.items()}


def _library_operators() -> Iterator[dict[str, Any]]:
    record = records.load("operators")
    for item in record.results["points"]:
        if not item["flops"]:
            continue
        unit = item["dtype"] if item["kind"] in _CONTRACTIONS else "fp32"
        size = f"{_sizes(**{k: v for k, v in item['params'].items() if k != 'causal'})}, {item['dtype']}"
        point = _point(record, item["name"], size, unit, item["flops"], item["bytes"], item["seconds"])
        if item["kind"] in _SAME:
            rate = "same" if unit == item["dtype"] else unit
            sizes = item["params"] if item["kind"] == "matmul" else _named(item["params"])
            point["set"] = {"op": _SAME[item["kind"]], "dtype": item["dtype"], "rate": rate, **sizes}
        yield point


def _tiled_products() -> Iterator[dict[str, Any]]:
    record = records.load("tiling")
    largest = max(item["n"] for item in record.results["matmul"])
    for item in record.results["matmul"]:
        if item["n"] == largest:
            cost = operators.matmul(largest, largest, largest, item["dtype"])
            name = f"{item['kernel']}, {item['tile']} x {item['tile']}" if item["tile"] > 1 else item["kernel"]
            size = f"{_sizes(m=largest, k=largest, n=largest)}, {item['dtype']}"
            yield _point(record, name, size, item["dtype"], cost.flops, cost.bytes, item["seconds"])


def _gelus() -> Iterator[dict[str, Any]]:
    record = records.load("gelu_five_ways")
    elements, dtype = record.results["elements"], record.results["dtype"]
    flops = operators.gelu(elements, dtype).flops
    for way in record.results["ways"]:
        kernels = f"{way['kernels']} kernels" if way["kernels"] > 1 else "one kernel"
        size = f"{elements:,}, {dtype}, {kernels}"
        yield _point(record, f"GeLU, {way['name']}", size, "fp32", flops, way["bytes"], way["seconds"])


_WAYS = {"inner loop": "lab 3, running maximum", "anchored": "lab 3, anchored", "cudnn": "cuDNN"}


def _attentions() -> Iterator[dict[str, Any]]:
    record = records.load("attention_anchor")
    dtype = record.results["dtype"]
    for item in record.results["points"]:
        shape = {key: item[key] for key in ("batch", "heads", "seq_len", "head_dim")}
        moved = operators.attention(**shape, dtype=dtype, causal=item["causal"], materialize=False).bytes
        size = f"{_sizes(**shape)}, {'causal' if item['causal'] else 'full'}, {dtype}"
        for way, name in _WAYS.items():
            yield _point(record, name, size, dtype, item["flops"], moved, item["timed"][way]["seconds"])


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """The recorded kernels in groups: key -> {label, points}.

    A point has its name, size, the number format whose flat roof it is held against, its intensity in FLOP/B (of the
    least traffic; of all its kernels' traffic for GeLU), FLOP/s, seconds, and device and date of the record.
    """
    groups = {
        "operators": ("operators of PyTorch (lecture 02)", _library_operators),
        "tiling": ("products with and without tiles (lecture 03)", _tiled_products),
        "gelu": ("GeLU in five ways (lecture 03)", _gelus),
        "attention": ("attention, forward (lecture 06)", _attentions),
    }
    return {key: {"label": label, "points": list(make())} for key, (label, make) in groups.items()}
