"""Linear layers whose three products multiply rounded factors, for training in fp8 and, beside it, in bf16.

A linear layer's forward pass multiplies input and weight; its backward pass multiplies the output's gradient with the
weight and with the input. The factors are rounded as the hardware would get them, the sums are those of PyTorch.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.formats import ELEMENTS

SCALINGS = ("none", "current", "delayed")
#: Steps whose largest magnitudes delayed scaling looks at.
HISTORY = 16
#: Format of each tensor's role (Micikevicius et al. 2022): gradients need range, the others precision.
ROLES = {"input": "e4m3", "weight": "e4m3", "gradient": "e5m2"}

#: The largest number over its scale may be off by a rounding in float32, which is no clipping.
_ROUNDED = 1 + 1e-6


class Fp8Scaling:
    """Rounds the tensors of one linear layer to fp8 and back; one for each layer, as it remembers.

    Args:
        scaling: "none" rounds as it is; "current" scales by the tensor's own largest magnitude, ``amax``; "delayed" by
            the largest of the last :data:`HISTORY` steps, so that a tensor is read once. What is beyond is clipped.

    Attributes:
        numbers, zeroed, clipped: for each role, how many numbers other than 0 were rounded so far, how many of them
            became 0, and how many were beyond the largest number.

    Raises:
        ValueError: an unknown scaling.
    """

    def __init__(self, scaling: str) -> None:
        if scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {scaling!r}")
        self.scaling = scaling
        self.histories = {role: deque(maxlen=HISTORY) for role in ROLES}
        self.numbers, self.zeroed, self.clipped = Counter(), Counter(), Counter()

    def __call__(self, x: Tensor, role: str) -> Tensor:
        """``x`` as fp8 keeps it, of the same shape and dtype; ``role`` is one of :data:`ROLES`."""
        element = ELEMENTS[ROLES[role]]
        scaled = x / (scale := self._scale(x, role, element.largest))
        kept = scaled.clamp(-element.largest, element.largest).to(element.dtype).to(x.dtype)
        self.numbers[role] += int(x.count_nonzero())
        self.zeroed[role] += int(x.count_nonzero() - kept.count_nonzero())
        self.clipped[role] += int((scaled.abs() > element.largest * _ROUNDED).sum())
        return kept * scale

    def _scale(self, x: Tensor, role: str, largest: float) -> float:
        if self.scaling == "none":
            return 1.0
        amax, history = float(x.detach().abs().max()), self.histories[role]
        known = max(history) if self.scaling == "delayed" and history else amax
        history.append(amax)
        return known / largest or 1.0


def bf16(x: Tensor, role: str) -> Tensor:
    """``x`` as bf16 keeps it, of the same dtype; the role does not matter."""
    return x.bfloat16().to(x.dtype)


class _Product(torch.autograd.Function):
    """x (..., K) times weight (N, K) transposed, with all factors of the three products rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Any) -> Tensor:
        x, weight = rounding(x, "input"), rounding(weight, "weight")
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = ctx.rounding(gradient, "gradient")
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None


def round_products(model: nn.Module, products: str) -> nn.Module:
    """The same model; from now on its linear layers multiply rounded factors. Biases are added unrounded.

    Args:
        model: is changed, and returned; given only the ``blocks`` of a :class:`utils.gpt.GPT`, its head stays as it is.
            Each linear layer has its own :class:`Fp8Scaling` as ``rounding``.
        products: "exact" changes nothing, "bf16" rounds to bf16, and a name of :data:`SCALINGS` to fp8.

    Raises:
        ValueError: another name.
    """
    if products == "exact":
        return model
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rounding = bf16 if products == "bf16" else Fp8Scaling(products)
            module.rounding = rounding
            module.forward = lambda x, m=module: _with_bias(_Product.apply(x, m.weight, m.rounding), m.bias)
    return model


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
