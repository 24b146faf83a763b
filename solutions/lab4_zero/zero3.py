"""ZeRO-3: the weights too are kept in shards; a block's are gathered before it computes, and then freed (exercise 4.6).

The shortest form: it waits for each collective. `prefetch.py` gathers one block ahead (exercise 4.10), and
`fully_sharded.py` is the whole method.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .async_collectives import all_gather, reduce_scatter_mean
from .buckets import Bucket
from .gradient_hooks import UsedParameters


class Unit:
    """The parameters of a block, end to end in one flat tensor, of which every rank keeps a shard.

    Args:
        parameters: trainable, of one dtype and device. They become views of ``full``.
        group: the ranks.

    Attributes:
        bucket: where each parameter lies in the flat tensor; zeros at its end make the shards equal in size.
        full: (numel,), everybody's weights. It has memory from :meth:`gather` to :meth:`free`, and at no other time.
        shard: (shard_numel,), the weights that this rank keeps.
        pieces: for each parameter the part of it that lies in ``shard``, (n,), perhaps empty: what an optimizer steps.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.bucket = Bucket(parameters, shards=dist.get_world_size(group))
        flat = self.bucket.new_flat()
        for parameter, view in zip(self.bucket.parameters, self.bucket.views(flat), strict=True):
            view.copy_(parameter)
        ### BEGIN SOLUTION 4.6: a rank's shard
        self.shard = self.bucket.shard(flat, self.rank).clone()  # a view would keep all of flat
        ### END SOLUTION
        self.pieces = [nn.Parameter(self.shard[start:stop]) for start, stop in self.bounds()]
        self.full = torch.empty_like(flat)
        for parameter, view in zip(self.bucket.parameters, self.bucket.views(self.full), strict=True):
            parameter.data = view  # through .data, so that autograd takes no gather for a change of a saved weight
        self.free()
        self._used = UsedParameters(group)

    def bounds(self) -> list[tuple[int, int]]:
        """Where in the shard the piece of each parameter starts and stops; at the same element if it is empty."""
        ### BEGIN SOLUTION 4.6: what of each parameter lies in the shard
        size = self.bucket.shard_numel
        first = self.rank * size
        return [
            (min(max(start - first, 0), size), min(max(start + parameter.numel() - first, 0), size))
            for start, parameter in zip(self.bucket.starts, self.bucket.parameters, strict=True)
        ]
        ### END SOLUTION

    @torch.no_grad()
    def gather(self) -> None:
        """Give ``full`` memory and fill it with the shards of all ranks."""
        ### BEGIN SOLUTION 4.6: gather the weights
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = self.bucket.shard(self.full, self.rank)
        own.copy_(self.shard)
        all_gather(self.full, own, self.group).wait()
        ### END SOLUTION

    def free(self) -> None:
        """Give the memory of ``full`` back; the parameters keep their shapes, without values."""
        ### BEGIN SOLUTION 4.6: free the weights
        self.full.untyped_storage().resize_(0)
        ### END SOLUTION

    @torch.no_grad()
    def reduce(self) -> None:
        """Turn the parameters' gradients into the mean over the ranks, of which the pieces here get their parts.

        A piece that has a gradient already, of an earlier backward pass, adds to it.
        """
        had = [parameter.grad is not None for parameter in self.bucket.parameters]
        used = self._used.agree(had, self.full.device)  # by any rank; the others' pieces get no gradient
        ### BEGIN SOLUTION 4.6: reduce and scatter the gradients
        flat = self.bucket.flat_gradient()
        self.bucket.release()
        mean = reduce_scatter_mean(torch.empty_like(self.shard), flat, self.group).wait()
        for piece, (start, stop), anywhere in zip(self.pieces, self.bounds(), used, strict=True):
            if anywhere:
                gradient = mean[start:stop]
                piece.grad = gradient if piece.grad is None else piece.grad + gradient
        ### END SOLUTION


