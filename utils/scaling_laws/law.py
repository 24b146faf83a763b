"""The law of Hoffmann et al. (2022), the constants published for it, and the models that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: FLOPs per parameter and token: 2 forward and 4 backward in training, 2 when a token is served.
TRAINING_FLOPS = 6
SERVING_FLOPS = 2


@dataclass(frozen=True)
class Law:
    """``L(N, D) = E + A / N^alpha + B / D^beta``, in nats per token.

    Raises:
        ValueError: a constant that is negative or no number, an exponent that is not above 0.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            exponent = name in ("alpha", "beta")
            if not (value > 0 if exponent else value >= 0):
                raise ValueError(f"{name} must be {'above 0' if exponent else 'zero or more'}, got {value!r}")

    @property
    def size_exponent(self) -> float:
        """``a`` in N_opt ~ C^a: beta / (alpha + beta) (Hoffmann et al. 2022, equation 4)."""
        return self.beta / (self.alpha + self.beta)


#: The constants that Hoffmann et al. (2022) print, with two decimals of each exponent.
HOFFMANN_2022 = Law(1.69, 406.4, 410.7, 0.34, 0.28)
#: The same law fitted again to points read from that paper's figure (Besiroglu et al. 2024).
BESIROGLU_2024 = Law(1.82, 482.0, 2085.4, 0.348, 0.366)


@dataclass(frozen=True)
class Optimum:
    """A model to train: parameters, training tokens, loss in nats per token, FLOPs of training and of serving."""

    parameters: float
    tokens: float
    loss: float
    training_flops: float
    serving_flops: float = 0.0

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.parameters


def predict(law: Law, parameters: float | Tensor, tokens: float | Tensor) -> float | Tensor:
    """Loss in nats per token of ``parameters`` trained on ``tokens``; tensors broadcast.

    Raises:
        ValueError: parameters or tokens that are not positive.
    """
    require_positive(parameters=parameters, tokens=tokens)
    return law.E + law.A * parameters**-law.alpha + law.B * tokens**-law.beta  # so written, no power overflows


def optimum(law: Law, compute: float, served_tokens: float = 0.0, serving_cost: float = 1.0) -> Optimum:
    """The model to train for ``compute`` FLOPs; or the cheapest one of the same loss, when it will be served.

    Without serving, N and D minimise the loss subject to ``6 N D = compute`` (Hoffmann et al. 2022, equation 4). With
    it they minimise ``6 N D + serving_cost * 2 N * served_tokens`` subject to that same loss (Sardana et al. 2024): the
    model becomes smaller and its training longer.

    Args:
        compute: training budget in FLOPs that sets the loss.
        served_tokens: tokens, read and written, that the model will process after training.
        serving_cost: cost of a FLOP in serving over that of a FLOP in training.

    Raises:
        ValueError: a budget that is not positive, negative tokens or cost.
    """
    require_positive(compute=compute)
    for name, value in (("served_tokens", served_tokens), ("serving_cost", serving_cost)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be zero or more, got {value!r}")
    pairs = compute / TRAINING_FLOPS  # N D
    ratio = law.alpha * law.A / (law.beta * law.B)
    parameters = ratio ** (1 / (law.alpha + law.beta)) * pairs**law.size_exponent
    tokens = pairs / parameters
    loss = predict(law, parameters, tokens)
    if served_tokens * serving_cost:
        parameters = _served(law, loss, parameters, served_tokens * serving_cost)
        tokens = tokens_for(law, loss, parameters)
    return Optimum(
        parameters, tokens, loss, TRAINING_FLOPS * parameters * tokens, SERVING_FLOPS * parameters * served_tokens
    )


def tokens_for(law: Law, loss: float, parameters: float) -> float:
    """Tokens on which ``parameters`` reach ``loss``, in nats per token.

    Raises:
        ValueError: the loss is out of reach of so many parameters, whatever the tokens.
    """
    require_positive(parameters=parameters)
    left = loss - law.E - law.A / parameters**law.alpha
    if left <= 0:
        raise ValueError(f"{parameters:g} parameters stay above a loss of {loss:g}: the tokens' term would be {left:g}")
    return (law.B / left) ** (1 / law.beta)


def _served(law: Law, loss: float, largest: float, served: float) -> float:
    """The N below ``largest`` at which ``6 N D + 2 N served`` has its minimum subject to the loss.

    With D bound to N by the loss, the derivative by log N is ``6 N D (1 - x) + 2 N served``, where x is the ratio of
    ``alpha A / N^alpha`` to ``beta B / D^beta``. Divided by N it rises with N, so bisection finds its zero.
    """

    def falls(n: float) -> bool:
        left = loss - law.E - law.A / n**law.alpha  # B / D^beta
        if left <= 0:  # so few parameters do not reach the loss
            return True
        x = law.alpha * (law.A / n**law.alpha) / (law.beta * left)
        return TRAINING_FLOPS * tokens_for(law, loss, n) * (1 - x) + SERVING_FLOPS * served < 0

    low, high = math.log(law.A / (loss - law.E)) / law.alpha, math.log(largest)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falls(math.exp(middle)) else (low, middle)
    return math.exp(high)


def require_positive(**values: float | Tensor) -> None:
    """Raise ValueError, with the name, for a number that is not positive and finite."""
    for name, value in values.items():
        numbers = torch.as_tensor(value, dtype=torch.float64)
        if not bool(((numbers > 0) & numbers.isfinite()).all()):
            raise ValueError(f"{name} must be positive and finite, got {value!r}")
