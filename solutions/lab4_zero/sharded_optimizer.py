"""The optimizer's part of ZeRO (exercise 4.4): each rank keeps and steps its shard, then all exchange the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .async_collectives import all_gather
from .buckets import Bucket

#: Elements of the shard that are stepped at once: no more float32 gradients than these exist at a time.
UPDATE_NUMEL = 2**25


class ParameterShard:
    """A bucket's parameters moved into one flat tensor, and this rank's shard of what trains them.

    Args:
        bucket: parameters, in as many shards as there are ranks.
        group: the ranks.
        master_dtype: parameters of fewer bits are stepped in this dtype.

    Attributes:
        flat: (numel,), the weights of the whole bucket; each parameter is a view of it.
        weights: (shard_numel,), this rank's part of ``flat``.
        master: (shard_numel,), what the optimizer steps: a copy of ``weights`` in ``master_dtype``, or ``weights``.
        pieces: which part of which parameter lies where in the shard.
        tensors: the optimizer's parameters, one for each piece: views of ``master``.
        gradient: (shard_numel,), the mean gradient; set before each update.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket, group: ProcessGroup | None, master_dtype: torch.dtype) -> None:
        self.bucket, self.group = bucket, group
        self.flat = bucket.new_flat()
        for parameter, view in zip(bucket.parameters, bucket.views(self.flat), strict=True):
            view.copy_(parameter)
            parameter.data = view
        rank = dist.get_rank(group)
        self.weights = bucket.shard(self.flat, rank)
        wide = self.flat.element_size() >= master_dtype.itemsize
        self.master = self.weights if wide else self.weights.to(master_dtype)
        self.pieces = bucket.pieces(rank)
        self.tensors = [nn.Parameter(self.master[piece.start : piece.stop]) for piece in self.pieces]
        self.gradient: Tensor | None = None

    def set_gradients(self, used: Mapping[nn.Parameter, bool]) -> None:
        """Give the optimizer the gradients of its pieces in the master's dtype; a parameter nobody used has none."""
        ### BEGIN SOLUTION 4.4: gradients of the shard
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            if used[self.bucket.parameters[piece.parameter]]:
                tensor.grad = self.gradient[piece.start : piece.stop].to(tensor.dtype)
        ### END SOLUTION


class ShardedOptimizer:
    """Steps this rank's shards with an ordinary optimizer and gathers the new weights.

    The optimizer sees pieces of parameters, so it must treat each element on its own, as SGD, Adam and AdamW do: one
    that forms a norm of a whole tensor (LAMB, Muon) needs the whole tensor.

    Args:
        buckets: of all trainable parameters, in N shards.
        groups: ``torch.optim`` parameter groups; frozen parameters in them are left alone.
        optimizer_class: such as ``torch.optim.AdamW``.
        group: the ranks.
        master_dtype: see :class:`ParameterShard`.
        **kwargs: arguments of ``optimizer_class``.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Sequence[Mapping[str, Any]],
        optimizer_class: type[Optimizer],
        group: ProcessGroup | None = None,
        *,
        master_dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        self.group = group
        self.shards = [ParameterShard(bucket, group, master_dtype) for bucket in buckets]
        pieces_of: dict[nn.Parameter, list[nn.Parameter]] = {}
        for shard in self.shards:
            for piece, tensor in zip(shard.pieces, shard.tensors, strict=True):
                pieces_of.setdefault(shard.bucket.parameters[piece.parameter], []).append(tensor)
        mine = [
            {**options, "params": [piece for parameter in options["params"] for piece in pieces_of.get(parameter, ())]}
            for options in groups
        ]
        self.inner = optimizer_class(mine, **kwargs)
        self.stepped: set[nn.Parameter] = set()  # parameters that have a state, on whichever rank

    @torch.no_grad()
    def update(self, used: Mapping[nn.Parameter, bool]) -> None:
        """One step of all shards, whose ``gradient`` is set; afterwards every rank has all new weights.

        The shards may be stepped in parts (:meth:`_parts`): then fewer float32 gradients exist at a time, and the new
        weights of one part are gathered while the next is stepped.
        """
        ### BEGIN SOLUTION 4.4: step the shard, gather the weights
        gathering = []
        for part in self._parts():
            for shard in part:
                shard.set_gradients(used)
            self.inner.step()
            for shard in part:
                for tensor in shard.tensors:
                    tensor.grad = None
                if shard.master is not shard.weights:
                    shard.weights.copy_(shard.master)
                gathering.append(all_gather(shard.flat, shard.weights, self.group))
        for pending in gathering:
            pending.wait()
        ### END SOLUTION
        self.stepped.update(parameter for parameter, anywhere in used.items() if anywhere)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale each shard's ``gradient`` so that the norm of all is at most ``max_norm``; returns the norm before.

        As ``torch.nn.utils.clip_grad_norm_`` does. Each rank adds up its shard, and one number is all-reduced.
        """
        ### BEGIN SOLUTION 4.4: the norm of a gradient in shards
        gradients = [shard.gradient for shard in self.shards]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm
        ### END SOLUTION

    def _parts(self) -> list[list[ParameterShard]]:
        """The shards in parts of about :data:`UPDATE_NUMEL` elements."""
        parts: list[list[ParameterShard]] = []
        room = 0
        for shard in self.shards:
            if room <= 0:
                parts.append([])
                room = UPDATE_NUMEL
            parts[-1].append(shard)
            room -= shard.bucket.shard_numel
        return parts
