"""Checkpoints of ZeRO-1, 2 and 3 (lab 4): saved by one world size, loaded by another; whole or refused by name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import parallel_training
import pytest
import torch
import torch.distributed as dist
from parallel_training import Run, assert_same_run, batch_of_step, reference, shard_of_batch
from parameters import thorough_but
from slow_machine_launch import launch
from torch import nn

from solutions.lab4_zero.checkpoint import (
    FORMAT,
    VERSION,
    CheckpointError,
    Trainer,
    check_state,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from solutions.lab4_zero.fully_sharded import FullyShardedDataParallel
from solutions.lab4_zero.training_state import TrainingState
from solutions.lab4_zero.zero1 import Zero1Optimizer
from solutions.lab4_zero.zero2 import Zero2
from utils.gpt import GPT, Block

CONFIG = parallel_training.CONFIG.replace(layers=1)
#: A larger epsilon than other tests': ten steps in sums of two orders, of three ranks' and of two ranks' gradients.
ADAMW = {**parallel_training.ADAMW, "eps": 1e-4}
HALF = 5  # of the ten steps, before the checkpoint
KINDS = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
LATER_WORLD = {2: 3, 3: 2}


def trainer_of(
    kind: str, seed: int = 0, **options: float
) -> tuple[Callable, Callable[[], None], Trainer, Callable[[], dict]]:
    """Forward function, step, what a checkpoint takes, and the whole parameters, of a model and its AdamW."""
    model, options = parallel_training.model_of(CONFIG, seed), {**ADAMW, **options}
    if kind == "ZeRO-1":
        zero1 = Zero1Optimizer(model.parameters(), torch.optim.AdamW, **options)
        return model, zero1.step, zero1, lambda: parallel_training.parameters_of(model)
    if kind == "ZeRO-2":
        zero2 = Zero2(model, torch.optim.AdamW, **options)
        return zero2, zero2.step, zero2, lambda: parallel_training.parameters_of(model)
    sharded = FullyShardedDataParallel(model, Block)
    adamw = torch.optim.AdamW(sharded.parameters(), **options)

    def step() -> None:
        adamw.step()
        adamw.zero_grad()

    return sharded, step, TrainingState(sharded, adamw), sharded.full_parameters


def run_steps(forward: Callable, step: Callable[[], None], first: int, last: int) -> Run:
    """Train this rank's rows of steps ``first`` to ``last``."""
    run = Run([], {})
    for number in range(first, last):
        loss = forward(*shard_of_batch(batch_of_step(CONFIG, number), dist.get_rank(), dist.get_world_size()))
        loss.backward()
        step()
        run.losses.append(loss.item())
    return run


def first_half(folder: str) -> dict[str, dict]:
    states = {}
    for kind in KINDS:
        forward, step, trainer, _ = trainer_of(kind)
        run_steps(forward, step, 0, HALF)
        save_checkpoint(Path(folder) / kind, trainer)
        states[kind] = trainer.state_dict()
    return states


def second_half(folder: str) -> dict[str, Run]:
    runs = {}
    for kind in KINDS:
        forward, step, trainer, whole = trainer_of(kind, seed=9, lr=0.5)  # other weights and rate, to be replaced
        load_checkpoint(Path(folder) / kind, trainer)
        runs[kind] = run_steps(forward, step, HALF, parallel_training.STEPS)
        runs[kind].parameters = whole()
    forward, step, trainer, whole = trainer_of("ZeRO-3", seed=9, lr=0.5)
    load_checkpoint(Path(folder) / "ZeRO-2", trainer)  # by the same names, so another stage may go on
    runs["ZeRO-2 into ZeRO-3"] = run_steps(forward, step, HALF, parallel_training.STEPS)
    runs["ZeRO-2 into ZeRO-3"].parameters = whole()
    return runs


@pytest.fixture(scope="module")
def continued(tmp_path_factory) -> Callable[[int], tuple[Path, list[dict[str, dict]], list[dict[str, Run]]]]:
    """Training that a world of some size begins and one of another size ends: checkpoints' folder, states, runs."""

    @functools.cache
    def of(world_size: int) -> tuple[Path, list[dict[str, dict]], list[dict[str, Run]]]:
        folder = tmp_path_factory.mktemp(f"from_{world_size}")
        states = launch(first_half, str(folder), world_size=world_size, backend="gloo")
        return folder, states, launch(second_half, str(folder), world_size=LATER_WORLD[world_size], backend="gloo")

    return of


