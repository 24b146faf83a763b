"""The next token of each request in a step, from its row of the logits and its own random numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from utils.serving import probabilities

from .request import Request
from .speculative import draw


def choose(logits: Tensor, requests: Sequence[Request]) -> tuple[list[int], dict[str, str]]:
    """One token per request, the one that :func:`utils.serving.sample` would choose, in few operations for all of them.

    A request that draws takes exactly one number from its own generator, so its text does not depend on who else is
    in the batch. Requests with the same temperature, top-k and top-p are drawn together.

    Args:
        logits: (S, V), a row a request.

    Returns:
        S tokens, and what went wrong, by request id: such a request's token means nothing, the others' are good.
    """
    likeliest = logits.argmax(-1)
    finite = logits.gather(-1, likeliest.unsqueeze(-1)).squeeze(-1).isfinite()  # argmax prefers NaN to any number
    found = torch.stack((likeliest, finite))
    failed: dict[str, str] = {}
    numbers: dict[int, Tensor] = {}
    alike: dict[tuple, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        if not request.params.greedy:
            try:
                numbers[row] = torch.rand((), dtype=torch.float64, generator=request.generator)
            except Exception as error:
                failed[request.id] = f"sampling failed: {type(error).__name__}: {error}"
            else:
                alike[request.params.temperature, request.params.top_k, request.params.top_p].append(row)
    drawn = [
        draw(probabilities(logits[rows], requests[rows[0]].params), torch.stack([numbers[row] for row in rows]))
        for rows in alike.values()
    ]
    tokens, finite = found.tolist()  # here the CPU waits for a GPU, if there is one
    for rows, each in zip(alike.values(), drawn, strict=True):
        for row, token in zip(rows, each.tolist(), strict=True):
            tokens[row] = token
    if not all(finite):
        failed |= {
            request.id: "the model's logits are not finite"
            for request, good in zip(requests, finite, strict=True)
            if not good
        }
    return tokens, failed
