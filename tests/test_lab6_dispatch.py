"""Exercise 6.8: rows to experts and back are those of the finished layer, and its check tells mistakes apart."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from slow_machine_launch import launch

from solutions.lab6_frontiers import combine, dispatch, exchange_rows
from solutions.lab6_frontiers.dispatch_simple import shares_of
from solutions.lab6_frontiers.exercises.dispatch_cases import (
    ADDED,
    RIGHT,
    SENT,
    Tokens,
    combined,
    dispatched,
    gradients,
    named,
)  # fmt: skip
from solutions.lab6_frontiers.exercises.exchanged_rows import Rows
from solutions.lab6_frontiers.rows_to_ranks import all_to_all

RANKS = 3
CASES = [Tokens(4, (5, 2, 6), 6), Tokens(4, (3, 4, 2), 7), Tokens(4, (0, 4, 3), 6, 3), Tokens(4, (2, 5, 3), 2)]


def both_exchanges() -> tuple[torch.Tensor, torch.Tensor]:
    rows, rank = Rows(3), dist.get_rank()
    sizes = rows.sizes(RANKS)
    sent, received = sizes[rank], [sizes[r][rank] for r in range(RANKS)]
    mine = rows.rows(rank, RANKS)
    return exchange_rows(mine, sent, received), all_to_all(mine, sent, received, dist.group.WORLD)


def there_and_back(case: Tokens) -> torch.Tensor:
    rank = dist.get_rank()
    rows, counts, kept = dispatch(case.x(rank), case.choices(rank), case.experts)
    factors = case.factors()[case.share(rank, RANKS)]
    return combine(rows * factors.repeat_interleave(counts, 0), kept, case.weights(rank))


@pytest.mark.slow
def test_the_exchange_is_that_of_the_finished_layer():
    for rank, (simple, finished) in enumerate(launch(both_exchanges, world_size=RANKS, backend="gloo")):
        assert torch.equal(simple, finished) and torch.equal(simple, Rows(3).right(rank, RANKS))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_each_token_gets_the_weighted_sum_of_its_experts(case):
    for rank, out in enumerate(launch(there_and_back, case, world_size=RANKS, backend="gloo")):
        each = case.x(rank)[:, None] * case.factors()[case.choices(rank)]
        torch.testing.assert_close(out, (each * case.weights(rank)[..., None]).sum(1))


@pytest.mark.parametrize(("experts", "ranks", "shares"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1, 0]), (6, 1, [6])])
def test_shares_of_experts_differ_by_one(experts, ranks, shares):
    assert shares_of(experts, ranks) == shares
    case = Tokens(1, (1,) * ranks, experts)
    assert [len(range(experts)[case.share(rank, ranks)]) for rank in range(ranks)] == shares


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda x, experts: (x.double(), experts, 6), TypeError, "x must be float32 or bfloat16"),
        (lambda x, experts: (x, experts.int(), 6), TypeError, "experts int64, got torch.float32 and torch.int32"),
        (lambda x, experts: (x[:3], experts, 6), ValueError, r"got \(3, 4\), \(5, 2\) and 6 experts"),
        (lambda x, experts: (x, experts, 1), ValueError, "k from 1 to num_experts"),
        (lambda x, experts: (x, experts + 6, 6), ValueError, "experts must be from 0 to 5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        dispatch(*change(CASES[0].x(0), CASES[0].choices(0)))


# ---- the check
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_right_reading_is_a_loop_over_tokens_and_experts(case):
    rows = dispatched(case, RANKS)
    for rank, out in enumerate(combined(case, RANKS)):
        x, weights, factors = case.x(rank).double(), case.weights(rank).double(), case.factors().double()
        for t, experts in enumerate(case.choices(rank)):
            right = sum(weights[t, j] * x[t] * factors[e] for j, e in enumerate(experts.tolist()))
            torch.testing.assert_close(out[t], right)
            for e in experts.tolist():
                owner = next(r for r in range(RANKS) if e in range(case.experts)[case.share(r, RANKS)])
                of_expert = rows[owner][0][rows[owner][1] == e]
                assert (of_expert == x[t]).all(1).sum() == 1
    assert sum(len(each) for each, _, _ in rows) == sum(case.tokens) * case.chosen


@pytest.mark.parametrize("readings", [SENT, ADDED])
def test_each_mistake_differs_from_the_right_one_and_from_each_other(readings):
    give = (lambda case, reading: [rows for rows, _, _ in dispatched(case, RANKS, reading)]) if readings is SENT else (
        lambda case, reading: combined(case, RANKS, reading)
    )  # fmt: skip
    found = [[give(case, reading) for case in CASES[:2]] for reading in (RIGHT, *(each[0] for each in readings))]
    for (a, one), (b, other) in itertools.combinations(enumerate(found), 2):
        pairs = [(x, y) for xs, ys in zip(one, other) for x, y in zip(xs, ys)]
        assert not all(x.shape == y.shape and torch.allclose(x, y) for x, y in pairs), (a, b)


def test_what_no_mistake_gives_has_no_cause():
    assert named(ADDED, lambda reading: False) == "" and "6" in named(ADDED, lambda reading: True)


def test_an_experts_gradient_comes_from_the_tokens_of_all_ranks():
    found = gradients(CASES[0], RANKS)
    total = torch.zeros(6, 4, dtype=torch.float64)
    for rank in range(RANKS):
        x, dy = CASES[0].x(rank).double(), CASES[0].gradient(rank).double()
        for t, experts in enumerate(CASES[0].choices(rank)):
            for j, e in enumerate(experts.tolist()):
                total[e] += CASES[0].weights(rank)[t, j].double() * x[t] * dy[t]
    torch.testing.assert_close(torch.cat([each["factors"] for each in found]), total)
