"""Attention of a sequence spread over ranks is that of one process, gradients too, and sends what the formulas say."""

from __future__ import annotations

import functools
import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist
from parameters import thorough_but
from slow_machine_launch import launch, once

from solutions.lab3_flash_attention import flash_attention
from solutions.lab6_frontiers import context_parallel as cp
from utils.distributed import DistributedError, record_collectives

B, HQ, HKV, D, N = 1, 4, 2, 16, 41
WAYS = [(way, causal) for way in ("zigzag", "contiguous", "heads") for causal in (False, True)]


def inputs(heads=HKV, dtype=torch.float32, length=N):
    source = torch.Generator().manual_seed(3)
    shapes = (B, HQ, length, D), (B, heads, length, D), (B, heads, length, D), (B, HQ, length, D)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


def with_gradients(function, q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def on_a_rank(way, causal, dtype, uneven):
    group = dist.group.WORLD
    heads = HQ if way == "heads" else HKV
    layout = "contiguous" if way == "heads" else way
    tensors = inputs(heads, dtype)
    if uneven:  # each rank another length; the last has one token
        lengths = uneven_lengths(group.size())
        mine = [x.split(lengths, 2)[group.rank()] for x in tensors]
    else:
        mine = [cp.cut_sequence(x, group.size(), layout)[group.rank()] for x in tensors]
    attend = functools.partial(
        cp.all_to_all_attention if way == "heads" else cp.ring_attention, causal=causal, group=group
    )
    if way != "heads":
        attend = functools.partial(attend, layout=layout)
    with record_collectives() as ledger:
        found = with_gradients(attend, *mine)
    return found, ledger.bytes("send"), ledger.bytes("all_to_all"), mine[0].shape[2]


def uneven_lengths(ranks):
    """All of N on the ranks: few on the first, none fewer than one, the last with one."""
    first = [3 + 2 * rank for rank in range(ranks - 2)]
    return [*first, N - 1 - sum(first), 1]


def all_on_a_rank():
    ways = [way for way in WAYS if way[0] != "heads" or HQ % dist.get_world_size() == 0]
    cases = [(*way, torch.float32, False) for way in ways]
    cases += [("contiguous", True, torch.float32, True), ("zigzag", True, torch.bfloat16, False)]
    return {case: on_a_rank(*case) for case in cases}


@once
def spread(world_size):
    return launch(all_on_a_rank, world_size=world_size)


def cases():
    for ranks, (way, causal) in itertools.product((2, 3, 4), WAYS):
        marks = pytest.mark.thorough if ranks == 4 else ()
        if way != "heads" or HQ % ranks == 0:
            yield pytest.param(ranks, (way, causal, torch.float32, False), marks=marks)
        if (way, causal) == ("contiguous", True):
            yield pytest.param(ranks, (way, causal, torch.float32, True), marks=marks)


def joined(found, layout):
    return [cp.join_sequence(parts, layout) for parts in zip(*found)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), list(cases()), ids=str)
