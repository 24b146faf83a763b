"""Lab 4's data parallelism: the same numbers as one process, nothing sent or kept that the formulas do not name."""

from __future__ import annotations

import functools
from typing import Any

import data_parallel_ranks as ranks
import parallel_training as training
import pytest
import torch
from slow_machine_launch import launch, once
from torch import nn
from torch.utils.checkpoint import checkpoint

from solutions import lab4_zero as lab
from solutions.lab4_zero.buckets import Bucket, make_buckets
from utils import gpt, transformer_math

#: Three and five ranks are those of the exercises' checks.
WORLD_SIZES = (2, *(pytest.param(size, marks=pytest.mark.thorough) for size in (3, 4)))


@once
def job(world_size: int) -> list[dict[str, Any]]:
    """Results of all ranks."""
    return launch(ranks.everything, world_size=world_size)


@functools.cache
def one_process(case: str, summands: int = 1) -> training.Run:
    return training.reference(summands=summands, **ranks.CASES[case])


@pytest.fixture(params=WORLD_SIZES)
def world_size(request):
    return request.param


def trainable(config=training.CONFIG) -> int:
    return sum(p.numel() for p in gpt.GPT(config).parameters() if p.requires_grad)


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks_", [1, 2, 3, 64])
def test_the_bytes_on_a_rank_are_those_of_the_course_s_model(stage, ranks_):
    components = transformer_math.memory_per_rank(999, ranks_, stage)
    assert lab.bytes_per_rank(999, ranks_, stage) == pytest.approx(sum(components.values()))


# ---- buckets -------------------------------------------------------------------------------------------------------


def test_buckets_take_each_trainable_parameter_once_last_first_and_never_mix_dtypes():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5, 6)]
    parameters[1].requires_grad_(False)
    parameters[2].data = parameters[2].data.double()
    buckets = make_buckets([*parameters, parameters[0]], bucket_bytes=1000, shards=4)
    assert [[len(p) for p in bucket.parameters] for bucket in buckets] == [[6], [5], [3]]
    assert [(bucket.numel, bucket.padding) for bucket in buckets] == [(8, 2), (8, 3), (4, 1)]
    assert len(make_buckets(parameters, bucket_bytes=1)) == 3
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        make_buckets(parameters, 0)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 50])
def test_the_pieces_of_all_shards_are_each_parameter_exactly_once(shards):
    bucket = Bucket([nn.Parameter(torch.empty(shape)) for shape in ((3, 5), (1,), (), (2, 2, 2), (7,))], shards)
    covered = [[] for _ in bucket.parameters]
    for rank in range(shards):
        for piece in bucket.pieces(rank):
            assert 0 <= piece.start < piece.stop <= bucket.shard_numel
            covered[piece.parameter] += range(piece.offset, piece.offset + piece.stop - piece.start)
            assert rank * bucket.shard_numel + piece.start == bucket.starts[piece.parameter] + piece.offset
    assert covered == [list(range(parameter.numel())) for parameter in bucket.parameters]


# ---- the same as one process ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kind", "case"),
    [pytest.param(*run, marks=pytest.mark.thorough if run[0] > 2 else ()) for run in ranks.RUNS],
)
def test_ten_steps_are_those_of_one_process(world_size, kind, case):
    """Parameter by parameter where one process adds N gradients; as one vector where it has the batch in one piece.

    There the sums within a gradient have another order too, which single biases feel: up to 8e-7 of their size.
    """
    runs = [result["runs"][kind, case] for result in job(world_size)]
    training.assert_same_run(runs, one_process(case, world_size))
    whole = one_process(case)
    expected = torch.cat([value.flatten() for value in whole.parameters.values()])
    for run in runs:
        found = torch.cat([run.parameters[name].flatten() for name in whole.parameters])
        assert training.relative_difference(found, expected) < training.TOLERANCE
    assert training.mean_losses(runs) == pytest.approx(whole.losses, rel=training.TOLERANCE)
    for run in runs[1:]:
        assert all(torch.equal(runs[0].parameters[name], run.parameters[name]) for name in whole.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"), [("ddp", "plain"), ("ddp", "accumulated"), ("ddp", "clipped"), ("zero1", "plain"),
                       ("zero1", "accumulated"), ("zero2", "plain")]
)  # fmt: skip
def test_two_ranks_give_the_bits_of_one_process_that_adds_two_gradients(kind, case):
    """Two numbers have one sum. Not so: ZeRO's norm (of other parts), ZeRO-2's accumulation (of sums over ranks)."""
    training.assert_same_run([result["runs"][kind, case] for result in job(2)], one_process(case, 2), tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ranks.KINDS)
