"""Checks of exercise 1.10: the FLOPs of a transformer layer by class of operator, and their shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from random import Random

from utils.checks.forms import Count, Rate, Table
from utils.checks.question import Case, Mistake, Question
from utils.dataflow import CLASSES
from utils.encoder_layer import transformer_layer

from .rules import LARGE, asking


def layer_flops(batch: int, seq_len: int, hidden: int, heads: int, backward: bool) -> dict[str, int]:
    """Summed operator by operator over the course's own table of all 50; the notebook condenses them."""
    totals = dict.fromkeys(CLASSES, 0)
    for operator in transformer_layer(batch, seq_len, hidden, heads, backward=backward):
        totals[operator.operator_class] += operator.flops
    return totals


def _cases(rng: Random) -> list[Case]:
    cases = []
    for backward in (False, True):
        for _ in range(4):
            heads = rng.randint(2, 6)
            sizes = {"batch": rng.randint(2, 5), "seq_len": rng.randint(3, 40), "hidden": heads * rng.randint(2, 9)}
            cases.append(Case(sizes | {"heads": heads, "backward": backward}))
        large = {"batch": 513, "seq_len": 8191, "hidden": 12288, "heads": 96}
        cases.append(Case(large | {"backward": backward}, LARGE))
    return cases


def _with(**wrong: Callable[..., int]) -> Callable[..., dict[str, int]]:
    """The right table, with the entries given computed from tokens, hidden, seq_len, scores, backward."""

    def computes(batch, seq_len, hidden, heads, backward):
        table = layer_flops(batch, seq_len, hidden, heads, backward)
        named = {key.replace("element_wise", "element-wise"): value for key, value in wrong.items()}
        sizes = (batch * seq_len, hidden, seq_len, batch * heads * seq_len**2, backward)
        return table | {key: value(*sizes) for key, value in named.items()}

    return computes


def _contraction(square: int = 4, products: int = 2, wide: int = 8, passes: int = 3) -> Callable[..., dict[str, int]]:
    """Contractions from (T, N) @ (N, N) products, attention products, and the feed-forward block in units of N by N."""

    def flops(tokens, hidden, seq_len, scores, backward):
        forward = (square + wide) * 2 * tokens * hidden**2 + products * 2 * tokens * hidden * seq_len
        return (passes if backward else 1) * forward

    return _with(contraction=flops)


def _normalisation(
    scores: tuple[int, int] = (6, 5), norms: tuple[int, int] = (14, 28), biases: int = 9
) -> Callable[..., dict[str, int]]:
    """Normalisations from operations a score and an activation, (forward, backward)."""
    return _with(
        normalisation=lambda tokens, hidden, seq_len, s, backward: (
            scores[0] * s
            + norms[0] * tokens * hidden
            + backward * (scores[1] * s + (norms[1] + biases) * tokens * hidden)
        )
    )


def _element_wise(forward: int = 17, backward_only: int = 8) -> Callable[..., dict[str, int]]:
    """Element-wise operations from operations an activation."""
    return _with(
        element_wise=lambda tokens, hidden, seq_len, s, backward: (forward + backward * backward_only) * tokens * hidden
    )


def _one_head(batch: int, seq_len: int, hidden: int, heads: int, backward: bool) -> dict[str, int]:
    return layer_flops(batch, seq_len, hidden, 1, backward)


def _hidden_per_head(batch: int, seq_len: int, hidden: int, heads: int, backward: bool) -> dict[str, int]:
    return _contraction(products=2 * heads)(batch, seq_len, hidden, heads, backward)


