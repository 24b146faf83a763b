"""A fully sharded model and its optimizer as one object that a checkpoint can save and load."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint import CheckpointError, State, check_state
from .flat_parameter import FlatParameter
from .sharded_module import ShardedModule


class TrainingState:
    """The weights of a sharded model and the state of an optimizer over its parameters, as ``checkpoint`` asks for.

    Args:
        model: a ``FullyShardedDataParallel``.
        optimizer: of ``torch.optim``, over (some of) ``model.parameters()``. What it keeps for a parameter must be
            element by element, of the piece's shape, or a scalar.
    """

    def __init__(self, model: ShardedModule, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._names = {id(piece): name for name, (_, _, piece) in model.infos().items()}

    def state_dict(self) -> State:
        """Whole weights and whole optimizer state, on every rank's CPU. A collective call."""
        return {
            "parameters": self.model.full_parameters(),
            "optimizer": self._whole_optimizer_state(),
            "groups": self._groups(),
        }

    def load_state_dict(self, state: State) -> None:
        """Take this rank's pieces out of a state of any world size.

        Raises:
            CheckpointError: it does not fit the model or the optimizer's groups; nothing has been changed then.
        """
        check_state(state, self.model.shapes())
        names = [group["names"] for group in self._groups()]
        saved = [group["names"] for group in state["groups"]]
        if saved != names:
            raise CheckpointError(f"the optimizer's parameter groups differ: {_difference(names, saved)}")
        self.model.load_full_parameters(state["parameters"])
        infos, numbers = self.model.infos(), [name for group in names for name in group]
        packed = {}
        for number, name in enumerate(numbers):
            if name in state["optimizer"]:
                flat, info, _ = infos[name]
                alone = not info.parameter.ndim  # of a parameter of one number, every tensor is a scalar
                packed[number] = {
                    key: (flat.piece_of(info, value) if value.ndim or (alone and key != "step") else value).clone()
                    for key, value in state["optimizer"][name].items()
                }
        first = 0
        groups = []
        for group in state["groups"]:
            members = list(range(first, first := first + len(group["names"])))
            groups.append({**{key: value for key, value in group.items() if key != "names"}, "params": members})
        self.optimizer.load_state_dict({"state": packed, "param_groups": groups})

    def _groups(self) -> list[dict]:
        """The optimizer's parameter groups with names for the pieces."""
        return [
            {
                "names": [self._names[id(piece)] for piece in group["params"]],
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            }
            for group in self.optimizer.param_groups
        ]

    def _whole_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizer keeps, put together by parameter."""
        found: dict[str, dict[str, Tensor]] = {}
        for flat in self.model.flats():
            if flat.trainable:
                for name, entries in self._whole_state_of(flat).items():
                    found.setdefault(name, {}).update(entries)
        return {name: found[name] for name in self.model.infos() if name in found}

    def _whole_state_of(self, flat: FlatParameter) -> dict[str, dict[str, Tensor]]:
        """The same for one flat parameter: one all-gather for each kind of tensor that is kept."""
        own = {
            info.name: self.optimizer.state[piece]
            for info, piece in zip(flat.infos, flat.pieces, strict=True)
            if self.optimizer.state.get(piece)
        }
        found = {
            name: {key: torch.as_tensor(value).cpu().clone() for key, value in entries.items() if not _is_cut(value)}
            for name, entries in own.items()
        }
        kinds = {(key, value.dtype) for entries in own.values() for key, value in entries.items() if _is_cut(value)}
        for key, dtype in _agreed(kinds, flat):
            shard = torch.zeros(flat.size, dtype=dtype, device=flat.shard.device)
            for info in flat.infos:
                if key in own.get(info.name, {}):
                    shard[slice(*flat.bounds(info))] = own[info.name][key]
            for name, whole in flat.whole(shard).items():
                if name in own:
                    found[name][key] = whole
        return found


def _is_cut(value: object) -> bool:
    """Whether an entry of an optimizer's state is one value per element of a piece."""
    return isinstance(value, Tensor) and value.ndim > 0


def _agreed(kinds: set[tuple[str, torch.dtype]], flat: FlatParameter) -> list[tuple[str, torch.dtype]]:
    """What all ranks will gather, in one order: a rank may lack state that the others have, but must take part."""
    everyone: list[set] = [set() for _ in range(flat.world_size)]
    dist.all_gather_object(everyone, kinds, group=flat.group)
    return sorted({kind for mine in everyone for kind in mine}, key=str)


def _difference(names: list[list[str]], saved: list[list[str]]) -> str:
    """What first tells two lists of groups of names apart."""
    sizes, saved_sizes = [len(group) for group in names], [len(group) for group in saved]
    if sizes != saved_sizes:
        return f"they hold {sizes} parameters, those of the checkpoint {saved_sizes}"
    flat = zip((name for group in names for name in group), (name for group in saved for name in group), strict=True)
    mine, other = next(pair for pair in flat if pair[0] != pair[1])
    return f"where the checkpoint has {other!r}, the optimizer has {mine!r}"