def test_outputs_and_gradients_are_those_of_one_process(ranks, case):
    way, causal, dtype, _ = case
    found = joined([each[case][0] for each in spread(ranks)], "zigzag" if way == "zigzag" else "contiguous")
    right = with_gradients(lambda *args: flash_attention(*args, causal), *inputs(HQ if way == "heads" else HKV, dtype))
    for got, of in zip(found, right, strict=True):
        assert float((got - of).abs().max()) <= 2e-6 * max(1.0, float(of.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", thorough_but([2, 3, 4], 2, 3))
def test_bfloat16_errs_no_more_than_twice_what_one_process_does(ranks):
    case = ("zigzag", True, torch.bfloat16, False)
    found = joined([each[case][0] for each in spread(ranks)], "zigzag")
    one = with_gradients(lambda *args: flash_attention(*args, True), *inputs(dtype=torch.bfloat16))
    right = with_gradients(in_float64, *(x.double() for x in inputs(dtype=torch.bfloat16)))
    for got, alone, of in zip(found, one, right, strict=True):
        assert float((got - of).abs().max()) <= 2 * float((alone - of).abs().max())


def in_float64(q, k, v):
    k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    scores = q @ k.mT / D**0.5
    return scores.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).softmax(-1) @ v


@pytest.mark.slow
@pytest.mark.parametrize("ranks", thorough_but([2, 3, 4], 2, 3))
def test_a_ring_sends_the_bytes_of_the_formula(ranks):
    results = spread(ranks)
    for case in results[0]:
        if case[0] == "heads":
            continue
        lengths = [each[case][3] for each in results]
        for rank, each in enumerate(results):
            sizes = (B, HKV, D, case[2].itemsize)
            assert each[case][1] == sum(cp.ring_bytes(lengths, rank, *sizes, backward) for backward in (False, True))
            assert each[case][2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", thorough_but([2, 4], 2))
def test_heads_for_tokens_sends_four_tensors_in_each_pass(ranks):
    for each in spread(ranks):
        _, sent, exchanged, own = each["heads", True, torch.float32, False]
        # q, k and v go out with all heads and come with all tokens, o the other way round; gradients likewise
        assert exchanged == 4 * B * D * 4 * (own * HQ + N * HQ // ranks)
        assert sent == 0


@pytest.mark.parametrize("layout", cp.LAYOUTS)
@pytest.mark.parametrize(("length", "ranks"), [(8, 1), (16, 2), (17, 2), (19, 3), (23, 4), (4, 4), (5, 4)])
def test_a_sequence_that_is_cut_and_joined_is_the_same(layout, length, ranks):
    x = torch.arange(length).view(1, 1, -1, 1)
    parts = cp.cut_sequence(x, ranks, layout)
    assert torch.equal(cp.join_sequence(parts, layout), x)
    assert max(part.shape[2] for part in parts) - min(part.shape[2] for part in parts) <= 2


@pytest.mark.parametrize("layout", cp.LAYOUTS)
@pytest.mark.parametrize(("length", "ranks"), [(16, 2), (17, 2), (19, 3), (23, 4), (5, 4)])
def test_what_a_rank_sees_is_what_the_causal_mask_leaves(layout, length, ranks):
    positions = [part.flatten() for part in cp.cut_sequence(torch.arange(length).view(1, 1, -1, 1), ranks, layout)]
    lengths = [len(each) for each in positions]
    for rank, source in itertools.product(range(ranks), repeat=2):
        allowed = positions[rank][:, None] >= positions[source][None, :]
        found = torch.zeros_like(allowed)
        if seen := cp.seen_by(rank, source, lengths, True, layout):
            rows, keys, diagonal = seen
            inside = torch.ones_like(found[rows, keys])
            found[rows, keys] = inside.tril() if diagonal else inside
        assert torch.equal(found, allowed)


def test_zigzag_gives_every_rank_the_same_work():
    ranks, length = 4, 64
    for layout, even in (("zigzag", True), ("contiguous", False)):
        positions = [part.flatten() for part in cp.cut_sequence(torch.arange(length).view(1, 1, -1, 1), ranks, layout)]
        work = [int(sum(each + 1)) for each in positions]
        assert (max(work) == min(work)) == even


def test_nothing_is_sent_by_one_rank_alone():
    assert cp.ring_bytes([100], 0, 1, 8, 64, 2, False) == cp.ring_bytes([100], 0, 1, 8, 64, 2, True) == 0


def dies_in_the_ring():
    tensors = [cp.cut_sequence(x, 3)[dist.get_rank()] for x in inputs()]
    if dist.get_rank() == 2:
        cp.flash_forward = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    cp.ring_attention(*tensors[:3], True, dist.group.WORLD)


@pytest.mark.slow
def test_a_rank_that_dies_in_the_ring_is_named():
    with pytest.raises(DistributedError, match="rank 2 of 3 was killed by SIGKILL"):
        launch(dies_in_the_ring, world_size=3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: cp.ring_attention(q, k[:, :, 1:], v[:, :, 1:], True, None), "parts of one sequence"),
        (lambda q, k, v: cp.ring_attention(q, k, v, True, None, "stripes"), "one of zigzag, contiguous, got 'stripes'"),
        (lambda q, k, v: cp.cut_sequence(q, 50), "41 tokens are fewer than 50 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(*inputs()[:3])
