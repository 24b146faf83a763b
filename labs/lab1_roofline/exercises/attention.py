"""Checks of exercise 1.4: FLOPs and bytes of attention."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from utils.checks.question import Case, Mistake, Question

from . import counting
from .operators import MULTIPLY_ADD, size_mistakes
from .rules import LARGE, ONE, asking, element_size

SMALL = 500  # multiplications that the oracle carries out one by one
FEWER_QUERIES = "fewer queries than keys"
MORE_QUERIES = "more queries than keys"


def visible_pairs(seq_q: int, seq_k: int, causal: bool) -> int:
    """Pairs of a query and a key that the mask leaves, in closed form."""
    if not causal:
        return seq_q * seq_k
    hidden = max(0, seq_k - 1) * seq_k // 2  # keys after the query, were there a query for every key and more
    if seq_q < seq_k:
        hidden = seq_q * (seq_q - 1) // 2
    return min(seq_q, seq_k) * seq_k - hidden


def attention_flops(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool) -> int:
    if batch * heads * seq_q * seq_k * head_dim <= SMALL:
        return counting.attention(batch, heads, seq_q, seq_k, head_dim, causal, False).flops
    return batch * heads * visible_pairs(seq_q, seq_k, causal) * (4 * head_dim + 5)


def attention_bytes(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, element_size: int, materialize: bool
) -> int:
    if batch * heads * seq_q * seq_k * head_dim <= SMALL:
        machine = counting.attention(batch, heads, seq_q, seq_k, head_dim, False, materialize)
        return machine.elements_moved * element_size + 4 * machine.statistics
    ends = 2 * (seq_q + seq_k) * head_dim * element_size
    return batch * heads * (ends + (4 * seq_q * seq_k * element_size if materialize else 4 * seq_q))


def _cases(rng: Random, flag: str, **others: Callable[[Random], object]) -> list[Case]:
    """For both values of ``flag``: as many queries as keys, fewer, more, one of everything, and large sizes."""
    cases = []
    for value in (False, True):
        lengths = []
        for tag in ("", "", FEWER_QUERIES, FEWER_QUERIES, MORE_QUERIES, MORE_QUERIES):
            short = rng.randint(2, 5)
            long = short + rng.randint(2, 4)
            lengths.append({"": (long, long), FEWER_QUERIES: (short, long), MORE_QUERIES: (long, short)}[tag] + (tag,))
        for seq_q, seq_k, tag in lengths:
            sizes = (rng.randint(1, 2), rng.randint(2, 3), seq_q, seq_k, rng.randint(2, 5))
            cases.append(_case(sizes, {key: draw(rng) for key, draw in others.items()} | {flag: value}, tag))
        drawn = {key: draw(rng) for key, draw in others.items()} | {flag: value}
        cases.append(_case((1, 1, 1, 1, 1), drawn, ONE))
        seq = 2**17 + 4 * rng.randint(1, 49) + 1  # odd factors throughout: a float loses the last digits
        cases.append(_case((2 * rng.randint(500, 999) + 1, 2 * rng.randint(4, 20) + 1, seq, seq, 128), drawn, LARGE))
    return cases


def _case(sizes: tuple[int, ...], others: dict[str, object], tag: str) -> Case:
    names = ("batch", "heads", "seq_q", "seq_k", "head_dim")
    return Case(dict(zip(names, sizes, strict=True)) | others, tag)


def _flops_of(
    pairs: Callable[[int, int, bool], int] = visible_pairs, per_pair: Callable[[int], int] | None = None
) -> Callable[..., int]:
    """A count of FLOPs from a count of pairs and a cost of a pair; what is not given is right."""
    cost = per_pair or (lambda head_dim: 4 * head_dim + 5)
    return lambda batch, heads, seq_q, seq_k, head_dim, causal: (
        batch * heads * pairs(seq_q, seq_k, causal) * cost(head_dim)
    )


def _half(seq_q: int, seq_k: int, causal: bool) -> int:
    return seq_q * seq_k // 2 if causal else seq_q * seq_k


def _strict(seq_q: int, seq_k: int, causal: bool) -> int:
    return sum(max(0, min(seq_k, i + seq_k - seq_q)) for i in _rows(seq_q, seq_k)) if causal else seq_q * seq_k


def _top_left(seq_q: int, seq_k: int, causal: bool) -> int:
    rows = min(seq_q, seq_k)
    return rows * (rows + 1) // 2 + (seq_q - rows) * seq_k if causal else seq_q * seq_k


def _rows(seq_q: int, seq_k: int) -> range:
    return range(max(0, seq_q - seq_k), seq_q)


def _square_formula(seq_q: int, seq_k: int, causal: bool) -> int:
    """Half of the square and half of the diagonal, which holds with as many queries as keys."""
    return seq_q * (seq_k + 1) // 2 if causal else seq_q * seq_k


def _triangle_of(side: Callable[[int, int], int]) -> Callable[[int, int, bool], int]:
    """A triangle of so many rows, whatever else there is."""
    return lambda seq_q, seq_k, causal: side(seq_q, seq_k) * (side(seq_q, seq_k) + 1) // 2 if causal else seq_q * seq_k


def _beside(of_all: Callable[[int], int]) -> Callable[..., int]:
    """What a pair costs, of which ``of_all`` is paid for hidden pairs too."""

    def flops(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool) -> int:
        hidden = seq_q * seq_k - visible_pairs(seq_q, seq_k, causal)
        right = attention_flops(batch, heads, seq_q, seq_k, head_dim, causal)
        return right + batch * heads * hidden * of_all(head_dim)

    return flops


def _negative_rows(seq_q: int, seq_k: int, causal: bool) -> int:
    """The sum of an arithmetic series that lets a query see a negative number of keys."""
    return seq_q * (seq_k - seq_q + 1 + seq_k) // 2 if causal else seq_q * seq_k


FLOPS = Question(
    "attention_flops",
    lambda rng: _cases(rng, "causal"),
    attention_flops,
    (
        Mistake(
            "the mask is ignored: hidden pairs are not computed",
            _flops_of(lambda seq_q, seq_k, causal: seq_q * seq_k),
            1,
        ),
        Mistake("half of the square is taken: a query sees itself, so the diagonal stays whole", _flops_of(_half), 1),
        Mistake("the diagonal is left out: a query sees its own key", _flops_of(_strict), 1),
        Mistake(
            "the mask begins at the first query and key: it ends at the last query and the last key",
            _flops_of(_top_left),
            2,
        ),
        Mistake(
            "queries that see no key are given a negative number of keys: they cost nothing",
            _flops_of(_negative_rows),
            2,
        ),
        Mistake(
            "a triangle of seq_q queries is taken whatever seq_k is: the last query sees all seq_k keys",
            _flops_of(_triangle_of(lambda seq_q, seq_k: seq_q)),
            2,
        ),
        Mistake(
            "a triangle of seq_k keys is taken whatever seq_q is: with fewer queries its first rows are not there",
            _flops_of(_triangle_of(lambda seq_q, seq_k: seq_k)),
            2,
        ),
        Mistake(
            "a triangle with the shorter side is taken: with fewer queries than keys, the first one sees some keys",
            _flops_of(_triangle_of(min)),
            2,
        ),
        Mistake(
            "a formula is used that holds with as many queries as keys only: seq_q (seq_k + 1) / 2",
            _flops_of(_square_formula),
            2,
        ),
        Mistake(
            "the hidden pairs are counted, not those that the mask leaves",
            _flops_of(lambda q, k, causal: q * k - visible_pairs(q, k, True) if causal else q * k),
            1,
        ),
        Mistake(
            "the mask is applied although causal is False",
            _flops_of(lambda seq_q, seq_k, causal: visible_pairs(seq_q, seq_k, True)),
            1,
        ),
        Mistake(
            "only Q K^T is masked: a hidden pair needs no scale, no softmax and no P V either",
            _beside(lambda head_dim: 2 * head_dim + 5),
            1,
        ),
        Mistake("the softmax runs over hidden pairs too: they cost nothing", _beside(lambda head_dim: 4), 1),
        Mistake("scale and softmax run over hidden pairs too: they cost nothing", _beside(lambda head_dim: 5), 1),
        Mistake(
            "the softmax and the scale are left out: five more operations a pair",
            _flops_of(per_pair=lambda d: 4 * d),
            3,
        ),
        Mistake(
            "one operation per pair is left out: the scale, one of the softmax's four, or an addition of a dot "
            "product, whose sum starts at zero",
            _flops_of(per_pair=lambda d: 4 * d + 4),
            3,
        ),
        Mistake("the softmax is left out: four operations per pair", _flops_of(per_pair=lambda d: 4 * d + 1), 3),
        Mistake(
            "Q is scaled, not the scores: one multiplication per score",
            lambda batch, heads, seq_q, seq_k, head_dim, causal: (
                batch * heads * (visible_pairs(seq_q, seq_k, causal) * (4 * head_dim + 4) + head_dim * seq_q)
            ),
            3,
        ),
        Mistake(
            "one operation per pair too many is counted: the maximum's comparisons, which are free inside a "
            "softmax, or the scale twice",
            _flops_of(per_pair=lambda d: 4 * d + 6),
            3,
        ),
        Mistake(
            f"one of the two products is left out, Q K^T or P V, or {MULTIPLY_ADD}",
            _flops_of(per_pair=lambda d: 2 * d + 5),
            4,
        ),
        Mistake(
            "the softmax, the scale and one of the two products are left out; or softmax and scale are, and "
            f"{MULTIPLY_ADD}",
            _flops_of(per_pair=lambda d: 2 * d),
            4,
        ),
        Mistake(
            "the heads are not counted",
            lambda heads, **sizes: attention_flops(heads=1, **sizes),
            5,
        ),
        Mistake("the sequences of the batch are not counted", lambda **a: attention_flops(**(a | {"batch": 1})), 5),
    ),
    refused={"batch": -2, "heads": -3, "seq_q": -4, "seq_k": -5, "head_dim": -8},
    split_by="causal",
)


def _bytes_of(
    scores: int = 4, ends: tuple[int, int] = (2, 2), statistics: int = 4, shared_scores: bool = False
) -> Callable[..., int]:
    """A count of bytes from trips of the scores and tensors with seq_q and seq_k rows; what is not given is right."""

    def moved(batch, heads, seq_q, seq_k, head_dim, element_size, materialize):
        through = (ends[0] * seq_q + ends[1] * seq_k) * head_dim * element_size
        between = scores * seq_q * seq_k * element_size if materialize else statistics * seq_q
        return batch * (heads * through + (1 if shared_scores and materialize else heads) * between)

    return moved


BYTES = Question(
    "attention_bytes",
    lambda rng: _cases(rng, "materialize", element_size=element_size),
    attention_bytes,
    (
        Mistake(
            "two of the four trips of S and P are left out: each of them is written by one kernel and read by the next",
            _bytes_of(scores=2),
            6,
        ),
        Mistake("one of the four trips of S and P is left out", _bytes_of(scores=3), 6),
        Mistake("three of the four trips of S and P are left out", _bytes_of(scores=1), 6),
        Mistake("the score matrices are left out: they go through HBM when materialised", _bytes_of(scores=0), 6),
        Mistake("one score matrix serves all heads: each head has its own", _bytes_of(shared_scores=True), 7),
        Mistake(
            "one of the two tensors with seq_q rows is left out: Q is read and O is written", _bytes_of(ends=(1, 2)), 7
        ),
        Mistake("one of the two tensors with seq_k rows is left out: K and V are both read", _bytes_of(ends=(2, 1)), 7),
        Mistake("Q, K, V and O are all taken to have seq_q rows: K and V have seq_k", _bytes_of(ends=(4, 0)), 7),
        Mistake("Q, K, V and O are all taken to have seq_k rows: Q and O have seq_q", _bytes_of(ends=(0, 4)), 7),
        Mistake(
            "K and V are counted once for all heads: each head has its own",
            lambda **a: (
                attention_bytes(**a)
                - 2 * a["batch"] * (a["heads"] - 1) * a["seq_k"] * a["head_dim"] * a["element_size"]
            ),
            7,
        ),
        Mistake("the heads are not counted", lambda **a: attention_bytes(**(a | {"heads": 1})), 7),
        Mistake("the sequences of the batch are not counted", lambda **a: attention_bytes(**(a | {"batch": 1})), 7),
        Mistake("the log-sum-exp of each query is left out", _bytes_of(statistics=0), 8),
        Mistake(
            "a log-sum-exp is counted beside the score matrices too: only the one kernel writes it",
            lambda **sizes: (
                attention_bytes(**sizes) + 4 * sizes["batch"] * sizes["heads"] * sizes["seq_q"] * sizes["materialize"]
            ),
            8,
        ),
        Mistake(
            "the log-sum-exp is counted twice, as if two numbers are written for each query: it holds the "
            "maximum and the sum in one",
            _bytes_of(statistics=8),
            8,
        ),
        Mistake("the log-sum-exp is counted as one byte: it is a float32", _bytes_of(statistics=1), 8),
        Mistake(
            "one log-sum-exp per key is counted: there is one per query",
            lambda **a: attention_bytes(**a) + 4 * a["batch"] * a["heads"] * (a["seq_k"] - a["seq_q"]),
            8,
        ),
        Mistake(
            "the log-sum-exp is counted in element_size bytes: it is a float32",
            lambda element_size, materialize, **sizes: _bytes_of(statistics=element_size)(
                element_size=element_size, materialize=materialize, **sizes
            ),
            8,
        ),
        Mistake(
            "materialize is read the wrong way round, or not at all: True means that S and P are in HBM",
            lambda materialize, **sizes: attention_bytes(materialize=not materialize, **sizes),
            6,
        ),
        *size_mistakes(attention_bytes, 8),
    ),
    refused={"batch": -9, "heads": -3, "seq_q": -5, "seq_k": -4, "head_dim": -8, "element_size": -2},
    split_by="materialize",
)


ATTENTION = asking(
    "1.4",
    "attention",
    15,
    (FLOPS, BYTES),
    check="check_attention",
    says="attention's FLOPs (causal or not) and bytes (scores materialised or not).",
    notice="with S and P in HBM, bytes grow with the square of the sequence; without, FLOPs do and bytes do not",
)
check_attention = ATTENTION.check
