"""Scaling laws: known constants come back from runs that follow them, and optima are the best of their neighbours."""

import math

import pytest
import torch
from torch.nn.functional import huber_loss

from utils.scaling_laws import (
    BESIROGLU_2024,
    HOFFMANN_2022,
    Law,
    band,
    bootstrap,
    fit,
    isoflop,
    optimum,
    predict,
    tokens_for,
)

SEED = 20319
GOPHER = 5.76e23  # FLOPs
SMALL = Law(0.9, 30.0, 60.0, 0.35, 0.3)  # losses per character of models of 10^4 to 10^6 parameters


def runs(law, sizes, lengths, noise=0.0, seed=SEED):
    """Parameters, tokens and losses of every pair, with relative noise on the loss."""
    n, d = torch.cartesian_prod(torch.tensor(sizes).double(), torch.tensor(lengths).double()).unbind(1)
    errors = torch.randn(len(n), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return n, d, predict(law, n, d) * torch.exp(noise * errors)


GRID = ([5e7, 2e8, 8e8, 3e9, 1.2e10], [5e9, 2e10, 8e10, 3e11])
SMALL_GRID = ([1e4, 5e4, 2e5, 1e6], [1e5, 5e5, 2e6, 1e7])


# ---- optima ----


@pytest.mark.parametrize("law", [HOFFMANN_2022, BESIROGLU_2024, SMALL])
def test_no_other_size_of_the_same_training_flops_has_a_lower_loss(law):
    best = optimum(law, 1e21)
    assert best.training_flops == pytest.approx(1e21, rel=1e-12)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        n = best.parameters * factor
        assert predict(law, n, 1e21 / (6 * n)) > best.loss


def test_at_the_optimum_both_terms_fall_equally_fast():
    law, best = BESIROGLU_2024, optimum(BESIROGLU_2024, GOPHER)
    size, data = law.A / best.parameters**law.alpha, law.B / best.tokens**law.beta
    assert law.alpha * size == pytest.approx(law.beta * data, rel=1e-12)


def test_the_published_constants_give_what_their_papers_say_of_tokens_per_parameter():
    assert 80 < optimum(HOFFMANN_2022, GOPHER).tokens_per_parameter < 100  # as printed; the paper's figure 4 says 59
    assert 17 < optimum(BESIROGLU_2024, GOPHER).tokens_per_parameter < 22  # about 20


def test_the_optimal_size_grows_as_the_stated_power_of_compute():
    small, large = optimum(BESIROGLU_2024, 1e20), optimum(BESIROGLU_2024, 1e24)
    grown = math.log(large.parameters / small.parameters) / math.log(1e4)
    assert grown == pytest.approx(BESIROGLU_2024.size_exponent, rel=1e-12)


@pytest.mark.parametrize("cost", [1.0, 12.0])
@pytest.mark.parametrize("served", [1e9, 1e12, 1e14])
def test_no_other_model_of_the_same_loss_is_cheaper_to_train_and_serve(served, cost):
    law, plain, best = BESIROGLU_2024, optimum(BESIROGLU_2024, 1e22), optimum(BESIROGLU_2024, 1e22, served, cost)

    def total(n):
        return 6 * n * tokens_for(law, plain.loss, n) + cost * 2 * n * served

    assert best.loss == plain.loss
    assert predict(law, best.parameters, best.tokens) == pytest.approx(plain.loss, rel=1e-12)
    assert best.parameters < plain.parameters and best.training_flops > plain.training_flops
    assert total(best.parameters) <= total(plain.parameters)
    assert best.training_flops + cost * best.serving_flops == pytest.approx(total(best.parameters), rel=1e-9)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert total(best.parameters * factor) > total(best.parameters)


def test_without_serving_the_served_optimum_is_the_plain_one():
    plain = optimum(HOFFMANN_2022, 1e22)
    assert optimum(HOFFMANN_2022, 1e22, 0.0) == plain
    nearly = optimum(HOFFMANN_2022, 1e22, 1.0)
    assert nearly.parameters == pytest.approx(plain.parameters, rel=1e-4)


# ---- fits ----


@pytest.mark.slow
@pytest.mark.parametrize(("law", "grid"), [(BESIROGLU_2024, GRID), (HOFFMANN_2022, GRID), (SMALL, SMALL_GRID)])
def test_runs_that_follow_a_law_give_its_constants_back(law, grid):
    found = fit(*runs(law, *grid))
    for name, value in vars(law).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name


@pytest.mark.slow
def test_noise_moves_the_constants_little_and_the_band_holds_them():
    n, d, y = runs(BESIROGLU_2024, *GRID, noise=1e-3)
    found = fit(n, d, y)
    assert found.size_exponent == pytest.approx(BESIROGLU_2024.size_exponent, abs=0.03)
    laws = bootstrap(n, d, y, resamples=30, seed=SEED)
    low, high = band((law.alpha for law in laws), 0.95)
    assert low < BESIROGLU_2024.alpha < high < 2 * low
    assert laws == bootstrap(n, d, y, resamples=30, seed=SEED)


@pytest.mark.slow
def test_one_run_that_failed_hardly_moves_the_law():
    n, d, y = runs(BESIROGLU_2024, *GRID, noise=1e-3)
    y[7] *= 1.5
    assert fit(n, d, y).size_exponent == pytest.approx(BESIROGLU_2024.size_exponent, abs=0.05)
    square = fit(n, d, y, delta=10.0)  # no residual is large: least squares
    assert abs(square.size_exponent - BESIROGLU_2024.size_exponent) > 0.05


@pytest.mark.parametrize(("noise", "delta"), [(1e-3, 1e-3), (3e-2, 1e-3), (3e-2, 3e-2)])
def test_the_minimum_is_the_one_that_l_bfgs_finds(noise, delta):
    n, d, y = runs(SMALL, *SMALL_GRID, noise=noise)
    found = fit(n, d, y, delta=delta)

    def objective(theta):
        a, b, e, alpha, beta = theta
        terms = torch.stack((a - alpha * (n.log() - 11), b - beta * (d.log() - 13), e.expand_as(n)))
        return huber_loss(terms.logsumexp(0), y.log(), reduction="sum", delta=delta) / delta**2

    centred = (math.log(SMALL.A) - 11 * SMALL.alpha, math.log(SMALL.B) - 13 * SMALL.beta, math.log(SMALL.E))
    theta = torch.tensor([*centred, SMALL.alpha, SMALL.beta], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([theta], max_iter=1000, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure():
        solver.zero_grad()
        value = objective(theta)
        value.backward()
        return value

    solver.step(closure)
    mine = torch.tensor([math.log(found.A) - 11 * found.alpha, math.log(found.B) - 13 * found.beta, math.log(found.E),
                         found.alpha, found.beta], dtype=torch.float64)  # fmt: skip
    assert objective(mine) <= objective(theta).detach() * (1 + 1e-3)


def test_a_parabola_finds_the_minimum_of_a_parabola_exactly_and_of_a_law_nearly():
    n = torch.tensor([1e7, 3e7, 1e8, 4e8], dtype=torch.float64)
    found = isoflop(n, 2.5 + 0.03 * (n.log() - math.log(5e7)) ** 2)
    assert found.parameters == pytest.approx(5e7, rel=1e-9) and found.loss == pytest.approx(2.5, rel=1e-12)
    assert found.curvature == pytest.approx(0.06, rel=1e-9)
    best = optimum(BESIROGLU_2024, 1e20)
    sizes = best.parameters * torch.tensor([0.5, 0.7, 1.0, 1.4, 2.0], dtype=torch.float64)
    near = isoflop(sizes, predict(BESIROGLU_2024, sizes, 1e20 / (6 * sizes)))
    assert near.parameters == pytest.approx(best.parameters, rel=0.02)


# ---- errors ----


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Law(1.0, 1.0, 1.0, 0.0, 0.3), "alpha must be above 0, got 0.0"),
        (lambda: Law(-1.0, 1.0, 1.0, 0.3, 0.3), "E must be zero or more"),
        (lambda: predict(SMALL, 0, 10), "parameters must be positive and finite, got 0"),
        (lambda: optimum(SMALL, -1e9), "compute must be positive"),
        (lambda: optimum(SMALL, 1e9, served_tokens=-1), "served_tokens must be zero or more, got -1"),
        (lambda: optimum(SMALL, 1e9, 1e9, serving_cost=math.inf), "serving_cost must be zero or more"),
        (lambda: tokens_for(SMALL, 1.0, 10.0), "10 parameters stay above a loss of 1"),
        (lambda: fit([1, 2, 3, 4], [1, 2, 3, 4], [1, 1, 1, 1]), "at least 5 runs, got 4"),
        (lambda: fit([1, 2], [1, 2, 3], [1, 1]), "got parameters 2, tokens 3, losses 2"),
        (lambda: fit([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 1, 1, 1, math.nan]), "losses must be positive"),
        (lambda: bootstrap([1, 2, 3, 4, 5] * 2, [1, 2, 3, 4, 5] * 2, [1] * 10), "at least 6 different runs"),
        (lambda: isoflop([1, 2, 2], [1, 2, 2]), "at least 3 different sizes, got 2"),
        (lambda: isoflop([1, 2, 4], [1, 2, 1]), "no minimum over log N"),
        (lambda: band([], 0.8), "got 0 values"),
        (lambda: band([1.0], 1.0), "level 1.0"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call()
