"""Classic wrong answers to the backward pass, each recognised by what it computes; and the inputs of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence

from . import shapes, tiles
from .mistakes import BlocksOf, scaled
from .walk import gradients

#: What e^(S - L) may be off by because L is rounded to float32, in a gradient of ordinary size.
ROUNDING = 4e-6
_PLACE = {"dq": 0, "dk": 1, "dv": 2}


def exactly(case: Case) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """(q, k, v, do) of a case, and its output and logsumexp computed in float64 (both float64)."""
    q, k, v, do = shapes.with_do(case)
    options = {name: value for name, value in case.options.items() if name in ("causal", "scale")}
    o, lse = shapes.attention(q.double(), k.double(), v.double(), **options)
    return (q, k, v, do), o, lse


def without_large_scores(cases: Sequence[Case]) -> list[Case]:
    """The cases whose scores stay in the tens: the float32 logsumexp of larger ones is too coarse for e^(S - L)."""
    return [case for case in cases if case.magnitude == 1 and case.kind != shapes.GROWING]


def inputs_with_output(case: Case) -> tuple[torch.Tensor, ...]:
    """(q, k, v, o, lse, do): the output rounded to the case's dtype, the logsumexp to float32."""
    (q, k, v, do), o, lse = exactly(case)
    return q, k, v, o.to(q.dtype), lse.float(), do


def inputs_with_delta(case: Case) -> tuple[torch.Tensor, ...]:
    """(q, k, v, do, lse, delta), the last two rounded to float32."""
    (q, k, v, do), o, lse = exactly(case)
    return q, k, v, do, lse.float(), (do.double() * o).sum(-1).float()


def _do_of(e: Evidence) -> torch.Tensor:
    """dO among the inputs, by its name in the student's function or its place."""
    return e.args64[5] if len(e.args64) > 5 and e.args64[5].dim() == 4 else e.args64[3]


