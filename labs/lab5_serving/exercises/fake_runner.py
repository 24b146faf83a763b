"""A runner without a model: what exercise 5.7 is tried with, so that every mistake of a step shows in the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]
#: What a request that fails says.
CANNOT = "this request cannot be computed"


class FakeRunner:
    """Slots of the cache keep tokens, and the next token of a sequence is a number made of those that its slots hold.

    Attributes:
        memory: slot -> the token written there.
        ran: (request's id, first token, number of tokens) of each chunk that was computed; cleared by its reader.
        failing: ids of requests whose chunks cannot be computed.
        failed: ids of those that were to be computed alone; cleared by its reader.
        not_finite: ids of requests whose logits are not numbers.
    """

    def __init__(self, num_blocks: int, block_size: int, vocabulary: int) -> None:
        self.num_blocks, self.block_size, self.vocabulary = num_blocks, block_size, vocabulary
        self.memory: dict[int, int] = {}
        self.ran: list[tuple[str, int, int]] = []
        self.failing: set[str] = set()
        self.failed: set[str] = set()
        self.not_finite: set[str] = set()

    def next_token(self, text: Sequence[int | None]) -> int:
        """The token after a text; what stands in no slot counts as token 0."""
        return sum((i * i + 3 * i + 5) * (token or 0) + i for i, token in enumerate(text)) % self.vocabulary

    def copy_blocks(self, pairs: Sequence[Pair]) -> None:
        """Copy blocks, (source, target) each."""
        size = self.block_size
        for source, target in pairs:
            for offset in range(size):
                self.memory[target * size + offset] = self.memory.get(source * size + offset, 0)

    def run(self, step: Any, manager: Any, rows: str = "last") -> Tensor:
        """Write the tokens of a step, and return a row of logits for each chunk that ends what its request has.

        Raises:
            ArithmeticError: a failing request is among them; then nothing is written.
        """
        if any(chunk.request.id in self.failing for chunk in step.chunks):
            self.failed.update(chunk.request.id for chunk in step.chunks if len(step.chunks) == 1)
            raise ArithmeticError(CANNOT)
        logits = []
        for request, start, count in step.chunks:
            slots = [manager.slot(request.id, position) for position in range(start + count)]
            self.memory.update(zip(slots[start:], request.tokens[start : start + count], strict=True))
            self.ran.append((request.id, start, count))
            if start + count == len(request.tokens):
                row = torch.full((self.vocabulary,), torch.nan if request.id in self.not_finite else 0.0)
                row[self.next_token([self.memory.get(slot) for slot in slots])] += 1.0
                logits.append(row)
        return torch.stack(logits) if logits else torch.empty(0, self.vocabulary)
