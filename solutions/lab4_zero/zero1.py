"""ZeRO-1: every rank keeps the optimizer's state of its shard alone (exercise 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .async_collectives import reduce_scatter_mean
from .buckets import BUCKET_BYTES, make_buckets
from .checkpoint import State
from .gradient_hooks import UsedParameters
from .sharded_optimizer import ShardedOptimizer
from .sharded_state import gather_state, scatter_state


class Zero1Optimizer(Optimizer):
    """An optimizer whose state is spread over the ranks; the module needs no ``DistributedDataParallel`` around it.

    After DDP's all-reduce, 2 Psi, an all-gather of the weights would make 3 Psi. But a rank needs no mean gradient
    outside its shard: here a reduce-scatter takes the all-reduce's place, and with the all-gather 2 Psi (N - 1) / N
    elements are sent per step, as in DDP. Both happen in :meth:`step`, so several backward passes
    (accumulation) need no communication.

    Args:
        params: parameters or ``torch.optim`` groups of them, the same on every rank; rank 0's values are given to all.
            Frozen ones are left alone. The values move into flat tensors: an older ``parameter.data`` goes stale.
        optimizer_class: such as ``torch.optim.AdamW``; see :class:`ShardedOptimizer` for which.
        group: the ranks.
        bucket_bytes: parameters and gradients are exchanged in buckets of about this size.
        master_dtype: parameters of fewer bits are stepped in this dtype, of which each rank keeps its shard.
        **kwargs: arguments of ``optimizer_class``.

    Gradients are views of one flat tensor per bucket. :meth:`step` reduces them in place and then lets go of them.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        master_dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, {})
        self.group = group
        everything = [parameter for options in self.param_groups for parameter in options["params"]]
        for parameter in everything:
            dist.broadcast(parameter.detach(), group=group, group_src=0)
        self.buckets = make_buckets(everything, bucket_bytes, shards=dist.get_world_size(group))
        self.sharded = ShardedOptimizer(
            self.buckets, self.param_groups, optimizer_class, group, master_dtype=master_dtype, **kwargs
        )
        for mine, inner in zip(self.param_groups, self.sharded.inner.param_groups, strict=True):
            mine.update({key: value for key, value in inner.items() if key != "params"})
        self.flat_gradients = [bucket.new_flat() for bucket in self.buckets]
        self._used = UsedParameters(group)
        self._known: dict[nn.Parameter, bool] | None = None  # who is used, once the gradients are reduced
        self._names = {parameter: str(k) for k, parameter in enumerate(dict.fromkeys(everything))}
        for bucket, flat in zip(self.buckets, self.flat_gradients, strict=True):
            for parameter, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(view))

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Set each shard's mean gradient. :meth:`clip_grad_norm` and :meth:`step` call it; the first call does it."""
        if self._known is not None:
            return
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        had = [parameter.grad is not None for parameter in parameters]
        rank = dist.get_rank(self.group)
        ### BEGIN SOLUTION 4.4: reduce-scatter the gradients
        reducing = []
        for bucket, flat, shard in zip(self.buckets, self.flat_gradients, self.sharded.shards, strict=True):
            bucket.collect(bucket.views(flat))
            shard.gradient = bucket.shard(flat, rank)  # in place: the mean of the shard overwrites what was this rank's
            reducing.append(reduce_scatter_mean(shard.gradient, flat, self.group))
        for pending in reducing:
            pending.wait()
        ### END SOLUTION
        device = self.flat_gradients[0].device if self.flat_gradients else torch.device("cpu")
        self._known = dict(zip(parameters, self._used.agree(had, device), strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Reduce the gradients, step this rank's shard and gather the weights. A collective call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for mine, inner in zip(self.param_groups, self.sharded.inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})  # a scheduler's new rate
        self.sharded.update(self._known)
        self.zero_grad()
        return loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the norm over all parameters of all ranks; returns the norm before. A collective call before step."""
        self.reduce_gradients()
        return self.sharded.clip_grad_norm(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients; with ``set_to_none=False`` they are zeros, and count as gradients."""
        self._known = None
        super().zero_grad(set_to_none)

    def state_dict(self) -> State:
        """Everything, whole and by name ("0", "1", ... in the order given): see `checkpoint`. A collective call."""
        return gather_state(self.sharded, self._names, self.param_groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's shards of what any world size gathered."""
        scatter_state(self.sharded, self._names, self.param_groups, state)


def _move_gradient_to(view: Tensor) -> Callable[[Tensor], None]:
    """A hook that moves a gradient into its place in the flat tensor, so that its own memory is freed at once."""

    def move(parameter: Tensor) -> None:
        if parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)

    return move
