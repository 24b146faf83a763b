"""Real operators as points on the roofline: measured time beside operations and least traffic.

``points`` are what notebook 02 draws. ``held_out`` are other operators and sizes, for predictions: lab 1 asks for the
time of an operator before it shows what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import benchmark_cli
from utils import roofline, runtime, timing
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, TEXT, TIMING, each
from utils.roofline import Cost

Case = tuple[str, str, str, dict[str, int]]  # name, kind, dtype, parameters

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

#: Kind -> operations and least traffic, from its parameters and a dtype.
COSTS: Mapping[str, Callable[..., Cost]] = {
    "copy": lambda n, dtype: roofline.copy(n, dtype),
    "add": lambda n, dtype: roofline.add(n, dtype),
    "axpy": lambda n, dtype: roofline.elementwise(n, dtype, flops_per_element=2, inputs=2),
    "relu": lambda n, dtype: roofline.relu(n, dtype),
    "gelu": lambda n, dtype: roofline.gelu(n, dtype),
    "dot": lambda n, dtype: roofline.dot_product(n, dtype),
    "softmax": lambda rows, cols, dtype: roofline.softmax(rows, cols, dtype),
    "layer_norm": lambda rows, cols, dtype: roofline.layer_norm(rows, cols, dtype),
    "transpose": lambda rows, cols, dtype: roofline.copy(rows * cols, dtype),
    "matmul": lambda m, k, n, dtype: roofline.matmul(m, k, n, dtype),
    "batched_matmul": lambda batch, m, k, n, dtype: batch * roofline.matmul(m, k, n, dtype),
    "flash_attention": lambda batch, heads, seq_len, head_dim, causal, dtype: roofline.attention(
        batch, heads, seq_len, head_dim, dtype, causal=bool(causal), materialize=False
    ),
    "eager_attention": lambda batch, heads, seq_len, head_dim, dtype: roofline.attention(
        batch, heads, seq_len, head_dim, dtype, materialize=True
    ),
}

_MI = 1 << 20

POINTS: Sequence[Case] = [
    ("dot product", "dot", "fp32", {"n": 64 * _MI}),
    ("add", "add", "bf16", {"n": 64 * _MI}),
    ("axpy", "axpy", "fp32", {"n": 64 * _MI}),
    ("ReLU fp32", "relu", "fp32", {"n": 64 * _MI}),
    ("ReLU", "relu", "bf16", {"n": 64 * _MI}),
    ("GeLU", "gelu", "bf16", {"n": 64 * _MI}),
    ("softmax", "softmax", "bf16", {"rows": 16384, "cols": 4096}),
    ("layer norm", "layer_norm", "bf16", {"rows": 16384, "cols": 4096}),
    ("transpose", "transpose", "bf16", {"rows": 8192, "cols": 8192}),
    ("matvec", "matmul", "bf16", {"m": 1, "k": 8192, "n": 8192}),
    *[
        (f"matmul B={m}", "matmul", "bf16", {"m": m, "k": 8192, "n": 8192})
        for m in (4, 16, 32, 64, 128, 256, 512, 1024, 2048)
    ],
    *[(f"matmul N={n}", "matmul", "bf16", {"m": n, "k": n, "n": n}) for n in (256, 512, 1024, 2048, 4096, 8192)],
    ("matmul fp32 N=4096", "matmul", "fp32", {"m": 4096, "k": 4096, "n": 4096}),
    (
        "flash attention",
        "flash_attention",
        "bf16",
        {"batch": 4, "heads": 16, "seq_len": 4096, "head_dim": 128, "causal": 0},
    ),
    ("eager attention", "eager_attention", "bf16", {"batch": 4, "heads": 16, "seq_len": 4096, "head_dim": 128}),
]

HELD_OUT: Sequence[Case] = [
    ("copy of 100 million floats", "copy", "fp32", {"n": 100_000_000}),
    ("sum of two vectors", "add", "fp32", {"n": 30_000_000}),
    ("ReLU after a wide layer", "relu", "fp16", {"n": 16384 * 11008}),
    ("GeLU after a narrow layer", "gelu", "fp16", {"n": 8192 * 3072}),
    ("dot product of long vectors", "dot", "fp32", {"n": 200_000_000}),
    ("axpy of an optimizer", "axpy", "fp32", {"n": 124_000_000}),
    ("softmax over scores", "softmax", "bf16", {"rows": 65536, "cols": 1024}),
    ("softmax over a vocabulary", "softmax", "bf16", {"rows": 4096, "cols": 32768}),
    ("layer norm of a large model", "layer_norm", "fp16", {"rows": 8192, "cols": 8192}),
    ("layer norm of a small model", "layer_norm", "bf16", {"rows": 32768, "cols": 768}),
    ("transpose of a wide matrix", "transpose", "fp32", {"rows": 4096, "cols": 16384}),
    ("one token through a layer", "matmul", "bf16", {"m": 1, "k": 4096, "n": 14336}),
    ("eight tokens through a layer", "matmul", "fp16", {"m": 8, "k": 5120, "n": 13824}),
    ("100 tokens through a layer", "matmul", "bf16", {"m": 100, "k": 4096, "n": 14336}),
    ("300 tokens through a layer", "matmul", "bf16", {"m": 300, "k": 12288, "n": 12288}),
    ("square matmul 3072", "matmul", "bf16", {"m": 3072, "k": 3072, "n": 3072}),
    ("square matmul 6144", "matmul", "fp16", {"m": 6144, "k": 6144, "n": 6144}),
    ("a batch through a wide layer", "matmul", "bf16", {"m": 16384, "k": 4096, "n": 11008}),
    ("matmul in fp32", "matmul", "fp32", {"m": 2048, "k": 4096, "n": 4096}),
    ("batched matmul of scores", "batched_matmul", "bf16", {"batch": 64, "m": 1024, "k": 64, "n": 1024}),
    ("batched matmul of large heads", "batched_matmul", "bf16", {"batch": 16, "m": 2048, "k": 128, "n": 2048}),
    ("causal flash attention", "flash_attention", "bf16",
     {"batch": 2, "heads": 32, "seq_len": 8192, "head_dim": 64, "causal": 1}),
    ("flash attention, short", "flash_attention", "fp16",
     {"batch": 16, "heads": 12, "seq_len": 1024, "head_dim": 64, "causal": 0}),
    ("eager attention, short", "eager_attention", "bf16", {"batch": 16, "heads": 12, "seq_len": 1024, "head_dim": 64}),
]  # fmt: skip

QUICK = ("dot product", "ReLU", "GeLU", "softmax", "layer norm", "transpose", "matvec", "matmul B=64", "matmul B=256",
         "matmul N=1024", "matmul N=4096", "flash attention", "eager attention")  # fmt: skip


def cost_of(kind: str, dtype: str, params: Mapping[str, int]) -> Cost:
    """Operations and least traffic of an operator of this record.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in COSTS:
        raise ValueError(f"kind must be one of {', '.join(COSTS)}, got {kind!r}")
    return COSTS[kind](**params, dtype=dtype)