@pytest.mark.parametrize("case", ["plain", "accumulated"])
def test_one_rank_alone_gives_the_bits_of_one_process(alone, kind, case):
    trainer = ranks.Trainer(kind, training.model_of())
    run = trainer.train(accumulation=ranks.CASES[case].get("accumulation", 1))
    training.assert_same_run([run], one_process(case), tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ranks.KINDS)
@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
def test_the_size_of_the_buckets_changes_no_bit(alone, monkeypatch, kind, bucket_bytes):
    monkeypatch.setattr(ranks, "BUCKET_BYTES", bucket_bytes)
    trainer = ranks.Trainer(kind, training.model_of())
    assert len(trainer.buckets()) == (len(trainer.trainable()) if bucket_bytes == 1 else 1)
    training.assert_same_run([trainer.train()], one_process("plain"), tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ranks.KINDS)
def test_layers_that_only_some_ranks_use_are_trained_and_those_that_none_uses_are_left_alone(world_size, kind):
    torch.manual_seed(0)
    start = training.parameters_of(ranks.Choosy())
    for result in job(world_size):
        found, expected = result["choosy"][kind], result["choosy"][None]
        for name, value in expected.items():
            assert training.relative_difference(found[name], value) < 1e-6, name
        assert torch.equal(found["none.weight"], start["none.weight"])  # AdamW would have decayed it


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ranks.OPTIMIZERS)
@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_a_model_of_fewer_elements_than_ranks_is_trained_and_saved_with_any_optimizer(world_size, kind, optimizer):
    for result in job(world_size):
        found, expected = result["tiny"][kind, optimizer], result["tiny"][None, optimizer]
        for name, value in expected.items():
            assert found[name].shape == value.shape
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


# ---- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_sends_two_psi_in_each_form_and_nothing_else(world_size):
    psi = trainable(training.CONFIG.replace(unused_parameter=False))
    for result in job(world_size):
        for kind, stage in zip(ranks.KINDS, range(3), strict=True):
            ledger, numel, buckets = result["ledgers"][kind, False]
            kinds = ["all_reduce"] if kind == "ddp" else ["reduce_scatter", "all_gather"]
            assert {entry.kind for entry in ledger.entries} == set(kinds)
            for name in kinds:
                assert ledger.elements(name) == numel and ledger.count(name) == buckets > 3
                assert ledger.bytes(name) == 4 * numel
            if kind == "ddp":
                assert numel == psi
            assert 0 <= numel - psi < world_size * buckets  # less than one element a rank and bucket is padding
            volume = transformer_math.communication_volume(numel, world_size, stage)
            assert ledger.volume() == pytest.approx(sum(volume.values()), abs=0, rel=1e-12)


@pytest.mark.slow
def test_an_unused_parameter_costs_one_small_number_for_each_parameter_a_step(world_size):
    parameters = sum(p.requires_grad for p in gpt.GPT(training.CONFIG).parameters())
    for kind in ranks.KINDS:
        ledger, _, buckets = job(world_size)[0]["ledgers"][kind, True]
        notes = [entry for entry in ledger.entries if entry.dtype == "int32"]
        assert [(entry.kind, entry.elements) for entry in notes] == [("all_reduce", parameters)]
        assert ledger.count() == 1 + buckets * (1 if kind == "ddp" else 2)


# ---- what is kept --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_zero_2_never_has_more_full_gradients_than_two_buckets(world_size):
    small = 10 * 61  # gradients of activations
    for live in (result["live"] for result in job(world_size)):
        assert (
            live[None]["all"] == live[None]["after"] <= live[None]["most"] <= live[None]["all"] + small
        )  # it sees them
        assert live["zero2"]["most"] <= 2 * live["zero2"]["bucket"] + small < live["zero2"]["all"] / 4
        assert live["zero2"]["kept"] == 0 and live["zero2"]["after"] == 0
        assert live["ddp"]["kept"] == live["zero1"]["kept"] == 40


