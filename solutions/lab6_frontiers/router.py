"""Which experts a token goes to, and what keeps them equally busy.

Letters: T tokens, H numbers each, E experts, k experts chosen for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

SCORES = ("softmax", "sigmoid")
BALANCES = ("loss", "bias", "none")


@dataclass(frozen=True)
class Routed:
    """Where T tokens go.

    Attributes:
        experts: (T, k) int64, for each token the experts that it goes to, the best first.
        weights: (T, k) float32, what their results are multiplied by; those of a token sum to 1.
        counts: (E,) int64, tokens of each expert.
        loss: scalar float32: what uneven counts cost, 0 without an auxiliary loss.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    loss: Tensor


class Router(nn.Module):
    """Scores each token against each expert in float32 and takes the best ``chosen``.

    Args:
        hidden: H.
        experts: E.
        chosen: k.
        scores: ``"softmax"`` over the experts, or ``"sigmoid"`` of each by itself.
        balance: ``"loss"``, ``"bias"`` or ``"none"``.

            - The auxiliary loss is E sum_e f_e p_e, with f_e the expert's share of all choices and p_e its mean score;
              a token's scores sum to 1. It is 1 where all are equal, and its gradient pushes down the scores of busy
              experts (Fedus, Zoph and Shazeer 2022, equation 4, for more than one choice).
            - A bias is added to an expert's scores for the choice alone, and not to the weights. After a step
              :meth:`update_bias` raises that of idle experts and lowers that of busy ones. No gradient is bent by it
              (DeepSeek-V3 technical report, 2024, section 2.1.2).

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(self, hidden: int, experts: int, chosen: int, scores: str = "softmax", balance: str = "loss") -> None:
        super().__init__()
        if not 1 <= chosen <= experts:
            raise ValueError(f"chosen must be between 1 and the number of experts {experts}, got {chosen}")
        for name, value, allowed in (("scores", scores, SCORES), ("balance", balance, BALANCES)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        self.experts, self.chosen, self.scores, self.balance = experts, chosen, scores, balance
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> Routed:
        """Route x (T, H)."""
        logits = nn.functional.linear(x.float(), self.gate.weight.float())  # (T, E)
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        experts = (scores.detach() + self.bias).topk(self.chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)  # sigmoids may all be 0
        counts = torch.bincount(experts.flatten(), minlength=self.experts)
        loss = self._loss(scores, counts) if self.balance == "loss" and len(x) else logits.new_zeros(())
        return Routed(experts, weights, counts, loss)

    def _loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        share = counts / counts.sum()
        mean = (scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)).mean(0)
        return self.experts * (share * mean).sum()

    @torch.no_grad()
    def update_bias(self, counts: Tensor, step: float = 1e-3) -> None:
        """Raise the bias of experts with fewer tokens than the mean of ``counts`` (E,), lower that of the others.

        Where ranks share the router, ``counts`` must be their sum over all ranks, or the ranks' biases drift apart
        (:meth:`.mixture_of_experts.MixtureOfExperts.update_bias` sums them).
        """
        self.bias += step * torch.sign(counts.float().mean() - counts)
