"""Tokens to the ranks of their experts, and back: expert parallelism's two all-to-alls (exercise 6.8).

Letters: R ranks; this one has T tokens of H numbers; E experts, k of them chosen for each token; n rows have come here.

The experts are cut into R shares of neighbours, the first of which have one more where R does not divide E: 7 experts
on 3 ranks are 0, 1, 2 on rank 0, then 3, 4 on rank 1, and 5, 6 on rank 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def shares_of(experts: int, ranks: int) -> list[int]:
    """How many experts each rank has."""
    return [len(share) for share in torch.arange(experts).tensor_split(ranks)]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        ### BEGIN SOLUTION 6.8: rows there
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ### BEGIN SOLUTION 6.8: gradients back
        out = gradient.new_empty((sum(ctx.sent), *gradient.shape[1:]))
        dist.all_to_all_single(out, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None
        ### END SOLUTION


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup | None = None
) -> Tensor:
    """An all-to-all of rows that autograd knows.

    Args:
        rows: (sum(sent), ...): first those for rank 0, then those for rank 1, and so on; any strides.
        sent: how many rows go to each rank, this one among them.
        received: how many come from each rank.
        group: the ranks; by default all.

    Returns:
        (sum(received), ...): first the rows of rank 0, then those of rank 1, and so on.
    """
    return _Exchange.apply(rows, list(sent), list(received), group)


def dispatch(
    x: Tensor, experts: Tensor, num_experts: int, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor, Any]:
    """Send each token to the ranks of its experts.

    Args:
        x: (T, H) float32 or bfloat16, the tokens of this rank; T may be 0, and differs from rank to rank.
        experts: (T, k) int64, the experts that each token goes to, all different.
        num_experts: E, of all ranks together.
        group: the ranks; by default all.

    Returns:
        rows: (n, H), what has come for this rank's experts, all rows of its first expert, then those of the next.
        counts: (experts of this rank,) int64, how many rows each of them has.
        kept: whatever :func:`combine` needs to bring results back.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(x, experts, num_experts)
    rank, ranks, k = dist.get_rank(group), dist.get_world_size(group), experts.shape[1]
    shares = shares_of(num_experts, ranks)
    ### BEGIN SOLUTION 6.8: dispatch
    chosen, local = experts.flatten(), shares[rank]
    order = chosen.argsort(stable=True)  # sorted by expert is sorted by rank
    counts = torch.bincount(chosen, minlength=num_experts)
    theirs = counts.new_empty(ranks * local)
    dist.all_to_all_single(theirs, counts, [local] * ranks, shares, group=group)
    theirs = theirs.view(ranks, local)  # rows of each rank for each of this rank's experts
    sent, received = [int(share.sum()) for share in counts.split(shares)], theirs.sum(1).tolist()
    rows = exchange_rows(x[order // k], sent, received, group)  # by rank, and by expert within what a rank sent
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(theirs.flatten())
    by_expert = expert.argsort(stable=True)
    return rows[by_expert], theirs.sum(0), (order, by_expert, sent, received, group)
    ### END SOLUTION


def combine(rows: Tensor, kept: Any, weights: Tensor) -> Tensor:
    """Bring the experts' results back, and add up those of each token.

    Args:
        rows: (n, H) of x's dtype, a result for each row of :func:`dispatch`, in the same order.
        kept: what dispatch kept.
        weights: (T, k) float32, what the results of a token's experts are multiplied by.

    Returns:
        (T, H) of x's dtype: weighted sums in float32, rounded once.
    """
    ### BEGIN SOLUTION 6.8: combine
    order, by_expert, sent, received, group = kept
    home = exchange_rows(rows[by_expert.argsort()], received, sent, group)
    each = home[order.argsort()].view(*weights.shape, rows.shape[1])  # (T, k, H)
    out = (each * weights.unsqueeze(-1)).sum(1)  # float32, as the weights are
    ### END SOLUTION
    return out.to(rows.dtype)


def _check(x: Tensor, experts: Tensor, num_experts: int) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16) or experts.dtype != torch.int64:
        raise TypeError(f"x must be float32 or bfloat16 and experts int64, got {x.dtype} and {experts.dtype}")
    if x.ndim != 2 or experts.ndim != 2 or len(x) != len(experts) or not 1 <= experts.shape[1] <= num_experts:
        shapes = f"{tuple(x.shape)}, {tuple(experts.shape)} and {num_experts} experts"
        raise ValueError(f"x must be (T, H) and experts (T, k) with k from 1 to num_experts, got {shapes}")
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < num_experts:
        raise ValueError(
            f"experts must be from 0 to {num_experts - 1}, got {int(experts.min())} to {int(experts.max())}"
        )
