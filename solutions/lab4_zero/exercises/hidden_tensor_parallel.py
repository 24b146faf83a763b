"""Hidden scenarios of exercise 4.7: layers whose matrices are cut over the ranks, and the MLP that they make."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from utils.checks.hidden import Draw, Observation

from .hidden_ranks import RankResult, named, of_some, record_collectives


def layers(package: ModuleType, seed: int) -> RankResult:
    """On each rank: both layers with and without bias."""
    seen: RankResult = {}
    for bias in (True, False):
        for name in ("ColumnParallelLinear", "RowParallelLinear"):
            seen |= named(f"{name} {'with' if bias else 'without'} bias", _layer(package, seed, name, bias))
    return seen


def mlps(package: ModuleType, seed: int) -> RankResult:
    """On each rank: MLPs whose features divide badly, also with too few of them."""
    inner = Draw(seed, "4.7").random.choice((7, 8, 10))
    seen = named("TensorParallelMLP", _mlp(package, seed, inner, None))
    return seen | named("TensorParallelMLP where a rank has no feature", _mlp(package, seed, 2, None))


def in_a_group(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a group of two of them."""
    with of_some((1, 2)) as group:
        found = {} if group is None else _mlp(package, seed, 7, group)
    return named("TensorParallelMLP in a group of two ranks", found)


class _MLP(nn.Module):
    """What a parallel MLP is cut from."""

    def __init__(self, draw: Draw, width: int, inner: int, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(draw.normal(*parameter.shape, scale=0.8))


def _gradients(module: nn.Module) -> list[Observation]:
    """The gradients of this rank's parameters, ordered by their shapes: their names are the module's own."""
    found = sorted(module.parameters(), key=lambda parameter: (parameter.dim(), tuple(parameter.shape)))
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in found]


def _layer(package: ModuleType, seed: int, name: str, bias: bool) -> RankResult:
    draw, rank, ranks = Draw(seed, f"4.7 {name} {bias}"), dist.get_rank(), dist.get_world_size()
    features, rows = (draw.between(4, 9), draw.between(4, 9)), draw.between(2, 4)
    linear = nn.Linear(*features, bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(draw.normal(*parameter.shape))
    x, dy = draw.normal(rows, 2, features[0]), draw.normal(rows, 2, features[1])
    if name == "RowParallelLinear":
        x = x.tensor_split(ranks, -1)[rank].clone()
    else:
        dy = dy.tensor_split(ranks, -1)[rank].clone()
    layer = getattr(package, name).from_linear(linear)
    x.requires_grad_()
    with record_collectives() as ledger:
        y = layer(x)
        forward = ledger.count()
        y.backward(dy)
    return {
        "result": y, "gradient of the input": x.grad, "gradients": _gradients(layer),
        "collectives forward and backward": [forward, ledger.count() - forward],
    }  # fmt: skip


def _mlp(package: ModuleType, seed: int, inner: int, group: ProcessGroup | None) -> RankResult:
    draw, width = Draw(seed, f"4.7 {inner}"), 5
    whole = _MLP(draw, width, inner)
    mlp = package.TensorParallelMLP(whole, **({} if group is None else {"group": group}))
    x, dy = draw.normal(3, 2, width), draw.normal(3, 2, width)
    given = x.clone()
    x.requires_grad_()
    with record_collectives() as ledger:
        y = mlp(x)
        forward = [[entry.kind, entry.elements] for entry in ledger.entries]
        y.backward(dy)
    every = [[entry.kind, entry.elements] for entry in ledger.entries]
    return {
        "result": y, "gradient of the input": x.grad, "gradients": _gradients(mlp),
        "collectives forward": forward, "collectives backward": every[len(forward) :],
        "its input stays as it is": torch.equal(given, x),
    }  # fmt: skip


def operators(package: ModuleType, seed: int) -> RankResult:
    """On each rank: what the two operators give, and whether they leave alone what they are given."""
    seen: RankResult = {}
    for name in ("copy_to_tp_region", "reduce_from_tp_region"):
        draw = Draw(seed, f"{name} {dist.get_rank()}")
        x, gradient = draw.normal(3, 4), draw.normal(3, 4)
        given: tuple[Tensor, ...] = x.clone(), gradient.clone()
        x.requires_grad_()
        y = getattr(package, name)(x)
        y.backward(gradient)
        seen |= {f"{name}: result": y, f"{name}: gradient": x.grad}
        seen[f"{name}: what it is given stays as it is"] = all(map(torch.equal, given, (x, gradient)))
    return seen


PARTS = (layers, mlps, operators, in_a_group)
