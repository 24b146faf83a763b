"""What the ranks do for test_lab4_tensor_pipeline.py, and what they bring back. All of it in one launch."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import parallel_training
import torch
import torch.distributed as dist
from parallel_training import STEPS, Run, batch_of_step, default_dtype, reference, shard_of_batch, train
from torch.distributed.device_mesh import DeviceMesh

from solutions.lab4_zero.mesh import (
    average_gradients,
    parallel_mesh,
    share_of_batch,
    tensor_data_parallel_gpt,
    tensor_pipeline_gpt,
)
from solutions.lab4_zero.pipeline import Pipeline
from solutions.lab4_zero.pipeline_order import gpipe_order, one_f_one_b_order
from solutions.lab4_zero.pipeline_stages import split_gpt
from solutions.lab4_zero.tensor_parallel_gpt import clip_grad_norm, full_parameters, tensor_parallel_gpt
from solutions.lab4_zero.vocabulary_parallel import partition_vocab
from utils.gpt import GPT, TINY, GPTConfig

#: Five blocks, five heads of 7, an MLP of 245: nothing that 2, 3 or 4 ranks share evenly; tied, frozen, unused.
FULL = TINY.replace(layers=3, unused_parameter=True)
#: Nothing tied: every gradient is then a sum over micro-batches in their order, in one process as in a pipeline.
UNTIED = TINY.replace(tied=False, bias=False, frozen_positions=False)
#: For counting and for many short runs.
SMALL = GPTConfig(vocabulary=11, context=5, layers=3, heads=2, hidden=6)
ROWS = 7
#: A larger epsilon than other tests': among more layers a bias whose gradient nearly cancels errs by 1e-6 itself.
ADAMW = {**parallel_training.ADAMW, "eps": 1e-4}
FEW = 3  # steps
ORDERS = {"1f1b": one_f_one_b_order, "gpipe": gpipe_order}


@dataclass(frozen=True)
class Case:
    """One training run of ten AdamW steps, or of fewer where it differs from another run in bookkeeping alone."""

    config: GPTConfig
    clip: float | None = None
    accumulation: int = 1
    micro_batches: int = 1  # of a pipeline
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    vocabulary: bool = False  # embedding and head are cut over the vocabulary
    exact: bool = False  # compare bit for bit, with one process that takes the pipeline's micro-batches one by one
    steps: int = STEPS


TENSOR = {
    "plain": Case(FULL, steps=FEW),
    "clipped and accumulated": Case(FULL, clip=0.5, accumulation=2),
    "ranks without a head": Case(FULL.replace(heads=1, layers=2), clip=0.5, steps=FEW),
    "untied, checkpointed": Case(UNTIED.replace(layers=2, checkpointing=True), steps=FEW),
    "vocabulary": Case(FULL, clip=0.5, vocabulary=True),
    "vocabulary, untied": Case(UNTIED.replace(layers=2), vocabulary=True, steps=FEW),
    "float64": Case(FULL, clip=0.5, dtype=torch.float64, steps=FEW),
}
PIPELINE = {
    "1f1b": Case(FULL, micro_batches=5),
    "gpipe": Case(FULL, micro_batches=5, schedule="gpipe"),
    "clipped and accumulated": Case(FULL, clip=0.5, accumulation=2, micro_batches=5),
    "stages without a block": Case(FULL.replace(layers=1), micro_batches=7, steps=FEW),
    "untied, checkpointed": Case(
        UNTIED.replace(checkpointing=True), clip=0.5, micro_batches=3, schedule="gpipe", steps=FEW
    ),
    "float64": Case(FULL, clip=0.5, micro_batches=5, dtype=torch.float64, steps=FEW),
    "1f1b, exact": Case(UNTIED, micro_batches=4, exact=True),
    "gpipe, exact": Case(UNTIED, micro_batches=4, schedule="gpipe", exact=True),
}


@functools.cache
def one_process(case: Case) -> Run:
    """What a case must give."""
    accumulation = case.micro_batches if case.exact else case.accumulation
    with default_dtype(case.dtype):
        return reference(case.config, case.steps, accumulation=accumulation, clip=case.clip, optimizer=ADAMW)


def model_of(case: Case) -> GPT:
    with default_dtype(case.dtype):
        return parallel_training.model_of(case.config)


def train_tensor_parallel(case: Case) -> Run:
    """On each rank: all rows, a part of each layer."""
    model = tensor_parallel_gpt(model_of(case))
    if case.vocabulary:
        model = split_gpt(partition_vocab(model), 1)[0]  # whose loss is made of cut logits
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)

    def step_and_clear() -> float | None:
        norm = None if case.clip is None else float(clip_grad_norm(model, case.clip))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    run = train(model, step_and_clear, 0, 1, config=case.config, steps=case.steps, accumulation=case.accumulation)
    run.parameters = full_parameters(model)
    return run


def train_pipeline(case: Case) -> Run:
    """On each rank: its stage; the losses are the last stage's."""
    stage = split_gpt(model_of(case), dist.get_world_size())[dist.get_rank()]
    pipeline = Pipeline(stage, schedule=case.schedule)
    return train_stage(case, pipeline)


