"""Lab 5's block manager beyond what the check of exercise 5.2 holds it to, and attention over its blocks in PyTorch."""

from __future__ import annotations

import pytest
import torch

from solutions.lab5_serving import BlockManager, OutOfBlocks
from solutions.lab5_serving.attention_torch import paged_attention_decode, paged_attention_extend, write_kv
from utils import reference


def written(manager: BlockManager, id: str, tokens: list[int]) -> int:
    """Allocate, and say that everything is computed."""
    cached = manager.allocate(id, tokens)
    manager.commit(id, len(tokens))
    manager.check()
    return cached


def test_a_slot_is_a_block_and_an_offset():
    manager = BlockManager(4, block_size=4)
    manager.allocate("a", [1, 2, 3, 4, 5])
    first, second = manager.table("a")
    assert [manager.slot("a", position) for position in (0, 3, 4)] == [first * 4, first * 4 + 3, second * 4]
    with pytest.raises(IndexError, match="slots for 5 tokens, none for token 5"):
        manager.slot("a", 5)


def test_too_few_blocks_change_nothing():
    manager = BlockManager(3, block_size=4)
    written(manager, "a", list(range(8)))
    assert not manager.can_allocate([9] * 5)
    with pytest.raises(OutOfBlocks, match="need 2 free blocks, there are 1"):
        manager.allocate("b", [9] * 5)
    with pytest.raises(OutOfBlocks, match="no room for 5 more tokens of 'a': 1 blocks are free"):
        manager.append("a", [9] * 5)
    manager.check()
    assert (manager.num_free, manager.length("a")) == (1, 8)


def test_freeing_twice_is_an_error_and_so_is_an_id_in_use():
    manager = BlockManager(3)
    manager.allocate("a", [1])
    with pytest.raises(ValueError, match="'a' holds blocks already"):
        manager.allocate("a", [1])
    with pytest.raises(ValueError, match="'a' holds blocks already"):
        manager.fork("a", "a")
    manager.free("a")
    with pytest.raises(KeyError, match="never allocated, or freed already"):
        manager.free("a")
    assert manager.num_free == 3


def test_a_block_with_the_same_tokens_behind_another_beginning_is_not_reused():
    manager = BlockManager(10, block_size=2)
    written(manager, "a", [1, 2, 3, 4, 5])
    assert manager.allocate("b", [9, 9, 3, 4, 5]) == 0
    assert manager.allocate("c", [1, 2, 1, 2, 5]) == 2


def test_without_prefix_caching_nothing_is_shared():
    manager = BlockManager(10, block_size=2, prefix_caching=False)
    written(manager, "a", [1, 2, 3])
    assert manager.allocate("b", [1, 2, 3]) == 0


def test_freed_blocks_stay_reusable_until_they_are_taken_the_oldest_first():
    manager = BlockManager(4, block_size=2)
    written(manager, "a", [1, 2, 3])
    written(manager, "b", [5, 6, 7])
    manager.free("a")
    manager.free("b")
    manager.allocate("c", [8] * 5)  # two empty blocks, and the one that "a" left
    assert manager.cached_prefix([1, 2, 3])[0] == []
    assert manager.allocate("d", [5, 6]) == 0  # its only block would be the last: one token must be computed
    manager.check()


