"""What failed checks of lab 5 show: of the block manager the calls, of a split context its parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from solutions.lab5_serving import BlockManager, OutOfBlocks
from solutions.lab5_serving.exercises import decode_rules, stateful
from solutions.lab5_serving.exercises.blocks import check_block_manager
from utils.checks.core import CheckFailed


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
    monkeypatch.setattr(stateful.Machine, "seconds", 0.2)
    with pytest.raises(CheckFailed, match=r"(?s)did not end in 0 s.*\d+\. fork\('\w', '\w'\)\n  a loop does not end"):
        check_block_manager(EndlessForks, OutOfBlocks, seed=5)


def test_parts_that_are_uneven_are_shown_in_their_order():
    cells = {((0, part), "k_cache_ptr"): SimpleNamespace(bytes_loaded=64 * rows) for part, rows in ((0, 36), (2, 4))}
    launch = SimpleNamespace(kernel=decode_rules.KERNEL, scalars={"BLOCK_N": 16, "parts": 3}, cells=cells)
    case = SimpleNamespace(sizes={"D": 16}, element_size=4)
    problem = decode_rules.even(SimpleNamespace(case=case, profile=SimpleNamespace(launches=[launch])))
    assert problem.headline == "sequence 0: the parts hold 36 0 4 tokens, in tiles of 16"