def train_stage(case: Case, pipeline: Pipeline, mesh: DeviceMesh | None = None) -> Run:
    stage, run = pipeline.stage, Run([], {})
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW) if trained else None  # a stage may have no parameter
    for step in range(case.steps):
        rows = batch_of_step(case.config, step)
        losses = []
        for k in range(case.accumulation):
            *part, weight = *shard_of_batch(rows, k, case.accumulation), 1.0
            if mesh is not None:
                *part, weight = share_of_batch(mesh, *part)
            losses.append(pipeline.step(*part, case.micro_batches, weight / case.accumulation))
        if mesh is not None:
            average_gradients(stage, mesh.get_group("data"))
        if case.clip is not None:
            run.norms.append(float(pipeline.clip_grad_norm(case.clip)))
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
        if stage.last:
            run.losses.append(float(sum(losses)))
    run.parameters = full_parameters(stage)
    return run


def train_tensor_data(case: Case) -> Run:
    """On 4 ranks: a part of each layer, half of the rows."""
    mesh = parallel_mesh(tensor=2, data=2)
    parallel = tensor_data_parallel_gpt(model_of(case), mesh)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], **ADAMW)
    run = Run([], {})
    for step in range(case.steps):
        total = 0.0
        for k in range(case.accumulation):
            rows = shard_of_batch(batch_of_step(case.config, step), k, case.accumulation)
            *mine, weight = share_of_batch(mesh, *rows)
            with nullcontext() if k == case.accumulation - 1 else parallel.no_sync():
                loss = parallel(*mine) * (weight / case.accumulation)
                loss.backward()
            total += float(loss.detach())
        if case.clip is not None:
            run.norms.append(float(clip_grad_norm(parallel, case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(total)
    run.parameters = full_parameters(parallel.module)
    return run


def train_tensor_pipeline(case: Case) -> Run:
    """On 4 ranks: a part of the layers of one of two stages."""
    mesh = parallel_mesh(tensor=2, pipeline=2)
    return train_stage(case, tensor_pipeline_gpt(model_of(case), mesh, case.schedule, case.vocabulary))


def train_data_pipeline(case: Case) -> Run:
    """On 4 ranks: one of two stages, half of the rows."""
    mesh = parallel_mesh(data=2, pipeline=2)
    pipeline = tensor_pipeline_gpt(model_of(case), mesh, case.schedule)
    return train_stage(case, pipeline, mesh)


MESHES = {
    "tensor x data": (train_tensor_data, Case(FULL, clip=0.5, accumulation=2)),
    "tensor x pipeline": (train_tensor_pipeline, Case(FULL, clip=0.5, micro_batches=5)),
    "tensor and vocabulary x pipeline": (
        train_tensor_pipeline,
        Case(FULL, clip=0.5, accumulation=2, micro_batches=5, vocabulary=True, steps=FEW),
    ),
    "data x pipeline": (train_data_pipeline, Case(FULL, clip=0.5, accumulation=2, micro_batches=5, schedule="gpipe")),
}
