"""The tensor-parallel engine with overlapped scheduling: every rank's host prepares a step while the GPUs compute one.

Tensor parallelism shortens a step on the GPUs and leaves the host's time as it is, so that the host's share grows.
:class:`.overlapped_engine.OverlappedEngine` hides it, on each rank by itself: all ranks run the same scheduler one step
ahead. Rank 0 still chooses the tokens for all, but on its GPU: they go to the other GPUs by a broadcast between two
steps, and no host waits for it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.lab5_serving.scheduler import Chunk

from .overlapped_engine import Flight, OverlappedEngine
from .overlapped_runner import OverlappedRunner, Read
from .overlapped_sampling import choose_later
from .tensor_parallel_decoder import TensorParallelRunner
from .tensor_parallel_engine import TensorParallelEngine


class OverlappedTensorRunner(OverlappedRunner, TensorParallelRunner):
    """A :class:`.TensorParallelRunner` that takes the newest tokens from where the step before has left them."""


class OverlappedTensorEngine(TensorParallelEngine, OverlappedEngine):
    """A :class:`.TensorParallelEngine` whose ranks work one step ahead of their GPUs.

    It is used as a ``TensorParallelEngine``; arguments and errors are the same, but a ``runner`` must be an
    :class:`OverlappedTensorRunner`.
    """

    runner_type: ClassVar[type[TensorParallelRunner]] = OverlappedTensorRunner

    def _choose_later(self, sampling: list[Chunk], logits: Tensor | None, failed: dict[str, str]) -> Read | None:
        """Rank 0 launches the choice; all ranks get its tokens on their devices, and hear who cannot get one."""
        if not sampling:
            return None
        wrong: dict[str, Any]
        if self.leads:
            found, wrong = choose_later(logits, [chunk.request for chunk in sampling])
            self._channel.say(("chosen", wrong))
        else:
            wrong = self._hear("chosen")
            found = torch.empty((2, len(sampling)), dtype=torch.int64, device=logits.device)
        failed.update(wrong)
        dist.broadcast(found, group=self._group, group_src=0)
        return self.runner.keep(found)

    def _read(self, flight: Flight) -> tuple[list[int], dict[str, str]]:
        """As :class:`OverlappedEngine`, but a device that is lost ends the engine: one rank cannot go on by itself."""
        if flight.read is not None:
            flight.read()
        return super()._read(flight)
