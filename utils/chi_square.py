"""Pearson's chi-square test: can counts have come from a distribution?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Cells that expect fewer samples than this are counted together; the approximation is poor below it (Cochran 1954).
FEWEST_EXPECTED = 5.0


@dataclass(frozen=True)
class Fit:
    """Outcome of a test: the statistic, its degrees of freedom, and the probability of one at least as large."""

    statistic: float
    degrees: int
    p_value: float


def chi_square(counts: Tensor, probabilities: Tensor) -> Fit:
    """Test counts of independent samples against the distribution that they should have.

    The statistic is the sum over cells of (count - expected)^2 / expected. If the samples are what they should be, its
    p-value is uniform between 0 and 1; if they are not, it falls towards 0 as samples are added.

    Args:
        counts: samples in each cell, any shape.
        probabilities: of each cell, of the same shape; divided by their sum.

    Returns:
        A p-value of 0 where a cell of probability 0 was hit.

    Raises:
        ValueError: shapes that differ, negative or no counts, probabilities that are negative or sum to nothing, or
            samples so few that fewer than two cells expect :data:`FEWEST_EXPECTED` of them.
    """
    if counts.shape != probabilities.shape:
        shapes = tuple(counts.shape), tuple(probabilities.shape)
        raise ValueError(f"give a probability for each cell, got counts {shapes[0]} and probabilities {shapes[1]}")
    found, p = counts.detach().double().cpu().flatten(), probabilities.detach().double().cpu().flatten()
    total, mass = float(found.sum()), float(p.sum())
    if (found < 0).any() or not total > 0:
        raise ValueError(f"counts must be at least 0 and sum to more, got a sum of {total:g}")
    if (p < 0).any() or not 0 < mass < float("inf"):
        raise ValueError(f"probabilities must be at least 0 and have a finite sum over 0, got a sum of {mass:g}")
    expected = p / mass * total
    impossible = bool(found[p == 0].sum() > 0)
    rare = expected < FEWEST_EXPECTED
    cells, wanted = found[~rare], expected[~rare]
    pooled = float(expected[rare].sum())
    if pooled >= FEWEST_EXPECTED:
        cells, wanted = torch.cat((cells, found[rare].sum()[None])), torch.cat((wanted, expected[rare].sum()[None]))
    elif pooled > 0 and len(cells):  # too few for a cell of their own: the smallest takes them in
        least = int(wanted.argmin())
        cells[least] += found[rare].sum()
        wanted[least] += pooled
    if len(cells) < 2:
        raise ValueError(f"{total:,.0f} samples are too few: two cells at least must expect {FEWEST_EXPECTED:g} each")
    statistic = float(((cells - wanted).square() / wanted).sum())
    degrees = len(cells) - 1
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    p_value = 0.0 if impossible else float(torch.special.gammaincc(half[0], half[1]))
    return Fit(statistic, degrees, p_value)
