"""Parameters of which each rank of a group has a part: which part, and the whole again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def owned_indices(size: int, rank: int, world_size: int, *, unit: int = 1, parts: int = 1) -> Tensor:
    """Which rows (or columns) of a whole matrix belong to a rank.

    Args:
        size: rows of the whole.
        unit: so many neighbours stay together, such as the ``head_dim`` rows of one head.
        parts: the whole is so many matrices of equal size one above another (3: queries, keys, values); each is cut.

    Returns:
        (rows of this rank,) int64, ascending. Where units do not divide by the ranks, the first ranks have one more.

    Raises:
        ValueError: ``unit * parts`` does not divide ``size``.
    """
    if size % (unit * parts):
        raise ValueError(f"{size} rows are not {parts} parts of whole units of {unit}")
    units = torch.arange(size).view(parts, -1, unit)
    return units.tensor_split(world_size, dim=1)[rank].reshape(-1)


class PartitionedModule(nn.Module):
    """A module some of whose parameters are parts of a whole that the ranks of a group share.

    Args:
        size: rows (or columns) of the whole parameters, along the dimension in which they are cut.
        cut: parameter name -> that dimension; a parameter not named here is whole on every rank.
        group, unit, parts: the ranks, and how the rows are shared (:func:`owned_indices`).
    """

    def __init__(
        self, size: int, cut: dict[str, int], group: ProcessGroup | None, *, unit: int = 1, parts: int = 1
    ) -> None:
        super().__init__()
        self.size, self.cut, self.group, self.unit, self.parts = size, cut, group, unit, parts

    def take(self, name: str, whole: nn.Parameter | None) -> None:
        """Register this rank's part of a whole parameter, copied; trained or frozen as the whole is."""
        part = None if whole is None else self.part_of(name, whole.detach()).clone()
        self.register_parameter(name, None if part is None else nn.Parameter(part, whole.requires_grad))

    def indices(self, rank: int) -> Tensor:
        """Rows of the whole that a rank of the group has, (rows,) int64."""
        return owned_indices(self.size, rank, dist.get_world_size(self.group), unit=self.unit, parts=self.parts)

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter (or of its gradient, or of its optimizer state)."""
        if name not in self.cut:
            return whole
        return whole.index_select(self.cut[name], self.indices(dist.get_rank(self.group)).to(whole.device))

    @torch.no_grad()
    def whole_of(self, name: str, part: Tensor) -> Tensor:
        """The whole of which every rank passes its part: the inverse of :meth:`part_of`. A collective call."""
        if name not in self.cut:
            return part.clone()
        dim, world_size = self.cut[name], dist.get_world_size(self.group)
        owned = [self.indices(rank).to(part.device) for rank in range(world_size)]
        moved = part.movedim(dim, 0)
        padded = moved.new_zeros(len(owned[0]), *moved.shape[1:])  # rank 0 has most: all ranks send as much
        padded[: len(moved)] = moved
        received = [torch.empty_like(padded) for _ in owned]
        dist.all_gather(received, padded, group=self.group)
        whole = moved.new_empty(self.size, *moved.shape[1:])
        for index, rows in zip(owned, received, strict=True):
            whole[index] = rows[: len(index)]
        return whole.movedim(0, dim).contiguous()
