"""The error of lab 3's attention beside plain PyTorch's in the same dtype, both against float64.

Random shapes, dtypes, groups of heads, scales and memory layouts; output, logsumexp and three gradients. Among the
lengths are those that have caught mistakes in other kernels: one query, lengths one short of a tile or one beyond it,
more queries than keys (where the first queries of a causal mask see nothing).
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import random
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import benchmark_cli
from solutions import lab3_flash_attention as lab
from utils import runtime
from utils.checks import cases, tensors
from utils.record_schemas import ERROR, POSITIVE, SIZE, TEXT, each

CASES = 312
WORKERS = 15
FACTOR = 2.0
OUTPUTS = ("o", "lse", "dq", "dk", "dv")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (1, 239), (239, 1), (127, 512), (512, 127), (113, 203), (203, 113), (1023, 1024), (1024, 1023), (108, 256),
    (256, 256), (64, 128), (800, 800), (1, 1), (3, 1040), (339, 64),
)  # fmt: skip
#: Query heads and key heads: as many, groups that share a key head, and all of them on one.
HEADS = ((2, 2), (4, 2), (6, 2), (6, 1), (3, 3), (1, 1))
#: As in :mod:`utils.checks.cases`; ``by token`` is (B, N, H, D) in memory, as a projection leaves it.
LAYOUTS = ("contiguous", "by token", "transposed", "padded", "strided", "offset", "expanded")


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """(o, lse, dq, dk, dv) by plain PyTorch and its autograd, in the dtype of q; the logsumexp in float32 at least.

    Args:
        q, k, v, causal, scale: As for ``flash_attention``.
        do, dlse: Gradients of o and of the logsumexp.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o, lse = _plain_forward(*leaves, causal, scale)
        return o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse.to(lse.dtype)))


def _plain_forward(q, k, v, causal, scale):
    group, (Nq, Nk) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    visible = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(Nk - Nq)
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(blind, 0.0)  # a row of -inf would give NaN
    lse = torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), -1)
    o = torch.softmax(scores, -1).masked_fill(blind, 0.0) @ v
    return o, lse.masked_fill(blind[:, 0], -math.inf)


