"""Float32 masters of 16-bit parameters (lab 4): 16 bytes a parameter, and no small step lost."""

from __future__ import annotations

import copy

import parallel_training
import pytest
import torch
import torch.distributed as dist
from parallel_training import STEPS, Run, assert_same_run, batch_of_step, shard_of_batch, train
from slow_machine_launch import launch

from solutions.lab4_zero import precision
from solutions.lab4_zero.fully_sharded import FullyShardedDataParallel
from solutions.lab4_zero.precision import MasterWeightOptimizer
from utils.distributed import CollectiveLog, record_collectives
from utils.gpt import GPT, Block, GPTConfig, batch

CONFIG = GPTConfig(layers=1, unused_parameter=False, frozen_positions=False)
SHARDED = parallel_training.CONFIG  # for ZeRO-3: tied, frozen and unused parameters
SHARDED_ADAMW = parallel_training.ADAMW
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "foreach": False}


def train_alone(model: GPT, optimizer: object, steps: int = 3) -> None:
    for step in range(steps):
        model(*batch(model.config, 2, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: GPT) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def test_adam_in_bfloat16_keeps_sixteen_bytes_a_parameter():
    model = GPT(CONFIG, dtype=torch.bfloat16)
    psi = sum(parameter.numel() for parameter in model.parameters())
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    train_alone(model, optimizer)
    model(*batch(CONFIG, 2)).backward()
    assert optimizer.memory() == {
        "weights": 2 * psi,
        "gradients": 2 * psi,
        "masters": 4 * psi,
        "exp_avg": 4 * psi,
        "exp_avg_sq": 4 * psi,
    }


def test_the_masters_take_the_steps_and_the_parameters_are_their_rounded_copies():
    model, masters = GPT(CONFIG, dtype=torch.bfloat16), GPT(CONFIG, dtype=torch.bfloat16).float()
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    by_hand = torch.optim.AdamW(masters.parameters(), **ADAMW)
    for step in range(3):
        model(*batch(CONFIG, 2, seed=step)).backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        by_hand.step()
    for parameter, master, right in zip(weights(model), optimizer.masters, weights(masters), strict=True):
        assert torch.equal(master, right)
        assert torch.equal(parameter, right.bfloat16())


def test_many_steps_too_small_for_bfloat16_add_up():
    alone, mastered = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    for parameter, optimizer in (
        (alone, torch.optim.SGD([alone], lr=1e-3)),
        (mastered, MasterWeightOptimizer([mastered], torch.optim.SGD, lr=1e-3)),
    ):
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert torch.equal(alone, torch.ones_like(alone))
    assert torch.equal(mastered, torch.full_like(mastered, 0.9))


def test_parameters_taken_a_few_at_a_time_get_the_same_steps(monkeypatch):
    models = [GPT(CONFIG, dtype=torch.bfloat16) for _ in range(2)]
    for model, elements in zip(models, (10**9, 1000), strict=True):
        monkeypatch.setattr(precision, "ELEMENTS_AT_A_TIME", elements)
        optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
        train_alone(model, optimizer)
        assert all(master.grad is None for master in optimizer.masters)
        assert {state["step"].item() for state in optimizer.optimizer.state.values()} == {3}
    assert all(torch.equal(a, b) for a, b in zip(weights(models[0]), weights(models[1]), strict=True))


def test_wide_parameters_are_their_own_masters():
    models = [GPT(CONFIG) for _ in range(2)]
    optimizer = MasterWeightOptimizer(models[0].parameters(), torch.optim.AdamW, **ADAMW)
    train_alone(models[0], optimizer)
    train_alone(models[1], torch.optim.AdamW(models[1].parameters(), **ADAMW))
    assert optimizer.memory()["masters"] == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(models[0]), weights(models[1]), strict=True))


