"""The state of a :class:`ShardedOptimizer`, whole and by name, as `checkpoint` describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .async_collectives import all_gather
from .checkpoint import CheckpointError, State, check_state
from .sharded_optimizer import ParameterShard, ShardedOptimizer


@torch.no_grad()
def gather_state(
    optimizer: ShardedOptimizer, names: Mapping[nn.Parameter, str], groups: Sequence[Mapping[str, Any]]
) -> State:
    """Parameters, the optimizer's tensors and its groups on the CPU, the same on every rank. A collective call.

    Only one bucket's tensors are whole on the device at a time.

    Args:
        names: of all parameters, frozen ones too.
        groups: parameter groups of whole parameters, with their present options.
    """
    parameters = {name: parameter.detach().cpu().clone() for parameter, name in names.items()}
    states: dict[str, dict[str, Tensor]] = {}
    for shard in optimizer.shards:
        bucket = shard.bucket
        for parameter, whole in zip(bucket.parameters, _whole(shard, shard.tensors), strict=True):
            parameters[names[parameter]] = whole
        for key in _keys(optimizer, shard):
            mine = [optimizer.inner.state.get(tensor, {}).get(key) for tensor in shard.tensors]
            for parameter, whole in zip(bucket.parameters, _whole(shard, mine), strict=True):
                if parameter in optimizer.stepped:
                    states.setdefault(names[parameter], {})[key] = whole
    for parameter, key, value in _scalars(optimizer):
        states.setdefault(names[parameter], {})[key] = value
    listed = [
        {
            "names": [names[parameter] for parameter in options["params"]],
            **{key: value for key, value in options.items() if key != "params"},
        }
        for options in groups
    ]
    return {
        "parameters": {name: parameters[name] for name in names.values()},
        "optimizer": {name: states[name] for name in names.values() if name in states},
        "groups": listed,
    }


@torch.no_grad()
def scatter_state(
    optimizer: ShardedOptimizer,
    names: Mapping[nn.Parameter, str],
    groups: Sequence[dict[str, Any]],
    state: State,
) -> None:
    """Take this rank's shards of a state that any world size gathered. No rank speaks to another.

    Raises:
        CheckpointError: the state does not fit the parameters.
    """
    check_state(state, {name: tuple(parameter.shape) for parameter, name in names.items()})
    options_of = {name: options for options in state["groups"] for name in options["names"]}
    for group in groups:
        for name in (names[parameter] for parameter in group["params"]):
            if name not in options_of:
                raise CheckpointError(f"no group of the checkpoint has parameter {name!r}")
            group.update({key: value for key, value in options_of[name].items() if key != "names"})
            break  # the options of a group are those of its first parameter
    for parameter, name in names.items():
        parameter.copy_(state["parameters"][name])
    optimizer.stepped = {parameter for parameter, name in names.items() if name in state["optimizer"]}
    packed = optimizer.inner.state_dict()
    index = {tensor: k for k, tensor in enumerate(t for g in optimizer.inner.param_groups for t in g["params"])}
    packed["state"] = {}
    for shard in optimizer.shards:
        for piece, tensor in zip(shard.pieces, shard.tensors, strict=True):
            name = names[shard.bucket.parameters[piece.parameter]]
            here = slice(piece.offset, piece.offset + tensor.numel())
            tensor.copy_(state["parameters"][name].flatten()[here])
            if name in state["optimizer"]:
                packed["state"][index[tensor]] = {
                    key: value.flatten()[here].clone()
                    if _is_cut(key, value, state["parameters"][name])
                    else value.clone()
                    for key, value in state["optimizer"][name].items()
                }
    optimizer.inner.load_state_dict(packed)


def _is_cut(key: str, value: Tensor, parameter: Tensor) -> bool:
    """Does this tensor of the optimizer have an element for each of the parameter's?"""
    return value.ndim > 0 or (parameter.ndim == 0 and key != "step")


def _keys(optimizer: ShardedOptimizer, shard: ParameterShard) -> list[str]:
    """Names of the optimizer's tensors that are cut as the parameters are, from whichever rank has some."""
    mine = {
        key
        for tensor in shard.tensors
        for key, value in optimizer.inner.state.get(tensor, {}).items()
        if isinstance(value, Tensor) and value.ndim
    }
    return sorted(set().union(*_from_all(optimizer, mine)))


def _scalars(optimizer: ShardedOptimizer) -> list[tuple[nn.Parameter, str, Tensor]]:
    """The optimizer's numbers (AdamW's step) for each parameter, from a rank that has a piece of it."""
    mine = {}
    for k, shard in enumerate(optimizer.shards):
        for piece, tensor in zip(shard.pieces, shard.tensors, strict=True):
            for key, value in optimizer.inner.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and not value.ndim:
                    mine[(k, piece.parameter, key)] = value.detach().cpu().clone()
    merged = {key: value for found in reversed(_from_all(optimizer, mine)) for key, value in found.items()}
    return [(optimizer.shards[k].bucket.parameters[j], key, merged[(k, j, key)]) for k, j, key in sorted(merged)]


def _from_all(optimizer: ShardedOptimizer, mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(optimizer.group)
    dist.all_gather_object(found, mine, group=optimizer.group)
    return found


def _whole(shard: ParameterShard, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Put the pieces of all ranks together: for each parameter of the bucket a tensor of its shape, on the CPU."""
    flat = torch.zeros(shard.bucket.numel, dtype=shard.master.dtype, device=shard.master.device)
    mine = shard.bucket.shard(flat, dist.get_rank(shard.group))
    for piece, tensor in zip(shard.pieces, tensors, strict=True):
        if tensor is not None:
            mine[piece.start : piece.stop] = tensor
    all_gather(flat, mine.clone(), shard.group).wait()
    return [view.cpu().clone() for view in shard.bucket.views(flat)]
