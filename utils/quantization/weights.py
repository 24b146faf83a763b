"""Weights as integers of few bits: rounded to nearest, by GPTQ, or by AWQ.

Letters: N rows of a weight (outputs), K columns (inputs), T tokens of calibration data.

A number is an integer from ``-largest`` to ``largest``, where ``largest = 2^(bits - 1) - 1``, times a scale in fp16
that it shares with the ``group`` columns of its row around it. So it takes ``bits + 16 / group`` bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Exponents that AWQ tries.
EXPONENTS = tuple(n / 20 for n in range(20))


@dataclass(frozen=True)
class Calibration:
    """What rounding wants to know of a layer's inputs X (T, K).

    Attributes:
        second_moment: X^T X / T, (K, K) float32. With the error D (N, K) of a weight, the mean square of the outputs'
            error, summed over outputs, is ``trace(D second_moment D^T)``.
        magnitude: mean of |X| for each channel, (K,) float32.
    """

    second_moment: Tensor
    magnitude: Tensor


def calibrate(inputs: Tensor) -> Calibration:
    """The calibration of a layer with these inputs, (..., K) floating point."""
    x = inputs.detach().flatten(0, -2).float()
    return Calibration(x.T @ x / len(x), x.abs().mean(0))


def output_error(weight: Tensor, kept: Tensor, calibration: Calibration) -> float:
    """Norm of the change of a layer's outputs over their norm, on the calibration's inputs.

    Args:
        weight, kept: (N, K), before and after rounding.
    """
    change = kept.float() - weight.float()
    return (_square(change, calibration) / _square(weight.float(), calibration)) ** 0.5


def round_to_nearest(weight: Tensor, calibration: Calibration | None = None, *, bits: int, group: int) -> Tensor:
    """Each number rounded to the nearest of its group; the largest of a group sets its scale.

    Args:
        weight: (N, K) floating point.
        calibration: not used.
        bits: of an integer, 2 or more.
        group: columns that share a scale, a divisor of K; K for one scale per row.

    Returns:
        The rounded numbers, (N, K) float32.

    Raises:
        ValueError: fewer than 2 bits, or a group that does not divide K.
    """
    _check(weight, bits, group)
    groups = weight.float().unflatten(1, (-1, group))  # (N, K / group, group)
    scales = _scales(groups, bits)
    return _rounded(groups, scales, bits).flatten(1)


def gptq(weight: Tensor, calibration: Calibration, *, bits: int, group: int, damping: float = 0.01) -> Tensor:
    """Column after column rounded to nearest, each column's error carried into the columns that are still to come.

    The columns to come change by ``-e U[j, k] / U[j, j]``, where ``e`` is what rounding took away from column ``j`` and
    U the upper Cholesky factor of the inverse of the second moment: this change minimises the error of the outputs,
    given the columns that are rounded already (Frantar et al. 2023, equations 2 and 3, algorithm 1; without its blocks,
    which do the same arithmetic in another order). A group's scale is set when its first column is reached.

    Args:
        weight, bits, group: as in :func:`round_to_nearest`.
        damping: this share of the mean of the second moment's diagonal is added to the diagonal, so that the inverse
            exists.

    Returns:
        The rounded numbers, (N, K) float32.

    Raises:
        ValueError: as :func:`round_to_nearest`.
    """
    _check(weight, bits, group)
    left = weight.float().T.contiguous()  # (K, N): the columns to come, with all errors so far
    kept = torch.empty_like(left)
    moment = calibration.second_moment.double()
    moment = moment + damping * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(moment), upper=True)
    carry = (upper / upper.diagonal()[:, None]).float()  # U[j, k] / U[j, j]
    for j in range(len(left)):
        if j % group == 0:
            scales = _scales(left[j : j + group].T, bits)[:, 0]  # (N,)
        kept[j] = _rounded(left[j], scales, bits)
        left[j + 1 :].addr_(carry[j, j + 1 :], left[j] - kept[j], alpha=-1)  # an outer product, subtracted
    return kept.T.contiguous()


def awq(weight: Tensor, calibration: Calibration, *, bits: int, group: int) -> Tensor:
    """Rounded to nearest after multiplying each column by a power of its channel's magnitude, then divided by it again.

    Of the exponents in :data:`EXPONENTS` the one with the smallest error of the outputs is kept (Lin et al. 2024,
    section 3.2; without its search for scales that clip). The factors cost no bits where the operation before the
    product can divide by them, as a norm does.

    Args:
        weight, bits, group: as in :func:`round_to_nearest`.

    Returns:
        The rounded numbers divided by their columns' factors, (N, K) float32.

    Raises:
        ValueError: as :func:`round_to_nearest`.
    """
    return min(
        (_scaled_by(weight, calibration.magnitude**exponent, bits, group) for exponent in EXPONENTS),
        key=lambda kept: output_error(weight, kept, calibration),
    )


def _scaled_by(weight: Tensor, factors: Tensor, bits: int, group: int) -> Tensor:
    factors = factors.clamp(min=1e-4)
    factors = factors / (factors.max() * factors.min()).sqrt()  # around 1, so that scales stay in fp16's range
    return round_to_nearest(weight * factors, bits=bits, group=group) / factors


def _square(change: Tensor, calibration: Calibration) -> float:
    return float(((change @ calibration.second_moment) * change).sum())


def _scales(groups: Tensor, bits: int) -> Tensor:
    """Scale of each group (..., group): (..., 1) float32 that fp16 holds exactly."""
    return (groups.abs().amax(-1, keepdim=True) / _largest(bits)).half().float()


def _rounded(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    integers = torch.where(scales > 0, groups / scales, 0.0).round().clamp(-_largest(bits), _largest(bits))
    return integers * scales


def _largest(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _check(weight: Tensor, bits: int, group: int) -> None:
    if bits < 2:
        raise ValueError(f"bits must be at least 2, got {bits}")
    if group < 1 or weight.shape[1] % group:
        raise ValueError(f"group must divide the {weight.shape[1]} columns of the weight, got {group}")
