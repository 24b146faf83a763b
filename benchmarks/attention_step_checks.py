"""Compiles one step of the capstone's ladder, checks it against float64, and says what the compiler spent on it.

A process of its own for each step (:mod:`benchmarks.attention_steps` starts them): a kernel that breaks the process's
GPU context or waits for ever takes no other with it. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from solutions.capstone_hopper import steps
from solutions.capstone_hopper.steps import compiler, trace
from utils import runtime

#: (batch, heads, seq_len): one tile or two a program, and more tiles than programs.
SIZES = ((1, 2, 128), (2, 3, 384), (4, 16, 1024))
#: Error of a step in units of plain PyTorch's in the same dtype.
FACTOR = 2.0
#: Largest error of a logsumexp, whose terms are float32.
LSE_ALLOWED = 1e-3


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o (B, H, N, D) and the natural logsumexp (B, H, N), in the dtype of q."""
    scores = (q @ k.mT) * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check(
    each: steps.Step, head_dim: int, causal: bool, sizes: tuple = SIZES, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The largest errors of one step over some sizes, beside what is allowed.

    Raises:
        ValueError: an error is larger than allowed, or not a number.
    """
    worst = {"largest_error": 0.0, "allowed": 0.0, "largest_lse_error": 0.0}
    for seed, (batch, heads, seq_len) in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, heads, seq_len, head_dim)
        q, k, v = (torch.randn(shape, generator=generator).to(runtime.DEVICE, dtype) for _ in range(3))
        want, want_lse = exact(q.double(), k.double(), v.double(), causal)
        plain, _ = exact(q, k, v, causal)
        o, lse = each.forward(q, k, v, causal)
        error = (o.double() - want).abs().max().item()
        allowed = FACTOR * (plain.double() - want).abs().max().item()
        lse_error = (lse.double() - want_lse).abs().max().item()
        if not (error <= allowed and lse_error <= LSE_ALLOWED):
            raise ValueError(
                f"{each.name}, {dtype}, {shape}, causal {causal}: o is off by {error:.2e} (allowed {allowed:.2e}), the "
                f"logsumexp by {lse_error:.2e} (allowed {LSE_ALLOWED:.0e})"
            )
        if error >= worst["largest_error"]:
            worst |= {"largest_error": error, "allowed": allowed}
        worst["largest_lse_error"] = max(worst["largest_lse_error"], lse_error)
    return {"name": each.name, "head_dim": head_dim, "causal": causal, **worst}


def watched(each: steps.Step, seen: list) -> None:
    """From now on, append what each launch of the step's kernel compiled to ``seen``."""
    module = each.load()
    kernel = getattr(module, "attention_kernel", None) or module.launch.hopper_forward_kernel
    run = kernel.run

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(run(*arguments, **options))
        return seen[-1]

    kernel.run = noted


def report(name: str) -> dict[str, list[dict[str, Any]]]:
    """``checks`` and ``kernels`` of one step: both head_dims, full and causal; float16 is checked too.

    Raises:
        ValueError: it computes something else than attention.
    """
    each = steps.step(name)
    seen: list = []
    watched(each, seen)
    checks, kernels = [], []
    for head_dim in (64, 128):
        for causal in (False, True):
            seen.clear()
            checks.append(check(each, head_dim, causal))
            made = seen[-1]
            used = compiler.assemble(made.asm["ptx"])
            kernels.append(
                {
                    "head_dim": head_dim,
                    "causal": causal,
                    "registers": used["registers"],
                    "spilled_bytes": used["spilled_bytes"],
                    "shared_bytes": made.metadata.shared,
                }
            )
        check(each, head_dim, True, SIZES[1:2], torch.float16)
    return {"checks": checks, "kernels": kernels}


def report_traces() -> dict[str, list[dict[str, Any]]]:
    """Each traced kernel computes attention too, and notes every event.

    Raises:
        ValueError: it computes something else than attention.
        RuntimeError: an event is missing.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((4, 16, 1024, 128), generator=generator).to(runtime.DEVICE, torch.bfloat16) for _ in "qkv")
    want, _ = exact(q.double(), k.double(), v.double(), False)
    plain, _ = exact(q, k, v, False)
    allowed = FACTOR * (plain.double() - want).abs().max().item()
    for name in trace.STEPS:
        error = (trace.launch(name, q, k, v, False)[0].double() - want).abs().max().item()
        if not error <= allowed:
            raise ValueError(f"{name} with clock reads: o is off by {error:.2e} (allowed {allowed:.2e})")
        trace.record(name, q, k, v, False)
    return {"checks": [], "kernels": []}


if __name__ == "__main__":
    print(json.dumps(report_traces() if sys.argv[1] == "traces" else report(sys.argv[1])))
