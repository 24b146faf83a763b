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
        raise NotImplementedError("Lab 3, exercise 3.8: what the forward pass keeps")

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        """Gradients of q, k and v that are asked for."""
        raise NotImplementedError("Lab 3, exercise 3.8: the backward pass")


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
