"""ZeRO-3 (lab 4) of modules that are no plain stack of blocks, and what may happen to them in a training loop."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from parameters import thorough_but
from sharded_modules import ADAMW, MODULES, WIDTH, Layer, Stack, loss_of, made, own_rows, rows, steps
from slow_machine_launch import launch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from solutions.lab4_zero.fully_sharded import FullyShardedDataParallel


def differences(kind: type[Stack], **options: object) -> list[str]:
    """What differs between three steps on the ranks and three in this process alone."""
    alone, model = made(kind), FullyShardedDataParallel(made(kind, seed=dist.get_rank()), Layer, **options)
    steps(alone, lambda x: x)
    steps(model, own_rows)
    expected, found = alone.state_dict(), model.state_dict()
    wrong = [] if list(expected) == list(found) else [f"names {list(found)}"]
    for key, value in expected.items():
        if not torch.allclose(found[key], value, rtol=1e-5, atol=1e-6):
            wrong.append(f"{key}: {(found[key] - value).abs().max():.1e}")
    if model.gathered_bytes:
        wrong.append(f"{model.gathered_bytes} bytes still gathered")
    model.eval()
    with torch.no_grad():
        with torch.inference_mode():
            model(rows(7))
        if not torch.allclose(loss_of(model, rows(7)), loss_of(alone, rows(7)), rtol=1e-4):
            wrong.append("the loss of an evaluation")
    return wrong


@functools.cache
def all_differences(world_size: int) -> list[dict[str, list[str]]]:
    def job() -> dict[str, list[str]]:
        torch.set_num_threads(1)
        return {name: differences(kind) for name, kind in MODULES.items()}

    return launch(job, world_size=world_size, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", thorough_but((2, 3), 2))
@pytest.mark.parametrize("name", MODULES)
def test_three_steps_equal_those_of_one_process(name, world_size):
    assert [rank[name] for rank in all_differences(world_size)] == [[]] * world_size


# ---- what may happen in a training loop ----
class Loops:
    """Each method trains ``model`` in one unusual way; the module alone must come to the same weights."""

    @staticmethod
    def two_forwards_before_one_backward(model, halves):
        x, y = halves(rows(0)), halves(rows(1))
        (loss_of(model, x) + loss_of(model, y)).backward()

    @staticmethod
    def a_forward_whose_loss_is_never_used(model, halves):
        loss_of(model, halves(rows(0)))
        loss_of(model, halves(rows(1))).backward()

    @staticmethod
    def two_backwards_through_one_graph(model, halves):
        loss = loss_of(model, halves(rows(0)))
        loss.backward(retain_graph=True)
        loss.backward()

    @staticmethod
    def the_whole_model_checkpointed(model, halves):
        x = halves(rows(0)).requires_grad_()
        checkpoint(model, x, use_reentrant=False).square().mean().backward()

    @staticmethod
    def gradients_added_up_and_dropped(model, halves):
        with model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext():
            loss_of(model, halves(rows(0))).backward()
        model.zero_grad()
        loss_of(model, halves(rows(1))).backward()

    @staticmethod
    def gradients_filled_with_zeros(model, halves):
        loss_of(model, halves(rows(0))).backward()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        optimizer.zero_grad(set_to_none=False)
        for step in (1, 2):
            loss_of(model, halves(rows(step))).backward()

    @staticmethod
    def an_error_in_a_forward(model, halves):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            loss_of(model, torch.ones(4, WIDTH + 1))
        loss_of(model, halves(rows(0))).backward()

    @staticmethod
    def an_error_in_a_backward(model, halves):
        def fail(gradient: Tensor) -> None:
            raise RuntimeError("on purpose")

        x = halves(rows(0)).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(model, x).backward()
        model.zero_grad()
        loss_of(model, halves(rows(1))).backward()

    @staticmethod
    def groups_of_parameters_by_name(model, halves):
        loss_of(model, halves(rows(0))).backward()
        decayed = [value for name, value in model.named_parameters() if name.endswith("weight")]
        others = [value for name, value in model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.03}]
        torch.optim.AdamW(groups, **ADAMW).step()
        model.zero_grad()
        loss_of(model, halves(rows(1))).backward()


LOOPS = [name for name in vars(Loops) if not name.startswith("_")]


def loop_differences(name: str, **options: object) -> list[str]:
    """What differs after an unusual loop."""
    alone, model = made(Stack), FullyShardedDataParallel(made(Stack), Layer, **options)
    for trained, part in ((alone, lambda x: x), (model, own_rows)):
        getattr(Loops, name)(trained, part)
        torch.optim.AdamW(trained.parameters(), **ADAMW).step()
    expected, found = alone.state_dict(), model.state_dict()
    wrong = [key for key in expected if not torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6)]
    return wrong + ([f"{model.gathered_bytes} bytes still gathered"] if model.gathered_bytes else [])


@functools.cache
def all_loops() -> list[dict[str, list[str]]]:
    def job() -> dict[str, list[str]]:
        return {name: loop_differences(name) + loop_differences(name, keep_root=True) for name in LOOPS}

    return launch(job, world_size=2, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_an_unusual_loop_comes_to_the_weights_of_one_process(name):
    assert [rank[name] for rank in all_loops()] == [[], []]


def refusals() -> dict[str, str]:
    """What is said to wrong uses."""

    class Integers(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)

    def mixed() -> Stack:
        module = Stack()
        module.layers[0].linear.weight.data = module.layers[0].linear.weight.data.double()
        return module

    model = FullyShardedDataParallel(Stack(), Layer)
    weights = Stack().state_dict()
    wrong_uses = {
        "no block": lambda: FullyShardedDataParallel(Stack(), (nn.LSTM, nn.GRU)),
        "no parameter": lambda: FullyShardedDataParallel(nn.Sequential(nn.ReLU()), nn.ReLU),
        "negative prefetch": lambda: FullyShardedDataParallel(Stack(), Layer, prefetch=-1),
        "integers": lambda: FullyShardedDataParallel(nn.Sequential(Integers()), Layer),
        "two dtypes": lambda: FullyShardedDataParallel(mixed(), Layer),
        "moved": lambda: model.half(),
        "missing weight": lambda: model.load_state_dict({k: v for k, v in weights.items() if k != "head.bias"}),
        "wrong shape": lambda: model.load_state_dict({**weights, "head.bias": torch.ones(4)}),
    }
    said = {}
    for name, use in wrong_uses.items():
        with pytest.raises((ValueError, TypeError, RuntimeError, KeyError)) as caught:
            use()
        said[name] = f"{caught.type.__name__}: {caught.value}"
    return said


@pytest.mark.slow
def test_wrong_uses_are_refused_by_name():
    (said,) = launch(refusals, world_size=1, backend="gloo")
    assert said["no block"].startswith(
        "ValueError: block_class must name modules within Stack, and it has no LSTM, GRU"
    )
    assert said["no parameter"] == "ValueError: Sequential has no parameters to shard"
    assert said["negative prefetch"] == "ValueError: prefetch must be at least 0, got -1"
    assert said["integers"] == "TypeError: parameter '0.table' must be floating point, got torch.int8"
    assert "several dtypes (torch.float32, torch.float64): give compute_dtype" in said["two dtypes"]
    assert said["moved"].startswith("RuntimeError: a sharded module cannot be moved or cast")
    assert "missing: ['head.bias']" in said["missing weight"]
    assert said["wrong shape"] == "ValueError: head.bias must have shape (3,), got (4,)"
