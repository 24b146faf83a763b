"""Lab 5's schedulers beyond what the check of exercise 5.3 holds them to: preemption, the reserve, drafts, refusals."""

from __future__ import annotations

import pytest

from solutions.lab5_serving import BlockManager, Request, Scheduler, Status
from solutions.lab5_serving.drafts import DraftedRequest, DraftScheduler
from utils.serving import SamplingParams


def request(id: str, length: int, new: int = 8) -> Request:
    return Request(id, list(range(length)), SamplingParams(max_new_tokens=new))


def advance(scheduler: Scheduler) -> dict[str, int]:
    """One step with a model that answers 1; tokens of each chunk by request. Finished requests leave."""
    step = scheduler.schedule()
    for chunk in step.chunks:
        one, last = chunk.request, chunk.samples
        one.computed = chunk.start + chunk.count
        scheduler.manager.commit(one.id, one.computed)
        if last:
            one.append(1, 0.0)
            if len(one.tokens) >= one.limit:
                scheduler.remove(one)
    scheduler.manager.check()
    return {chunk.request.id: chunk.count for chunk in step.chunks}


def test_without_chunks_a_prompt_waits_for_a_step_with_room_or_goes_as_its_only_prompt():
    manager = BlockManager(100, 4, prefix_caching=False)
    scheduler = Scheduler(manager, max_batch=4, token_budget=8, chunked_prefill=False)
    for id, length in (("a", 5), ("b", 5), ("c", 20), ("d", 2)):
        scheduler.add(request(id, length, new=30))
    assert [advance(scheduler) for _ in range(4)] == [
        {"a": 5},
        {"a": 1, "b": 5},
        {"a": 1, "b": 1, "c": 20},
        {"a": 1, "b": 1, "c": 1, "d": 2},
    ]


def test_the_newest_is_preempted_keeps_its_tokens_and_is_the_first_to_come_back():
    scheduler = Scheduler(BlockManager(6, 2, prefix_caching=False), max_batch=3, token_budget=16)
    requests = old, young, waiting = [request("old", 4, 8), request("young", 4, 8), request("waiting", 4, 8)]
    for each in requests:
        scheduler.add(each)
    advance(scheduler)
    assert [each.status for each in requests] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    while young.status is Status.RUNNING:
        advance(scheduler)
    assert (young.computed, young.preemptions, old.preemptions) == (0, 1, 0)
    assert len(young.output) > 0
    assert list(scheduler.waiting) == [young, waiting]
    while scheduler.has_work:
        advance(scheduler)
    assert [len(each.output) for each in requests] == [8, 8, 8]
    assert old.preemptions == 0 and scheduler.manager.num_used == 0


def test_an_admission_leaves_a_reserve_unless_nothing_runs():
    scheduler = Scheduler(BlockManager(4, 2), max_batch=3, token_budget=16)
    scheduler.add(request("a", 4, new=2))
    scheduler.add(request("b", 4, new=2))
    assert advance(scheduler) == {"a": 4}  # "b" would take the last block
    scheduler = Scheduler(BlockManager(2, 2), max_batch=3, token_budget=16)
    scheduler.add(request("a", 3, new=2))
    assert advance(scheduler) == {"a": 3}


def test_a_draft_is_cut_to_the_budget_and_given_up_before_anybody_is_preempted():
    for blocks, drafted in ((9, [3, 1]), (5, [0, 0])):
        scheduler = DraftScheduler(BlockManager(blocks, 2, prefix_caching=False), max_batch=2, token_budget=6)
        for id in ("one", "two"):
            scheduler.add(DraftedRequest(id, [0, 1, 2], SamplingParams(max_new_tokens=8)))
        assert advance(scheduler) == {"one": 3, "two": 3}
        for each in scheduler.running:
            each.draft = [5, 6, 7]
        step = scheduler.schedule()
        assert [chunk.tokens for chunk in step.chunks] == [[1, 5, 6, 7][: 1 + count] for count in drafted]
        assert all(chunk.samples for chunk in step.chunks) and not step.preempted


def test_what_can_never_fit_is_refused_by_its_numbers():
    scheduler = Scheduler(BlockManager(3, 4), max_batch=2, token_budget=8)
    scheduler.add(request("fits", 5, new=8))  # its last token is never fed back
    with pytest.raises(ValueError, match=r"'big' may grow to 14 tokens \(its prompt has 5\), 4 blocks of 4; .* has 3"):
        scheduler.add(request("big", 5, new=9))
    with pytest.raises(ValueError, match="token_budget must be at least max_batch = 9, got 8"):
        Scheduler(BlockManager(3, 4), max_batch=9, token_budget=8)
    with pytest.raises(ValueError, match="neither waiting nor running"):
        scheduler.remove(request("unknown", 1))
