"""Lab 5's block manager beyond what the check of exercise 5.2 holds it to."""

from __future__ import annotations

import pytest

from solutions.lab5_serving import BlockManager, OutOfBlocks


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
