"""The operator: lab 3's interface over Hopper's kernels, and over lab 3's own where those cannot run."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from solutions.lab3_flash_attention import flash_attention_with_lse as portable_attention
from solutions.lab3_flash_attention.arguments import check_attention, dtype_name, softmax_scale
from utils import runtime

HEAD_DIMS = (64, 128, 256)


def why_portable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why lab 3's portable kernels run for these tensors, or None where Hopper's do.

    Args:
        q: (B, Hq, Nq, D).
        k, v: (B, Hkv, Nk, D).
    """
    if runtime.INTERPRET or q.device.type != "cuda":
        return "kernels run in the interpreter here"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"{torch.cuda.get_device_name(q.device)} is no Hopper GPU (compute capability 9.0)"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"the tensor cores take float16 and bfloat16 in these kernels, not {dtype_name(q)}"
    if q.shape[3] not in HEAD_DIMS:
        return f"head_dim {q.shape[3]} is none of {', '.join(map(str, HEAD_DIMS))}"
    if 0 in q.shape or 0 in k.shape:
        return "a tensor is empty"
    return None


class HopperAttention(torch.autograd.Function):
    """Keeps q, k, v, o and the logsumexp, as lab 3's."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, deterministic):
        """o and the logsumexp of one call."""
        from .launch import hopper_forward  # Gluon's kernels exist only where Triton compiles for a GPU

        o, lse = hopper_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale, ctx.deterministic = causal, scale, deterministic
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        """Gradients of q, k and v."""
        from .launch_reordered import Step, hopper_backward_reordered
        from .launch_wide import hopper_wide_backward

        q, k, v, o, lse = ctx.saved_tensors
        given = (q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse, ctx.causal, ctx.scale)
        if q.shape[3] == 256:
            gradients = hopper_wide_backward(*given, ctx.deterministic)
        else:
            gradients = hopper_backward_reordered(*given, Step.ORDERED if ctx.deterministic else Step.BALANCED)
        return *gradients, None, None, None


def flash_attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention and its logsumexp; gradients flow through both. Lab 3's rules hold, and its text.

    Args:
        q: (B, Hq, Nq, D), float32, float16 or bfloat16, any strides, D from 16 to 256.
        k, v: (B, Hkv, Nk, D) of q's dtype; Hkv divides Hq.
        causal: Query i sees keys j <= i + Nk - Nq.
        scale: Factor of the scores, by default 1 / sqrt(D).
        deterministic: Whether two backward passes are equal to the bit. Without it dq is summed in the order in which
            its parts arrive, which is faster.

    Returns:
        o, of q's shape and dtype, and L (B, Hq, Nq) float32, the natural logsumexp of each row of scores.

    Raises:
        TypeError, ValueError: as lab 3's function raises them.
    """
    check_attention(q, k, v)
    scale = softmax_scale(scale, q.shape[3])
    if why_portable(q, k, v) is not None:
        return portable_attention(q, k, v, causal, scale)
    if scale <= 0:  # the kernels take the largest product for the largest score
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q) * q, 1.0)
    return HopperAttention.apply(q, k, v, bool(causal), scale, bool(deterministic))


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None,
    deterministic: bool = True,
) -> torch.Tensor:  # fmt: skip
    """o of :func:`flash_attention_with_lse`."""
    return flash_attention_with_lse(q, k, v, causal, scale, deterministic)[0]
