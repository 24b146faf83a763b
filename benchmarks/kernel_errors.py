"""The error of lab 2's kernels beside PyTorch's own, both against float64: random shapes, strides and dtypes.

Half of the point is what the shapes are: sizes that divide nothing, rows of one element and of a hundred thousand,
views with gaps, turned, expanded, and a few tensors of more than 2^31 elements.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import benchmark_cli
from solutions import lab2_triton_kernels as lab
from utils import runtime
from utils.checks import cases, tensors
from utils.record_schemas import ERROR, POSITIVE, SIZE, TEXT, each

CASES = 264
WORKERS = 12
FACTOR = 2.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "transposed", "padded", "strided", "offset", "expanded")

Function = Callable[..., Any]


def with_gradients(function: Function) -> Function:
    """A function of its inputs and a gradient of its output that gives the gradients of its inputs."""

    def gradients(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, grad = args
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            return torch.autograd.grad(function(*leaves), leaves, grad)

    return gradients


#: Operator -> what lab 2 computes, the same in plain PyTorch, and which inputs it takes (see :func:`_draw_inputs`).
OPERATORS: Mapping[str, tuple[Function, Function, str]] = {
    "gelu": (lab.gelu, lambda x: F.gelu(x, approximate="tanh"), "x"),
    "bias_relu": (lab.bias_relu, lambda x, bias: F.relu(x + bias), "x vector"),
    "bias_relu backward": (with_gradients(lab.bias_relu), with_gradients(lambda x, b: F.relu(x + b)), "x vector like"),
    "weighted_sum": (lab.weighted_sum, lambda x, w: (w * x).sum(-1), "x vector"),
    "weighted_sum backward": (
        with_gradients(lab.weighted_sum), with_gradients(lambda x, w: (w * x).sum(-1)), "x vector rows"
    ),
    "softmax": (lab.softmax, lambda x: torch.softmax(x, -1), "x"),
    "softmax, long rows": (lab.softmax, lambda x: torch.softmax(x, -1), "long"),
    "online_softmax": (lab.online_softmax, lambda x: torch.softmax(x, -1), "long"),
    "matmul": (lab.matmul, torch.matmul, "a b"),
    "matmul, aligned": (lab.matmul, torch.matmul, "a b by 8"),
    "tiled_matmul": (lab.tiled_matmul, torch.matmul, "a b"),
}  # fmt: skip


def _tensor(
    draw: random.Random, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0, masked: float = 0.0
) -> torch.Tensor:
    """Random values in a random layout; ``masked`` of the columns at most, side by side, are -inf."""
    source = torch.Generator().manual_seed(draw.getrandbits(63))
    values = (torch.randn(tuple(shape), generator=source) * scale).to(dtype).to(runtime.DEVICE)
    if masked:
        width = int(draw.random() * masked * shape[-1])
        start = draw.randint(0, shape[-1] - width)
        values[..., start : start + width] = -float("inf")
    return cases.with_layout(values, draw.choice(LAYOUTS)) if values.ndim else values


def _draw_inputs(kind: str, draw: random.Random, dtype: torch.dtype, largest: int) -> list[torch.Tensor]:
    """Random inputs: ``largest`` bounds rows and sides."""
    if kind.startswith("a b"):
        unit = 8 if "by 8" in kind else 1
        m, k, n = (unit * draw.randint(1, max(2, largest // (4 * unit))) for _ in range(3))
        return [_tensor(draw, (m, k), dtype), _tensor(draw, (k, n), dtype)]
    if kind == "long":
        return [_tensor(draw, (draw.randint(1, 3), draw.randint(2 * largest, 60 * largest)), dtype, 4.0, masked=0.5)]
    leading = [draw.randint(1, 6) for _ in range(draw.randint(0, 4))]
    x = _tensor(draw, (*leading, draw.choice([1, 3, 8, 17, 64, 100, largest // 2 + 1, largest])), dtype, 2.0)
    if draw.random() < 0.3:
        x = x.permute(draw.sample(range(x.ndim), x.ndim))
    inputs = [x]
    if "vector" in kind:
        inputs.append(_tensor(draw, (x.shape[-1],), dtype))
    if "like" in kind:
        inputs.append(_tensor(draw, tuple(x.shape), dtype))
    if "rows" in kind:
        inputs.append(_tensor(draw, tuple(x.shape[:-1]), dtype))
    return inputs


def case(number: int, largest: int) -> dict[str, Any]:
    """One random case: its error, PyTorch's, and the error allowed (:func:`utils.checks.tensors.targets`)."""
    names = list(OPERATORS)
    name = names[number % len(names)]
    draw = random.Random(f"kernel errors {number}")
    dtype = DTYPES[number // len(names) % len(DTYPES)]
    ours, plain, kind = OPERATORS[name]
    inputs = _draw_inputs(kind, draw, dtype, largest)
    targets = tensors.targets(plain, inputs, factor=FACTOR)
    found, theirs = (tensors.as_outputs(function(*inputs)) for function in (ours, plain))
    errors, peers, allowed = [], [], []
    for mine, peer, target in zip(found, theirs, targets, strict=True):
        if tuple(mine.shape) != target.shape or mine.dtype != target.dtype:
            raise AssertionError(f"{name}: {tuple(mine.shape)} {mine.dtype}, not {target.shape} {target.dtype}")
        errors.append(_largest(mine, target.right))
        peers.append(_largest(peer, target.right))
        allowed.append(target.allowed)
    worst = max(range(len(errors)), key=lambda i: errors[i] / allowed[i] if allowed[i] else errors[i])
    return {
        "operator": name,
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": " ".join(_text(tensor.shape) for tensor in inputs),
        "strides": " ".join(_text(tensor.stride()) for tensor in inputs),
        "error": errors[worst],
        "torch_error": peers[worst],
        "allowed": allowed[worst],
    }


def _text(sizes: Sequence[int]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _largest(value: torch.Tensor, right: torch.Tensor) -> float:
    difference = (value.detach().double().cpu() - right).abs()
    return difference.max().item() if difference.numel() else 0.0


def large(elements: int, columns: int = 4096) -> list[dict[str, Any]]:
    """The operators on bf16 inputs of more than ``elements`` elements, compared on the last rows: largest offsets."""
    rows, last = elements // columns + 3, 2
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=runtime.DEVICE).normal_()
    vector = torch.randn(columns, device=runtime.DEVICE).to(torch.bfloat16)
    grad = torch.randn(rows, device=runtime.DEVICE).to(torch.bfloat16)
    tail, found = x[-last:], []

    def compare(name: str, function: Function, mine: torch.Tensor, *inputs: torch.Tensor) -> None:
        (target,) = tensors.targets(function, inputs, factor=FACTOR)
        found.append({
            "operator": name, "elements": x.numel(), "error": _largest(mine, target.right),
            "torch_error": _largest(function(*inputs), target.right), "allowed": target.allowed,
        })  # fmt: skip

    with torch.no_grad():
        compare("gelu", OPERATORS["gelu"][1], lab.gelu(x)[-last:], tail)
        compare("bias_relu", OPERATORS["bias_relu"][1], lab.bias_relu(x, vector)[-last:], tail, vector)
        compare("weighted_sum", OPERATORS["weighted_sum"][1], lab.weighted_sum(x, vector)[-last:], tail, vector)
        compare("softmax", OPERATORS["softmax"][1], lab.softmax(x)[-last:], tail)
        b = vector[:, None].repeat(1, 8)
        compare("matmul", torch.matmul, lab.matmul(x, b)[-last:], tail, b)
        compare("tiled_matmul", torch.matmul, lab.tiled_matmul(x, b)[-last:], tail, b)
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(lab.weighted_sum(leaf, vector), leaf, grad)
    compare("weighted_sum backward", lambda d, w: d[:, None] * w, dx[-last:], grad[-last:], vector)
    return found


SCHEMA = {
    "factor": POSITIVE,
    "points": [{**each(TEXT, "operator", "dtype", "shapes", "strides"), **ERROR}],
    "large": [{"operator": TEXT, "elements": SIZE, **ERROR}],
}


def measure(
    quick: bool = False, count: int | None = None, largest: int = 1600, elements: int = 1 << 31, workers: int = WORKERS
) -> dict[str, Any]:
    """All cases; ``quick`` takes a few, and no large tensor.

    Raises:
        RuntimeError: there is no GPU here.
    """
    count = count or (len(OPERATORS) if quick else CASES)
    numbers, sizes = range(count), [largest] * count
    if workers > 1:  # most of the time goes into compiling: each worker keeps a core busy
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            points = list(pool.map(case, numbers, sizes))
    else:
        points = list(map(case, numbers, sizes))
    return {"factor": FACTOR, "points": points, "large": [] if quick else large(elements)}


def within(point: Mapping[str, Any]) -> bool:
    """Whether a case's error is allowed."""
    return point["error"] <= point["allowed"]


def table(results: Mapping[str, Any]) -> str:
    """One line an operator: cases, the worst share of the allowed error, and cases beyond it."""
    rows = []
    for group, points in (("", results["points"]), ("more than 2^31 elements: ", results["large"])):
        for name in dict.fromkeys(point["operator"] for point in points):
            mine = [point for point in points if point["operator"] == name]
            share = max(point["error"] / point["allowed"] if point["allowed"] else 0.0 for point in mine)
            bad = sum(not within(point) for point in mine)
            rows.append([group + name, len(mine), f"{share:.2f}", bad])
    return benchmark_cli.text_table(["operator", "cases", "of the error allowed", "beyond it"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("kernel_errors", measure, table, SCHEMA))
