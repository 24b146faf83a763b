"""Exercise 6.6: the simple ring is the tuned one, and its check tells mistakes apart that it can tell apart."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from slow_machine_launch import launch

from solutions.lab6_frontiers import context_parallel, merge_parts, ring_forward
from solutions.lab6_frontiers.exercises import ring_attention
from solutions.lab6_frontiers.exercises.ring_merge import KINDS, judge_merge, merged, pairs
from solutions.lab6_frontiers.exercises.ring_sequences import READINGS, Reading, Zigzag, named
from solutions.lab6_frontiers.exercises.ring_watch import Watch
from solutions.lab6_frontiers.ring_simple import seen_by, zigzag

RANKS = 3
SEQUENCES = [*(Zigzag(5, tokens) for tokens in (12, 13, 15, 17)), Zigzag(5, 12, kind="far")]


def taken(sequence: Zigzag, reading: Reading) -> list[torch.Tensor]:
    return [sequence.taken(rank, RANKS, reading)[0] for rank in range(RANKS)]


@pytest.mark.parametrize("tokens", [3, 7, 12, 17])
def test_parts_are_those_of_the_finished_ring(tokens):
    x = torch.randn(1, 2, tokens, 4)
    for mine, theirs in zip(zigzag(x, RANKS), context_parallel.cut_sequence(x, RANKS), strict=True):
        assert torch.equal(mine, theirs)
    lengths = [part.shape[2] for part in zigzag(x, RANKS)]
    for rank, source in itertools.product(range(RANKS), repeat=2):
        rows, keys, diagonal = seen_by(rank, source, lengths, causal=True)
        other = context_parallel.seen_by(rank, source, lengths, True, "zigzag")
        assert (rows, keys, diagonal) == other or (other is None and lengths[rank] == 1)


def both(sequence: Zigzag) -> tuple[torch.Tensor, torch.Tensor]:
    part = sequence.part(dist.get_rank(), RANKS)
    finished = context_parallel.ring_attention(*part, sequence.causal, dist.group.WORLD)
    return ring_forward(*part, causal=sequence.causal), finished


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_the_simple_ring_gives_what_the_finished_one_gives(causal):
    sequence = Zigzag(3, 17, causal, heads=4, key_heads=2, dim=16)
    for rank, (simple, finished) in enumerate(launch(both, sequence, world_size=RANKS, backend="gloo")):
        torch.testing.assert_close(simple, finished, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(simple.double(), sequence.right(rank, RANKS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda q, k, v: (q.double(), k, v), TypeError, "q must be a tensor of q's dtype, float32 or bfloat16"),
        (lambda q, k, v: (q, k.bfloat16(), v), TypeError, "k must be a tensor of q's dtype"),
        (lambda q, k, v: (q, k[:, :, :2], v), ValueError, r"k \(1, 2, 2, 8\)"),
        (lambda q, k, v: (q[:, :1], k, v), ValueError, "G a divisor of H"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        ring_forward(*change(*Zigzag(1, 12).part(0, RANKS)), causal=True)


# ---- the check
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_the_rings_right_reading_is_attention_of_the_whole_sequence(sequence):
    for rank, found in enumerate(taken(sequence, Reading())):
        torch.testing.assert_close(found, sequence.right(rank, RANKS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_merge_passes_and_a_wrong_one_is_told(kind):
    given = pairs(kind, 3)
    assert judge_merge(kind, 3, merge_parts(*given)) is None and judge_merge(kind, 3, merged(*given)) is None
    assert judge_merge(kind, 3, (given[0] + 1, given[1])) is not None
    assert "float32" in judge_merge(kind, 3, merged(*(x.double() for x in given))).headline


def test_each_mistake_of_the_ring_differs_from_the_right_one_and_from_each_other():
    ragged = [taken(sequence, Reading()) for sequence in SEQUENCES]
    found = [[taken(sequence, reading) for sequence in SEQUENCES] for reading, _, _ in READINGS]
    for (a, one), (b, other) in itertools.combinations([(-1, ragged), *enumerate(found)], 2):
        same = all(torch.allclose(x, y) for xs, ys in zip(one, other) for x, y in zip(xs, ys))
        assert not same, (a, b)


def test_what_no_mistake_gives_has_no_cause():
    sequence = SEQUENCES[0]
    outputs = [sequence.right(rank, RANKS) + 1 for rank in range(RANKS)]
    assert named(lambda reading: ring_attention._gives(reading, sequence, outputs)) == ""


def test_pairs_are_counted_that_a_rank_need_not_leave_out():
    sequence = Zigzag(1, 24)
    assert [sequence.pairs(rank, RANKS) for rank in range(RANKS)] == [8 * 8 + 2 * 8 * 4] * RANKS
    assert Zigzag(1, 24, causal=False).pairs(0, RANKS) == 8 * 24


@pytest.mark.parametrize(
    ("events", "overlapped"),
    [
        (["message", "message", "product", "wait", "wait", "product"], True),
        (["message", "message", "wait", "wait", "product"], False),
        (["message", "product", "wait", "message", "wait"], False),
        (["product"], True),
    ],
)
def test_a_message_travels_during_a_product_or_not(events, overlapped):
    watch = Watch()
    watch.events += events
    assert watch.overlapped() is overlapped
