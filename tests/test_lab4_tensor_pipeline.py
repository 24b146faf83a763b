"""Tensor and pipeline parallelism, and the mesh of tensor and data parallelism, against one process (lab 4).

Each world size is launched once and runs all cases; the tests read what the ranks brought back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import parallel_training
import pytest
import torch
import torch.distributed as dist
from parallel_training import (
    STEPS,
    Run,
    assert_same_run,
    batch_of_step,
    reference,
    shard_of_batch,
    train,
)

from solutions.lab4_zero.held_activations import HeldActivations
from solutions.lab4_zero.pipeline import Pipeline
from solutions.lab4_zero.pipeline_order import gpipe_order, one_f_one_b_order
from solutions.lab4_zero.pipeline_stages import split_gpt
from solutions.lab4_zero.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from solutions.lab4_zero.tensor_parallel_gpt import clip_grad_norm, tensor_parallel_gpt, whole_parameters
from utils.distributed import Ledger, launch, record_collectives
from utils.gpt import GPT, TINY, GPTConfig, batch

#: Five blocks, five heads of 7, an MLP of 245: nothing that 2, 3 or 4 ranks share evenly; tied, frozen, unused.
FULL = TINY.replace(layers=3, unused_parameter=True)
#: Nothing tied: every gradient is then a sum over micro-batches in their order, in one process as in a pipeline.
UNTIED = TINY.replace(tied=False, bias=False, frozen_positions=False)
#: For counting and for many short runs.
SMALL = GPTConfig(vocabulary=11, context=5, layers=3, heads=2, hidden=6)
ROWS = 7
#: A larger epsilon than other tests': among more layers a bias whose gradient nearly cancels errs by 1e-6 itself.
ADAMW = {**parallel_training.ADAMW, "eps": 1e-4}
ORDERS = {"1f1b": one_f_one_b_order, "gpipe": gpipe_order}


@dataclass(frozen=True)
class Case:
    """One training run of ten AdamW steps."""

    config: GPTConfig
    clip: float | None = None
    accumulation: int = 1
    micro_batches: int = 1  # of a pipeline
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    exact: bool = False  # compare bit for bit, with one process that takes the pipeline's micro-batches one by one


TENSOR = {
    "plain": Case(FULL),
    "clipped and accumulated": Case(FULL, clip=0.5, accumulation=2),
    "ranks without a head": Case(FULL.replace(heads=1, layers=2), clip=0.5),
    "untied, checkpointed": Case(UNTIED.replace(checkpointing=True)),
    "float64": Case(FULL, clip=0.5, dtype=torch.float64),
}
PIPELINE = {
    "1f1b": Case(FULL, micro_batches=5),
    "gpipe": Case(FULL, micro_batches=5, schedule="gpipe"),
    "clipped and accumulated": Case(FULL, clip=0.5, accumulation=2, micro_batches=5),
    "stages without a block": Case(FULL.replace(layers=1), micro_batches=7),
    "untied, checkpointed": Case(UNTIED.replace(checkpointing=True), clip=0.5, micro_batches=3, schedule="gpipe"),
    "float64": Case(FULL, clip=0.5, micro_batches=5, dtype=torch.float64),
    "1f1b, exact": Case(UNTIED, micro_batches=4, exact=True),
    "gpipe, exact": Case(UNTIED, micro_batches=4, schedule="gpipe", exact=True),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made within are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def one_process(case: Case) -> Run:
    """What a case must give."""
    accumulation = case.micro_batches if case.exact else case.accumulation
    with default_dtype(case.dtype):
        return reference(case.config, accumulation=accumulation, clip=case.clip, optimizer=ADAMW)


def model_of(case: Case) -> GPT:
    with default_dtype(case.dtype):
        return GPT(case.config)


def train_tensor_parallel(case: Case) -> Run:
    """On each rank: all rows, a part of each layer."""
    model = tensor_parallel_gpt(model_of(case))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)

    def step_and_clear() -> float | None:
        norm = None if case.clip is None else float(clip_grad_norm(model, case.clip))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    run = train(model, step_and_clear, 0, 1, config=case.config, accumulation=case.accumulation)
    run.parameters = whole_parameters(model)
    return run


def train_pipeline(case: Case) -> Run:
    """On each rank: its stage; the losses are the last stage's."""
    stage = split_gpt(model_of(case), dist.get_world_size())[dist.get_rank()]
    pipeline = Pipeline(stage, schedule=case.schedule)
    return train_stage(case, pipeline)


