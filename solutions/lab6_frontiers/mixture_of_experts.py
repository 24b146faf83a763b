"""A layer of experts: each token is computed by the few that its router chooses, and no token is dropped.

Letters: T tokens of H numbers, E experts with I inner numbers each, k of them for a token, R ranks.

Tokens are sorted by expert, so that all rows of an expert lie side by side for :func:`.grouped_matmul`, and go back to
their places afterwards. With a process group each rank has E / R of the experts and its own tokens: rows travel to the
rank of their expert and back, two all-to-alls forward and two backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .grouped_matmul import grouped_matmul
from .router import Routed, Router
from .rows_to_ranks import all_to_all


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a layer of experts and how its router works (:class:`.router.Router`).

    Attributes:
        hidden: H.
        inner: I, of each routed expert.
        experts: E.
        chosen: k.
        shared: inner numbers of the expert that every token meets; 0 for none.
        scores, balance: of the router.
    """

    hidden: int
    inner: int
    experts: int
    chosen: int
    shared: int = 0
    scores: str = "softmax"
    balance: str = "loss"

    @property
    def parameters(self) -> int:
        """All parameters of the layer, those of the router included."""
        return 3 * self.hidden * (self.experts * self.inner + self.shared) + self.hidden * self.experts

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return 3 * self.hidden * (self.chosen * self.inner + self.shared) + self.hidden * self.experts


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
        rows = tokens.unsqueeze(1).expand(-1, config.chosen, -1).reshape(-1, config.hidden)[order]  # (k T, H)
        rows = self._on_all_ranks(rows, counts) if self.group else self._experts(rows, counts)
        each = rows[order.argsort()].view(-1, config.chosen, config.hidden)  # (T, k, H)
        out = (each * routed.weights.to(each.dtype).unsqueeze(-1)).sum(1)
        if self.shared_up is not None:
            out = out + self.shared_down(_swiglu(self.shared_up(tokens)))
        return out.view(x.shape)

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
        rows = self._experts(rows[order], mine)[order.argsort()]
        return all_to_all(rows, received, sent, self.group)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


def _sizes(counts: Tensor, ranks: int) -> Sequence[int]:
    """Rows for each rank, from those for each expert; the host waits for them, since all-to-alls ask it for sizes."""
    return counts.view(ranks, -1).sum(1).tolist()


def all_to_all_bytes(config: MoEConfig, tokens: int, ranks: int, element_size: int, training: bool = False) -> int:
    """Bytes that leave a rank in one layer, with tokens spread evenly over the experts.

    A row of H numbers leaves for each choice of another rank's expert, and its result comes back: two all-to-alls, four
    with the backward pass; and in the forward pass a count of 8 bytes for each of the others' experts.

    Args:
        config: the layer.
        tokens: of this rank.
        ranks: R.
        element_size: bytes of a number.
        training: whether there is a backward pass.
    """
    away = tokens * config.chosen * (ranks - 1) // ranks
    rows = (4 if training else 2) * away * config.hidden * element_size
    return rows + 8 * config.experts * (ranks - 1) // ranks
