"""Log probabilities of generated tokens: how a request asks an engine for them, and what the engine reports.

They are those of the model: the logarithm of the softmax of its logits, before temperature, top-k and top-p. So a
greedy request has them too, and a token's value does not depend on how it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from utils.serving.generate import SamplingParams

#: Likeliest tokens that a request may ask for beside the chosen one: what OpenAI's chat protocol allows.
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class ScoredParams(SamplingParams):
    """Sampling parameters of a request that also wants log probabilities.

    Args:
        logprobs: likeliest tokens to report at each place; 0: of the chosen token alone.

    Raises:
        ValueError: ``logprobs`` outside 0..20, or as :class:`SamplingParams`.
    """

    logprobs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.logprobs, int) or not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(f"logprobs must be an integer from 0 to {MOST_LOGPROBS}, got {self.logprobs!r}")


class TokenScore(NamedTuple):
    """A chosen token, its log probability in nats, and the likeliest tokens with theirs, likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_scores(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """The scores of S chosen tokens.

    Args:
        logits: (S, V), the row that each token was chosen from.
        tokens: S tokens.
        count: likeliest tokens to report of each row; at most V are there.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    values, likeliest = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    tops = (list(zip(*row, strict=True)) for row in zip(likeliest.tolist(), values.tolist(), strict=True))
    return [TokenScore(*each) for each in zip(tokens, chosen, tops, strict=True)]
