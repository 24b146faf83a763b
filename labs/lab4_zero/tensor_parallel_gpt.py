"""A GPT whose blocks are cut over the ranks, and what training it needs: whole weights, the gradient's norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from utils.gpt import GPT

from .partitioned_module import PartitionedModule
from .tensor_parallel import TensorParallelAttention, TensorParallelMLP


def tensor_parallel_gpt(model: GPT, group: ProcessGroup | None = None) -> GPT:
    """Cut the blocks of a model over the ranks of a group, in place.

    Each layer then calls four all-reduces of B N C elements per step: after its attention and after its MLP in the
    forward pass, before them in the backward pass. Embedding, positions, norms and head stay whole on every rank: they
    see the same input everywhere, so that their gradients are the same too, and nothing needs to be sent for them.

    Args:
        model: the whole, with the same weights on all ranks (the same seed).
        group: the ranks that share it, by default all.

    Returns:
        The model. Ordinary optimizers train ``model.parameters()``; for the norm of its gradient see
        :func:`clip_grad_norm`.
    """
    for block in model.blocks:
        block.attention = TensorParallelAttention(block.attention, group)
        block.mlp = TensorParallelMLP(block.mlp, group)
    return model


def named_owners(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, PartitionedModule | None]]:
    """Each parameter once: its name, itself, and the module that holds a part of it (None: it is whole)."""
    owners = {
        id(parameter): layer
        for layer in module.modules()
        if isinstance(layer, PartitionedModule)
        for name, parameter in layer.named_parameters(recurse=False)
        if name in layer.cut
    }
    for name, parameter in module.named_parameters():
        yield name, parameter, owners.get(id(parameter))


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of the uncut module, by the names that it has for them; copies. A collective call."""
    return {
        name: parameter.detach().clone() if owner is None else owner.whole_of(name.rpartition(".")[2], parameter)
        for name, parameter, owner in named_owners(module)
    }


def squared_norm(module: nn.Module, without: nn.Parameter | None = None) -> Tensor:
    """Sum of the squares of a module's whole gradient, a scalar, the same on all ranks that share the module.

    It is computed in float32 at least.

    Every rank has a part of what is cut: those squares are summed over the ranks. What is whole on every rank is there
    several times, but counts once.

    Args:
        without: a parameter that does not count.
    """
    cut, whole, group = [], [], None
    device = next((parameter.device for parameter in module.parameters()), None)
    for _, parameter, owner in named_owners(module):
        if parameter.grad is None or parameter is without:
            continue
        wide = torch.promote_types(parameter.dtype, torch.float32)
        square = torch.linalg.vector_norm(parameter.grad, dtype=wide).square()
        if owner is None:
            whole.append(square)
        else:
            cut.append(square)
            group = owner.group
    total = sum(cut, torch.zeros((), device=device))
    if cut:
        dist.all_reduce(total, group=group)
    return sum(whole, total)


def scale_gradients(module: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Multiply the gradients by max_norm / norm where that is below 1, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))


def clip_grad_norm(module: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradient of a tensor-parallel module by the norm of the whole (see :func:`squared_norm`).

    Returns:
        The norm before clipping, a scalar, the same on all ranks.
    """
    norm = squared_norm(module).sqrt()
    scale_gradients(module, norm, max_norm)
    return norm
