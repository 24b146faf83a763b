"""Checkpoints that one world size saves and another loads.

A shard says nothing without the number of ranks that it was cut for. So a checkpoint holds no shards: it holds each
parameter, and each tensor that the optimizer keeps for it, whole, without padding and by name. Loading cuts them again.

What can be saved and loaded is anything with two methods (:class:`Trainer`); every rank calls them:

``state_dict() -> State``
    Gathers a dictionary of tensors on the CPU, the same on every rank::

        {
            "parameters": {name: tensor},        # the weights that the optimizer steps: the float32 masters, shaped as
                                                 # in the model; of tied weights the first name only; frozen too
            "optimizer": {name: {key: tensor}},  # "exp_avg" and "exp_avg_sq" in the parameter's shape, "step" a scalar;
                                                 # no entry for a parameter that has never been stepped
            "groups": [{"names": [...], "lr": 1e-3, ...}],  # the optimizer's parameter groups, by name
        }

    A trainer that was given parameters without names calls them "0", "1", ... in the order in which it got them.

``load_state_dict(state: State) -> None``
    Takes such a dictionary from any world size; :func:`check_state` says what does not fit.

``Zero1Optimizer`` and ``Zero2`` are such objects; ``TrainingState`` (in ``training_state``) makes one of a
``FullyShardedDataParallel`` and the optimizer over its parameters.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

FORMAT = "making-llms-fast checkpoint"
VERSION = 1
PARTS = ("parameters", "optimizer", "groups")

#: See the module's description.
State = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; the text names the file, the entry and what would be right."""


class Trainer(Protocol):
    """What can be saved and loaded: see the module's description."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


def save_checkpoint(path: str | Path, trainer: Trainer, group: ProcessGroup | None = None) -> None:
    """Write ``trainer.state_dict()`` to one file. A collective call; it returns when the file is there.

    Rank 0 writes beside ``path`` and renames at the end: whoever reads ``path``, also after a crash, finds the old
    checkpoint or the new one, never half of one.

    Raises:
        CheckpointError: rank 0 could not write; on every rank, so that none waits for the others.
    """
    state = trainer.state_dict()
    outcome: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        content = {"format": FORMAT, "version": VERSION, "world_size": dist.get_world_size(group), "state": state}
        try:
            _write(Path(path), content)
        except Exception as error:  # whatever it is, the other ranks must be told
            outcome = [f"could not write the checkpoint {path}: {error}"]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])


def load_checkpoint(path: str | Path, trainer: Trainer) -> None:
    """Read a checkpoint of any world size into ``trainer``. Every rank calls it, and reads only what it keeps.

    Raises:
        CheckpointError: the file is missing, cut short or none of ours, or does not fit the trainer.
    """
    state = read_checkpoint(path)
    try:
        trainer.load_state_dict(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_checkpoint(path: str | Path) -> State:
    """The dictionary in a checkpoint; its tensors stay in the file until they are used.

    Raises:
        CheckpointError: the file is missing, cut short, none of ours, or of a later version.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file raises nearly anything: RuntimeError, EOFError, UnpicklingError, ...
        raise CheckpointError(f"{path} is no whole checkpoint (cut short, or another kind of file): {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this course: its format must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {content.get('version')}, this code reads version {VERSION}")
    return content["state"]


def check_state(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a state that does not fit parameters of these names and shapes.

    Raises:
        CheckpointError: a part, a parameter or a tensor is missing, unknown, or of another shape.
    """
    for part in PARTS:
        if part not in state:
            raise CheckpointError(f"the state has no {part!r}; it must have {', '.join(PARTS)}, got {sorted(state)}")
    saved = state["parameters"]
    for name, shape in shapes.items():
        if name not in saved:
            raise CheckpointError(f"there is no parameter {name!r}; the checkpoint has {_some(saved)}")
        _check_shape(f"parameter {name!r}", saved[name], shape)
    for name in (*saved, *state["optimizer"]):
        if name not in shapes:
            raise CheckpointError(f"the model has no parameter {name!r} of the checkpoint; it has {_some(shapes)}")
    for name, entries in state["optimizer"].items():
        for key, value in entries.items():
            if value.ndim:  # a scalar, like AdamW's step, is not cut
                _check_shape(f"{key!r} of parameter {name!r}", value, shapes[name])


def _check_shape(what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"{what} has shape {tuple(value.shape)} in the checkpoint, the model's is {tuple(shape)}")


def _some(names: Mapping[str, Any]) -> str:
    """``3 names: a, b, c``; of many, the first few."""
    shown = list(names)[:6]
    return f"{len(names)} names: {', '.join(shown)}{', ...' if len(names) > len(shown) else ''}"


def _write(path: Path, content: object) -> None:
    """Write beside ``path``, make sure that the bytes are on the disk, then take its place at once."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