def _random(*shape: int, dtype: str) -> torch.Tensor:
    return torch.randn(*shape, device=runtime.DEVICE, dtype=torch.float32).to(_DTYPES[dtype])


def _attention_inputs(batch: int, heads: int, seq_len: int, head_dim: int, dtype: str) -> list[torch.Tensor]:
    return [_random(batch, heads, seq_len, head_dim, dtype=dtype) for _ in range(3)]


def build(kind: str, dtype: str, params: Mapping[str, int]) -> Callable[[], object]:
    """A function that runs the operator once, on random inputs that it keeps.

    Raises:
        ValueError: the kind is unknown.
    """
    p = dict(params)
    if kind in ("copy", "add", "axpy"):
        x, y, out = (_random(p["n"], dtype=dtype) for _ in range(3))
        calls = {
            "copy": lambda: out.copy_(x),
            "add": lambda: torch.add(x, y, out=out),
            "axpy": lambda: torch.add(x, y, alpha=1.5, out=out),
        }
        return calls[kind]
    if kind in ("relu", "gelu"):
        x = _random(p["n"], dtype=dtype)
        return (lambda: F.relu(x)) if kind == "relu" else (lambda: F.gelu(x, approximate="tanh"))
    if kind == "dot":
        x, y = (_random(p["n"], dtype=dtype) for _ in range(2))
        return lambda: torch.dot(x, y)
    if kind in ("softmax", "layer_norm", "transpose"):
        x = _random(p["rows"], p["cols"], dtype=dtype)
        weight, bias = (_random(p["cols"], dtype=dtype) for _ in range(2))
        calls = {
            "softmax": lambda: torch.softmax(x, dim=-1),
            "layer_norm": lambda: F.layer_norm(x, (p["cols"],), weight, bias),
            "transpose": lambda: x.t().contiguous(),
        }
        return calls[kind]
    if kind in ("matmul", "batched_matmul"):
        batch = (p["batch"],) if kind == "batched_matmul" else ()
        a, b = _random(*batch, p["m"], p["k"], dtype=dtype), _random(*batch, p["k"], p["n"], dtype=dtype)
        return lambda: torch.matmul(a, b)
    if kind == "flash_attention":
        q, k, v = _attention_inputs(p["batch"], p["heads"], p["seq_len"], p["head_dim"], dtype)
        causal = bool(p["causal"])
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    if kind == "eager_attention":
        q, k, v = _attention_inputs(p["batch"], p["heads"], p["seq_len"], p["head_dim"], dtype)
        q = q * p["head_dim"] ** -0.5
        return lambda: torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
    raise ValueError(f"kind must be one of {', '.join(COSTS)}, got {kind!r}")