LAYER = Question(
    "layer_flops",
    _cases,
    layer_flops,
    (
        Mistake(
            "the backward pass of a product is counted as one product: there are two, one for each input's gradient",
            _contraction(passes=2),
            1,
        ),
        Mistake("the backward pass is left out, or not asked for by backward", _contraction(passes=1), 1),
        Mistake("the two products of attention, Q K^T and P V, are left out", _contraction(products=0), 2),
        Mistake("one of attention's two products is left out", _contraction(products=1), 2),
        Mistake("every head is given the whole hidden width: each has hidden / heads dimensions", _hidden_per_head, 2),
        Mistake("one of the projections Q, K, V and output is left out", _contraction(square=3), 3),
        Mistake("Q, K and V are counted as one projection: they are three", _contraction(square=2), 3),
        Mistake("only one of the two linear layers is counted", _contraction(wide=4), 3),
        Mistake("the feed-forward block is taken to be hidden wide: it is 4 * hidden inside", _contraction(wide=2), 3),
        Mistake(
            "a multiply-add is counted as one operation",
            lambda **case: {name: flops // 2 for name, flops in layer_flops(**case).items()},
            3,
        ),
        Mistake("the scores of one head are counted: there is a score matrix for each head", _one_head, 4),
        Mistake("one of the two layer norms is left out", _normalisation(norms=(7, 14)), 4),
        Mistake("the gradients of the biases are left out: they sum over the tokens", _normalisation(biases=0), 5),
        Mistake(
            "the gradient of linear 1's bias is taken to be hidden wide: it has 4 * hidden elements a token",
            _normalisation(biases=6),
            5,
        ),
        Mistake("the gradient of linear 1's bias is left out", _normalisation(biases=5), 5),
        Mistake("the biases of Q, K and V are counted as one: they are three", _normalisation(biases=7), 5),
        Mistake(
            "five of nine parts of the bias gradients are left out: Q, K, V, output and linear 2 have one each, "
            "linear 1 has four, all here and not with the element-wise operators",
            _normalisation(biases=4),
            5,
        ),
        Mistake("the attention dropout is left out (it counts with the softmax)", _normalisation(scores=(5, 5)), 4),
        Mistake("the scale is left out", _normalisation(scores=(5, 4)), 4),
        Mistake(
            "the layer norms' backward pass is taken to cost what the forward pass does: the table gives 14",
            _normalisation(norms=(14, 14)),
            4,
        ),
        Mistake("the normalisations' backward pass is left out", _normalisation((6, 0), (14, 0), 0), 5),
        Mistake(
            "linear 1 is taken to be hidden wide: its bias and dropout have 4 * hidden elements",
            _element_wise(11, 5),
            6,
        ),
        Mistake("one of the two residual connections is left out", _element_wise(16, 7), 6),
        Mistake(
            "the biases' gradients are counted here: they reduce, so they are normalisations", _element_wise(17, 17), 5
        ),
        Mistake("the ReLU's comparisons are counted: the table gives 0", _element_wise(21, 8), 6),
        Mistake("the ReLU's comparisons are counted: the table gives 0", _element_wise(21, 12), 6),
        Mistake("the element-wise operators' backward pass is left out", _element_wise(17, 0), 6),
    ),
    form=Table(CLASSES, Count()),
    refused={"batch": -2, "seq_len": -5, "hidden": -64, "heads": 7919},
    also_refused=[({"hidden": 12, "heads": -3}, -3)],
)


OTHER = "a table with classes of its own"
OTHER_CLASSES = (("convolution", "pooling"), ("embedding", "attention", "feed-forward", "normalisation", "loss"))


def _share_cases(rng: Random) -> list[Case]:
    drawn = [{name: rng.randint(1, 10**6) for name in CLASSES} for _ in range(5)]
    cases = [Case({"amounts": amounts}) for amounts in (*drawn, dict(zip(CLASSES, (2**61 + 1, 7, 0), strict=True)))]
    for names in OTHER_CLASSES:
        cases.append(Case({"amounts": {name: rng.randint(1, 10**6) for name in names}}, OTHER))
    return cases


def shares(amounts: Mapping[str, int]) -> dict[str, float]:
    """One minus what all the others take."""
    total = sum(amounts.values())
    return {name: float(1 - Fraction(sum(v for n, v in amounts.items() if n != name), total)) for name in amounts}


SHARES = Question(
    "shares",
    _share_cases,
    shares,
    (
        Mistake(
            "percentages are returned: shares add up to 1",
            lambda amounts: {k: 100 * v for k, v in shares(amounts).items()},
            7,
        ),
        Mistake(
            "each is divided by the largest, not by the sum",
            lambda amounts: {k: v / max(amounts.values()) for k, v in amounts.items()},
            7,
        ),
        Mistake(
            "each is divided by the sum of the others",
            lambda amounts: {k: v / max(1, sum(amounts.values()) - v) for k, v in amounts.items()},
            7,
        ),
        Mistake("the shares are rounded", lambda amounts: {k: round(v, 2) for k, v in shares(amounts).items()}, 7),
        Mistake("the shares are rounded", lambda amounts: {k: round(v, 4) for k, v in shares(amounts).items()}, 7),
        Mistake(
            "the names of layer_flops' classes are written into shares: take whatever names amounts has",
            lambda amounts: {name: shares(amounts)[name] for name in CLASSES},
            7,
        ),
        Mistake("an equal part is given to each", lambda amounts: dict.fromkeys(amounts, 1 / len(amounts)), 7),
    ),
    form=Table(CLASSES, Rate(), keys_of="amounts"),
)


LAYER_TABLE = asking(
    "1.10",
    "the operator table of a transformer layer",
    15,
    (LAYER, SHARES),
    check="check_layer",
    says="a transformer layer's FLOPs by class of operator, and the shares of each class.",
    notice="matrix products do nearly all of the arithmetic and far less of the time",
)
check_layer = LAYER_TABLE.check