def our_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """The same five by lab 3."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        o, lse = lab.flash_attention_with_lse(*leaves, causal, scale)
        return o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse))


def _tensor(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    source = torch.Generator().manual_seed(draw.getrandbits(63))
    values = torch.randn(shape, generator=source).to(dtype).to(runtime.DEVICE)
    if layout == "by token":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    return cases.with_layout(values, layout)


def case(number: int, longest: int = 1024) -> dict[str, Any]:
    """One random case: errors of the five outputs, PyTorch's, and those allowed.

    Args:
        number: Decides everything; lengths, head dimensions and dtypes take turns.
        longest: Longer lengths are cut to it.
    """
    draw = random.Random(f"attention errors {number}")
    dtype = DTYPES[number % len(DTYPES)]
    D = HEAD_DIMS[number // len(DTYPES) % len(HEAD_DIMS)]
    Nq, Nk = (min(n, longest) for n in LENGTHS[number % len(LENGTHS)])
    if number % 2:  # half of the lengths are drawn
        Nq, Nk = draw.randint(1, longest), draw.randint(1, longest)
    B, (Hq, Hkv), causal = draw.randint(1, 2), draw.choice(HEADS), draw.random() < 0.5
    layout = draw.choice(LAYOUTS)
    scale = draw.choice((None, None, *(factor / math.sqrt(D) for factor in (0.5, -1.0, 1.5))))
    inputs = [
        _tensor(draw, shape, dtype, layout if draw.random() < 0.7 else "contiguous")
        for shape in ((B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, Hq, Nq, D))
    ]
    dlse = _tensor(draw, (B, Hq, Nq), torch.float32, "contiguous") * (draw.random() < 0.5)
    inputs.append(dlse)
    options = {"causal": causal, "scale": scale}
    targets = tensors.targets(plain_attention, inputs, options, factor=FACTOR)
    found, theirs = our_attention(*inputs, **options), plain_attention(*inputs, **options)
    floors = dict.fromkeys(OUTPUTS, 0.0) | cancelled(*inputs, **options)
    for name, mine, target in zip(OUTPUTS, found, targets, strict=True):
        if tuple(mine.shape) != target.shape or mine.dtype != target.dtype:
            raise AssertionError(f"{name}: {tuple(mine.shape)} {mine.dtype}, not {target.shape} {target.dtype}")
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "shape": f"B={B} Hq={Hq} Hkv={Hkv} Nq={Nq} Nk={Nk} D={D}",
        "head_dim": D,
        "causal": causal,
        "layout": layout,
        "scale": "1/sqrt(D)" if scale is None else f"{scale:.4f}",
        "outputs": {
            name: {
                "error": largest_error(mine, target.right),
                "torch_error": largest_error(peer, target.right),
                "allowed": target.allowed + floors[name],
            }
            for name, mine, peer, target in zip(OUTPUTS, found, theirs, targets, strict=True)
        },
    }


def cancelled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> dict[str, float]:
    """What float32 may leave of the terms that cancel in dQ and dK: a few units in the last place of the largest.

    dS = P (dP - delta), and where a query sees one key dP equals delta: the gradient is 0, PyTorch's is 0 to the bit,
    and the difference of two sums over D rounded differently is not.
    """
    q, k, v, do = (x.detach().double().cpu() for x in (q, k, v, do))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    term = do.norm(dim=-1).max() * v.norm(dim=-1).max() * abs(scale) * 4 * torch.finfo(torch.float32).eps
    return {"dq": (term * k.abs().max()).item(), "dk": (term * q.abs().max()).item()}


def largest_error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference, where infinities agree with themselves.

    Raises:
        AssertionError: ``found`` is NaN, or infinite, where ``right`` is not.
    """
    found = found.detach().double().cpu()
    difference = torch.where(found == right, torch.zeros_like(right), (found - right).abs())
    if not torch.isfinite(difference).all():
        raise AssertionError(f"{(~torch.isfinite(difference)).sum().item()} elements are NaN or infinite")
    return difference.max().item() if difference.numel() else 0.0


def within(point: Mapping[str, Any]) -> bool:
    """Whether all errors of a case are allowed."""
    return all(output["error"] <= output["allowed"] for output in point["outputs"].values())


SCHEMA = {
    "factor": POSITIVE,
    "points": [
        {
            "dtype": TEXT,
            "shape": TEXT,
            "head_dim": SIZE,
            "causal": bool,
            "layout": TEXT,
            "scale": TEXT,
            "outputs": each(ERROR, "o", "lse", "dq", "dk", "dv"),
        }
    ],
}


def measure(
    quick: bool = False, count: int | None = None, longest: int = 1024, workers: int = WORKERS
) -> dict[str, Any]:
    """All cases; ``quick`` takes a few.

    Raises:
        RuntimeError: there is no GPU here.
    """
    numbers = range(count or (24 if quick else CASES))
    lengths = [longest] * len(numbers)
    if workers > 1:  # most of the time goes into compiling: each worker keeps a core busy
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            points = list(pool.map(case, numbers, lengths))
    else:
        points = list(map(case, numbers, lengths))
    return {"factor": FACTOR, "points": points}


def table(results: Mapping[str, Any]) -> str:
    """One line for each dtype and output: cases, the worst share of the error allowed, and cases beyond it."""
    rows = []
    for dtype in dict.fromkeys(point["dtype"] for point in results["points"]):
        mine = [point for point in results["points"] if point["dtype"] == dtype]
        for name in OUTPUTS:
            found = [point["outputs"][name] for point in mine]
            share = max(each["error"] / each["allowed"] if each["allowed"] else 0.0 for each in found)
            bad = sum(each["error"] > each["allowed"] for each in found)
            rows.append([f"{dtype} {name}", len(found), f"{share:.2f}", bad])
    worst = [
        f"beyond: {point['dtype']} {point['shape']} causal={point['causal']} {point['layout']} scale={point['scale']}"
        for point in results["points"]
        if not within(point)
    ]
    return "\n".join(
        [benchmark_cli.text_table(["output", "cases", "of the error allowed", "beyond it"], rows), *worst[:20]]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_errors", measure, table, SCHEMA))
