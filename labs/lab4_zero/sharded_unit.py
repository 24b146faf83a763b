"""One unit of a fully sharded model: what is gathered together, freed together and reduced together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from .flat_parameter import FlatParameter, ParamInfo
from .overlap import SideStream, start_reduce_scatter


class ShardedUnit:
    """A block (or what lies outside all blocks): its trainable parameters in one flat parameter, its frozen in another.

    Frozen ones are apart because they have no gradient to reduce and no optimizer state to keep.

    Args:
        infos: of the unit's parameters.
        reduce_dtype: in which gradients travel; None for the dtype that the unit computes in.
    """

    def __init__(
        self,
        infos: list[ParamInfo],
        group: ProcessGroup | None,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        parts = ([info for info in infos if info.parameter.requires_grad is trainable] for trainable in (True, False))
        self.flats = [FlatParameter(part, group, device, compute_dtype) for part in parts if part]
        self.trained = next((flat for flat in self.flats if flat.trainable), None)
        self.reduce_dtype = reduce_dtype
        self.full_bytes = sum(flat.padded * flat.full.element_size() for flat in self.flats)  # of memory, when gathered
        self.gathered = False
        self.unreduced: Tensor | None = None  # gradients of micro-batches in no_sync, (N size,)
        self.used: set[int] = set()  # parameters that had a gradient since the last reduction
        self.doubtful: list[nn.Parameter] = []  # pieces whose gradient only other ranks can have made
        self._works: list[Work] = []
        self._arrived: torch.cuda.Event | None = None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters that the unit really holds now."""
        return sum(flat.gathered_bytes for flat in self.flats)

    # ---- parameters ----
    def gather(self, stream: SideStream, event: torch.cuda.Event | None) -> None:
        """Start to gather the parameters, on ``stream`` after ``event``."""
        with stream.stream_after(event):
            self._works = [work for flat in self.flats if (work := flat.gather()) is not None]
            self._arrived = stream.recorded_event()
        self.gathered = True

    def wait(self, stream: SideStream) -> None:
        """Let the computation wait until the parameters have arrived."""
        for work in self._works:
            work.wait()
        stream.wait_for_event(self._arrived)
        self._works, self._arrived = [], None

    def free(self) -> None:
        """Give the gathered parameters' memory back. Waits for pending all-gathers first."""
        for work in self._works:
            work.wait()
        for flat in self.flats:
            flat.free()
        self._works, self._arrived, self.gathered = [], None, False

    # ---- gradients ----
    def has_gradient(self) -> bool:
        """Whether a backward pass has left gradients in the full parameters."""
        return self.trained is not None and any(parameter.grad is not None for parameter in self.trained.parameters)

    def add_gradient(self) -> None:
        """Move the full parameters' gradients, not yet reduced, into one flat tensor, added to what is there."""
        flat, found = self.trained.full_gradient(self.reduce_dtype or self.trained.compute_dtype)
        self.used |= found
        self.unreduced = flat if self.unreduced is None else self.unreduced.add_(flat)

    def discard_unreduced_grad(self) -> None:
        """Drop what an unfinished backward pass has left."""
        self.unreduced, self.used, self.doubtful = None, set(), []
        for parameter in self.trained.parameters if self.trained else ():
            parameter.grad = None

    def reduce(self, stream: SideStream) -> Reduction:
        """Start to reduce what :meth:`add_gradient` has collected."""
        flat, self.unreduced = self.unreduced, None
        return Reduction(self, flat, stream)


class Reduction:
    """A reduce-scatter on its way: ``full`` (N size,) is summed over the ranks, and each keeps the mean of its shard.

    ``shard`` (size,) is of the dtype of ``full``, ``work`` what :func:`start_reduce_scatter` returns. ``full`` must not
    be overwritten while it is read: this object holds it until :meth:`complete`.
    """

    def __init__(self, unit: ShardedUnit, full: Tensor, stream: SideStream) -> None:
        self.unit, self.full, self.stream = unit, full, stream
        ready = stream.recorded_event()
        with stream.stream_after(ready):
            self.shard = full.new_empty(unit.trained.size)
            self.work = start_reduce_scatter(self.shard, full, unit.trained.group)
            if self.work is None:  # on a GPU the rest is queued at once
                self._add_to_pieces()
            self.done = stream.recorded_event()

    def complete(self) -> None:
        """Let the computation wait for the reduction; the pieces then have their gradients, and ``full`` is freed."""
        if self.work is not None:
            self.work.wait()
            self._add_to_pieces()
        self.stream.wait_for_event(self.done)
        self.full = self.shard = self.work = None

    def discard(self) -> None:
        """Let the reduction end, without a gradient."""
        if self.work is not None:
            self.work.wait()
        self.stream.wait_for_event(self.done)
        self.full = self.shard = self.work = None

    @torch.no_grad()
    def _add_to_pieces(self) -> None:
        """Hand the mean over to the pieces' ``grad``, in the dtype of the shards."""
        unit, flat = self.unit, self.unit.trained
        mean = self.shard.to(flat.master_dtype).div_(flat.world_size)
        kept, more = [], []
        for number, (info, piece) in enumerate(zip(flat.infos, flat.pieces, strict=True)):
            gradient = mean[slice(*flat.bounds(info))]
            if piece.grad is not None:
                kept.append(piece.grad)
                more.append(gradient)
                continue
            piece.grad = gradient
            if number not in unit.used:
                unit.doubtful.append(piece)
        if kept:
            torch._foreach_add_(kept, more)
        unit.used = set()


def clear_unused_grads(units: list[ShardedUnit]) -> None:
    """Reset the gradient to None for parameters unused on all ranks: here unused, and the reduced gradient is zero.

    The one place where the host waits for the device, and only for a model with unused parameters.
    """
    doubtful = [piece for unit in units for piece in unit.doubtful]
    if doubtful:
        used_by_others = torch.stack([piece.grad.any() for piece in doubtful]).tolist()
        for piece, used in zip(doubtful, used_by_others, strict=True):
            piece.grad = piece.grad if used else None
    for unit in units:
        unit.doubtful = []
