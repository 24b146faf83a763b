"""Speculative sampling: a small model drafts tokens, the large one checks them all in one pass (exercise 5.6).

Letters: k drafted tokens, V vocabulary, S sequences. The target's distributions have a row more than the draft's: row i
is that of the token *after* i drafted ones, so row 0 judges the first drafted token, and row k comes after the last.
"""

from __future__ import annotations

import torch
from torch import Tensor


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What a rejected token is replaced from: max(p - q, 0), divided by its sum (Leviathan et al. 2023, section 2.3).

    Args:
        target_probs: p, (..., V), rows that sum to 1.
        draft_probs: q, of the same shape.

    Returns:
        (..., V) in float64. Where p nowhere exceeds q (the two are equal up to rounding), p itself.
    """
    raise NotImplementedError("Lab 5, exercise 5.6: the residual distribution")


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (...,) of distributions (..., V) at uniform numbers (...,) in [0, 1): the inverse of the running sum.

    The same token as :func:`utils.serving.sample` takes at the same number; never one of probability 0.
    """
    upto = probs.double().cumsum(-1)
    at = uniforms.to(upto).unsqueeze(-1) * upto[..., -1:]
    last = (upto < upto[..., -1:]).sum(-1)
    return torch.searchsorted(upto, at, right=True).squeeze(-1).minimum(last)


def speculative_sample(
    target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, generator: torch.Generator
) -> list[int]:
    """The drafted tokens that are accepted, in order, and one more: 1 to k + 1 tokens, distributed as the target's own.

    Drafted token x of row i is accepted with probability min(1, p(x) / q(x)). The first that is not is replaced by one
    of the row's :func:`residual`, and those behind it are dropped. After k accepted ones a token comes from row k
    (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

    Args:
        target_probs: p, (k + 1, V), after the sampling parameters (temperature, top-k, top-p) are applied.
        draft_probs: q, (k, V), the distributions that the tokens were really drawn from.
        drafted: (k,) integers.
        generator: on the CPU; it gives k + 1 uniform numbers in float64 in one call, whatever is accepted: number i
            decides on drafted token i, the last one draws (:func:`draw`) the token that is added.

    Raises:
        ValueError: shapes that do not belong together, or a drafted token that the draft could not have drawn.
    """
    _check(target_probs, draft_probs, drafted)
    uniforms = torch.rand(len(drafted) + 1, dtype=torch.float64, generator=generator)
    raise NotImplementedError("Lab 5, exercise 5.6: accept, replace or add")


def verify(target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`speculative_sample` of S sequences at once, without reading a GPU back.

    Args:
        target_probs: (S, k + 1, V).
        draft_probs: (S, k, V). A row of zeros drafts nothing: the sequence's token comes from the target's row there.
        drafted: (S, k) integers; anything where nothing is drafted.
        uniforms: (S, k + 1) in [0, 1), used as :func:`speculative_sample` uses its own.

    Returns:
        The number of accepted tokens (S,), and the one that follows them (S,), both int64.
    """
    k = drafted.shape[1]
    uniforms = uniforms.to(device=target_probs.device, dtype=torch.float64)
    p = target_probs[:, :k].gather(-1, drafted.unsqueeze(-1)).squeeze(-1).double()
    q = draft_probs.gather(-1, drafted.unsqueeze(-1)).squeeze(-1).double()
    passed = (q > 0) & (uniforms[:, :k] * q < p)
    accepted = passed.cumprod(-1).sum(-1)
    row = accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[-1])
    # Nothing is drafted after the last token: with a row of zeros there, residual() is the target's row.
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    left = residual(target_probs.gather(1, row).squeeze(1), padded.gather(1, row).squeeze(1))
    return accepted, draw(left, uniforms[:, k])


def _check(target_probs: Tensor, draft_probs: Tensor, drafted: Tensor) -> None:
    k, vocabulary = len(drafted), target_probs.shape[-1]
    if drafted.shape != (k,) or target_probs.shape != (k + 1, vocabulary) or draft_probs.shape != (k, vocabulary):
        raise ValueError(
            "for k drafted tokens (k,) the target has (k + 1, V) probabilities and the draft (k, V), got "
            f"{tuple(drafted.shape)}, {tuple(target_probs.shape)} and {tuple(draft_probs.shape)}"
        )
    if k and (drafted.min() < 0 or drafted.max() >= vocabulary):
        raise ValueError(f"drafted tokens lie in 0..{vocabulary - 1}, got {drafted.tolist()}")
    impossible = [int(t) for i, t in enumerate(drafted) if not draft_probs[i, t] > 0]
    if impossible:
        raise ValueError(f"drafted token {impossible[0]} has probability 0 in the draft: it was not drawn from there")
