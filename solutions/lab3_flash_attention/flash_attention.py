"""FlashAttention as an operator that autograd knows (exercise 3.8)."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .arguments import check_attention, softmax_scale
from .flash_backward import attention_delta, flash_dkdv, flash_dq
from .flash_forward import flash_forward


class FlashAttention(torch.autograd.Function):
    """Keeps q, k, v, o and the logsumexp: nothing of N x N."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        """o and the logsumexp of one call."""
        ### BEGIN SOLUTION 3.8: what the forward pass keeps
        o, lse = flash_forward(q, k, v, causal, scale, anchored=True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return o, lse
        ### END SOLUTION

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        """Gradients of q, k and v that are asked for."""
        ### BEGIN SOLUTION 3.8: the backward pass
        q, k, v, o, lse = ctx.saved_tensors
        if do is None:
            do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
        num_fully_masked = max(0, q.shape[2] - k.shape[2]) if ctx.causal else 0
        delta = attention_delta(o, do, dlse, num_fully_masked)
        dq = dk = dv = None
        if ctx.needs_input_grad[0]:
            dq = flash_dq(q, k, v, do, lse, delta, ctx.causal, ctx.scale)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk, dv = flash_dkdv(q, k, v, do, lse, delta, ctx.causal, ctx.scale)
        return dq, dk, dv, None, None
        ### END SOLUTION


def flash_attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its logsumexp; gradients flow through both.

    Args:
        q: (B, Hq, Nq, D), float32, float16 or bfloat16, any strides, D from 16 to 256.
        k, v: (B, Hkv, Nk, D) of q's dtype; Hkv divides Hq, and query head h reads key head h // (Hq / Hkv).
        causal: Query i sees keys j <= i + Nk - Nq: the last query sees every key.
        scale: Factor of the scores, by default 1 / sqrt(D).

    Returns:
        o, of q's shape and dtype, and L (B, Hq, Nq) float32, the natural logsumexp of each row of scores. A query that
        sees no key has o = 0 and L = -inf, and its gradients are 0.

    Raises:
        TypeError, ValueError: as :func:`.arguments.check_attention`, or ``scale`` is no finite number.
    """
    check_attention(q, k, v)
    return FlashAttention.apply(q, k, v, bool(causal), softmax_scale(scale, q.shape[3]))


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """:func:`flash_attention_with_lse` without the logsumexp."""
    return flash_attention_with_lse(q, k, v, causal, scale)[0]