@pytest.mark.slow
def test_bfloat16_parameters_and_float32_masters_take_the_formula_s_bytes(world_size):
    for result in job(world_size):
        for stage, kind in ((1, "zero1"), (2, "zero2")):
            found = result["halves"][kind]
            padded = found["weight_bytes"] // 2
            kept = found["weight_bytes"] + found["gradient_bytes"] + 3 * found["master_bytes"]
            assert kept == lab.bytes_per_rank(padded, world_size, stage)
            assert found["moments"] * 4 <= 2 * found["master_bytes"]
    psi = trainable() - training.CONFIG.context  # the unused parameter has no moments
    for kind in ("zero1", "zero2"):
        assert sum(result["halves"][kind]["moments"] for result in job(world_size)) == 2 * psi


@pytest.mark.slow
def test_float32_masters_are_stepped_and_rounded_into_the_parameters(world_size):
    for result in job(world_size):
        one, two = (result["halves"][kind] for kind in ("zero1", "zero2"))
        for master, (name, parameter) in zip(two["masters"], two["run"].items(), strict=True):
            if name != "positions":
                assert master.dtype == torch.float32 and parameter.dtype == torch.bfloat16
            assert torch.equal(master.bfloat16(), parameter), name
        assert all(torch.equal(a, b) for a, b in zip(one["masters"], two["masters"], strict=True))
        assert any(not torch.equal(master, master.bfloat16().float()) for master in two["masters"])


# ---- habits --------------------------------------------------------------------------------------------------------


def test_gradients_are_views_of_the_buckets(alone):
    model = gpt.GPT(training.CONFIG)
    ddp = lab.DistributedDataParallel(model, bucket_bytes=ranks.BUCKET_BYTES)
    tokens = training.batch_of_step(training.CONFIG, 0)
    for _ in range(2):  # the second adds in place
        ddp(*tokens).backward()
        places = {flat.untyped_storage().data_ptr() for flat in ddp.flat_gradients}
        used = [p for p in model.parameters() if p.grad is not None]
        assert {p.grad.untyped_storage().data_ptr() for p in used} == places and len(used) > 10
    assert model.unused.grad is None and model.positions.grad is None


def test_a_backward_pass_that_fails_does_not_spoil_the_next(alone):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp = lab.DistributedDataParallel(layers)

    def fail(_gradient):
        raise KeyError("halfway")

    out = layers[0](torch.ones(1, 3))
    out.register_hook(fail)
    with pytest.raises(KeyError):
        layers[1](out).sum().backward()
    layers.zero_grad()
    ddp(torch.ones(1, 3)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (layers[0].bias, layers[1].bias))


def test_a_second_gradient_in_one_backward_pass_is_refused(alone):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return self.head(x).sum()

    ddp = lab.DistributedDataParallel(Twice())
    with pytest.raises(RuntimeError, match="got a gradient twice in one backward pass; checkpoint with use_reentrant"):
        ddp(torch.ones(1, 3, requires_grad=True)).backward()


def test_a_scheduler_moves_the_rate_of_a_sharded_optimizer(alone):
    layer = nn.Linear(3, 3)
    optimizer = lab.Zero1Optimizer(layer.parameters(), torch.optim.SGD, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for rate in (1.0, 0.5, 0.25):
        before = layer.bias.detach().clone()
        layer(torch.zeros(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(before - layer.bias, torch.full((3,), rate))


def test_groups_of_parameters_keep_their_own_options(alone):
    layer = nn.Linear(3, 3)
    groups = [{"params": [layer.weight], "weight_decay": 0.5}, {"params": [layer.bias]}]
    optimizer = lab.Zero1Optimizer(groups, torch.optim.AdamW, lr=0.0, weight_decay=0.0)
    assert [group["weight_decay"] for group in optimizer.sharded.inner.param_groups] == [0.5, 0.0]
    assert [group["weight_decay"] for group in optimizer.state_dict()["groups"]] == [0.5, 0.0]