@functools.cache
def unbroken() -> Run:
    run = reference(CONFIG, optimizer=ADAMW)
    return Run(run.losses[HALF:], run.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", thorough_but(LATER_WORLD, 3))
@pytest.mark.parametrize("kind", thorough_but((*KINDS, "ZeRO-2 into ZeRO-3"), "ZeRO-1", "ZeRO-2 into ZeRO-3"))
def test_training_goes_on_in_another_world_size_as_if_never_broken(kind, world_size, continued):
    *_, ranks = continued(world_size)
    assert_same_run([rank[kind] for rank in ranks], unbroken())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_says_nothing_of_ranks_or_padding(kind, continued):
    model = GPT(CONFIG)
    folder, states, _ = continued(2)
    state = read_checkpoint(folder / kind)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if kind == "ZeRO-1":  # parameters without names
        shapes = {str(k): shape for k, shape in enumerate(shapes.values())}
    check_state(state, shapes)
    trained = [name for name, parameter in zip(shapes, model.parameters()) if parameter.requires_grad]
    assert set(state["optimizer"]) == set(trained) - {list(shapes)[[*dict(model.named_parameters())].index("unused")]}
    assert all(entries["step"].item() == HALF for entries in state["optimizer"].values())
    for name, entries in state["optimizer"].items():
        assert entries["exp_avg"].shape == entries["exp_avg_sq"].shape == torch.Size(shapes[name])
        assert entries["exp_avg_sq"].count_nonzero() > 0
    assert state["groups"][0]["lr"] == ADAMW["lr"]
    for rank in states:  # the same on every rank, though only the first one writes
        assert all(torch.equal(rank[kind]["parameters"][name], value) for name, value in state["parameters"].items())


# ---- what does not fit ----
STATE = {
    "parameters": {"weight": torch.ones(3, 5), "bias": torch.ones(3)},
    "optimizer": {"weight": {"exp_avg": torch.ones(3, 5), "step": torch.tensor(1.0)}},
    "groups": [{"names": ["weight", "bias"], "lr": 0.1}],
}
SHAPES = {"weight": (3, 5), "bias": (3,)}


@pytest.mark.parametrize(
    ("shapes", "message"),
    (
        ({**SHAPES, "gain": (3,)}, "there is no parameter 'gain'; the checkpoint has 2 names: weight, bias"),
        ({"weight": (3, 5)}, "the model has no parameter 'bias' of the checkpoint; it has 1 names: weight"),
        (
            {**SHAPES, "weight": (3, 4)},
            r"parameter 'weight' has shape \(3, 5\) in the checkpoint, the model's is \(3, 4\)",
        ),
    ),
)
def test_a_state_that_does_not_fit_is_refused_by_name(shapes, message):
    with pytest.raises(CheckpointError, match=message):
        check_state(STATE, shapes)


def test_optimizer_state_of_another_shape_and_a_missing_part_are_refused_by_name():
    cut = {**STATE, "optimizer": {"weight": {"exp_avg": torch.ones(8)}}}
    with pytest.raises(CheckpointError, match=r"'exp_avg' of parameter 'weight' has shape \(8,\) in the checkpoint"):
        check_state(cut, SHAPES)
    with pytest.raises(CheckpointError, match="the state has no 'optimizer'"):
        check_state({"parameters": {}, "groups": []}, SHAPES)


class Fixed(nn.Module):
    """A trainer whose state is given."""

    def __init__(self, state: dict) -> None:
        super().__init__()
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        check_state(state, SHAPES)
        self.state = state


def test_files_that_are_cut_short_foreign_or_missing_are_refused_by_name(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*run\.pt"):
        read_checkpoint(path)
    torch.save({"format": FORMAT, "version": VERSION, "world_size": 1, "state": STATE}, path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"run\.pt is no whole checkpoint"):
            read_checkpoint(path)
    torch.save({"weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"run\.pt is no checkpoint of this course"):
        read_checkpoint(path)
    torch.save({"format": FORMAT, "version": VERSION + 1, "state": STATE}, path)
    with pytest.raises(CheckpointError, match=f"has version {VERSION + 1}, this code reads version {VERSION}"):
        read_checkpoint(path)
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"run\.pt: parameter 'bias' has shape"):
        torch.save({"format": FORMAT, "version": VERSION, "state": {**STATE, "parameters": {
            **STATE["parameters"], "bias": torch.ones(4)}}}, path)  # fmt: skip
        load_checkpoint(path, Fixed(STATE))


def failures(folder: str) -> list[str]:
    """What each rank is told when rank 0 cannot write, and what is on the disk then."""
    said = []
    path = Path(folder) / "run.pt"
    save_checkpoint(path, Fixed(STATE))
    for target, state in ((Path(folder) / "nowhere" / "run.pt", STATE), (path, {"parameters": lambda: 0})):
        try:
            save_checkpoint(target, Fixed(state))
        except CheckpointError as error:
            said.append(str(error))
    load_checkpoint(path, Fixed({}))
    said += sorted(os.listdir(folder))
    sharded = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), nn.Linear)
    one = TrainingState(sharded, torch.optim.SGD(sharded.parameters(), lr=1.0))
    other = TrainingState(sharded, torch.optim.SGD([{"params": [p]} for p in sharded.parameters()], lr=1.0))
    swapped = TrainingState(sharded, torch.optim.SGD(list(sharded.parameters())[::-1], lr=1.0))
    for trainer in (other, swapped):
        try:
            trainer.load_state_dict(one.state_dict())
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_a_failed_write_is_told_to_every_rank_and_leaves_the_old_checkpoint(tmp_path):
    for directory, lambda_, file, sizes, order in launch(failures, str(tmp_path), world_size=2, backend="gloo"):
        assert "could not write the checkpoint" in directory and "nowhere" in directory
        assert "could not write the checkpoint" in lambda_
        assert file == "run.pt"
        assert sizes == (
            "the optimizer's parameter groups differ: they hold [1, 1, 1, 1] parameters, those of the checkpoint [4]"
        )
        assert order == (
            "the optimizer's parameter groups differ: where the checkpoint has '0.weight', the optimizer has '1.bias'"
        )
