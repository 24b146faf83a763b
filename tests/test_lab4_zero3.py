"""The short ZeRO-3 of lab 4, exercise 4.6: it trains what one process trains, and what the fast form trains."""

from __future__ import annotations

import functools

import parallel_training
import pytest
import torch
import torch.distributed as dist
from parallel_training import CONFIG, Run, assert_same_run, reference, train
from parameters import thorough_but
from slow_machine_launch import launch
from torch import Tensor, nn

from solutions.lab4_zero.exercises import parameter_shards
from solutions.lab4_zero.fully_sharded import FullyShardedDataParallel
from solutions.lab4_zero.zero3 import Zero3, unit_parameters
from utils.checks.core import CheckFailed
from utils.checks.ranks.scenarios import ScenarioRun
from utils.gpt import Block


def train_with(kind: type, accumulation: int) -> Run:
    """Ten steps of a GPT on this rank."""
    model = kind(parallel_training.model_of(CONFIG, seed=dist.get_rank()), Block)
    optimizer = torch.optim.AdamW(model.parameters(), **parallel_training.ADAMW)

    def step_and_clear() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run = train(model, step_and_clear, dist.get_rank(), dist.get_world_size(), accumulation=accumulation)
    run.parameters = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    return run


def train_all() -> dict[str, Run]:
    return {
        "short": train_with(Zero3, 1),
        "short, accumulated": train_with(Zero3, 2),
        "fast": train_with(FullyShardedDataParallel, 1),
    }


@functools.cache
def seen(world_size: int) -> dict[str, list[Run]]:
    ranks = launch(train_all, world_size=world_size, backend="gloo")
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", thorough_but((2, 3), 2))
def test_ten_steps_equal_those_of_one_process(world_size):
    assert_same_run(seen(world_size)["short"], reference())
    assert_same_run(seen(world_size)["short, accumulated"], reference(accumulation=2))
    if world_size == 2:
        assert_same_run(seen(2)["short"], reference(summands=2), tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", thorough_but((2, 3), 2))
def test_the_fast_form_trains_the_same_to_the_last_bit(world_size):
    for short, fast in zip(seen(world_size)["short"], seen(world_size)["fast"], strict=True):
        assert short.losses == fast.losses
        assert all(torch.equal(short.parameters[name], value) for name, value in fast.parameters.items())


class Stack(nn.Module):
    """Blocks alone, so that the module has no parameters of its own, and the first block's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.frozen = (nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.twice(self.twice(self.first(x)))).square().sum()


def differences() -> dict[str, float]:
    """Largest differences of the gradients from one process's; every rank sees the same rows."""
    found, x = {}, torch.arange(6.0).view(2, 3) / 6
    alone, zero = Stack(), Zero3(Stack(), nn.Sequential)
    alone(x).backward()

    def worst() -> float:
        shards = torch.cat([piece.grad for unit in zero.units.values() for piece in unit.pieces])
        whole = [torch.empty_like(shards) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, shards)
        right = [p.grad.flatten() for p in alone.parameters() if p.requires_grad]
        return float((torch.cat(whole).sort().values - torch.cat(right).sort().values).abs().max())

    zero(x).backward()
    found["a block used twice"] = worst()
    for piece in zero.parameters():
        piece.grad = None
    with torch.no_grad():
        found["evaluated"] = float((zero(x) - alone(x)).abs())
    handle = zero.module.first.register_full_backward_pre_hook(lambda *_: 1 / 0)
    try:
        zero(x).backward()
    except ZeroDivisionError:
        handle.remove()
    for piece in zero.parameters():
        piece.grad = None
    zero(x).backward()
    found["after an error"] = worst()
    return found


@pytest.mark.slow
def test_blocks_may_come_first_twice_or_frozen_and_an_error_leaves_nothing_behind():
    for found in launch(differences, world_size=2, backend="gloo"):
        assert max(found.values()) < 1e-6, found


def test_a_parameter_of_two_blocks_is_the_modules_own_and_a_module_without_blocks_is_refused():
    stack = Stack()
    stack.twice[0].bias = stack.first[0].bias
    units = unit_parameters(stack, nn.Sequential)
    assert [len(parameters) for parameters in units.values()] == [1, 1, 1, 0]
    assert units[stack][0] is stack.first[0].bias
    with pytest.raises(ValueError, match=r"^block_class must name modules within Stack: no LSTM$"):
        unit_parameters(stack, nn.LSTM)


def test_a_rank_that_dies_of_freed_memory_is_told_so():
    scenarios = parameter_shards.CHECK.scenarios(1)
    died = ScenarioRun({}, end="rank 0 of 3 was killed by SIGSEGV", scenario=scenarios[0].name, called=[[], [], []])
    with pytest.raises(CheckFailed, match=r"used while its memory is freed.*\"classic wrong answers\" 4"):
        parameter_shards.CHECK.judge(died, scenarios, 1)
