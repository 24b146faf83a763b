"""Tensor parallelism: one layer's matrices split over the ranks, one all-reduce per direction (exercise 4.7).

Shoeybi et al. 2019 (Megatron-LM), section 3. A matrix cut by columns turns the same input into different features; one
cut by rows turns different features into summands of the same output. Between the two
stands a function of single features (a GeLU) or of single heads (attention), so nothing has to be sent there.

    x --copy--> x W1[:, mine] --gelu--> h[mine] --> h[mine] W2[mine, :] --all-reduce--> y

``nn.Linear`` stores the transpose: W1's columns are rows of ``up.weight``, W2's rows are columns of ``down.weight``.
Letters: B batch, N sequence, C hidden width. The sizes need not divide by the number of ranks: the first ranks have one
column, or one head, more; a rank may even have none.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .partitioned_module import PartitionedModule


class WholeMLP(Protocol):
    """What :class:`TensorParallelMLP` is cut from: ``up`` (C to inner) and ``down`` (inner to C)."""

    up: nn.Linear
    down: nn.Linear


class WholeAttention(Protocol):
    """What :class:`TensorParallelAttention` is cut from: ``qkv`` (C to 3C), ``output`` (C to C), ``heads``."""

    heads: int
    qkv: nn.Linear
    output: nn.Linear


class _CopyToRanks(torch.autograd.Function):
    """The same tensor goes into each rank's part of a matrix: its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError("Lab 4, exercise 4.7: the gradient of what all ranks read")


class _ReduceFromRanks(torch.autograd.Function):
    """Each rank has a summand: all get the sum. The gradient of each summand is the gradient of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None) -> Tensor:
        raise NotImplementedError("Lab 4, exercise 4.7: the sum of all ranks' parts")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError("Lab 4, exercise 4.7: the gradient of one rank's part")


def copy_to_tp_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """x itself; in the backward pass its gradient is summed over the ranks (Megatron-LM's *f*).

    Args:
        x: any shape, the same on all ranks of the group.

    Returns:
        The same values. Nothing is sent forward; one all-reduce of x.numel() elements backward.
    """
    return _CopyToRanks.apply(x, group) if dist.get_world_size(group) > 1 else x


def reduce_from_tp_region(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' x; in the backward pass the gradient is handed on as it is (Megatron-LM's *g*).

    Args:
        x: any shape, the same shape on all ranks of the group.

    Returns:
        The sum, the same on all ranks. One all-reduce of x.numel() elements forward; nothing is sent backward.
    """
    return _ReduceFromRanks.apply(x, group) if dist.get_world_size(group) > 1 else x


class ColumnParallelLinear(PartitionedModule):
    """A linear layer of which each rank computes some output features: (..., in) to (..., its share of out).

    Args:
        in_features, out_features, bias: of the whole layer, drawn as ``nn.Linear`` draws it and then cut: the same seed
            on all ranks gives the same whole on any number of ranks.
        group: the ranks that share the layer, by default all.
        unit, parts: see :func:`.partitioned_module.owned_indices`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: ProcessGroup | None = None,
        *,
        unit: int = 1,
        parts: int = 1,
    ) -> None:
        self._cut(nn.Linear(in_features, out_features, bias), group, unit, parts)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, group: ProcessGroup | None = None, *, unit: int = 1, parts: int = 1
    ) -> ColumnParallelLinear:
        """This rank's share of a whole layer, which is the same on all ranks; copied, not shared with it."""
        layer = cls.__new__(cls)
        layer._cut(linear, group, unit, parts)
        return layer

    def _cut(self, linear: nn.Linear, group: ProcessGroup | None, unit: int, parts: int) -> None:
        super().__init__(linear.out_features, {"weight": 0, "bias": 0}, group, unit=unit, parts=parts)
        self.take("weight", linear.weight)
        self.take("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("Lab 4, exercise 4.7: column-parallel linear layer")


class RowParallelLinear(PartitionedModule):
    """A linear layer of which each rank has some input features: (..., its share of in) to (..., out), summed.

    The bias is whole on every rank and added once, to the sum. Arguments: as for :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: ProcessGroup | None = None,
        *,
        unit: int = 1,
    ) -> None:
        self._cut(nn.Linear(in_features, out_features, bias), group, unit)

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: ProcessGroup | None = None, *, unit: int = 1) -> RowParallelLinear:
        """This rank's share of a whole layer, which is the same on all ranks; copied, not shared with it."""
        layer = cls.__new__(cls)
        layer._cut(linear, group, unit)
        return layer

    def _cut(self, linear: nn.Linear, group: ProcessGroup | None, unit: int) -> None:
        super().__init__(linear.in_features, {"weight": 1}, group, unit=unit)
        self.take("weight", linear.weight)
        self.take("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("Lab 4, exercise 4.7: row-parallel linear layer")


class TensorParallelMLP(nn.Module):
    """The share of an MLP, down(gelu(up(x))), that one rank computes: (..., C) to (..., C), the same on all ranks.

    The GeLU is the GPT's, in its tanh form. One all-reduce of x.numel() elements forward and one backward.

    Args:
        mlp: the whole, the same on all ranks; its parameters are copied.
        group: the ranks that share it, by default all.
    """

    def __init__(self, mlp: WholeMLP, group: ProcessGroup | None = None) -> None:
        super().__init__()
        raise NotImplementedError("Lab 4, exercise 4.7: which matrix is cut which way")

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("Lab 4, exercise 4.7: the MLP")


class TensorParallelAttention(nn.Module):
    """The heads of a causal self-attention that one rank computes: (B, N, C) to (B, N, C), the same on all ranks.

    One all-reduce of B N C elements forward and one backward. Arguments: as for :class:`TensorParallelMLP`.
    """

    def __init__(self, attention: WholeAttention, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.head_dim = attention.output.in_features // attention.heads
        self.qkv = ColumnParallelLinear.from_linear(attention.qkv, group, unit=self.head_dim, parts=3)
        self.output = RowParallelLinear.from_linear(attention.output, group, unit=self.head_dim)
        self.heads = self.output.weight.shape[1] // self.head_dim  # of this rank

    def forward(self, x: Tensor) -> Tensor:
        shares = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (share.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for share in shares)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads of this rank, N, head_dim)
        return self.output(mixed.transpose(1, 2).flatten(2))
