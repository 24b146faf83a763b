"""How long a step of a serving engine takes, as a function of what goes through the model in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What a step has to do, added up over its chunks.

    A chunk is ``count`` tokens of one sequence behind ``start`` tokens that are in the cache: one token of a sequence
    that decodes, or a part of a prompt.

    Args:
        sequences: chunks in the step.
        tokens: their tokens, which all go through the weights.
        context: keys and values that attention reads, in tokens: ``start + count`` per chunk.
        pairs: pairs of a query and a key that it sees: ``count * start + count * (count + 1) / 2`` per chunk.
    """

    sequences: int
    tokens: int
    context: int
    pairs: int

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> Work:
        """The work of a step of ``(start, count)`` chunks."""
        sequences = tokens = context = pairs = 0
        for start, count in chunks:
            sequences += 1
            tokens += count
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        return cls(sequences, tokens, context, pairs)

    def __add__(self, other: Work) -> Work:
        """The work of both in one step."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepTime:
    """A step's seconds: a sum of four terms, each with the coefficient of one kind of work.

    Args:
        base: seconds of every step, for reading the weights and starting the kernels.
        token: seconds per token, for its arithmetic with the weights.
        context: seconds per token of keys and values that attention reads.
        pair: seconds per pair of a query and a key, for attention's arithmetic.

    Raises:
        ValueError: a coefficient that is negative or not finite, or all of them 0.
    """

    base: float
    token: float
    context: float = 0.0
    pair: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of seconds, at least 0, got {value!r}")
        if not any(astuple(self)):
            raise ValueError("a step that takes no time cannot be simulated: every coefficient is 0")

    def __call__(self, work: Work) -> float:
        """Seconds of a step."""
        return self.base + self.token * work.tokens + self.context * work.context + self.pair * work.pairs
