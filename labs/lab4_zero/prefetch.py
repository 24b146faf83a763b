"""ZeRO-3 that seldom waits: while a block computes, the weights of the next one are gathered (exercise 4.10).

The shortest form, on top of `zero3.py`. `fully_sharded.py` does the same on streams of its own, in any order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .async_collectives import AsyncWork, all_gather
from .zero3 import Unit, Zero3


class PrefetchUnit(Unit):
    """A unit whose weights may still be on their way.

    Attributes:
        pending: the all-gather that is under way into ``full``; None if there is none.
    """

    pending: AsyncWork | None = None

    @property
    def has_memory(self) -> bool:
        """Whether ``full`` has memory: the weights are there, or on their way."""
        return self.full.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def start(self) -> None:
        """Give ``full`` memory and start to gather; return at once. Nothing to do if ``full`` has memory already."""
        raise NotImplementedError("Lab 4, exercise 4.10: start to gather")

    def gather(self) -> None:
        """Return when the weights are in ``full``, whether or not :meth:`start` was called."""
        raise NotImplementedError("Lab 4, exercise 4.10: wait for the weights")

    def free(self) -> None:
        """Give the memory of ``full`` back; what is on its way there arrives first."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        super().free()


class PrefetchZero3(Zero3):
    """:class:`Zero3` with each block's all-gather behind the computation of the block before it.

    It sends what :class:`Zero3` sends. Besides the module's own unit, two blocks are gathered at a time.

    Every pass runs each block once, in the order in which the module has them. Blocks may be checkpointed (with
    ``use_reentrant=False``): such a block computes a second time in the backward pass, right before its own backward.

    Attributes:
        in_backward: whether a backward pass is going on.
    """

    unit_class = PrefetchUnit
    in_backward = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module returns."""
        self.in_backward = False
        for unit in self.units.values():
            unit.free()  # an error may have cut the last pass short
        return super().__call__(*args, **kwargs)

    @property
    def blocks(self) -> list[PrefetchUnit]:
        """The units of the blocks, in the order of the forward pass."""
        return [unit for part, unit in self.units.items() if part is not self.module]

    def _add_hooks(self, part: nn.Module, unit: PrefetchUnit) -> None:
        """Have a block's weights gathered ahead, and freed after it has computed, in both passes.

        The module's own unit is gathered and freed as in exercise 4.6.
        """
        if part is self.module:
            super()._add_hooks(part, unit)
            return
        raise NotImplementedError("Lab 4, exercise 4.10: the hooks of a block")

    def _before(self, k: int) -> None:
        """Before block k computes, in either pass: its weights are there, and those of the next block on their way."""
        raise NotImplementedError("Lab 4, exercise 4.10: before a block computes")

    def _start_backward(self, gradient: Tensor) -> None:
        """When the gradient of the module's output is known."""
        self.in_backward = True
        super()._start_backward(gradient)

    def _end_backward(self) -> None:
        """When the backward pass is over."""
        super()._end_backward()
        self.in_backward = False
