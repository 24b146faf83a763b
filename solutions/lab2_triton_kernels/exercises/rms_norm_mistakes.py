"""What a wrong answer to exercise 2.3 is told: RMSNorm in PyTorch, and the mistakes that are made in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence, same_as
from utils.checks.launches import arguments_in, tile_over
from utils.kernel_profile import Finding

from . import shapes


def reference(
    x: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor, eps: float = 1e-6, calls: str = ""
) -> tuple[torch.Tensor, ...]:
    """Output and both gradients, in float32 at least, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x64, w64, d64 = x.to(wide), weight.to(wide), dout.to(wide)
    rstd = 1 / torch.sqrt(x64.square().mean(-1, keepdim=True) + eps)
    normed, scaled = x64 * rstd, d64 * w64
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return tuple(y.to(x.dtype) for y in (normed * w64, dx, _flat(d64 * normed).sum(0)))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2)


def _tile(e: Evidence) -> tuple[int, int]:
    """Rows and columns of the block with which the student's kernels load x."""
    return tile_over(e.trial.profile, e.trial.args[0])


def _between(e: Evidence, kind: str) -> list[Finding]:
    """The profiler's findings in memory that is neither an input's nor an output's: the partial sums'."""
    tensors = (*e.trial.args, *e.trial.outputs)
    named = {(to.kernel, name) for to in e.trial.profile.launches for x in tensors for name in arguments_in(to, x)}
    return [found for found in e.findings(kind) if (found.kernel, found.argument) not in named]


def _with_mean(e: Evidence, mean: Callable[[torch.Tensor], torch.Tensor], eps: float | None = None) -> bool:
    """Whether the output is what another mean of the squares, or another eps, gives."""
    x, weight, _ = e.args64
    eps = e.case.options.get("eps", 1e-6) if eps is None else eps
    return e.difference.name == "out" and e.close(x / torch.sqrt(mean(x.square()) + eps) * weight)


def _of_the_tile(e: Evidence) -> torch.Tensor:
    """The output where the rows of a tile share one mean, of their sums of squares or of all their elements."""
    x, weight, _ = e.args64
    flat, eps = _flat(x) if x.dim() > 1 else x[None], e.case.options.get("eps", 1e-6)
    parts = flat.split(_tile(e)[0])
    sums = torch.cat([part.square().sum().expand(len(part), 1) for part in parts])
    return (flat / torch.sqrt(sums / x.shape[-1] + eps) * weight).reshape(x.shape)


