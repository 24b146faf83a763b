"""What the ranks count for test_lab4_tensor_pipeline.py, and all that they bring back from one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from lab4_tensor_pipeline_runs import (
    FULL,
    MESHES,
    ORDERS,
    PIPELINE,
    ROWS,
    SMALL,
    TENSOR,
    train_pipeline,
    train_tensor_parallel,
)
from parallel_training import Run

from solutions.lab4_zero.mesh import (
    parallel_mesh,
    share_of_batch,
    tensor_data_parallel_gpt,
)
from solutions.lab4_zero.pipeline import Pipeline
from solutions.lab4_zero.pipeline_stages import split_gpt
from solutions.lab4_zero.saved_tensor_meter import SavedTensorMeter
from solutions.lab4_zero.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from solutions.lab4_zero.tensor_parallel_gpt import named_owners, tensor_parallel_gpt
from solutions.lab4_zero.vocabulary_parallel import partition_vocab
from utils.distributed import CollectiveLog, record_collectives
from utils.gpt import GPT, batch


def largest_difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """Of any element; infinite where one is not a number."""
    if not right.numel():
        return 0.0
    return float((found - right).detach().abs().max().nan_to_num(torch.inf))


def count_tensor_parallel(vocabulary: bool = False) -> tuple[CollectiveLog, CollectiveLog]:
    """What a forward and a backward pass of :data:`SMALL` send."""
    model = tensor_parallel_gpt(GPT(SMALL))
    if vocabulary:
        model = split_gpt(partition_vocab(model), 1)[0]
    tokens, targets = batch(SMALL, ROWS)
    with record_collectives() as forward:
        loss = model(tokens, targets)
    with record_collectives() as backward:
        loss.backward()
    return forward, backward


def drawn_layers() -> float:
    """Largest difference of parallel layers, drawn from one seed, from the whole ones (exercise 4.7 has the rest)."""
    differences = []
    for layer_class in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(3)
        whole = torch.nn.Linear(7, 11)
        torch.manual_seed(3)
        layer = layer_class(7, 11)
        for name, right in whole.named_parameters():
            found = layer.whole_of(name, getattr(layer, name))
            assert found.shape == right.shape
            differences.append(largest_difference(found, right))
    return max(differences)


@dataclass
class Swept:
    """One pipeline step of :data:`SMALL`, its gradients held against the whole model's on the spot."""

    schedule: str
    micro_batches: int
    peak: int
    difference: float  # largest, of loss and gradients
    ledger: CollectiveLog


def sweep() -> list[Swept]:
    """Each schedule with 1 to 6 micro-batches of 7 rows."""
    rank, stages, found = dist.get_rank(), dist.get_world_size(), []
    tokens, targets = batch(SMALL, ROWS)
    targets[:2] = -100  # one of six micro-batches has no target at all, one of two has more than the other
    whole = GPT(SMALL)
    loss = whole(tokens, targets)
    loss.backward()
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for schedule in ORDERS:
        for micro_batches in range(1, 7):
            pipeline = Pipeline(split_gpt(GPT(SMALL), stages)[rank], schedule=schedule)
            with record_collectives() as ledger:
                mine = pipeline.step(tokens, targets, micro_batches)
            pairs = [(p.grad, expected[name].grad) for name, p in pipeline.stage.named_parameters() if p.requires_grad]
            pairs += [(mine, loss.detach())] if rank == stages - 1 else []
            difference = max((largest_difference(a, b) for a, b in pairs), default=0.0)
            found.append(Swept(schedule, micro_batches, pipeline.peak_in_flight, difference, ledger))
    return found


def held_bytes() -> dict[str, int]:
    """Most bytes that autograd holds on this stage: of one row at a time, of six rows under each schedule."""
    stage = split_gpt(GPT(FULL), dist.get_world_size())[dist.get_rank()]
    found = {}
    for name, rows, schedule in (("one", 1, "1f1b"), ("1f1b", 6, "1f1b"), ("gpipe", 6, "gpipe")):
        with SavedTensorMeter() as held:
            Pipeline(stage, schedule=schedule).step(*batch(FULL, rows), rows)
        assert held.bytes == 0, "a backward pass has left something behind"
        found[name] = held.peak
    return found


def uneven_rows() -> float:
    """Largest difference of gradients from the whole model's, where 7 rows are shared as 4 and 3."""
    mesh = parallel_mesh(tensor=2, data=2)
    tokens, targets = batch(SMALL, ROWS)
    targets[0, :3] = -100
    whole = GPT(SMALL)
    whole(tokens, targets).backward()
    parallel = tensor_data_parallel_gpt(GPT(SMALL), mesh)
    *rows, weight = share_of_batch(mesh, tokens, targets)
    (parallel(*rows) * weight).backward()
    expected = dict(whole.named_parameters())
    return max(
        largest_difference(parameter.grad, right if owner is None else owner.part_of(name.rpartition(".")[2], right))
        for name, parameter, owner in named_owners(parallel.module)
        if (right := expected[name].grad) is not None
    )


def count_tensor_data() -> tuple[CollectiveLog, int]:
    """What a step of :data:`SMALL` sends; and how many parameters this rank trains."""
    mesh = parallel_mesh(tensor=2, data=2)
    parallel = tensor_data_parallel_gpt(GPT(SMALL), mesh)
    *rows, weight = share_of_batch(mesh, *batch(SMALL, 2 * ROWS))
    with record_collectives() as ledger:
        (parallel(*rows) * weight).backward()
    return ledger, sum(p.numel() for p in parallel.parameters() if p.requires_grad)


@dataclass
class Found:
    """What a rank brings back."""

    tensor: dict[str, Run]
    pipeline: dict[str, Run]
    counted: tuple[CollectiveLog, CollectiveLog]
    counted_vocabulary: tuple[CollectiveLog, CollectiveLog]
    layers: float
    swept: list[Swept]
    held: dict[str, int]
    meshes: dict[str, Run]
    uneven: float


def everything() -> Found:
    """On each rank: all cases."""
    four = dist.get_world_size() == 4
    return Found(
        tensor={name: train_tensor_parallel(case) for name, case in TENSOR.items()},
        pipeline={name: train_pipeline(case) for name, case in PIPELINE.items()},
        counted=count_tensor_parallel(),
        counted_vocabulary=count_tensor_parallel(vocabulary=True),
        layers=drawn_layers(),
        swept=sweep(),
        held=held_bytes(),
        meshes={name: train(case) for name, (train, case) in MESHES.items()} if four else {},
        uneven=uneven_rows() if four else 0.0,
    )