def test_a_cached_block_that_nobody_holds_counts_as_one_of_those_needed():
    manager = BlockManager(2, block_size=2)
    written(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    assert manager.can_allocate([1, 2, 3, 4])
    assert not manager.can_allocate([1, 2, 3, 4], reserve=1)
    assert not manager.can_allocate([1, 2, 3, 4, 5])
    with pytest.raises(OutOfBlocks):
        manager.allocate("b", [1, 2, 3, 4, 5])
    assert manager.allocate("b", [1, 2, 3, 4]) == 2
    manager.check()


def test_truncating_gives_back_the_blocks_that_are_left_and_forgets_what_is_overwritten():
    manager = BlockManager(5, block_size=2)
    written(manager, "a", [1, 2, 3, 4, 5, 6])
    manager.truncate("a", 3)
    assert (len(manager.table("a")), manager.num_used) == (2, 2)
    manager.append("a", [9])
    manager.commit("a", 4)
    manager.check()
    assert manager.allocate("b", [1, 2, 3, 4, 5]) == 2
    assert manager.allocate("c", [1, 2, 3, 9, 5]) == 4
    for length in (0, 5):
        with pytest.raises(ValueError, match=f"length must be between 1 and 4, got {length}"):
            manager.truncate("a", length)


def test_check_says_what_is_wrong():
    manager = BlockManager(4, block_size=2)
    manager.allocate("a", [1, 2, 3])
    manager.pool.references[manager.table("a")[0]] = 2
    with pytest.raises(AssertionError, match="block 0 has 2 references, but 1 tables hold it"):
        manager.check()


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_positive_integers(value):
    with pytest.raises(ValueError, match="num_blocks must be an integer of at least 1"):
        BlockManager(value)
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1"):
        BlockManager(1, block_size=value)


# ---- paged attention in PyTorch --------------------------------------------------------------------------------------


def paged(lengths: list[int], block_size: int, heads: int, dim: int):
    """Keys and values (length, heads, dim) of sequences, their caches, written through slots, and their tables."""
    generator = torch.Generator().manual_seed(0)
    manager = BlockManager(30, block_size, prefix_caching=False)
    caches = [torch.full((30, block_size, heads, dim), torch.nan) for _ in range(2)]
    pairs, tables = [], torch.zeros(len(lengths), 10, dtype=torch.int32)
    for s, length in enumerate(lengths):
        k, v = torch.randn(2, length, heads, dim, generator=generator)
        pairs.append((k, v))
        if length:
            manager.allocate(str(s), list(range(length)))
            table = torch.tensor(manager.table(str(s)))
            tables[s, : len(table)] = table
            write_kv(k, v, *caches, torch.tensor([manager.slot(str(s), p) for p in range(length)]))
    return pairs, caches, tables


def test_attention_over_blocks_is_attention_over_the_sequence():
    counts, lengths = [3, 1, 0, 7, 0], [8, 5, 4, 7, 0]
    pairs, caches, tables = paged(lengths, block_size=4, heads=2, dim=8)
    q = torch.randn(sum(counts), 4, 8, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    for scale in (None, 0.3):
        out = paged_attention_extend(q, *caches, tables, starts, torch.tensor(lengths), scale=scale)
        for s, (k, v) in enumerate(pairs):
            own = slice(starts[s], starts[s + 1])
            if counts[s]:
                heads_first = (x.transpose(0, 1)[None] for x in (q[own], k, v))
                expected, _ = reference.attention(*heads_first, causal=True, scale=scale)
                torch.testing.assert_close(out[own], expected[0].transpose(0, 1).float(), rtol=1e-5, atol=1e-5)


def test_one_query_sees_its_whole_context_and_an_empty_one_gives_zeros():
    lengths = [9, 0, 4]
    pairs, caches, tables = paged(lengths, block_size=4, heads=1, dim=8)
    q = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    out = paged_attention_decode(q, *caches, tables, torch.tensor(lengths), num_splits=3)
    assert torch.equal(out[1], torch.zeros(2, 8))
    for s in (0, 2):
        k, v = (x.transpose(0, 1)[None] for x in pairs[s])
        expected, _ = reference.attention(q[s][None, :, None], k, v)
        torch.testing.assert_close(out[s], expected[0, :, 0].float(), rtol=1e-5, atol=1e-5)


def test_a_token_without_a_slot_is_not_stored():
    caches = [torch.zeros(2, 2, 1, 4) for _ in range(2)]
    write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), *caches, torch.tensor([3, -1]))
    assert [float(cache.sum()) for cache in caches] == [4, 4] and caches[0][1, 1].sum() == 4
