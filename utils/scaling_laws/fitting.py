"""Estimating a law from training runs, how certain the estimate is, and the best size among runs of equal FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.scaling_laws.law import Law, require_positive

#: Starting points of a fit: exponents, and the logarithms of E, A and B; and how many of them are refined.
_EXPONENTS = (0.1, 0.25, 0.5, 1.0, 2.0)
_LOG_E = (-1.0, -0.5, 0.0, 0.5, 1.0)
_LOG_AB = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)
_REFINED = 50
#: A steeper power is a step: runs that ask for one do not determine the exponent.
_LARGEST_EXPONENT = 10.0

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


def fit(parameters: Numbers, tokens: Numbers, losses: Numbers, *, delta: float = 1e-3) -> Law:
    """The law with the least sum of Huber's loss of ``log L_predicted - log L`` (Hoffmann et al. 2022, section D.2).

    The logarithm of the prediction is a logsumexp of ``a - alpha log N``, ``b - beta log D`` and ``e``, where A, B and
    E are the exponentials of a, b and e. Of a grid of starting points the best are refined; the best result counts.

    Args:
        parameters, tokens, losses: of each run, (R,); losses in nats per token.
        delta: residuals up to this size are squared, larger ones count linearly. It should be about the noise of the
            losses, as a fraction: 1e-3 is for large runs.

    Raises:
        ValueError: fewer than five runs, numbers that are not positive, lengths that differ.
    """
    runs = _Runs(parameters, tokens, losses, delta)
    grid = runs.grid()
    every = torch.ones(1, len(runs.n), dtype=torch.float64)
    begun = grid[runs.objective(grid, every).argsort()[:_REFINED]]
    found, values = runs.minimise(begun, every.expand(len(begun), -1))
    return runs.law(found[values.argmin()])


def bootstrap(
    parameters: Numbers, tokens: Numbers, losses: Numbers, *, resamples: int = 100, seed: int = 0, delta: float = 1e-3
) -> list[Law]:
    """Laws fitted to runs drawn with replacement, to see how much the constants depend on which runs there are.

    Each fit begins at the law of all runs. A draw with fewer than six different runs is drawn again, since five
    constants fit any five runs.

    Raises:
        ValueError: as :func:`fit`, and fewer than six different runs.
    """
    runs = _Runs(parameters, tokens, losses, delta)
    if len(torch.stack((runs.n, runs.d), 1).unique(dim=0)) < 6:
        raise ValueError("resampling five constants needs at least 6 different runs")
    whole, random, counts = fit(parameters, tokens, losses, delta=delta), torch.Generator().manual_seed(seed), []
    while len(counts) < resamples:
        drawn = torch.randint(len(runs.n), (len(runs.n),), generator=random).bincount(minlength=len(runs.n))
        if int((drawn > 0).sum()) >= 6:
            counts.append(drawn.double())
    found, _ = runs.minimise(runs.theta(whole).expand(resamples, 5), torch.stack(counts))
    return [runs.law(theta) for theta in found]


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


class _Runs:
    """Runs to fit to. A law is theta (5,): a, b and e with the means of log N and log D moved into a and b, and the
    logarithms of alpha and beta. So centred, the constants hardly depend on each other.
    """

    def __init__(self, parameters: Numbers, tokens: Numbers, losses: Numbers, delta: float) -> None:
        n, d, y = (x.log() for x in _columns(parameters=parameters, tokens=tokens, losses=losses))
        if len(n) < 5:
            raise ValueError(f"five constants need at least 5 runs, got {len(n)}")
        require_positive(delta=delta)
        self.mean_n, self.mean_d, self.delta = float(n.mean()), float(d.mean()), delta
        self.n, self.d, self.log_loss = n - n.mean(), d - d.mean(), y

    def theta(self, law: Law) -> Tensor:
        a, b, e = (math.log(max(value, 1e-300)) for value in (law.A, law.B, law.E))
        centred = (a - law.alpha * self.mean_n, b - law.beta * self.mean_d, e, math.log(law.alpha), math.log(law.beta))
        return torch.tensor(centred, dtype=torch.float64)

    def law(self, theta: Tensor) -> Law:
        a, b, e, log_alpha, log_beta = theta.tolist()
        alpha, beta = math.exp(log_alpha), math.exp(log_beta)
        return Law(math.exp(e), math.exp(a + alpha * self.mean_n), math.exp(b + beta * self.mean_d), alpha, beta)

    def grid(self) -> Tensor:
        axes = [torch.tensor(axis, dtype=torch.float64) for axis in (_LOG_AB, _LOG_AB, _LOG_E, _EXPONENTS, _EXPONENTS)]
        a, b, e, alpha, beta = torch.cartesian_prod(*axes).unbind(1)
        return torch.stack((a - alpha * self.mean_n, b - beta * self.mean_d, e, alpha.log(), beta.log()), 1)

    def _terms(self, theta: Tensor) -> Tensor:
        """Logarithms of the law's three terms for each of K laws (K, 5): (3, K, R)."""
        a, b, e, log_alpha, log_beta = theta[..., None].unbind(1)  # each (K, 1)
        return torch.stack((a - log_alpha.exp() * self.n, b - log_beta.exp() * self.d, e.expand(-1, len(self.n))))

    def objective(self, theta: Tensor, counts: Tensor) -> Tensor:
        """Sum of Huber's loss over the runs, each counted as often as ``counts`` (K, R) says: (K, 5) to (K,)."""
        off = (self._terms(theta).logsumexp(0) - self.log_loss).abs()
        return (counts * torch.where(off <= self.delta, off * off / 2, self.delta * (off - self.delta / 2))).sum(-1)

    def minimise(self, theta: Tensor, counts: Tensor, steps: int = 300) -> tuple[Tensor, Tensor]:
        """K laws (K, 5) refined by the method of Levenberg and Marquardt, all at once; and their objectives (K,).

        A run whose residual r is beyond delta has the weight delta / |r|: reweighted squares have Huber's gradient.
        """
        damping, value = torch.full((len(theta), 1), 1e-2, dtype=torch.float64), self.objective(theta, counts)
        for _ in range(steps):
            terms = self._terms(theta)
            off = terms.logsumexp(0) - self.log_loss  # (K, R)
            share = terms.softmax(0)  # of each term in the prediction, (3, K, R)
            slopes = -theta[:, 3:].exp()  # d(-alpha n) / d(log alpha) = -alpha n
            bends = (share[0] * slopes[:, :1] * self.n, share[1] * slopes[:, 1:] * self.d)
            jacobian = torch.stack((*share, *bends), -1)  # (K, R, 5)
            weighted = jacobian * (counts * (self.delta / off.abs().clamp(min=self.delta)))[..., None]
            normal = weighted.mT @ jacobian  # (K, 5, 5)
            scale = normal.diagonal(dim1=1, dim2=2) + 1e-9 * normal.diagonal(dim1=1, dim2=2).amax(1, keepdim=True)
            gradient = (weighted * off[..., None]).sum(1)
            trial = theta - torch.linalg.solve(normal + torch.diag_embed(damping * scale), gradient)
            trial[:, 3:].clamp_(max=math.log(_LARGEST_EXPONENT))
            reached = self.objective(trial, counts)
            better = reached < value  # False for NaN
            theta, value = torch.where(better[:, None], trial, theta), torch.where(better, reached, value)
            damping = torch.where(better[:, None], damping / 3, damping * 4).clamp(1e-12, 1e12)
            if bool((damping > 1e9).all()):  # no step helps any more
                break
        return theta, value


def _columns(**columns: Numbers) -> list[Tensor]:
    """The columns as float64 tensors (R,) of one length, all positive and finite."""
    found = [torch.as_tensor(values, dtype=torch.float64).flatten() for values in columns.values()]
    if len({len(values) for values in found}) != 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in zip(columns, found, strict=True))
        raise ValueError(f"every run needs one number of each kind, got {lengths}")
    require_positive(**dict(zip(columns, found, strict=True)))
    return found