class Zero3:
    """A module of which each rank keeps 1/N: Rajbhandari et al. 2020, section 5.3.

    Every instance of ``block_class`` is a unit. The parameters outside the blocks, and those that several blocks share,
    are the unit of the module itself, which stays gathered from the start of each pass to its end. A step with one
    backward pass sends 3 Psi (N - 1) / N elements: two all-gathers and a reduce-scatter of each unit.

    Any optimizer of ``torch.optim`` that treats each element on its own trains :meth:`parameters`. Several backward
    passes before its step add up. Ranks must run the same blocks in the same order.

    Args:
        module: with the same structure on all ranks; rank 0's parameters and buffers are given to all. Frozen
            parameters stay whole on every rank. It takes and returns tensors, its blocks too; blocks are not
            checkpointed.
        block_class: class of the blocks.
        group: the ranks.

    Raises:
        ValueError: no block in the module.
    """

    unit_class = Unit

    def __init__(self, module: nn.Module, block_class: type[nn.Module], group: ProcessGroup | None = None) -> None:
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        owned = unit_parameters(module, block_class)
        self.units = {part: self.unit_class(parameters, group) for part, parameters in owned.items() if parameters}
        for part, unit in self.units.items():
            self._add_hooks(part, unit)
        self._unreduced: dict[Unit, None] = {}  # in this backward pass

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module returns."""
        output = self.module(*args, **kwargs)
        if output.requires_grad:
            output.register_hook(self._start_backward)
        return output

    def parameters(self) -> list[nn.Parameter]:
        """This rank's pieces of the trainable parameters, for an optimizer."""
        return [piece for unit in self.units.values() for piece in unit.pieces]

    def state_dict(self) -> dict[str, Tensor]:
        """What the unsharded module's ``state_dict()`` would be, on the CPU. A collective call."""
        whole: dict[Tensor, Tensor] = {}
        for unit in self.units.values():
            unit.gather()
            whole |= {parameter: parameter.detach().cpu().clone() for parameter in unit.bucket.parameters}
            unit.free()
        state = self.module.state_dict(keep_vars=True)
        return {name: whole[value] if value in whole else value.detach().cpu().clone() for name, value in state.items()}

    def _add_hooks(self, part: nn.Module, unit: Unit) -> None:
        """Have the weights gathered before ``part`` computes and freed after it, in both passes.

        The backward pass of the module itself is that of :meth:`_start_backward` and :meth:`_end_backward`.
        """
        ### BEGIN SOLUTION 4.6: when a block is gathered and freed
        part.register_forward_pre_hook(lambda *_: unit.gather())
        part.register_forward_hook(lambda *_: unit.free())
        if part is not self.module:
            part.register_full_backward_pre_hook(lambda *_: unit.gather())
            part.register_full_backward_hook(partial(self._after_backward, unit))
        ### END SOLUTION

    def _start_backward(self, gradient: Tensor) -> None:
        """When the gradient of the module's output is known."""
        self._unreduced = dict.fromkeys(self.units.values())
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.module.zero_grad()  # what a pass that an error has cut short may have left
        if self.module in self.units:
            self.units[self.module].gather()

    def _after_backward(self, unit: Unit, block: nn.Module, inputs: Sequence[Tensor | None], outputs: object) -> None:
        """When the gradients of a block's ``inputs``, and so those of its parameters, are known."""
        if any(gradient is not None for gradient in inputs):  # if no input needs one, this is called too early
            unit.free()
            unit.reduce()
            self._unreduced.pop(unit, None)

    def _end_backward(self) -> None:
        """When the backward pass is over: the module's own unit, and blocks whose inputs need no gradient."""
        for unit in self._unreduced:
            unit.free()
            unit.reduce()


def unit_parameters(module: nn.Module, block_class: type[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """The trainable parameters of the module's own unit, and those of each block."""
    blocks = [part for part in module.modules() if part is not module and isinstance(part, block_class)]
    if not blocks:
        raise ValueError(f"block_class must name modules within {type(module).__name__}: no {block_class.__name__}")
    inside = {part for block in blocks for part in block.modules()}
    outside = [part for part in module.modules() if part not in inside]
    owner = {parameter: module for part in outside for parameter in part.parameters(recurse=False)}
    for block in blocks:
        owner |= {parameter: module if parameter in owner else block for parameter in block.parameters()}
    return {
        part: [parameter for parameter in module.parameters() if owner[parameter] is part and parameter.requires_grad]
        for part in (module, *blocks)
    }
