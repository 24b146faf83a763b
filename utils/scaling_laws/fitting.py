"""Estimating a law from training runs, how certain the estimate is, and the best size among runs of equal FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.scaling_laws.law import Law, require_positive

#: Starting points of a fit: exponents, and the logarithms of E, A and B.
_EXPONENTS = (0.1, 0.25, 0.5, 1.0, 2.0)
_LOG_E = (-1.0, -0.5, 0.0, 0.5, 1.0)
_LOG_AB = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)

Numbers = Sequence[float] | Tensor


@dataclass(frozen=True)
class IsoFlop:
    """Minimum of a parabola through losses over log N: parameters, loss in nats, and the second derivative."""

    parameters: float
    loss: float
    curvature: float


def isoflop(parameters: Numbers, losses: Numbers) -> IsoFlop:
    """The best size among runs of equal FLOPs: the minimum of a parabola in log N, by least squares.

    This is the second approach of Hoffmann et al. (2022, section 3.2).

    Args:
        parameters, losses: of each run, (R,).

    Raises:
        ValueError: fewer than three sizes, or losses whose parabola has no minimum.
    """
    n, y = _columns(parameters=parameters, losses=losses)
    if len(n.unique()) < 3:
        raise ValueError(f"a parabola needs at least 3 different sizes, got {len(n.unique())}")
    middle = n.log().mean()
    x = n.log() - middle
    c, b, a = torch.linalg.lstsq(torch.stack((torch.ones_like(x), x, x * x), 1), y[:, None]).solution[:, 0].tolist()
    if a <= 0:
        raise ValueError(f"the losses have no minimum over log N: their parabola opens downwards, x^2 times {a:g}")
    return IsoFlop(math.exp(middle - b / (2 * a)), c - b * b / (4 * a), 2 * a)


def fit(
    parameters: Numbers,
    tokens: Numbers,
    losses: Numbers,
    *,
    delta: float = 1e-3,
    starts: int = 5,
    start: Law | None = None,
) -> Law:
    """The law with the least sum of Huber's loss of ``log L_predicted - log L`` (Hoffmann et al. 2022, section D.2).

    The logarithm of the prediction is a logsumexp of ``a - alpha log N``, ``b - beta log D`` and ``e``, where A, B and
    E are the exponentials of a, b and e. Of a grid of starting points, the best are refined by L-BFGS in float64.

    Args:
        parameters, tokens, losses: of each run, (R,); losses in nats per token.
        delta: residuals up to this size are squared, larger ones count linearly.
        starts: points of the grid that are refined.
        start: a law to begin from instead of the grid.

    Raises:
        ValueError: fewer than five runs, numbers that are not positive, lengths that differ.
    """
    n, d, y = _columns(parameters=parameters, tokens=tokens, losses=losses)
    if len(n) < 5:
        raise ValueError(f"five constants need at least 5 runs, got {len(n)}")
    require_positive(delta=delta)
    data = (n.log() - n.log().mean(), d.log() - d.log().mean(), y.log())
    shifts = (float(n.log().mean()), float(d.log().mean()))
    if start is None:
        grid = _grid(*shifts)
        begun = grid[_objective(grid, data, delta).argsort()[:starts]]
    else:
        begun = _theta(start, *shifts)[None]
    found = [_refine(theta, data, delta) for theta in begun]
    return _law(min(found, key=lambda theta: float(_objective(theta, data, delta))), *shifts)


def bootstrap(
    parameters: Numbers, tokens: Numbers, losses: Numbers, *, resamples: int = 100, seed: int = 0, delta: float = 1e-3
) -> list[Law]:
    """Laws fitted to runs drawn with replacement, to see how much the constants depend on which runs there are.

    A draw with fewer than six different runs is drawn again, since five constants fit any five runs.

    Raises:
        ValueError: as :func:`fit`, and fewer than six different runs.
    """
    n, d, y = _columns(parameters=parameters, tokens=tokens, losses=losses)
    if len(n) < 6:
        raise ValueError(f"resampling five constants needs at least 6 runs, got {len(n)}")
    whole, random, laws = fit(n, d, y, delta=delta), torch.Generator().manual_seed(seed), []
    while len(laws) < resamples:
        rows = torch.randint(len(n), (len(n),), generator=random)
        if len(rows.unique()) >= 6:
            laws.append(fit(n[rows], d[rows], y[rows], delta=delta, start=whole))
    return laws


def band(values: Iterable[float], level: float = 0.8) -> tuple[float, float]:
    """Lower and upper end of the middle ``level`` of some values: with 0.8, the 10th and the 90th percentile.

    Raises:
        ValueError: no values, a level outside (0, 1).
    """
    values = torch.tensor(list(values), dtype=torch.float64)
    if not len(values) or not 0 < level < 1:
        raise ValueError(f"band needs values and a level between 0 and 1, got {len(values)} values and level {level}")
    low, high = values.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


# theta (..., 5) holds a, b and e with the means of log N and log D moved into a and b, and the logarithms of alpha and
# beta: centred, the constants hardly depend on each other, and L-BFGS needs few steps.


def _theta(law: Law, mean_n: float, mean_d: float) -> Tensor:
    a, b, e = (math.log(max(value, 1e-300)) for value in (law.A, law.B, law.E))
    centred = (a - law.alpha * mean_n, b - law.beta * mean_d, e, math.log(law.alpha), math.log(law.beta))
    return torch.tensor(centred, dtype=torch.float64)


def _law(theta: Tensor, mean_n: float, mean_d: float) -> Law:
    a, b, e, log_alpha, log_beta = theta.tolist()
    alpha, beta = math.exp(log_alpha), math.exp(log_beta)
    return Law(math.exp(e), math.exp(a + alpha * mean_n), math.exp(b + beta * mean_d), alpha, beta)


def _grid(mean_n: float, mean_d: float) -> Tensor:
    axes = [torch.tensor(axis, dtype=torch.float64) for axis in (_LOG_AB, _LOG_AB, _LOG_E, _EXPONENTS, _EXPONENTS)]
    a, b, e, alpha, beta = torch.cartesian_prod(*axes).unbind(1)
    return torch.stack((a - alpha * mean_n, b - beta * mean_d, e, alpha.log(), beta.log()), 1)


def _objective(theta: Tensor, data: tuple[Tensor, Tensor, Tensor], delta: float) -> Tensor:
    """Sum of Huber's loss over the runs, in units of delta squared: theta (..., 5) to (...)."""
    n, d, log_loss = data  # each (R,)
    a, b, e, log_alpha, log_beta = theta[..., None].unbind(-2)  # each (..., 1)
    terms = torch.stack((a - log_alpha.exp() * n, b - log_beta.exp() * d, e.expand(*theta.shape[:-1], len(n))))
    off = (terms.logsumexp(0) - log_loss).abs() / delta
    return torch.where(off <= 1, off * off / 2, off - 0.5).sum(-1)


def _refine(theta: Tensor, data: tuple[Tensor, Tensor, Tensor], delta: float) -> Tensor:
    theta = theta.clone().requires_grad_()
    solver = torch.optim.LBFGS(
        [theta],
        max_iter=500,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        value = _objective(theta, data, delta)
        value.backward()
        return value

    solver.step(closure)
    return theta.detach()


def _columns(**columns: Numbers) -> list[Tensor]:
    """The columns as float64 tensors (R,) of one length, all positive and finite."""
    found = [torch.as_tensor(values, dtype=torch.float64).flatten() for values in columns.values()]
    if len({len(values) for values in found}) != 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in zip(columns, found, strict=True))
        raise ValueError(f"every run needs one number of each kind, got {lengths}")
    require_positive(**dict(zip(columns, found, strict=True)))
    return found
