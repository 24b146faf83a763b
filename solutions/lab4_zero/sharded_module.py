"""How a sharded module looks from outside: the names of its parameters, its whole weights, where it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .flat_parameter import FlatParameter, ParamInfo


class ShardedModule(nn.Module):
    """A module whose parameters are this rank's pieces of ``flats``; ``module`` computes with the whole ones.

    ``names`` holds every name of a parameter in ``module`` and its first one.
    """

    module: nn.Module
    names: dict[str, str]

    def flats(self) -> Iterator[FlatParameter]:
        """Every flat parameter, in an order that is the same on all ranks."""
        raise NotImplementedError

    def infos(self) -> dict[str, tuple[FlatParameter, ParamInfo, nn.Parameter]]:
        """Flat parameter, place in it and piece of each parameter, by its first name, in the module's order."""
        found = {
            info.name: (flat, info, piece)
            for flat in self.flats()
            for info, piece in zip(flat.infos, flat.pieces, strict=True)
        }
        return {name: found[name] for name in dict.fromkeys(self.names.values())}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces by the names of the module that was sharded, on every rank the same names."""
        for name, (_, _, piece) in self.infos().items():
            yield prefix + ("." if prefix else "") + name, piece

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of each parameter."""
        return {name: tuple(info.parameter.shape) for name, (_, info, _) in self.infos().items()}

    def full_parameters(self) -> dict[str, Tensor]:
        """The whole parameters in the shards' dtype, on the CPU, by their first names. A collective call."""
        whole: dict[str, Tensor] = {}
        for flat in self.flats():
            whole |= flat.whole(flat.shard)
        return {name: whole[name] for name in self.infos()}

    @torch.no_grad()
    def load_full_parameters(self, whole: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces out of whole parameters, by their first names."""
        for name, (flat, info, piece) in self.infos().items():
            piece.copy_(flat.piece_of(info, whole[name]))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """What the unsharded module's ``state_dict()`` would be, on the CPU: whole weights and buffers. Collective."""
        whole = self.full_parameters()
        return {
            key: whole[self.names[key]] if key in self.names else value.cpu().clone()
            for key, value in self.module.state_dict().items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
        """Load whole weights and buffers, such as the unsharded module's, into the shards.

        Raises:
            KeyError, ValueError: a name is missing or unknown, a shape is another; nothing has been changed then.
        """
        own = {key: tuple(value.shape) for key, value in self.module.state_dict().items()}
        missing, unknown = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        if missing or unknown:
            raise KeyError(f"the weights must have the module's names; missing: {missing}, unknown: {unknown}")
        for key, shape in own.items():
            if tuple(state_dict[key].shape) != shape:
                raise ValueError(f"{key} must have shape {shape}, got {tuple(state_dict[key].shape)}")
        self.load_full_parameters({self.names[key]: state_dict[key] for key in self.names})
        for key, buffer in self.module.named_buffers():
            if key in state_dict:
                buffer.copy_(state_dict[key])

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        raise RuntimeError("a sharded module cannot be moved or cast: do that to the module before it is sharded")


def device_of(module: nn.Module, group: ProcessGroup | None) -> torch.device:
    """Where to compute: this rank's GPU with NCCL, else where the module is."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return next(module.parameters()).device


def share_buffers(module: nn.Module, device: torch.device, group: ProcessGroup | None) -> None:
    """Move a module's buffers to a device and give every rank rank 0's values."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer = buffer.to(device).contiguous()
                dist.broadcast(buffer, group=group, group_src=0)
