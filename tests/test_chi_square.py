"""The chi-square test: its p-value is uniform for what it tests, and its refusals."""

from __future__ import annotations

import pytest
import torch

from utils.chi_square import chi_square

P = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)


def counts(probabilities, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(probabilities, samples, replacement=True, generator=generator)
    return drawn.bincount(minlength=len(probabilities))


def test_a_worked_case_gives_the_statistic_and_p_value_of_the_tables():
    fit = chi_square(torch.tensor([44, 56]), torch.tensor([0.5, 0.5]))
    assert fit.statistic == pytest.approx(1.44) and fit.degrees == 1 and fit.p_value == pytest.approx(0.2301, abs=1e-4)


def test_p_values_of_right_samples_are_uniform():
    values = torch.tensor([chi_square(counts(P, 500, seed), P).p_value for seed in range(400)])
    assert [int(((values >= low) & (values < low + 0.25)).sum()) for low in (0, 0.25, 0.5, 0.75)] == pytest.approx(
        [100] * 4, abs=30
    )


def test_samples_of_another_distribution_and_of_an_impossible_cell_are_seen():
    other = torch.tensor([0.48, 0.27, 0.125, 0.125], dtype=torch.float64)
    assert chi_square(counts(other, 50_000, 0), P).p_value < 1e-9
    assert chi_square(torch.tensor([50, 49, 1]), torch.tensor([0.5, 0.5, 0.0])).p_value == 0


def test_rare_cells_are_counted_together():
    rare = torch.cat((torch.tensor([0.6, 0.3]), torch.full((50,), 0.002))).double()
    assert chi_square(counts(rare, 1000, 1), rare).degrees == 2
    assert chi_square(torch.tensor([60.0, 37.0, 3.0]), torch.tensor([0.6, 0.37, 0.03])).degrees == 1


@pytest.mark.parametrize(
    ("found", "p", "message"),
    [
        ([1, 2, 3], [0.5, 0.5], r"a probability for each cell, got counts \(3,\)"),
        ([0, 0], [0.5, 0.5], "sum to more, got a sum of 0"),
        ([-1, 9], [0.5, 0.5], "at least 0"),
        ([5, 5], [0.0, 0.0], "finite sum over 0, got a sum of 0"),
        ([3, 3], [0.5, 0.5], "6 samples are too few"),
    ],
)
def test_what_cannot_be_tested_is_refused(found, p, message):
    with pytest.raises(ValueError, match=message):
        chi_square(torch.tensor(found), torch.tensor(p))
