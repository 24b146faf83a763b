"""The next tokens of a step's requests, chosen on the device without waiting for it.

Letters: S requests, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from solutions.lab5_serving.request import Request
from solutions.lab5_serving.speculative import draw
from utils.serving import probabilities


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on the device. From pageable memory a copy would wait for all that was launched."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@torch.no_grad()
def choose_later(logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, dict[str, str]]:
    """One token a request, the one that :func:`solutions.lab5_serving.sampling.choose` would choose, on the device.

    Temperature, top-k and top-p need nothing of the host but one random number a request that draws, and that number
    does not depend on the logits: it comes from the same generator in the same order.

    Args:
        logits: (S, V), a row a request.

    Returns:
        (2, S) int64: the tokens, and 1 where the row's logits are finite, otherwise 0; and, by request id, which
        random numbers could not be drawn. A token whose row is not finite, or whose request failed, means nothing,
        but it lies in the vocabulary.
    """
    tokens = logits.argmax(-1)
    finite = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()  # argmax prefers NaN to any number
    failed: dict[str, str] = {}
    alike: dict[tuple, list[tuple[int, Tensor]]] = defaultdict(list)
    for row, request in enumerate(requests):
        params = request.params
        if not params.greedy:
            try:
                number = torch.rand((), dtype=torch.float64, generator=request.generator)
            except Exception as error:
                failed[request.id] = f"sampling failed: {type(error).__name__}: {error}"
            else:
                alike[params.temperature, params.top_k, params.top_p].append((row, number))
    for group in alike.values():
        rows = to_device(torch.tensor([row for row, _ in group]), logits.device)
        numbers = to_device(torch.stack([number for _, number in group]), logits.device)
        params = requests[group[0][0]].params
        tokens = tokens.index_copy(0, rows, draw(probabilities(logits.index_select(0, rows), params), numbers))
    return torch.stack((tokens, finite)), failed
