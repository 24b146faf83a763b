"""Several forms of parallelism at once: the ranks as a grid, each of its directions a group of its own.

Tensor parallelism sends the most and the most often (four times a layer, in the middle of the computation), so its
ranks are neighbours, on one host's fast links. Data parallelism sends gradients once a step, while the backward pass
goes on. A pipeline sends activations between two ranks at a time, and may cross hosts. With 8 ranks, 2 of each:

                 tensor: 0 1        0 1
    pipeline 0   data 0  0 1   1    4 5     (pipeline, data and tensor give the rank; Narayanan et al. 2021, section 3)
                 data 1  2 3        6 7
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from utils.gpt import GPT

from .distributed_data_parallel import DistributedDataParallel
from .pipeline import Order, Pipeline
from .pipeline_stages import split_gpt
from .tensor_parallel_gpt import tensor_parallel_gpt
from .vocabulary_parallel import partition_vocab


def parallel_mesh(*, tensor: int = 1, data: int = 1, pipeline: int = 1) -> DeviceMesh:
    """All ranks as a grid; ``mesh.get_group("tensor")`` is the group of those that share this rank's layers.

    Returns:
        A mesh with the dimensions "pipeline", "data" and "tensor", of which the last varies fastest.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.
    """
    if tensor * data * pipeline != dist.get_world_size():
        sizes = f"tensor {tensor} x data {data} x pipeline {pipeline}"
        raise ValueError(f"{sizes} needs {tensor * data * pipeline} ranks, there are {dist.get_world_size()}")
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device_type, (pipeline, data, tensor), mesh_dim_names=("pipeline", "data", "tensor"))


def share_of_batch(mesh: DeviceMesh, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
    """The rows of a batch that this rank trains on; all ranks with the same place in "data" have the same rows.

    Args:
        tokens, targets: (B, N) int64, the whole batch, the same on all ranks.

    Returns:
        Tokens and targets (B of this rank, N), and the factor of the loss with which the mean over "data" is the mean
        over the batch even if the ranks have different numbers of rows.

    Raises:
        ValueError: fewer rows than ranks.
    """
    ranks, rank = mesh.get_group("data").size(), mesh.get_local_rank("data")
    if len(tokens) < ranks:
        raise ValueError(f"each of {ranks} ranks needs a row, the batch has {len(tokens)}")
    mine = targets.tensor_split(ranks)[rank]
    weight = ranks * int((mine != -100).sum()) / int((targets != -100).sum())
    return tokens.tensor_split(ranks)[rank], mine, weight


def tensor_data_parallel_gpt(model: GPT, mesh: DeviceMesh) -> DistributedDataParallel:
    """A GPT cut over "tensor", whose parts are averaged over "data": a rank has all layers, and a part of each.

    Args:
        model: the whole, with the same weights on all ranks; cut in place.

    Returns:
        What an ordinary optimizer trains: ``(parallel(tokens, targets) * weight).backward()``, with the rows and the
        weight that :func:`share_of_batch` gives; clip with :func:`.tensor_parallel_gpt.clip_grad_norm`.
    """
    return DistributedDataParallel(tensor_parallel_gpt(model, mesh.get_group("tensor")), group=mesh.get_group("data"))


def tensor_pipeline_gpt(
    model: GPT, mesh: DeviceMesh, schedule: Literal["1f1b", "gpipe"] | Order = "1f1b", vocabulary: bool = False
) -> Pipeline:
    """A GPT whose layers are cut over "tensor" and dealt out over "pipeline": a rank has a part of some layers.

    Args:
        model: the whole, with the same weights on all ranks; cut in place.
        vocabulary: cut embedding and head too.

    With a "data" larger than 1, call :func:`average_gradients` between ``step`` and the optimizer.
    """
    cut = tensor_parallel_gpt(model, mesh.get_group("tensor"))
    if vocabulary:
        cut = partition_vocab(cut, mesh.get_group("tensor"))
    stage = split_gpt(cut, mesh.get_group("pipeline").size())[mesh.get_local_rank("pipeline")]
    return Pipeline(stage, mesh.get_group("pipeline"), schedule)


@torch.no_grad()
def average_gradients(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Replace gradients by their mean over the ranks, all of them in one all-reduce a dtype, after the backward passes.

    ``DistributedDataParallel`` averages while one backward pass goes on; in a pipeline there are many, and only after
    the last one the gradients are complete.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in same])
        dist.all_reduce(flat, group=group)
        flat /= ranks
        for gradient, mean in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(mean.view_as(gradient))
