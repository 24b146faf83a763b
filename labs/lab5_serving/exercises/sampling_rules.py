"""What speculative sampling must give, and what each known mistake gives: exact distributions over its results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Results (tuples of tokens) and their probabilities.
Distribution = dict[tuple[int, ...], float]
#: Of a row: p, q (V,) and the drafted token, the probability that it is accepted.
Accept = Callable[[Tensor, Tensor, int], float]
#: Of a row: p, q (V,), what a rejected token is replaced from.
Replace = Callable[[Tensor, Tensor], Tensor]


def drawn_rows(rng: random.Random, *shape: int) -> Tensor:
    """Distributions over the last axis, some tokens with no probability."""
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    logits = 1.5 * torch.randn(*shape, generator=draw, dtype=torch.float64)
    logits[torch.rand(*shape, generator=draw) < 0.15] = -torch.inf
    logits[..., 0] = logits[..., 0].clamp(min=-2.0)
    return logits.softmax(-1)


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    """min(1, p/q) (Leviathan et al. 2023)."""
    return min(1.0, float(p[token] / q[token])) if q[token] > 0 else 0.0


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), divided by its sum; p where nothing is left."""
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else p


@dataclass(frozen=True)
class Rule:
    """One way to accept, replace and add, right or wrong.

    Attributes:
        accept, replace: of a row.
        last: the row of the target that the token after k accepted ones is drawn from, from the end; None adds none.
        keeps: a rejected token stays before its replacement.
        adds: a rejected token is replaced at all.
        goes_on: the drafted tokens behind a rejected one are judged as well.
        ahead: how many rows the target is read too far ahead.
        shared: one number decides on all drafted tokens.
        reused: the number that rejected a token also draws its replacement.
    """

    accept: Accept = ratio
    replace: Replace = left_over
    last: int | None = -1
    keeps: bool = False
    adds: bool = True
    goes_on: bool = False
    ahead: int = 0
    shared: bool = False
    reused: bool = False

    def distribution(self, p: Tensor, q: Tensor, drafted: list[int]) -> Distribution:
        """The distribution of results for p (k + 1, V), q (k, V) and k drafted tokens."""
        found: Distribution = {}
        self._from(0, (), 1.0, 1.0, p.double(), q.double(), drafted, found)
        return found

    def _from(
        self,
        i: int,
        so_far: tuple[int, ...],
        mass: float,
        above: float,
        p: Tensor,
        q: Tensor,
        x: list[int],
        found: Distribution,
    ) -> None:
        """Add what may follow after i judged tokens; with a shared number it is known to lie below ``above``."""
        if mass <= 0:
            return
        if i == len(x):
            self._add(found, so_far, mass, None if self.last is None else p[self.last])
            return
        row = min(i + self.ahead, len(p) - 1)
        stays = self.accept(p[row], q[i], x[i])
        if self.shared:
            stays, above = min(1.0, stays / above), min(above, stays)
        self._from(i + 1, (*so_far, x[i]), mass * stays, above, p, q, x, found)
        gone = mass * (1 - stays)
        if gone <= 0:
            return
        kept = (*so_far, x[i]) if self.keeps else so_far
        new = self.replace(p[row], q[i]) if self.adds else None
        if new is not None and self.reused:
            new = _above(new, stays)
        if not self.goes_on:
            self._add(found, kept, gone, new)
            return
        for token, share in enumerate((new if new is not None else torch.zeros(0)).tolist()):
            self._from(i + 1, (*kept, token), gone * share, above, p, q, x, found)

    @staticmethod
    def _add(found: Distribution, so_far: tuple[int, ...], mass: float, row: Tensor | None) -> None:
        if row is None:
            found[so_far] = found.get(so_far, 0.0) + mass
            return
        for token, share in enumerate(row.tolist()):
            if share > 0:
                found[(*so_far, token)] = found.get((*so_far, token), 0.0) + mass * share


def _above(probs: Tensor, least: float) -> Tensor:
    """Tokens that the inverse of the running sum gives for numbers that are uniform between ``least`` and 1."""
    upto = probs.cumsum(0)
    low = torch.cat((torch.zeros(1, dtype=upto.dtype), upto[:-1]))
    share = (upto.clamp(min=least) - low.clamp(min=least)).clamp(min=0)
    return share / share.sum() if share.sum() > 0 else probs


def _likeliest(p: Tensor, q: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(left_over(p, q).argmax(), len(p)).double()


def _apart(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs() / (p - q).abs().sum() if (p - q).abs().sum() > 0 else p


def _other_way(p: Tensor, q: Tensor) -> Tensor:
    return left_over(q, p)


def distance(one: Distribution, other: Distribution) -> float:
    """Total variation of two distributions: half the sum of what they differ by."""
    return sum(abs(one.get(result, 0.0) - other.get(result, 0.0)) for result in {*one, *other}) / 2


RIGHT = Rule()
#: Known mistakes: what they do, what is said of them, and their number among the classic wrong answers.
MISTAKES: tuple[tuple[Rule, str, int], ...] = (
    (Rule(lambda p, q, x: min(1.0, float(q[x] / p[x])) if p[x] > 0 else 1.0),
     "the acceptance ratio is upside down: min(1, p/q), p is the target's", 1),
    (Rule(replace=lambda p, q: p),
     "a rejected token is replaced from the target's distribution: likely tokens then come too often, once accepted "
     "and once as a replacement; max(p - q, 0) is what is missing", 2),
    (Rule(replace=lambda p, q: q), "a rejected token is replaced from the draft's distribution", 2),
    (Rule(replace=_apart), "the residual is |p - q|: where the draft has too much, nothing is missing", 3),
    (Rule(replace=_other_way), "the residual is upside down: max(p - q, 0)", 3),
    (Rule(replace=_likeliest),
     "the likeliest token of the residual is taken, or its number is not uniform: draw one by its own number", 3),
    (Rule(last=None), "after k accepted tokens one more comes from the target's last row: it is free", 4),
    (Rule(last=-2), "the token after k accepted ones is drawn from row k - 1: row k comes after the last one", 4),
    (Rule(goes_on=True), "what stands behind a rejected token is still judged: it follows a token that is gone", 5),
    (Rule(keeps=True), "the rejected token is kept beside its replacement", 5),
    (Rule(adds=False), "a rejected token is not replaced: every pass of the target adds a token", 5),
    (Rule(keeps=True, adds=False), "the rejected token is kept", 5),
    (Rule(lambda p, q, x: float(p[x])), "a token is accepted with probability p: min(1, p/q)", 1),
    (Rule(lambda p, q, x: 1.0), "every drafted token is accepted", 1),
    (Rule(lambda p, q, x: 0.0), "no drafted token is accepted", 1),
    (Rule(lambda p, q, x: float(p[x] >= q[x])), "a token is accepted if p >= q, and never by chance", 1),
    (Rule(lambda p, q, x: float(x == int(p.argmax()))), "only the target's likeliest token is accepted", 1),
    (Rule(lambda p, q, x: 1 - ratio(p, q, x)), "what is to be accepted is rejected, and the other way round", 1),
    (Rule(ahead=1), "row i of the target judges drafted token i: it is the distribution after i drafted tokens", 6),
    (Rule(shared=True), "one number decides on all drafted tokens: each has a number of its own", 7),
    (Rule(reused=True), "the number that rejects a token also draws its replacement: it is known to be large then", 7),
)  # fmt: skip