def _second_term(wrong: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """All outputs with another second term in dx: a function of scaled, normed, weight and dout."""

    def formula(x, weight, dout, eps=1e-6, calls=""):
        rstd = 1 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        normed, scaled = x * rstd, dout * weight
        dx = rstd * (scaled - wrong(scaled, normed, weight, dout))
        return normed * weight, dx, _flat(dout * normed).sum(0)

    return formula


def _output(wrong: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """All outputs with another forward formula: a function of x, weight and eps."""
    return lambda x, weight, dout, eps=1e-6, calls="": (
        wrong(x, weight, eps),
        *reference(x, weight, dout, eps)[1:],
    )


def _weights(wrong: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """All outputs with another gradient of the weight: a function of x, normed, weight and dout."""

    def formula(x, weight, dout, eps=1e-6, calls=""):
        normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        return *reference(x, weight, dout, eps)[:2], _flat(wrong(x, normed, weight, dout)).sum(0)

    return formula


def _ms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True)


def _large_float16(case: Case) -> bool:
    """Whether squares of a case's numbers leave float16's range."""
    return case.dtype == torch.float16 and case.magnitude > 1


def _last_tiles(e: Evidence) -> bool:
    """Whether dweight is the sum over the last tile of every split of rows, whatever the splits."""
    if e.difference.name != "dweight":
        return False
    products, height = _products(e), _tile(e)[0]
    tiles = [tile.sum(0) for tile in products.split(height)]
    strides = range(2, len(tiles) + 1)
    return any(
        e.close(sum(tiles[min(start + step_, len(tiles)) - 1] for start in range(0, len(tiles), step_)))
        for step_ in strides
    )


def _products(e: Evidence) -> torch.Tensor:
    x, _, dout = e.args64
    eps = e.case.options.get("eps", 1e-6)
    return _flat(dout * x / torch.sqrt(_ms(x) + eps)) if x.dim() > 1 else (dout * x / torch.sqrt(_ms(x) + eps))[None]


def _first_split(e: Evidence) -> bool:
    """Whether dweight is the sum over the first so many rows."""
    products = _products(e)
    return e.difference.name == "dweight" and any(
        e.close(products[:count].sum(0)) for count in range(1, len(products)) if count % _tile(e)[0] == 0
    )


#: All outputs where dx has its first term alone.
_NO_SECOND_TERM = _second_term(lambda scaled, normed, weight, dout: torch.zeros_like(scaled))

#: The most telling first; the numbers are those of the notebook's list.
MISTAKES = (
    shapes.FAR,
    Diagnosis(
        lambda e: e.same_as(_NO_SECOND_TERM) and not e.trial.outputs[2].any(),
        "x * rstd is 0 in the backward pass: dx lacks the term that holds it, and dweight is 0",
    ),
    same_as(
        _NO_SECOND_TERM,
        classic("dx lacks its second term and so takes rstd for a constant: rstd depends on every x of its row", 1),
    ),
    same_as(
        _second_term(lambda scaled, normed, weight, dout: normed * (scaled * normed).sum(-1, keepdim=True)),
        classic("dx takes the sum of dout * weight * normed, not its mean over the row", 1),
    ),
    same_as(
        _second_term(lambda scaled, normed, weight, dout: normed * (dout * normed).mean(-1, keepdim=True)),
        classic("the mean in dx lacks the weight", 1),
    ),
    same_as(
        _second_term(lambda scaled, normed, weight, dout: normed * scaled.mean(-1, keepdim=True)),
        classic("the mean in dx lacks the factor normed", 1),
    ),
    same_as(
        _second_term(lambda scaled, normed, weight, dout: -normed * (scaled * normed).mean(-1, keepdim=True)),
        classic("the second term of dx has the wrong sign", 1),
    ),
    Diagnosis(
        lambda e: e.difference.name == "dx" and e.close(reference(*e.args64)[1] * torch.sqrt(_ms(e.args64[0]) + 1e-6)),
        classic("dx lacks the factor rstd in front", 1),
    ),
    Diagnosis(
        lambda e: _with_mean(e, lambda s: s.sum(-1, keepdim=True) / _tile(e)[1]),
        classic("the sum of squares is divided by the width of the tile: a row has `columns` elements", 2),
    ),
    same_as(
        _output(lambda x, weight, eps: x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps) * weight),
        classic("the squares are summed and not divided by `columns`: this is x over its norm", 2),
    ),
    same_as(
        _output(
            lambda x, weight, eps: (
                (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + eps) * weight
            )
        ),
        classic("the mean of x is subtracted: that is LayerNorm; RMSNorm only scales", 2),
    ),
    same_as(
        _output(lambda x, weight, eps: x / (_ms(x) + eps) * weight),
        classic("the square root is left out", 2),
    ),
    same_as(
        _output(lambda x, weight, eps: x * torch.sqrt(_ms(x) + eps) * weight),
        classic("x is multiplied by the root, not divided by it", 2),
    ),
    same_as(
        _output(lambda x, weight, eps: x / (torch.sqrt(_ms(x)) + eps) * weight),
        classic("eps is added to the root: it belongs to the mean, under the root", 3),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: "eps" in case.options),
        classic("only another eps fails: take the argument, not a fixed number", 3),
    ),
    Diagnosis(lambda e: _with_mean(e, lambda s: s.mean(-1, keepdim=True), eps=0.0), classic("eps is left out", 3)),
    same_as(_output(lambda x, weight, eps: x / torch.sqrt(_ms(x) + eps)), classic("the weight is left out", 2)),
    Diagnosis(
        lambda e: e.difference.name == "out" and e.close(_of_the_tile(e)),
        classic("all rows of a tile share one sum of squares: sum along axis 1, one number per row", 4),
    ),
    same_as(
        _weights(lambda x, normed, weight, dout: dout * x),
        classic("dweight holds x itself: the weight multiplies x * rstd", 5),
    ),
    same_as(
        _weights(lambda x, normed, weight, dout: dout * normed * weight),
        classic("dweight holds the weight: the derivative by the weight is x * rstd", 5),
    ),
    same_as(_weights(lambda x, normed, weight, dout: normed), classic("dweight lacks the factor dout", 5)),
    same_as(_weights(lambda x, normed, weight, dout: dout), classic("dweight lacks the factor x * rstd", 5)),
    same_as(
        _weights(lambda x, normed, weight, dout: dout * normed / max(1, len(_flat(x)))),
        classic("dweight is a mean over rows, not their sum", 5),
    ),
    Diagnosis(
        lambda e: e.difference.name == "dweight" and _between(e, "races"),
        lambda e: classic(
            f"programs write the same partial sums ({_between(e, 'races')[0]}): each needs a row of its own", 6
        ),
    ),
    Diagnosis(
        lambda e: e.difference.name == "dweight" and _between(e, "uninitialized_reads"),
        lambda e: classic(
            f"partial sums are added up that no program has written ({_between(e, 'uninitialized_reads')[0]})", 6
        ),
    ),
    Diagnosis(_last_tiles, classic("dweight holds the last tile of each split only: add every tile to the sums", 6)),
    Diagnosis(_first_split, classic("dweight holds the first rows only: add up the sums of all programs", 6)),
    Diagnosis(
        lambda e: e.difference.name == "dweight" and e.only(lambda case: case.kind in ("tall", "sums that cancel")),
        classic("only sums over many rows are wrong: keep rstd, the sums and the partial sums in float32", 7),
    ),
    Diagnosis(
        lambda e: (
            _large_float16(e.case) and e.only(lambda case: _large_float16(case) or case.kind == "sums that cancel")
        ),
        classic("large float16 values fail and small ones pass: x * x passes 65,504 unless x is float32 before", 7),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: "calls" in case.options),
        lambda e: classic(f"only {e.case.options['calls']} fails: what a call keeps belongs to its own ctx", 9),
    ),
    *shapes.MISTAKES,
    shapes.too_inaccurate("squares, means and products in float32, and round once when storing", 7),
)