def train_stage(case: Case, pipeline: Pipeline) -> Run:
    stage, run = pipeline.stage, Run([], {})
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW) if trained else None  # a stage may have no parameter
    for step in range(STEPS):
        rows = batch_of_step(case.config, step)
        losses = [
            pipeline.step(*shard_of_batch(rows, k, case.accumulation), case.micro_batches, 1 / case.accumulation)
            for k in range(case.accumulation)
        ]
        if case.clip is not None:
            run.norms.append(float(pipeline.clip_grad_norm(case.clip)))
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
        if stage.last:
            run.losses.append(float(sum(losses)))
    run.parameters = whole_parameters(stage)
    return run


def count_tensor_parallel() -> tuple[Ledger, Ledger]:
    """What a forward and a backward pass of :data:`SMALL` send."""
    model = tensor_parallel_gpt(GPT(SMALL))
    tokens, targets = batch(SMALL, ROWS)
    with record_collectives() as forward:
        loss = model(tokens, targets)
    with record_collectives() as backward:
        loss.backward()
    return forward, backward


def layers_against_whole() -> dict[str, float]:
    """Largest differences of parallel layers, drawn from one seed, from the whole ones: outputs and gradients."""
    torch.manual_seed(3)
    rank, differences = dist.get_rank(), {}
    x, g = torch.randn(2, 5, 7), torch.randn(2, 5, 11)
    whole = torch.nn.Linear(7, 11)
    theirs = x.clone().requires_grad_()
    y = whole(theirs)
    y.backward(g)
    for name, layer_class in {"column": ColumnParallelLinear, "row": RowParallelLinear}.items():
        torch.manual_seed(3)
        torch.randn(2, 5, 7), torch.randn(2, 5, 11)  # the same draws before the layer as before the whole one
        layer = layer_class(7, 11)
        mine = layer.indices(rank)
        given = (x if name == "column" else x[..., mine]).clone().requires_grad_()
        out = layer(given)
        out.backward(g[..., mine] if name == "column" else g)
        pairs = {
            "output": (out, y[..., mine] if name == "column" else y),
            "input's gradient": (given.grad, theirs.grad if name == "column" else theirs.grad[..., mine]),
            "weight's gradient": (layer.whole_of("weight", layer.weight.grad), whole.weight.grad),
            "bias's gradient": (layer.whole_of("bias", layer.bias.grad), whole.bias.grad),
            "weight": (layer.whole_of("weight", layer.weight), whole.weight),
        }
        for what, (found, right) in pairs.items():
            assert found.shape == right.shape
            differences[f"{name}: {what}"] = float((found - right).abs().max()) if right.numel() else 0.0
    return differences


@dataclass
class Swept:
    """One pipeline step of :data:`SMALL`, its gradients held against the whole model's on the spot."""

    schedule: str
    micro_batches: int
    peak: int
    difference: float  # largest, of loss and gradients
    ledger: Ledger


def sweep() -> list[Swept]:
    """Each schedule with 1 to 6 micro-batches of 7 rows."""
    rank, stages, found = dist.get_rank(), dist.get_world_size(), []
    tokens, targets = batch(SMALL, ROWS)
    targets[0, :3] = -100  # micro-batches differ in the number of targets too
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
            pairs += [(mine, loss)] if rank == stages - 1 else []
            difference = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
            found.append(Swept(schedule, micro_batches, pipeline.peak_in_flight, difference, ledger))
    return found


def held_bytes() -> dict[str, int]:
    """Most bytes that autograd holds on this stage: of one row at a time, of six rows under each schedule."""
    stage = split_gpt(GPT(FULL), dist.get_world_size())[dist.get_rank()]
    found = {}
    for name, rows, schedule in (("one", 1, "1f1b"), ("1f1b", 6, "1f1b"), ("gpipe", 6, "gpipe")):
        with HeldActivations() as held:
            Pipeline(stage, schedule=schedule).step(*batch(FULL, rows), rows)
        assert held.bytes == 0, "a backward pass has left something behind"
        found[name] = held.peak
    return found


@dataclass
class Found:
    """What a rank brings back."""

    tensor: dict[str, Run]
    pipeline: dict[str, Run]
    counted: tuple[Ledger, Ledger]
    layers: dict[str, float]
    swept: list[Swept]
    held: dict[str, int]


def everything() -> Found:
    """On each rank: all cases."""
    return Found(
        tensor={name: train_tensor_parallel(case) for name, case in TENSOR.items()},
        pipeline={name: train_pipeline(case) for name, case in PIPELINE.items()},
        counted=count_tensor_parallel(),
        layers=layers_against_whole(),
        swept=sweep(),
        held=held_bytes(),
    )


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def found(request: pytest.FixtureRequest) -> list[Found]:
    return launch(everything, world_size=request.param)


