"""Scaling laws: a language model's loss from its parameters and training tokens, and what to train for a budget.

The law is ``L(N, D) = E + A / N^alpha + B / D^beta`` (Hoffmann et al. 2022, section 3.3): N parameters, D training
tokens, L the loss in nats per token on text that was not trained on. A training run takes ``C = 6 N D`` FLOPs.

- :func:`predict` evaluates a law, :func:`optimum` says which model to train for a budget, and which when it is served.
- :func:`fit` estimates a law from runs, :func:`bootstrap` from resampled runs, and :func:`band` gives their spread.
- :func:`isoflop` finds the best size among runs of equal FLOPs without any law.
"""

from utils.scaling_laws.fitting import IsoFlop, band, bootstrap, fit, isoflop
from utils.scaling_laws.law import (
    BESIROGLU_2024,
    HOFFMANN_2022,
    SERVING_FLOPS,
    TRAINING_FLOPS,
    Law,
    Optimum,
    optimum,
    predict,
    tokens_for,
)
