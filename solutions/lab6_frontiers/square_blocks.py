"""Weights with one scale for each square of 128 rows and 128 columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from utils.formats import Quantized, decode


@dataclass(frozen=True)
class SquareBlocks(Quantized):
    """A matrix (N, K) in 8 bits, with a scale for each square of ``block`` rows and columns.

    ``values`` is (N, K) in the dtype of ``format``, ``scales`` (ceil(N / block), K / block) float32. The last squares
    have fewer rows where ``block`` does not divide N. A product needs one scale per square and step along K then, where
    :class:`utils.formats.Quantized` has one for each row (DeepSeek-V3 technical report, 2024, section 3.3.2).
    """

    def dequantize(self) -> Tensor:
        """The numbers again, (N, K) float32, on the device of ``values``."""
        numbers = decode(self.values.view(torch.uint8), self.format)
        scales = self.scales.repeat_interleave(self.block, 0)[: len(numbers)]
        return (numbers.unflatten(-1, (-1, self.block)) * scales.unsqueeze(-1)).flatten(-2)
