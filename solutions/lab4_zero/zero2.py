"""ZeRO-2: gradients too are kept in shards; a bucket is reduce-scattered when it is full, and freed (exercise 4.5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .async_collectives import AsyncWork, reduce_scatter_mean
from .buckets import BUCKET_BYTES, make_buckets
from .checkpoint import State
from .distributed_data_parallel import broadcast_module
from .gradient_hooks import GradientHooks, UsedParameters
from .sharded_optimizer import ShardedOptimizer
from .sharded_state import gather_state, scatter_state

#: Buckets whose reduce-scatter may be under way while the next one fills.
IN_FLIGHT = 1


class Zero2:
    """A module and its optimizer: each rank keeps its shard of the gradients and of the optimizer's state.

    ``backward()`` leaves no ``parameter.grad``: each bucket is averaged into this rank's shard as soon as it is full.
    A further backward pass before :meth:`step` adds to the shards, and sends Psi (N - 1) / N elements again: keeping
    the gradients of this rank until the last one, as DDP's ``no_sync``, would keep all of them. With one backward pass
    a step sends 2 Psi (N - 1) / N.

    Args:
        module: the same on every rank; rank 0's weights and buffers are given to all. Its parameters may be shared,
            frozen, or left out of some or all forward passes.
        optimizer_class: such as ``torch.optim.AdamW``; see :class:`ShardedOptimizer` for which.
        group: the ranks.
        bucket_bytes: about two buckets' full gradients exist at a time.
        master_dtype: parameters of fewer bits are stepped in this dtype, of which each rank keeps its shard.
        **kwargs: arguments of ``optimizer_class``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[Optimizer],
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        master_dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        self.module, self.group = module, group
        broadcast_module(module, group)
        self.buckets = make_buckets(module.parameters(), bucket_bytes, shards=dist.get_world_size(group))
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._groups = [{"params": list(self._names)}]
        self.sharded = ShardedOptimizer(
            self.buckets, self._groups, optimizer_class, group, master_dtype=master_dtype, **kwargs
        )
        self.gradients = [shard.weights.new_zeros(shard.weights.shape) for shard in self.sharded.shards]
        for shard, gradient in zip(self.sharded.shards, self.gradients, strict=True):
            shard.gradient = gradient
        self._filled = [False] * len(self.buckets)
        self._had: dict[nn.Parameter, bool] = {}  # which parameters got a gradient here since the last step
        self._reducing: deque[tuple[int, AsyncWork, Tensor]] = deque()
        self._used = UsedParameters(group)
        self._hooks = GradientHooks(self.buckets, self._bucket_full, self._backward_done)
        self.zero_grad()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        self._reducing.clear()
        self._hooks.reset()
        return self.module(*args, **kwargs)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank's shards; a learning-rate scheduler takes it."""
        return self.sharded.inner

    def _bucket_full(self, k: int) -> None:
        """Every gradient of bucket k that this backward pass gives is there."""
        bucket = self.buckets[k]
        for parameter in bucket.parameters:
            self._had[parameter] |= parameter.grad is not None
        ### BEGIN SOLUTION 4.5: reduce-scatter a bucket and free it
        while len(self._reducing) >= IN_FLIGHT:
            self._take_oldest()
        flat = bucket.flat_gradient()
        bucket.release()
        into = torch.empty_like(self.gradients[k]) if self._filled[k] else self.gradients[k]
        self._reducing.append((k, reduce_scatter_mean(into, flat, self.group), flat))
        ### END SOLUTION

    def _take_oldest(self) -> None:
        """Wait for the bucket that has been under way longest; its full gradient is freed."""
        ### BEGIN SOLUTION 4.5: a shard arrives
        k, pending, _ = self._reducing.popleft()
        mean = pending.wait()
        if self._filled[k]:
            self.gradients[k] += mean
        self._filled[k] = True
        ### END SOLUTION

    def _backward_done(self) -> None:
        """The last buckets' shards are there when ``backward()`` returns."""
        while self._reducing:
            self._take_oldest()

    def step(self) -> None:
        """Step this rank's shard, gather the weights and let go of the gradients. A collective call."""
        used = self._used.agree(list(self._had.values()), self.gradients[0].device if self.gradients else None)
        self.sharded.update(dict(zip(self._had, used, strict=True)))
        self.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the norm over all parameters of all ranks; returns the norm before. A collective call before step."""
        return self.sharded.clip_grad_norm(max_norm)

    def zero_grad(self) -> None:
        """Forget the gradients: the next backward pass overwrites the shards."""
        self._filled = [False] * len(self.buckets)
        self._had = {parameter: False for bucket in self.buckets for parameter in bucket.parameters}

    def state_dict(self) -> State:
        """Everything, whole and by the module's names: see `checkpoint`. A collective call."""
        return gather_state(self.sharded, self._names, self._groups_now())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's shards of what any world size gathered."""
        groups = self._groups_now()
        scatter_state(self.sharded, self._names, groups, state)
        for inner, options in zip(self.optimizer.param_groups, groups, strict=True):
            inner.update({key: value for key, value in options.items() if key != "params"})

    def _groups_now(self) -> list[dict[str, Any]]:
        """The parameter groups of whole parameters with the options that hold now."""
        return [
            {**{key: value for key, value in inner.items() if key != "params"}, "params": mine["params"]}
            for inner, mine in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
