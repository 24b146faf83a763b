"""The implementations of attention that the benchmarks compare, by name: ``eager``, ``ours``, PyTorch's backends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from solutions import lab3_flash_attention as lab

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
IMPLEMENTATIONS = ("eager", "ours", *BACKENDS)
#: Ways that write no N x N tensor.
TILED = ("ours", *BACKENDS)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, dropout: float = 0.0) -> Tensor:
    """Attention operator by operator, as a textbook writes it: the scores and the probabilities are tensors.

    q is scaled before the product, which is the cheapest place. With ``causal`` or ``dropout`` the operators for them
    are added. q, k, v (B, H, N, D).
    """
    scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.mT
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, -1)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return weights @ v


def forward(way: str, causal: bool = False, dropout: float = 0.0) -> Attention:
    """Attention of q, k, v (B, H, N, D) in one of :data:`IMPLEMENTATIONS`.

    Raises:
        ValueError: the way is unknown, or ours was asked for dropout, which it does not have.
    """
    if way not in IMPLEMENTATIONS:
        raise ValueError(f"way must be one of {', '.join(IMPLEMENTATIONS)}, got {way!r}")
    if way == "eager":
        return lambda q, k, v: eager(q, k, v, causal, dropout)
    if way == "ours":
        if dropout:
            raise ValueError(f"ours has no dropout, got {dropout}")
        return lambda q, k, v: lab.flash_attention(q, k, v, causal=causal)
    backend = BACKENDS[way]

    def of_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)

    return of_pytorch


def call(attention: Attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor, step: bool) -> Callable[[], object]:
    """One call without gradients, or with ``step`` forward and backward: q, k, v must then require gradients."""

    def run() -> object:
        if step:
            return torch.autograd.grad(attention(q, k, v), (q, k, v), do)
        with torch.no_grad():
            return attention(q, k, v)

    return run
