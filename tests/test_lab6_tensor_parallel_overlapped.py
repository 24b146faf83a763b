"""The engine over ranks that work a step ahead: the tokens of one process, and an end wherever a rank fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab6_tensor_parallel_runs import LONG_PARAMS, PARAMS, PROMPT, engine_steps, error_of, failing
from slow_machine_launch import launch
from token_identity import tiny_model

from solutions.lab5_serving import Engine
from solutions.lab6_frontiers.tensor_parallel_decoder import TensorParallelRunner, shard
from solutions.lab6_frontiers.tensor_parallel_overlapped import OverlappedTensorEngine, OverlappedTensorRunner
from utils.serving import SamplingParams

PROMPTS = [PROMPT[: 3 + 5 * n] for n in range(6)]
#: Greedy and drawn, with ends of text and without, of different lengths.
EACH = [
    PARAMS,
    LONG_PARAMS,
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=1),
    SamplingParams(max_new_tokens=15, temperature=1.2, top_k=20, seed=2),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=12, top_p=0.9, temperature=1.0, seed=3),
]
SETTINGS = {"max_batch": 4, "token_budget": 16}
#: Room for all, and so little that requests are preempted.
POOLS = {"enough": (64, 4), "short": (14, 4)}


def served(pool: str) -> tuple[Any, list[tuple], int]:
    """What rank 0's engine generates, the steps of a rank, and the blocks in use at the end."""
    runner = OverlappedTensorRunner(shard(tiny_model()), *POOLS[pool], cuda_graphs=pool == "enough")
    with OverlappedTensorEngine(runner.model, runner=runner, **SETTINGS) as engine:
        found = engine.generate(PROMPTS, EACH) if engine.leads else engine.follow()
    return found, engine_steps(engine), engine.manager.num_used


def everything() -> dict[str, Any]:
    torch.set_grad_enabled(False)
    wrong = TensorParallelRunner(shard(tiny_model()), 20)
    found = {
        "pools": {pool: served(pool) for pool in POOLS},
        "runner": error_of(lambda: OverlappedTensorEngine(wrong.model, runner=wrong)),
    }
    found["failing"] = failing(0, OverlappedTensorEngine)
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return launch(everything, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_ranks_that_work_ahead_give_the_tokens_of_one_process_in_the_same_steps(of_ranks, pool):
    blocks, size = POOLS[pool]
    right = Engine(tiny_model(), num_blocks=blocks, block_size=size, **SETTINGS).generate(PROMPTS, EACH)
    (tokens, steps, used), (_, followed, used_there) = (found["pools"][pool] for found in of_ranks)
    assert tokens == right
    assert steps == followed and len(steps) > 10
    assert used == used_there == 0


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_engine_on_all_ranks(of_ranks):
    for found in of_ranks:
        assert "RankFailed" in found["failing"]
    assert "ArithmeticError: injected" in of_ranks[0]["failing"]


@pytest.mark.slow
def test_a_runner_that_knows_no_placeholders_is_refused(of_ranks):
    assert all("TypeError: an OverlappedEngine needs an OverlappedRunner" in found["runner"] for found in of_ranks)