def point(case: Case, rounds: int = 25) -> dict[str, Any]:
    """Measure one operator.

    Raises:
        RuntimeError: there is no GPU here.
    """
    name, kind, dtype, params = case
    cost = cost_of(kind, dtype, params)
    with torch.no_grad():
        timed = timing.measure(build(kind, dtype, params), rounds=rounds)
    return {
        "name": name,
        "kind": kind,
        "dtype": dtype,
        "params": dict(params),
        "flops": cost.flops,
        "bytes": cost.bytes,
        "intensity": cost.intensity,
        **timed.as_dict(),
        "flops_per_second": cost.flops / timed.median,
        "bytes_per_second": cost.bytes / timed.median,
    }


_OPERATOR = {
    **each(TEXT, "name", "kind", "dtype"),
    "params": {str: COUNT},
    "flops": COUNT,
    "bytes": SIZE,
    "intensity": NOT_NEGATIVE,
    **TIMING,
    "flops_per_second": NOT_NEGATIVE,
    "bytes_per_second": POSITIVE,
}
SCHEMA = {"points": [_OPERATOR], "held_out": [_OPERATOR]}


def measure(
    quick: bool = False, points: Sequence[Case] | None = None, held_out: Sequence[Case] | None = None
) -> dict[str, Any]:
    """Both lists of operators; ``quick`` measures a dozen points and no held-out operator in a few seconds.

    Raises:
        RuntimeError: there is no GPU here.
    """
    if points is None:
        points = [case for case in POINTS if case[0] in QUICK] if quick else POINTS
    if held_out is None:
        held_out = [] if quick else HELD_OUT
    former = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        return {"points": [point(case) for case in points], "held_out": [point(case) for case in held_out]}
    finally:
        torch.backends.cuda.matmul.fp32_precision = former


def table(results: dict[str, Any]) -> str:
    """One line an operator: intensity, time, rates."""
    rows = [
        [
            f"{item['name']} ({item['dtype']})",
            f"{item['intensity']:.3g}",
            f"{item['seconds'] * 1e6:,.1f}",
            f"{item['flops_per_second'] / 1e12:.2f}",
            f"{item['bytes_per_second'] / 1e12:.3f}",
        ]
        for item in [*results["points"], *results["held_out"]]
    ]
    return benchmark_cli.text_table(["operator", "FLOP/B", "us", "TFLOP/s", "TB/s"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("operators", measure, table, SCHEMA))
