"""Classic wrong answers to the backward pass, each recognised by what it computes; and the inputs of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.diagnoses import Diagnosis, Evidence

from . import shapes, tiles
from .mistakes import BlocksOf, Mistake, causal, rules, scaled
from .walk import gradients

#: What an output or gradient of ordinary size may be off by because S and L are rounded to float32, and so e^(S - L).
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
    return [case for case in cases if case.magnitude == 1 and case.kind not in (shapes.GROWING, shapes.VERY_LOW)]


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


def mistakes(blocks: BlocksOf, **places: int) -> tuple[Diagnosis, ...]:
    """Rules for dq, dk and dv.

    Args:
        blocks: The answer's tile sizes.
        places: Where the exercise's list tells of ``delta``, ``scale``, ``sums`` (what is added up over tiles),
            ``mask`` (the causal one), ``heads`` (shared ones), ``softmax`` (P, computed again from L), ``products``
            (of matrices) and ``do`` (strides).
    """

    def compute(e: Evidence, **way: Any) -> torch.Tensor:
        return gradients(*e.args64[:3], _do_of(e), **way, **blocks(e))[_PLACE[e.difference.name]]

    return rules((*_STEPS, *_PRODUCTS, _STRIDES), compute, places)


def _is_dv(e: Evidence) -> bool:
    return e.difference.name == "dv"


_STEPS = (
    Mistake("delta", "delta is missing: dS = P * (dP - delta)", [{"delta": "none"}]),
    Mistake("delta", "delta is added: dS = P * (dP - delta)", [{"delta": "added"}]),
    Mistake(
        "delta",
        "delta is taken off after the product: dS = P * (dP - delta), not P * dP - delta",
        [{"delta": "after"}],
    ),
    Mistake(
        "delta",
        "delta is that of a tile of keys: it is the sum of P * dP over a whole row, rowsum(dO * O)",
        [{"delta": "tile"}],
    ),
    Mistake("delta", "the factor P is missing: dS = P * (dP - delta)", [{"delta": "no p"}]),
    Mistake(
        "scale",
        "dS is not multiplied by the scale: S = scale Q K^T, so dQ and dK carry the factor",
        [{"ds_scale": 0}],
    ),
    Mistake("scale", "the scale is multiplied twice: once in dS, or once at the end", [{"ds_scale": 2}]),
    Mistake("scale", "dV carries the scale: only dQ and dK do", [{"dv_factor": lambda e: 1 / scaled(e)}], _is_dv),
    Mistake("delta", "the logsumexp is taken off where delta belongs: dS = P * (dP - delta)", [{"delta": "lse"}]),
    Mistake(
        "softmax",
        "the scale multiplies the scores twice: probabilities() takes products and applies it",
        [{"score_factor": lambda e: 1 / scaled(e)}],
    ),
    Mistake("softmax", "P is recomputed from scores without the scale", [{"score_factor": scaled}]),
    Mistake(
        "softmax",
        "P is recomputed in powers of 2 from a natural logsumexp: exp2 needs both S and L multiplied by log2 e",
        [{"softmax": "base 2"}],
    ),
    Mistake(
        "softmax",
        "P is recomputed in powers of 2: the scores are multiplied by log2 e and the logsumexp is not",
        [{"softmax": "natural lse"}],
    ),
    Mistake(
        "softmax",
        "P is recomputed in powers of 2: the logsumexp is multiplied by log2 e and the scores are not",
        [{"softmax": "natural scores"}],
    ),
    Mistake(
        "softmax",
        "P is exp(S) without the logsumexp: the rows are not divided by their sums",
        [{"softmax": "no lse"}],
    ),
    Mistake("mask", "the causal mask is missing where P is computed again", [{"shift": "none"}], causal),
    Mistake(
        "mask",
        "the causal mask is aligned at the top left: with Nq != Nk, j <= i + Nk - Nq",
        [{"shift": "top left"}],
        causal,
    ),
    Mistake("mask", "the causal mask is off by one: a query does not see its own key", [{"shift": -1}], causal),
    Mistake("mask", "the causal mask is off by one: a query sees the key after its own", [{"shift": 1}], causal),
    Mistake(
        "sums",
        "only the last tile is left: each step adds to the gradient",
        [{"rows": "last tile"}, {"rows": "last tile", "over": "last"}],
    ),
    Mistake(
        "sums",
        "only the first tile counts: go through all tiles that see this one",
        [{"rows": "first tile"}],
        lambda e: bool((e.got != 0).any()),  # zeros may come of no tile as well
    ),
    Mistake(
        "heads",
        "only one query head counts: gradients of K and V are summed over the heads that share them",
        [{"over": "first"}, {"over": "last"}],
    ),
    Mistake(
        "heads",
        "the gradients of the heads that share K and V are averaged: they are summed",
        [{"over": "mean"}],
    ),
    Mistake(
        "heads",
        "query head h reads key head h % Hkv: heads that share keys are neighbours",
        [{"heads": "modulo"}],
    ),
)


def _product(cause: str, wrong: Callable[..., torch.Tensor], square: bool = False) -> Mistake:
    """The mistake that a gradient is another product; of (P, dS, q, k, v, dO, scale) with as many heads as q.

    ``square``: the product exists only where there are as many queries as keys.
    """

    def applies(e: Evidence) -> bool:
        q, k, v = e.args64[:3]
        do, scale = _do_of(e), 1 / scaled(e)
        if q.shape[1] != k.shape[1] or (square and q.shape[2] != k.shape[2]):
            return False
        o, lse = shapes.attention(q, k, v, causal(e), scale)
        p = shapes.probabilities(q, k, lse, causal(e), scale)
        ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True))
        return e.close(wrong(p, ds, q, k, v, do, scale))

    return Mistake("products", cause, where=applies)


_PRODUCTS = (
    _product("dV = P^T dO: P is not transposed", lambda p, ds, q, k, v, do, scale: p @ do, square=True),
    _product("dK = scale dS^T Q: dS is not transposed", lambda p, ds, q, k, v, do, scale: ds @ q * scale, square=True),
    _product("dQ = scale dS K: dS is transposed", lambda p, ds, q, k, v, do, scale: ds.mT @ k * scale, square=True),
    _product("dV comes from dS: it is P^T dO", lambda p, ds, q, k, v, do, scale: ds.mT @ do),
    _product("dV multiplies Q: it is P^T dO", lambda p, ds, q, k, v, do, scale: p.mT @ q),
    _product("dK comes from P: it is scale dS^T Q", lambda p, ds, q, k, v, do, scale: p.mT @ q * scale),
    _product("dK multiplies dO: it is scale dS^T Q", lambda p, ds, q, k, v, do, scale: ds.mT @ do * scale),
    _product("dQ multiplies V: it is scale dS K", lambda p, ds, q, k, v, do, scale: ds @ v * scale),
    _product("dQ comes from P: it is scale dS K", lambda p, ds, q, k, v, do, scale: p @ k * scale),
)
_STRIDES = Mistake(
    "do",
    "only non-contiguous inputs fail: each tensor has strides of its own, dO too",
    where=tiles.not_contiguous,
)
