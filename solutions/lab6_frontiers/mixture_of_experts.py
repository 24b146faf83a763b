"""A layer of experts: each token is computed by the few that its router chooses, and no token is dropped.

Letters: T tokens of H numbers (``hidden``), E experts of inner size I, k of them for a token, R ranks.

Tokens are sorted by expert, so that all rows of an expert lie side by side for :func:`.grouped_matmul`, and go back to
their places afterwards. With a process group each rank has E / R of the experts and its own tokens: rows travel to the
rank of their expert and back, two all-to-alls forward and two backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from utils.transformer_math import ExpertLayer

from .grouped_matmul import grouped_matmul
from .router import Routed, Router
from .rows_to_ranks import all_to_all


@dataclass(frozen=True)
class MoEConfig(ExpertLayer):
    """Sizes of a layer of experts, and how its router works (:class:`.router.Router`: ``scores`` and ``balance``)."""

    scores: str = "softmax"
    balance: str = "loss"


def sorted_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order that puts choices of experts side by side, and how many each has.

    Args:
        experts: (n,) int64.
        count: how many experts there are.

    Returns:
        ``order`` (n,): ``experts[order]`` rises, and equal ones keep their order; ``counts`` (count,) int64.
    """
    return experts.argsort(stable=True), torch.bincount(experts, minlength=count)


class MixtureOfExperts(nn.Module):
    """SwiGLU experts behind a router, ``(..., H) -> (..., H)``; :attr:`routed` holds where the last tokens went.

    Args:
        config: the sizes.
        group: spreads the experts over its ranks, E / R on each; each rank gives its own tokens, and the router and
            the shared expert are the same on all. The gradients of those two are the rank's own, to be summed as in
            data parallelism; an expert's gradient is whole.

    Raises:
        ValueError: the ranks do not divide the experts.
    """

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        ranks = group.size() if group else 1
        if config.experts % ranks:
            raise ValueError(f"{ranks} ranks must divide the {config.experts} experts")
        self.config, self.group, self.local = config, group, config.experts // ranks
        self.router = Router(config.hidden, config.experts, config.chosen, config.scores, config.balance)
        self.up = nn.Parameter(torch.empty(self.local, config.hidden, 2 * config.inner))  # gates, then what they let by
        self.down = nn.Parameter(torch.empty(self.local, config.inner, config.hidden))
        self.shared_up = nn.Linear(config.hidden, 2 * config.shared, bias=False) if config.shared else None
        self.shared_down = nn.Linear(config.shared, config.hidden, bias=False) if config.shared else None
        self.routed: Routed | None = None
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The experts' results of each token of x, weighted, and that of the shared expert."""
        config = self.config
        tokens = x.reshape(-1, config.hidden)
        self.routed = routed = self.router(tokens)
        order, counts = sorted_by_expert(routed.experts.flatten(), config.experts)
        back = order.argsort()  # where the row of each choice lies
        rows = _TakeRows.apply(tokens, order // config.chosen, back)  # (k T, H)
        rows = self._on_all_ranks(rows, counts) if self.group else self._experts(rows, counts)
        each = _TakeRows.apply(rows, back, order).view(-1, config.chosen, config.hidden)  # (T, k, H)
        out = (each * routed.weights.to(each.dtype).unsqueeze(-1)).sum(1)
        if self.shared_up is not None:
            out = out + self.shared_down(_swiglu(self.shared_up(tokens)))
        return out.view(x.shape)

    @torch.no_grad()
    def update_bias(self, step: float = 1e-3) -> None:
        """After a step: :meth:`.router.Router.update_bias` by the last tokens' counts, those of all ranks together."""
        counts = self.routed.counts.clone()
        if self.group:
            dist.all_reduce(counts, group=self.group)
        self.router.update_bias(counts, step)

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (n, H), sorted by this rank's experts, through them."""
        return grouped_matmul(_swiglu(grouped_matmul(rows, self.up, counts)), self.down, counts)

    def _on_all_ranks(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (n, H), sorted by expert, to the ranks of their experts, through them, and back."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)  # what each rank sends to each of this one's experts
        sent, received = (_sizes(each, self.group.size()) for each in (counts, theirs))
        rows = all_to_all(rows, sent, received, self.group)  # by rank, and by expert within what a rank sent
        experts = torch.arange(self.local, device=rows.device).repeat(self.group.size()).repeat_interleave(theirs)
        order, mine = sorted_by_expert(experts, self.local)
        back = order.argsort()
        rows = _TakeRows.apply(self._experts(_TakeRows.apply(rows, order, back), mine), back, order)
        return all_to_all(rows, received, sent, self.group)


class _TakeRows(torch.autograd.Function):
    """Rows ``index`` of x, each row of x the same number of times, built once.

    ``back`` lists the places of a row's copies, row by row: its gradient is the sum of theirs, in that order, where
    indexing's own would add them up in any.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(back)
        return x[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        rows, width = ctx.shape
        copies = len(back) // rows if rows else 0
        return gradient[back].view(rows, copies, width).sum(1), None, None


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


def _sizes(counts: Tensor, ranks: int) -> Sequence[int]:
    """Rows for each rank, from those for each expert; the host waits for them, since all-to-alls ask it for sizes."""
    return counts.view(ranks, -1).sum(1).tolist()
