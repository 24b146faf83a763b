"""A runner whose steps take the newest tokens from the device, where the step before has left them.

Letters: S sequences that got a token in the last step, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solutions.lab5_serving.batch import Batch
from solutions.lab5_serving.runner import ModelRunner

Read = Callable[[], list[list[int]]]


def placeholder(row: int) -> int:
    """Stands in a list of tokens for one that only the device knows: the last step's token of a row, as -1 - row."""
    return -1 - row


class OverlappedRunner(ModelRunner):
    """A :class:`solutions.lab5_serving.ModelRunner` that replaces placeholders by the tokens of the last step.

    It goes before any other runner's class: ``class Both(OverlappedRunner, LowBitRunner)``.

    Attributes:
        newest: (num_blocks,) int32, the last step's token of each row. A row's request runs, so it holds a block: there
            are never more rows than blocks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.newest = torch.zeros(self.num_blocks, dtype=torch.int32, device=self.model.device)

    @torch.no_grad()
    def compute(self, batch: Batch) -> Tensor:
        """Logits (R, V) of a batch on the device, whose tokens may be placeholders.

        A CUDA graph records the lookup with the rest: ``newest`` stays at its address.
        """
        looked_up = self.newest.index_select(0, (-1 - batch.tokens).clamp(min=0))
        return super().compute(replace(batch, tokens=torch.where(batch.tokens < 0, looked_up, batch.tokens)))

    def keep(self, found: Tensor) -> Read:
        """Keep a step's tokens for the next one, and start their way to the host; nothing is waited for.

        Args:
            found: (2, S) integers, tokens in the first row.

        Returns:
            What waits until ``found`` is on the host and returns it as lists. It does not wait for what is launched
            after this call, which a plain ``tolist`` would: it copies when all that was launched before it is done.
        """
        self.newest[: found.shape[1]].copy_(found[0])
        if found.device.type != "cuda":
            return found.tolist
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[list[int]]:
            copied.synchronize()
            return on_host.tolist()

        return read
