"""Attention in plain PyTorch: what participants of a comparison are replaced by, and the source of an entry."""

from __future__ import annotations

import torch

#: Small cases in place of the leaderboard's.
SMALL = (
    (1, 1, 1, 1, 1, False, None, "contiguous"),
    (2, 4, 2, 9, 13, True, None, "padded"),
    (1, 3, 1, 11, 5, True, 0.3, "by token"),
)
#: An attention as lab 3 promises it, in plain PyTorch and float32.
RIGHT = """
import math
import torch

def flash_attention_with_lse(q, k, v, causal=False, scale=None):
    group, (Nq, Nk) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = q.float() @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    sees = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device)
    sees = sees.tril(Nk - Nq) if causal else sees
    blind = ~sees.any(-1, keepdim=True)
    scores = scores.masked_fill(~sees, -math.inf).masked_fill(blind, 0.0)
    o = torch.softmax(scores, -1).masked_fill(blind, 0.0) @ v
    return o.to(q.dtype), torch.logsumexp(scores, -1).masked_fill(blind[:, 0], -math.inf)

def flash_attention(q, k, v, causal=False, scale=None):
    return flash_attention_with_lse(q, k, v, causal, scale)[0]
"""


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of as many queries as keys, computed in float32; q's dtype."""
    scores = q.float() @ k.float().mT / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype)
