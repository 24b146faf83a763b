"""The parameters of one unit laid end to end, and this rank's shard of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .overlap import start_all_gather


@dataclass
class ParamInfo:
    """One parameter of the module: its first name, every (module, attribute) that holds it, and where it lies."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    start: int = 0

    @property
    def stop(self) -> int:
        """End of its range in the flat parameter."""
        return self.start + self.parameter.numel()


def shard_size(numel: int, world_size: int) -> int:
    """Elements of each rank's shard: the least equal share that covers ``numel``; the last ranks' is padded."""
    return -(-numel // world_size)


def shard_of(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's shard of a flat tensor: elements ``rank * size`` to ``(rank + 1) * size``, zeros past the end.

    Args:
        flat: (n,), any dtype.

    Returns:
        (size,) with size = :func:`shard_size` of n; memory of its own, so that ``flat`` can be freed.
    """
    size = shard_size(flat.numel(), world_size)
    own = flat[rank * size : (rank + 1) * size]  # shorter than size, or empty, on the last ranks
    return F.pad(own, (0, size - own.numel())).clone()


class FlatParameter:
    """Some parameters of a module as one flat tensor, of which every rank keeps a shard.

    There are three views of the same weights:

    - ``shard`` (size,), in ``master_dtype``: what this rank owns, all the time;
    - ``pieces``: one ``nn.Parameter`` (1-D, perhaps empty) per parameter, the part of it that lies in ``shard``
      and shares its memory: what an optimizer steps;
    - ``parameters``: one ``nn.Parameter`` per parameter in its own shape, in ``compute_dtype``, all views of ``full``
      (N size,): what the module computes with. They are made once and stay; only the memory under them comes
      (:meth:`gather`) and goes (:meth:`free`).

    Args:
        infos: of the parameters; those of the module are replaced by ``parameters``. All of them trainable, or none.
        device: where shards live and computation happens.
        compute_dtype: None for the parameters' own.

    Raises:
        TypeError: parameters that are not floating point, or of several dtypes without a ``compute_dtype``.
    """

    def __init__(
        self,
        infos: list[ParamInfo],
        group: ProcessGroup | None,
        device: torch.device,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.infos, self.group = infos, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.trainable = infos[0].parameter.requires_grad
        self.compute_dtype, self.master_dtype = _dtypes(infos, compute_dtype)
        for before, info in pairwise(infos):
            info.start = before.stop
        self.numel = infos[-1].stop
        self.size = shard_size(self.numel, self.world_size)
        self.padded = self.size * self.world_size

        with torch.no_grad():
            flat = torch.cat([info.parameter.detach().to(device, self.master_dtype).flatten() for info in infos])
            dist.broadcast(flat, group=group, group_src=0)  # all ranks start from rank 0's weights
            self.shard = shard_of(flat, self.rank, self.world_size)
        self.pieces = [nn.Parameter(self.shard[slice(*self.bounds(info))], self.trainable) for info in infos]

        self.full = torch.empty(self.padded, dtype=self.compute_dtype, device=device)
        self.own_part = self.full[self.rank * self.size :][: self.size]
        # Through .data: gathering writes below autograd, which would otherwise take a saved weight for a changed one.
        self.parameters = [
            nn.Parameter(self.full.data[info.start : info.stop].view(info.parameter.shape), self.trainable)
            for info in infos
        ]
        for info, parameter in zip(infos, self.parameters, strict=True):
            for module, attribute in info.places:
                module._parameters[attribute] = parameter
            info.parameter = parameter
        self.free()

    def bounds(self, info: ParamInfo) -> tuple[int, int]:
        """Range of a parameter's piece within ``shard``; empty where none of it lies there."""
        first = self.rank * self.size
        start = min(max(info.start - first, 0), self.size)
        return start, min(max(info.stop - first, start), self.size)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of memory that ``full`` has now: 0 while it is freed."""
        return self.full.untyped_storage().nbytes()

    @torch.no_grad()
    def gather(self) -> dist.Work | None:
        """Give ``full`` memory and start to fill it from the ranks' shards.

        What travels is in ``compute_dtype``: a bfloat16 model with float32 shards sends 2 bytes an element.

        Returns:
            What :func:`start_all_gather` returns.
        """
        self.full.untyped_storage().resize_(self.padded * self.full.element_size())
        self.own_part.copy_(self.shard)  # casts, and saves a second buffer: the collective runs in place
        return start_all_gather(self.full, self.own_part, self.group)

    def free(self) -> None:
        """Give the memory of ``full`` back; the parameters stay, without content."""
        self.full.untyped_storage().resize_(0)

    def full_gradient(self, dtype: torch.dtype) -> tuple[Tensor, set[int]]:
        """Take the parameters' gradients: one flat tensor (N size,), zero where there is none, and in the padding.

        Returns:
            The tensor, and the numbers of the parameters that had a gradient. The parameters' own are dropped.
        """
        found = {number for number, parameter in enumerate(self.parameters) if parameter.grad is not None}
        parts = [
            parameter.grad.flatten() if number in found else self.full.new_zeros(parameter.numel())
            for number, parameter in enumerate(self.parameters)
        ]
        flat = torch.empty(self.padded, dtype=dtype, device=self.full.device)
        torch.cat([*parts, parts[0].new_zeros(self.padded - self.numel)], out=flat)
        for parameter in self.parameters:
            parameter.grad = None
        return flat, found

    @torch.no_grad()
    def whole(self, own: Tensor) -> dict[str, Tensor]:
        """The ranks' tensors like ``shard`` put together, by name, in the parameters' shapes, on the CPU. Collective.

        Args:
            own: (size,), for example ``shard``, or what an optimizer keeps for it.
        """
        full = torch.empty(self.padded, dtype=own.dtype, device=own.device)
        work = start_all_gather(full, own, self.group)
        if work is not None:
            work.wait()
        full = full.cpu()
        return {info.name: full[info.start : info.stop].view(info.parameter.shape).clone() for info in self.infos}

    def piece_of(self, info: ParamInfo, whole: Tensor) -> Tensor:
        """The part of a parameter-shaped tensor that belongs to this rank's piece, (b - a,)."""
        start, stop = self.bounds(info)
        offset = self.rank * self.size - info.start
        return whole.reshape(-1)[start + offset : stop + offset]


def _dtypes(infos: list[ParamInfo], compute_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Dtype to compute in, and of the shards: the parameters', but at least float32."""
    for info in infos:
        if not info.parameter.is_floating_point():
            raise TypeError(f"parameter {info.name!r} must be floating point, got {info.parameter.dtype}")
    found = {info.parameter.dtype for info in infos}
    if compute_dtype is None and len(found) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in found))
        raise TypeError(f"the parameters of {infos[0].name!r}'s unit have several dtypes ({names}): give compute_dtype")
    master = torch.float32
    for dtype in found:
        master = torch.promote_types(master, dtype)
    return compute_dtype or found.pop(), master