def mistakes(
    blocks: BlocksOf,
    *,
    delta: int,
    scale: int,
    sums: int,
    mask: int,
    heads: int,
    softmax: int,
    products: int,
    do: int,
) -> tuple[Diagnosis, ...]:
    """Rules for dq, dk and dv, each with its place in the exercise's list.

    Args:
        blocks: The answer's tile sizes.
        delta: Where the list tells of delta.
        scale: Of the scale.
        sums: Of what is added up over tiles.
        mask: Of the causal mask.
        heads: Of shared heads.
        softmax: Of P, computed again from L.
        products: Of the matrix products.
        do: Of strides.
    """

    def rule(cause: str, place: int, *alternatives: Mapping[str, Any], where: Callable[[Evidence], bool] | None = None):
        def applies(e: Evidence) -> bool:
            if where is not None and not where(e):
                return False
            number = _PLACE[e.difference.name]
            options = {name: value for name, value in e.case.options.items() if name in ("causal", "scale")}
            for flags in alternatives:
                given = {name: value(e) if callable(value) else value for name, value in flags.items()}
                if e.close(gradients(*e.args64[:3], _do_of(e), **options, **blocks(e), **given)[number]):
                    return True
            return False

        return Diagnosis(applies, classic(cause, place))

    def causal(e: Evidence) -> bool:
        return bool(e.case.options.get("causal"))

    def is_dv(e: Evidence) -> bool:
        return e.difference.name == "dv"

    def product(wrong: Callable[..., torch.Tensor]) -> Callable[[Evidence], bool]:
        """Whether dv, dk or dq equals another product; of (P, dS, q, k, v, dO, scale) with as many heads as q."""

        def applies(e: Evidence) -> bool:
            q, k, v = e.args64[:3]
            d_o, factor = _do_of(e), 1 / scaled(e)
            if q.shape[1] != k.shape[1] or (q.shape[2] != k.shape[2] and wrong in _SQUARE):
                return False
            o, lse = shapes.attention(q, k, v, bool(e.case.options.get("causal")), factor)
            p = shapes.probabilities(q, k, lse, causal(e), factor)
            ds = p * (d_o @ v.transpose(-1, -2) - (d_o * o).sum(-1, keepdim=True))
            return e.close(wrong(p, ds, q, k, v, d_o, factor))

        return applies

    return (
        rule("delta is missing: dS = P * (dP - delta)", delta, {"delta": "none"}),
        rule("delta is added: dS = P * (dP - delta)", delta, {"delta": "added"}),
        rule(
            "delta is taken off after the product: dS = P * (dP - delta), not P * dP - delta", delta, {"delta": "after"}
        ),
        rule("the factor P is missing: dS = P * (dP - delta)", delta, {"delta": "no p"}),
        rule(
            "dS is not multiplied by the scale: S = scale Q K^T, so dQ and dK carry the factor", scale, {"ds_scale": 0}
        ),
        rule("the scale is multiplied twice: once in dS, or once at the end", scale, {"ds_scale": 2}),
        rule(
            "dV carries the scale: only dQ and dK do",
            scale,
            {"ds_scale": 1, "dv_factor": lambda e: 1 / scaled(e)},
            where=is_dv,
        ),
        rule("the logsumexp is taken off where delta belongs: dS = P * (dP - delta)", delta, {"delta": "lse"}),
        rule(
            "the scale multiplies the scores twice: probabilities() takes products and applies it",
            softmax,
            {"score_factor": lambda e: 1 / scaled(e)},
        ),
        rule("P is recomputed from scores without the scale", softmax, {"score_factor": scaled}),
        rule(
            "P is recomputed in powers of 2 from a natural logsumexp: exp2 needs both S and L multiplied by log2 e",
            softmax,
            {"softmax": "base 2"},
        ),
        rule(
            "P is recomputed in powers of 2: the scores are multiplied by log2 e and the logsumexp is not",
            softmax,
            {"softmax": "natural lse"},
        ),
        rule(
            "P is recomputed in powers of 2: the logsumexp is multiplied by log2 e and the scores are not",
            softmax,
            {"softmax": "natural scores"},
        ),
        rule(
            "P is exp(S) without the logsumexp: the rows are not divided by their sums", softmax, {"softmax": "no lse"}
        ),
        rule("the causal mask is missing where P is computed again", mask, {"shift": "none"}, where=causal),
        rule(
            "the causal mask is aligned at the top left: with Nq != Nk, j <= i + Nk - Nq",
            mask,
            {"shift": "top left"},
            where=causal,
        ),
        rule("the causal mask is off by one: a query does not see its own key", mask, {"shift": -1}, where=causal),
        rule("the causal mask is off by one: a query sees the key after its own", mask, {"shift": 1}, where=causal),
        rule("only the last tile is left: each step adds to the gradient", sums, {"rows": "last tile"}),
        rule("only the first tile counts: go through all tiles that see this one", sums, {"rows": "first tile"}),
        rule(
            "only one query head counts: gradients of K and V are summed over the heads that share them",
            heads,
            {"over": "first"},
            {"over": "last"},
        ),
        rule("the gradients of the heads that share K and V are averaged: they are summed", heads, {"over": "mean"}),
        rule("query head h reads key head h % Hkv: heads that share keys are neighbours", heads, {"heads": "modulo"}),
        *(Diagnosis(product(wrong), classic(cause, products)) for wrong, cause in _PRODUCTS),
        Diagnosis(
            tiles.not_contiguous,
            classic("only non-contiguous inputs fail: each tensor has strides of its own, dO too", do),
        ),
    )


def _dv_untransposed(p, ds, q, k, v, d_o, factor):
    return p @ d_o


def _dk_untransposed(p, ds, q, k, v, d_o, factor):
    return ds @ q * factor


def _dq_transposed(p, ds, q, k, v, d_o, factor):
    return ds.transpose(-1, -2) @ k * factor


def _dv_from_ds(p, ds, q, k, v, d_o, factor):
    return ds.transpose(-1, -2) @ d_o


def _dv_from_v(p, ds, q, k, v, d_o, factor):
    return p.transpose(-1, -2) @ q


def _dk_from_p(p, ds, q, k, v, d_o, factor):
    return p.transpose(-1, -2) @ q * factor


def _dk_from_do(p, ds, q, k, v, d_o, factor):
    return ds.transpose(-1, -2) @ d_o * factor


def _dq_from_v(p, ds, q, k, v, d_o, factor):
    return ds @ v * factor


def _dq_from_p(p, ds, q, k, v, d_o, factor):
    return p @ k * factor


_SQUARE = (_dv_untransposed, _dk_untransposed, _dq_transposed)
_PRODUCTS = (
    (_dv_untransposed, "dV = P^T dO: P is not transposed"),
    (_dk_untransposed, "dK = scale dS^T Q: dS is not transposed"),
    (_dq_transposed, "dQ = scale dS K: dS is transposed"),
    (_dv_from_ds, "dV comes from dS: it is P^T dO"),
    (_dv_from_v, "dV multiplies Q: it is P^T dO"),
    (_dk_from_p, "dK comes from P: it is scale dS^T Q"),
    (_dk_from_do, "dK multiplies dO: it is scale dS^T Q"),
    (_dq_from_v, "dQ multiplies V: it is scale dS K"),
    (_dq_from_p, "dQ comes from P: it is scale dS K"),
)