def with_tied_head(run: Run) -> Run:
    """The reference with the names that the last stage's parameters have."""
    named = {"head.weight": run.parameters["embedding.weight"], **run.parameters}
    return Run(run.losses, named, run.norms)


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR)
def test_a_tensor_parallel_gpt_trains_as_one_process_does(found: list[Found], name: str) -> None:
    expected, runs = one_process(TENSOR[name]), [rank.tensor[name] for rank in found]
    assert all(run.parameters.keys() == expected.parameters.keys() for run in runs)
    assert_same_run(runs, expected, *tolerance_of(TENSOR[name]))
    for run in runs[1:]:  # what is whole everywhere stays the same everywhere, bit for bit
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.parameters[key], runs[0].parameters[key]) for key in expected.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINE)
def test_a_pipeline_trains_as_one_process_does(found: list[Found], name: str) -> None:
    expected, runs = with_tied_head(one_process(PIPELINE[name])), [rank.pipeline[name] for rank in found]
    assert {key for run in runs for key in run.parameters} >= one_process(PIPELINE[name]).parameters.keys()
    for run in runs:
        run.losses = runs[-1].losses
    assert_same_run(runs, expected, *tolerance_of(PIPELINE[name]))
    if PIPELINE[name].exact:
        for run in runs:
            assert all(torch.equal(parameter, expected.parameters[key]) for key, parameter in run.parameters.items())
    if PIPELINE[name].config.tied:
        assert torch.equal(runs[0].parameters["embedding.weight"], runs[-1].parameters["head.weight"])


def tolerance_of(case: Case) -> tuple[float, ...]:
    return (1e-11,) if case.dtype == torch.float64 else ()


@pytest.mark.slow
def test_tensor_parallelism_calls_four_all_reduces_a_layer_of_the_residual_stream(found: list[Found]) -> None:
    stream = ROWS * SMALL.context * SMALL.hidden
    for rank in found:
        for ledger in rank.counted:
            assert {entry.kind for entry in ledger.entries} == {"all_reduce"}
            assert ledger.count("all_reduce") == 2 * SMALL.layers
            assert [entry.elements for entry in ledger.entries] == [stream] * 2 * SMALL.layers


@pytest.mark.slow
def test_parallel_layers_have_the_whole_ones_outputs_and_gradients(found: list[Found]) -> None:
    for rank in found:
        assert max(rank.layers.values()) < 1e-5, rank.layers


@pytest.mark.slow
def test_a_pipeline_of_any_micro_batches_has_the_whole_models_gradients(found: list[Found]) -> None:
    for rank in found:
        assert len(rank.swept) == 12
        for step in rank.swept:
            assert step.difference < 1e-6, f"{step.schedule}, {step.micro_batches} micro-batches"


@pytest.mark.slow
def test_a_stage_sends_each_micro_batch_once_each_way(found: list[Found]) -> None:
    stages, stream = len(found), ROWS * SMALL.context * SMALL.hidden
    for stage, rank in enumerate(found):
        ends = (stage > 0) + (stage < stages - 1)  # neighbours: one gets activations, the other gradients
        for step in rank.swept:
            for kind in ("send", "recv"):
                assert step.ledger.count(kind) == ends * step.micro_batches
                assert step.ledger.elements(kind) == ends * stream
            shares = stage in (0, stages - 1)
            assert step.ledger.count("all_reduce") == shares
            assert step.ledger.elements("all_reduce") == shares * SMALL.vocabulary * SMALL.hidden
    for steps in zip(*(rank.swept for rank in found), strict=True):
        assert sum(step.ledger.count("send") for step in steps) == 2 * (stages - 1) * steps[0].micro_batches


@pytest.mark.slow
def test_1f1b_holds_fewer_micro_batches_than_gpipe(found: list[Found]) -> None:
    for stage, rank in enumerate(found):
        for step in rank.swept:
            most = len(found) - stage if step.schedule == "1f1b" else step.micro_batches
            assert step.peak == min(most, step.micro_batches)


@pytest.mark.slow
def test_what_autograd_holds_is_what_is_in_flight(found: list[Found]) -> None:
    for stage, rank in enumerate(found):
        assert rank.held["gpipe"] == 6 * rank.held["one"]
        assert rank.held["1f1b"] == (len(found) - stage) * rank.held["one"]
