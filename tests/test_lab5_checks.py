"""What lab 5's checks compute with: the references are right, and the known mistakes are mistakes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from solutions.lab5_serving import BlockManager, OutOfBlocks
from solutions.lab5_serving.exercises import paged, sampling_rules, stateful
from solutions.lab5_serving.exercises.blocks import check_block_manager
from solutions.lab5_serving.exercises.fake_block_manager import FakeBlockManager, NoRoom
from solutions.lab5_serving.exercises.spied_model import tiny_model, without_cache
from utils import reference
from utils.checks.core import CheckFailed
from utils.serving import SamplingParams, generate

TILES = dict.fromkeys(paged.DTYPES, 16)


def distributions(rows: int, size: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=draw, dtype=torch.float64).softmax(-1)


def test_the_right_rule_gives_the_targets_distribution_over_all_drafts():
    p, q = distributions(3, 4, 1), distributions(2, 4, 2)
    first = torch.zeros(4, dtype=torch.float64)
    both = torch.zeros(4, 4, dtype=torch.float64)
    for x in range(4):
        for y in range(4):
            for result, mass in sampling_rules.RIGHT.distribution(p, q, [x, y]).items():
                first[result[0]] += float(q[0, x] * q[1, y]) * mass
                if len(result) > 1:
                    both[result[0], result[1]] += float(q[0, x] * q[1, y]) * mass
    torch.testing.assert_close(first, p[0])
    accepted = torch.minimum(p[0], q[0])  # only after an accepted token is there a second one in the same round
    torch.testing.assert_close(both, accepted[:, None] * p[1])


def test_every_rule_gives_a_distribution_and_every_mistake_differs_from_the_right_one():
    p, q = distributions(4, 5, 3), distributions(3, 5, 4)
    for drafted in ([0, 1, 2], [3, 3, 4]):
        right = sampling_rules.RIGHT.distribution(p, q, drafted)
        assert sum(right.values()) == pytest.approx(1)
        for rule, text, _ in sampling_rules.MISTAKES:
            found = rule.distribution(p, q, drafted)
            assert sum(found.values()) == pytest.approx(1), text
    every = list(itertools.product(range(5), repeat=3))
    for rule, text, _ in sampling_rules.MISTAKES:
        pairs = ((rule.distribution(p, q, list(x)), sampling_rules.RIGHT.distribution(p, q, list(x))) for x in every)
        assert any(sampling_rules.distance(*pair) > 0.05 for pair in pairs), text


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


def test_a_fake_block_manager_refuses_what_does_not_fit():
    blocks = FakeBlockManager(3, 4)
    assert blocks.allocate("a", range(5)) == 0 and blocks.num_free == 1
    assert not blocks.can_append("a", 8) and blocks.can_append("a", 7)
    with pytest.raises(NoRoom, match="8 more tokens"):
        blocks.append("a", range(8))
    blocks.free("a")
    assert blocks.num_free == 3 and [name for name, *_ in blocks.calls] == ["allocate", "free"]


class LeakingForks(BlockManager):
    def fork(self, parent: str, child: str) -> None:
        super().fork(parent, child)
        self.pool.share(self.table(child)[0])


class EndlessForks(BlockManager):
    def fork(self, parent: str, child: str) -> None:
        while True:
            pass


@pytest.fixture
def own_classes(monkeypatch):
    """Let these classes be checked although their module imports the solution, which an answer may not."""
    monkeypatch.setattr(stateful, "check_written_here", lambda *answer: None)


def told(seed: int) -> list[str]:
    with pytest.raises(CheckFailed) as failed:
        check_block_manager(LeakingForks, OutOfBlocks, seed=seed)
    return str(failed.value).splitlines()


def test_a_failed_check_shows_the_calls_that_the_failure_needs_and_the_same_for_the_same_seed(own_classes):
    first, *calls, cause, reproduce = told(5)
    assert first.startswith("exercise 5.2 (block manager): block 0 counts 3 references, expected 2")
    assert [call.split("(")[0].split(". ")[1] for call in calls] == ["BlockManager", "allocate", "commit", "fork"]
    assert "after a fork" in cause and reproduce == "  reproduce: seed 5, the calls above"
    assert told(5)[1:-2] == calls != told(6)[1:-2]


def test_a_call_that_does_not_end_is_stopped_and_shown(own_classes, monkeypatch):
    monkeypatch.setattr(stateful, "CALL_SECONDS", 0.2)
    with pytest.raises(CheckFailed, match=r"(?s)did not end in 0 s.*\d+\. fork\('\w', '\w'\)\n  a loop does not end"):
        check_block_manager(EndlessForks, OutOfBlocks, seed=5)
