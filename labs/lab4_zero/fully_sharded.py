"""ZeRO-3: parameters, gradients and optimizer state all sharded, gathered one block at a time.

What `zero3.py` grows into: the next block is gathered while one computes, in a dtype of its own; blocks may be
checkpointed, nested, and take and return anything that holds tensors; frozen parameters are sharded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .flat_parameter import FlatParameter
from .nested import call_after_backward, cast_floats, tensors_of
from .overlap import SideStream
from .sharded_module import ShardedModule, device_of, share_buffers
from .sharded_unit import Reduction, ShardedUnit, clear_unused_grads
from .unit_infos import canonical_names, infos_of_units


class FullyShardedDataParallel(ShardedModule):
    """A module of which each rank keeps 1/N: Rajbhandari et al. 2020, section 5.3.

    Every instance of ``block_class`` is a unit; what lies outside of them (and what several blocks share) is the root
    unit. A unit's parameters are gathered before it computes, freed after, gathered again in the backward pass, and its
    gradients are reduced to the rank's shard as soon as they are there. While one block computes the next one is
    gathered. The root's parameters stay from the start of a pass to its end.

    Elements in the collectives of a step, with n the elements of a unit rounded up to a multiple of N:

    - trainable parameters: two all-gathers and one reduce-scatter of n, the 3 Psi of ZeRO-3;
    - frozen parameters: two all-gathers of n (they are a flat tensor of their own);
    - ``keep_root=True`` saves the root's second all-gather; every block, the last one too, is gathered twice.

    Gathered at one time: the root, and ``1 + prefetch`` blocks.

    Any optimizer of ``torch.optim`` over :meth:`parameters` trains it: these are this rank's pieces, 1-D and perhaps
    empty, under the parameters' names. A parameter without gradient on any rank gets none here, so that weight decay
    leaves it alone. Ranks must run the same blocks in the same order.

    Args:
        module: with the same structure on all ranks; their parameters and buffers become rank 0's. It is used up: its
            parameters are replaced. Move, cast and freeze it before.
        block_class: class, or classes, of the blocks.
        group: the ranks that share it, by default all.
        compute_dtype: in which parameters are gathered and floating-point inputs cast; None for the parameters' own.
            The shards, their gradients and so the optimizer's state are at least float32.
        prefetch: number of blocks gathered ahead (True is 1, False 0).
        reduce_dtype: in which gradients are summed over the ranks; None for the dtype that is computed in.
        keep_root: whether the root stays gathered between the forward and the backward pass.

    Raises:
        TypeError: parameters that cannot be flattened (see ``FlatParameter``).
        ValueError: no block or no parameter in the module, or a negative ``prefetch``.
    """

    def __init__(
        self,
        module: nn.Module,
        block_class: type[nn.Module] | tuple[type[nn.Module], ...],
        group: ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        prefetch: int = True,
        *,
        reduce_dtype: torch.dtype | None = None,
        keep_root: bool = False,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch must be at least 0, got {prefetch}")
        self.module, self.group, self.prefetch, self.keep_root = module, group, int(prefetch), keep_root
        self.compute_dtype = compute_dtype
        self.names = canonical_names(module)
        root, blocks = infos_of_units(module, block_class)
        self.device = device_of(module, group)
        unit = partial(
            ShardedUnit, group=group, device=self.device, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype
        )
        self.root = unit(root)
        self.blocks = [unit(infos) for infos in blocks.values()]
        self.units = [*self.blocks, self.root]
        for block, sharded in zip(blocks, self.blocks, strict=True):
            block.register_forward_pre_hook(partial(self._before_forward, sharded), with_kwargs=True)
            block.register_forward_hook(partial(self._after_forward, sharded))
        share_buffers(module, self.device, group)
        self._gathers, self._reductions = SideStream(self.device), SideStream(self.device)
        self._may_gather = self._gathers.recorded_event()  # from here freed memory may be overwritten, shards stepped
        self._reduction: Reduction | None = None  # the last one, perhaps still on its way
        self._order: list[ShardedUnit] = []  # blocks in the order of this forward pass
        self._expected: list[ShardedUnit] = []  # of the one before
        self._position = -1  # of the block that computes, in that order
        self._in_backward = False
        self._synchronize = True
        self.peak_gathered_bytes = 0  # most memory that gathered parameters had at one time; set it to 0 to start anew

    # ---- what each pass does; every method runs on the host, ahead of the device ----
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass; it returns what the module does."""
        args, kwargs = cast_floats((args, kwargs), self.compute_dtype)
        if torch._C._current_graph_task_id() != -1:  # a checkpoint around the whole model, in its backward pass
            return self.module(*args, **kwargs)
        self._start_forward()
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self._free_all()
            raise
        return self._end_forward(output)

    def _start_forward(self) -> None:
        if self._in_backward:
            self._abandon_backward()
        self._free_all()  # gathered weights may be older than the last optimizer step
        self._may_gather = self._gathers.recorded_event()
        self._expected, self._order, self._position = self._order or self._expected, [], -1
        self._gather(self.root)
        self._gather_ahead()
        self.root.wait(self._gathers)

    def _end_forward(self, output: Any) -> Any:
        hooked = self._hook(self.root, output)
        if self.keep_root and hooked:
            for block in self.blocks:
                self._free(block)  # any that was gathered ahead in vain
        else:
            self._free_all()
        return output

    def _before_forward(self, unit: ShardedUnit, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Before a block computes.

        In a forward pass: it is put at the end of ``_order``, and ``_position`` is its place there; it is gathered, the
        gathers of the next ones are started, and the computation waits for this one. In a backward pass, where a
        checkpoint computes again: what :meth:`_before_backward` does.
        """
        if self._in_backward:
            self._before_backward(unit)
        else:
            self._position = len(self._order)
            self._order.append(unit)
            self._gather(unit)
            self._gather_ahead()
            unit.wait(self._gathers)
        return call_after_backward(partial(self._after_backward, unit), (args, kwargs))

    def _after_forward(self, unit: ShardedUnit, block: nn.Module, args: tuple, output: Any) -> None:
        """After a block has computed: its output is hooked, its weights are freed, and the next ones are gathered.

        In a backward pass nothing: after a checkpoint's second forward pass the block's backward pass needs them.
        """
        if self._in_backward:
            return  # a checkpoint's second forward pass: the block's backward pass is next
        self._hook(unit, output)
        self._free(unit)
        self._gather_ahead()

    def _before_backward(self, unit: ShardedUnit, gradient: Tensor | None = None) -> None:
        """When the gradient of a unit's output is known: its weights are needed again.

        ``_position`` becomes the unit's place in ``_order`` (the root has none); then as before a forward pass.
        """
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._position = len(self._order)
            self._gather(self.root)
            self.root.wait(self._gathers)
        if unit in self._order:
            self._position = self._order.index(unit)
        self._gather(unit)
        self._gather_ahead()
        unit.wait(self._gathers)

    def _after_backward(self, unit: ShardedUnit) -> None:
        """When the gradients of a unit's inputs, and so of its parameters, are there: free, reduce, gather the next."""
        self._free(unit)
        self._reduce(unit)
        self._gather_ahead()

    def _end_backward(self) -> None:
        """When the whole backward pass is through: what is left is reduced, and optimizers may step."""
        self._free_all()
        for unit in self.units:  # the root, and blocks whose inputs need no gradient
            self._reduce(unit)
        self._complete_reduction()
        self._in_backward = False
        clear_unused_grads(self.units)

    def _abandon_backward(self) -> None:
        """Forget a backward pass that an exception has ended."""
        if self._reduction is not None:
            self._reduction.discard()
            self._reduction = None
        for unit in self.units:
            unit.discard_unreduced_grad()
        self._in_backward = False

    # ---- steps of the passes ----
    def _gather(self, unit: ShardedUnit) -> None:
        if not unit.gathered:
            unit.gather(self._gathers, self._may_gather)
            held = sum(other.full_bytes for other in self.units if other.gathered)
            self.peak_gathered_bytes = max(self.peak_gathered_bytes, held)

    def _gather_ahead(self) -> None:
        """Start to gather the blocks that come next, until ``1 + prefetch`` are gathered."""
        if self._in_backward:
            upcoming = self._order[: max(self._position, 0)][::-1]
        else:
            upcoming = self._expected[self._position + 1 :]
        for unit in upcoming if self.prefetch else ():
            if sum(block.gathered for block in self.blocks) > self.prefetch:
                return
            self._gather(unit)

    def _free(self, unit: ShardedUnit) -> None:
        if unit.gathered:
            unit.free()
            self._may_gather = self._gathers.recorded_event()

    def _free_all(self) -> None:
        for unit in self.units:
            self._free(unit)

    def _reduce(self, unit: ShardedUnit) -> None:
        """Reduce what gradients a unit has; in ``no_sync`` add them up."""
        if not unit.has_gradient():
            return
        self._complete_reduction()  # its memory is what this one's gradient takes
        unit.add_gradient()
        if self._synchronize:
            self._reduction = unit.reduce(self._reductions)

    def _complete_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.complete()
            self._reduction = None

    def _hook(self, unit: ShardedUnit, output: Any) -> bool:
        """Have :meth:`_before_backward` called once a gradient of ``output`` is known; False if none ever will be."""
        outputs = [value for value in tensors_of(output) if value.requires_grad]
        for value in outputs:
            value.register_hook(partial(self._before_backward, unit))
        return bool(outputs)

    # ---- what a training loop calls ----
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block add up full gradients without sending any: Psi more elements of memory.

        The first backward pass after it reduces the sum. Without ``no_sync`` each pass reduces its own, and the shards'
        gradients add up: the same result, more communication, less memory.
        """
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that ``no_sync`` has added up too (which an optimizer's ``zero_grad`` cannot)."""
        super().zero_grad(set_to_none)
        for unit in self.units:
            unit.discard_unreduced_grad()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; returns the norm before, a scalar.

        Every rank calls it, after the backward pass. One number per rank travels.
        """
        gradients = [piece.grad for piece in self.parameters() if piece.grad is not None and piece.grad.numel()]
        total = torch.zeros((), dtype=next(self.flats()).master_dtype, device=self.device)
        if gradients:
            total += torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters that this rank holds now; 0 between steps."""
        return sum(unit.gathered_bytes for unit in self.units)

    def flats(self) -> Iterator[FlatParameter]:
        """Every flat parameter: the blocks', then the root's."""
        return (flat for unit in self.units for flat in unit.flats)
