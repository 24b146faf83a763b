"""How long prompts and answers are, and when requests come: the random parts of a workload.

Each function gives a *draw*: ``draw(rng, count)`` with a ``numpy.random.Generator``. Lengths are in tokens, times in
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: Draws ``count`` values: whole lengths of at least 1, or times of arrival in ascending order.
Draw = Callable[[np.random.Generator, int], np.ndarray]


def _at_least(name: str, value: float, least: float, *, strict: bool = False) -> float:
    if not (isinstance(value, int | float) and math.isfinite(value)) or value < least or (strict and value == least):
        raise ValueError(f"{name} must be {'over' if strict else 'at least'} {least}, got {value!r}")
    return value


# ---- lengths ----


def fixed(length: int) -> Draw:
    """Always the same length."""
    _at_least("length", length, 1)
    return lambda rng, count: np.full(count, length, dtype=np.int64)


def uniform(low: int, high: int) -> Draw:
    """Every length from ``low`` to ``high``, both included, equally often."""
    _at_least("low", low, 1)
    _at_least("high", high, low)
    return lambda rng, count: rng.integers(low, high + 1, count)


def geometric(mean: float) -> Draw:
    """An answer that ends after each token with probability ``1 / mean``, however long it is already."""
    _at_least("mean", mean, 1)
    return lambda rng, count: rng.geometric(1 / mean, count)


def lognormal(mean: float, variation: float, *, longest: int | None = None) -> Draw:
    """Many short lengths and a few long ones: the logarithm is normally distributed.

    Args:
        mean: of the lengths, before they are cut.
        variation: their standard deviation over their mean.
        longest: longer draws are cut to this.
    """
    _at_least("mean", mean, 1)
    _at_least("variation", variation, 0)
    if longest is not None:
        _at_least("longest", longest, 1)
    sigma2 = math.log1p(variation**2)
    centre = math.log(mean) - sigma2 / 2

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        lengths = np.rint(np.exp(rng.normal(centre, math.sqrt(sigma2), count))).astype(np.int64)
        return np.clip(lengths, 1, longest)

    return draw


@dataclass(frozen=True)
class Conversations:
    """Lengths of a data set of conversations, as a serving engine meets them; ``longest`` is the model's context."""

    name: str
    prompts: Draw
    outputs: Draw
    longest: int


def sharegpt_like() -> Conversations:
    """Lengths like those of ShareGPT, questions and answers that users of a chat assistant shared.

    Mean prompt 161.31 and mean answer 337.99 tokens, context 2,048 (Kwon et al. 2023, section 6.1 and figure 11). The
    spread is not published as a number. A variation of 0.9 of the answers is what that paper's figure 2 implies: its
    systems hold 1.5 tokens for each slot that is kept for a token still to come, and lengths of a variation c give
    (161 + 169 (1 + c^2)) / (169 (1 + c^2)).
    """
    return Conversations("ShareGPT-like", lognormal(161.31, 1.2, longest=1024), lognormal(337.99, 0.9), 2048)


# ---- arrivals ----


def at_once() -> Draw:
    """Every request at time 0."""
    return lambda rng, count: np.zeros(count)


def evenly(rate: float) -> Draw:
    """One request every ``1 / rate`` seconds, the first at 0."""
    _at_least("rate", rate, 0, strict=True)
    return lambda rng, count: np.arange(count) / rate


def poisson(rate: float) -> Draw:
    """Requests of many users who know nothing of each other: exponential gaps, ``rate`` requests a second."""
    return bursty(rate, 1.0)


def bursty(rate: float, variation: float = 3.0) -> Draw:
    """Gaps with a gamma distribution: ``variation`` (standard deviation over mean) above 1 makes bursts and lulls.

    1 is a Poisson process. The same mean rate at any variation.
    """
    _at_least("rate", rate, 0, strict=True)
    _at_least("variation", variation, 0, strict=True)
    shape = variation**-2
    return lambda rng, count: np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))