def test_frozen_and_unused_parameters_stay_and_gradients_stay_until_cleared():
    config = CONFIG.replace(frozen_positions=True, unused_parameter=True)
    model = GPT(config, dtype=torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    model(*batch(config, 2)).backward()
    optimizer.step()
    assert model.head.weight.grad is not None
    assert torch.equal(model.positions, before["positions"]) and torch.equal(model.unused, before["unused"])
    assert not torch.equal(model.head.weight, before["embedding.weight"])
    optimizer.zero_grad(set_to_none=False)
    assert model.head.weight.grad.count_nonzero() == 0
    optimizer.zero_grad()
    assert model.head.weight.grad is None


def test_groups_and_a_schedule_reach_the_masters():
    model = GPT(CONFIG, dtype=torch.bfloat16)
    groups = [
        {"params": [model.head.weight], "lr": 0.0},
        {"params": model.blocks.parameters()},
        {"params": model.norm.bias, "weight_decay": 0.0},
    ]
    before = model.head.weight.detach().clone()
    optimizer = MasterWeightOptimizer(groups, torch.optim.AdamW, **ADAMW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step)
    train_alone(model, optimizer, steps=1)
    schedule.step()
    assert torch.equal(model.head.weight, before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 5e-4, 5e-4]


def test_a_saved_optimizer_goes_on_with_its_masters():
    model, other = GPT(CONFIG, dtype=torch.bfloat16), GPT(CONFIG, seed=5, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    train_alone(model, optimizer)
    loaded = MasterWeightOptimizer(other.parameters(), torch.optim.AdamW, **ADAMW)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_alone(model, optimizer)
    train_alone(other, loaded)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.masters, loaded.masters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))


def test_what_cannot_be_trained_is_refused_by_name():
    with pytest.raises(TypeError, match=r"parameters must be floating point, got torch\.int64"):
        MasterWeightOptimizer([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="params must hold at least one parameter, got none"):
        MasterWeightOptimizer([])
    optimizer = MasterWeightOptimizer([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"the masters must have shapes \[\(3,\)\], got \[\(4,\)\]"):
        optimizer.load_state_dict({"masters": [torch.ones(4)], "optimizer": {}})


# ---- sharded masters ----
def train_mixed(reduce_dtype: torch.dtype | None) -> tuple[Run, CollectiveLog, set]:
    """Ten steps in bfloat16 with float32 shards."""
    model = FullyShardedDataParallel(
        GPT(SHARDED, seed=0), Block, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype
    )
    optimizer = torch.optim.AdamW(model.parameters(), **SHARDED_ADAMW)

    def step_and_clear() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with record_collectives() as ledger:
        run = train(model, step_and_clear, dist.get_rank(), dist.get_world_size(), config=SHARDED)
    run.parameters = model.full_parameters()
    kept = {value.dtype for state in optimizer.state.values() for value in state.values()}
    return run, ledger, kept | {piece.dtype for piece in model.parameters()}


def mixed_by_hand(reduce_dtype: torch.dtype) -> Run:
    """What two ranks should do, in one process: bfloat16 copies of float32 masters, gradients summed in a dtype."""
    masters, model = GPT(SHARDED, seed=0), GPT(SHARDED, seed=0, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), **SHARDED_ADAMW)
    run = Run([], {})
    for step in range(STEPS):
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
        losses, halves = [], []
        for rank in range(2):
            loss = model(*shard_of_batch(batch_of_step(SHARDED, step), rank, 2))
            loss.backward()
            losses.append(loss.item())
            halves.append([None if p.grad is None else p.grad.to(reduce_dtype) for p in model.parameters()])
            model.zero_grad()
        for master, first, second in zip(masters.parameters(), *halves, strict=True):
            master.grad = None if first is None else (first + second).float() / 2
        optimizer.step()
        run.losses.append(sum(losses) / 2)
    run.parameters = {name: parameter.detach() for name, parameter in masters.named_parameters()}
    return run


@pytest.mark.slow
def test_in_bfloat16_two_bytes_travel_and_the_masters_stay_float32():
    ranks = launch(lambda: [train_mixed(None), train_mixed(torch.float32)], world_size=2, backend="gloo")
    for number, (reduce_dtype, size) in enumerate(((torch.bfloat16, 2), (torch.float32, 4))):
        for _, ledger, kept in (rank[number] for rank in ranks):
            assert kept == {torch.float32}
            assert ledger.bytes("all_gather") == 2 * ledger.elements("all_gather")
            assert ledger.bytes("reduce_scatter") == size * ledger.elements("reduce_scatter")
        assert_same_run([rank[number][0] for rank in ranks], mixed_by_hand(reduce_dtype), tolerance=0)
