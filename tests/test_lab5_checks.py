"""What lab 5's checks compute with: the references are right, and the known mistakes are mistakes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from solutions.lab5_serving.exercises import laws, paged
from solutions.lab5_serving.exercises.block_life import new_life
from solutions.lab5_serving.exercises.plain_blocks import NoRoom, PlainBlocks
from solutions.lab5_serving.exercises.scenes import Mistaken
from solutions.lab5_serving.exercises.spied_model import tiny_model, without_cache
from utils import reference
from utils.serving import SamplingParams, generate

TILES = dict.fromkeys(paged.DTYPES, 16)


def distributions(rows: int, size: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=draw, dtype=torch.float64).softmax(-1)


def test_the_right_law_gives_the_targets_distribution_over_all_drafts():
    p, q = distributions(3, 4, 1), distributions(2, 4, 2)
    first = torch.zeros(4, dtype=torch.float64)
    both = torch.zeros(4, 4, dtype=torch.float64)
    for x in range(4):
        for y in range(4):
            for result, mass in laws.RIGHT.law(p, q, [x, y]).items():
                first[result[0]] += float(q[0, x] * q[1, y]) * mass
                if len(result) > 1:
                    both[result[0], result[1]] += float(q[0, x] * q[1, y]) * mass
    torch.testing.assert_close(first, p[0])
    accepted = torch.minimum(p[0], q[0])  # only after an accepted token is there a second one in the same round
    torch.testing.assert_close(both, accepted[:, None] * p[1])


def test_every_law_is_a_distribution_and_every_mistake_differs_from_the_right_one():
    p, q = distributions(4, 5, 3), distributions(3, 5, 4)
    for drafted in ([0, 1, 2], [3, 3, 4]):
        right = laws.RIGHT.law(p, q, drafted)
        assert sum(right.values()) == pytest.approx(1)
        for rule, text, _ in laws.MISTAKES:
            law = rule.law(p, q, drafted)
            assert sum(law.values()) == pytest.approx(1), text
    every = list(itertools.product(range(5), repeat=3))
    for rule, text, _ in laws.MISTAKES:
        pairs = ((rule.law(p, q, list(x)), laws.RIGHT.law(p, q, list(x))) for x in every)
        assert any(laws.distance(*pair) > 0.05 for pair in pairs), text


@pytest.mark.parametrize("kind", range(6))
def test_reading_a_paged_cache_without_a_mistake_is_attention(kind):
    case = paged.drawn(5, TILES)[kind]
    q, k_cache, v_cache, tables, lens = (
        x.cpu().double() if x.is_floating_point() else x.cpu() for x in paged.inputs(case)
    )
    got = paged.attention(q, k_cache, v_cache, tables, lens)
    size = case.sizes["block"]
    for s, n in enumerate(lens.tolist()):
        slots = [int(tables[s, t // size]) * size + t % size for t in range(n)]
        if not n:
            assert not got[s].any()
            continue
        k, v = (cache.flatten(0, 1)[slots].transpose(0, 1)[None] for cache in (k_cache, v_cache))
        right, *_ = reference.attention(q[s][None, :, None], k, v)
        torch.testing.assert_close(got[s], right[0, :, 0])


def test_the_cases_of_the_kernel_hold_every_edge():
    cases = paged.drawn(5, TILES)
    contexts = [n for case in cases for n in paged.lengths(case)]
    assert 0 in contexts and 1 in contexts and max(contexts) > 6 * 16
    assert {case.sizes["block"] for case in cases} >= {1, 8, 16} and any(case.sizes["block"] > 16 for case in cases)
    assert any(case.sizes["D"] & (case.sizes["D"] - 1) for case in cases)
    assert any(n % case.sizes["block"] == 0 for case in cases for n in paged.lengths(case) if n)


def test_slots_of_no_context_hold_large_values_and_tables_end_in_a_block_of_them():
    case = paged.drawn(1, TILES)[1]
    _, k_cache, _, tables, lens = paged.inputs(case)
    size = case.sizes["block"]
    owned = {(int(tables[s, t // size]), t % size) for s, n in enumerate(lens.tolist()) for t in range(n)}
    spare = int(tables[0, -1])
    assert all(spare != block for block, _ in owned)
    assert k_cache[spare].mean() > paged.POISON - 2


def test_decoding_without_a_cache_is_the_courses_generation():
    model = tiny_model(random.Random(3))
    prompt = [5, 1, 7]
    assert without_cache(model, prompt, 8) == generate(model, prompt, SamplingParams(max_new_tokens=8)).tokens


def test_plain_blocks_refuse_what_does_not_fit():
    blocks = PlainBlocks(3, 4)
    assert blocks.allocate("a", range(5)) == 0 and blocks.num_free == 1
    assert not blocks.can_append("a", 8) and blocks.can_append("a", 7)
    with pytest.raises(NoRoom, match="8 more tokens"):
        blocks.append("a", range(8))
    blocks.free("a")
    assert blocks.num_free == 3 and [name for name, *_ in blocks.calls] == ["allocate", "free"]


def test_the_memory_that_remembers_sees_a_block_written_while_it_is_shared():
    from solutions.lab5_serving import BlockManager, OutOfBlocks

    life = new_life(BlockManager, OutOfBlocks, 8, 4)
    life.allocate("a", [1, 2, 3])
    life.write("a")
    life.fork("a", "b")
    life.known["b"].tokens.append(9)
    life.manager.sequences["b"].tokens.append(9)  # behind append's back
    with pytest.raises(Mistaken, match="is to be written by 'b', and 'a' holds it too"):
        life.write("b")
