"""The package's own kernel under the steps' interface."""

from __future__ import annotations

import torch

from .. import launch
from .host import check, scale_of


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp; the package's docstring says of what."""
    check(q, k, v)
    return launch.hopper_forward(q, k, v, causal, scale_of(q))
