"""The check of exercise 4.9: the step of a pipeline, on ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils import gpt, schedules
from utils.checks.core import Exercise, classic
from utils.checks.hidden import Draw, Tolerance
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck
from utils.checks.ranks.scenarios import RankObservation, RankScenario

#: The orders that are run, whatever exercise 4.8 says.
_ORDERS = {"1f1b": schedules.one_f_one_b, "gpipe": schedules.gpipe}
_NO_GRADIENT = classic(
    "the activation that has come is a leaf of the stage's graph: it must require a gradient before the forward pass, "
    "and what it gets is for the stage before",
    1,
)
_NOT_MADE = classic(
    "each action is run and puts into self.made what an exchange sends, and an exchange into self.received what an "
    "action needs, by (content, micro-batch); no activation comes to the first stage, and no gradient to the last",
    2,
)
_LEFT = classic("what an action has used is taken out of self.received (pop): else it lives until the step's end", 5)
_NOT_FREED = classic("every F has its B, which is run, and in which the micro-batch leaves in_flight", 5)
_NOT_TIED = (
    "no gradient has reached the embedding, or the head: no backward pass runs through this stage's graph, or the "
    "stage's actions are not run"
)
_END = classic(
    "a micro-batch's backward pass starts where its forward pass has ended: on the last stage from the loss, a number "
    "that it forms of its targets; on a stage in the middle from its output and the gradient that comes",
    3,
)
_FROZEN_RAISED = {
    "gradient edge for a Tensor that does not": (
        "a stage that is frozen, or stands behind frozen ones alone, has no graph: its micro-batch's end is None"
    )
}
_RAISED = {
    ("'NoneType' object has no attribute 'grad'", "x.grad"): (
        "x is None on the first stage: it has no input, and no stage before it to send a gradient to"
    ),
    ("NoneType", "x.grad"): _NO_GRADIENT,
    "KeyError: (": _NOT_MADE,
    "the schedule ended before": _NOT_FREED,
    "'str' object has no attribute 'kind'": classic("an Action is a tuple too: ask whether an item is one first", 2),
    ("must be Tensor, not NoneType", "tied.grad"): _NOT_TIED,
    ("of type torch.Tensor", "tied.grad"): _NOT_TIED,
    "grad can be implicitly created only": _END,
    ("'NoneType' object is not iterable", "autograd.backward"): _END,
    "Mismatch in shape": classic(
        "the gradient does not fit the output: B i goes backward through F i's graph, from the gradient that has come "
        "for micro-batch i",
        6,
    ),
}


@dataclass(frozen=True)
class Batch:
    """A GPT and a step of it in micro-batches.

    Attributes:
        order: a key of ``_ORDERS``.
        empty: rows whose targets are all left out: the first ones.
        scale: factor of the loss.
        frozen: whether the first stage has nothing to train (of three stages: the embeddings, and the first block).
    """

    seed: int
    layers: int = 3
    micro_batches: int = 5
    order: str = "1f1b"
    empty: int = 0
    scale: float = 1.0
    frozen: bool = False

    @property
    def config(self) -> gpt.GPTConfig:
        """The sizes of the model."""
        return gpt.TINY.replace(layers=self.layers, hidden=10, heads=2, mlp_ratio=2, vocabulary=17, context=5)

    def model(self) -> gpt.GPT:
        """The whole model."""
        model = gpt.GPT(self.config, seed=self.seed)
        for part in (model.embedding, model.positions, model.blocks[0]) if self.frozen else ():
            part.requires_grad_(False)
        return model

    def rows(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets of six rows; some targets of the last row do not count."""
        tokens, targets = gpt.batch(self.config, 6, seed=self.seed)
        targets = targets.clone()
        targets[: self.empty] = -100
        targets[-1, 2:] = -100
        return tokens, targets

    def actions(self, stage: int, stages: int, micro_batches: int) -> Sequence[schedules.Action]:
        """One stage's actions."""
        return _ORDERS[self.order](stages, micro_batches).orders[stage]


class Living:
    """Counts which inputs and outputs of a stage's forward passes are still alive, at each of them.

    Attributes:
        inputs, outputs: the most that were alive at once; of inputs that require a gradient, and the one that comes
            counts too; of outputs only those of earlier passes.
    """

    def __init__(self, stage: nn.Module) -> None:
        self.inputs = self.outputs = 0
        self._known: dict[str, list[weakref.ref]] = {"inputs": [], "outputs": []}
        stage.register_forward_pre_hook(self._before)
        stage.register_forward_hook(lambda stage, given, output: self._known["outputs"].append(weakref.ref(output)))

    def _before(self, stage: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given[0].is_floating_point():
            self._known["inputs"].append(weakref.ref(given[0]))
        alive = {what: sum(ref() is not None for ref in known) for what, known in self._known.items()}
        self.inputs, self.outputs = max(self.inputs, alive["inputs"]), max(self.outputs, alive["outputs"])


@contextmanager
def _watched(pipeline: type) -> Iterator[set[tuple[str, int]]]:
    """What is still in ``received`` when a step ends, of a pipeline of this class."""
    module, left = sys.modules[pipeline.__module__], set()

    class Watched(module._Run):
        def finish(self) -> None:
            left.update(self.received)
            super().finish()

    with mock.patch.object(module, "_Run", Watched):
        yield left


def _play(answer: Mapping[str, Callable], batch: Batch) -> dict[str, Any]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = answer["split_gpt"](batch.model(), stages)[rank]
    living = Living(stage)
    pipeline = answer["Pipeline"](stage, schedule=batch.actions)
    with _watched(answer["Pipeline"]) as left:
        loss = pipeline.step(*batch.rows(), micro_batches=batch.micro_batches, scale=batch.scale)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in stage.named_parameters()}
    return {
        "loss": None if loss is None else float(loss.detach()), "gradients": gradients, "peak": pipeline.peak_in_flight,
        "inputs": living.inputs, "outputs": living.outputs, "graph": loss is not None and loss.requires_grad,
        "left": sorted(left),
    }  # fmt: skip


def _judge(observations: Sequence[RankObservation], batch: Batch) -> Problem | None:
    model = batch.model()
    loss = model(*batch.rows()) * batch.scale
    loss.backward()
    right = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    if problem := _judge_loss(observations[-1].value["loss"], batch, float(loss.detach())):
        return problem
    gradients = [observed.value["gradients"] for observed in observations]
    if problem := _judge_gradients(gradients, right, batch):
        return problem
    for rank, observed in enumerate(observations):
        seen, most = observed.value, min(len(observations) - rank, batch.micro_batches)
        most = batch.micro_batches if batch.order == "gpipe" else most
        if seen["peak"] != most:
            cause = _NOT_FREED if seen["peak"] > most else ""
            return Problem(f"stage {rank} held {seen['peak']} micro-batches at once, expected {most}", cause)
        if seen["graph"]:
            return Problem("the loss that is returned has a graph", classic("detach what is added up", 5))
        if seen["left"]:
            first = ", ".join(map(repr, seen["left"][0]))
            return Problem(
                f"stage {rank} ends its step with {len(seen['left'])} entries in received: ({first}), ...", _LEFT
            )
        if seen["inputs"] > most:
            cause = classic("an input lives from its F to its B, and no longer", 5)
            return Problem(f"stage {rank} keeps {seen['inputs']} inputs at once, {most} are in flight", cause)
        if seen["outputs"] and rank < len(observations) - 1:
            cause = "the output is sent without its graph (detach), and the graph needs no more than its edge"
            cause = classic(f"{cause} (get_gradient_edge)", 5)
            return Problem(f"stage {rank} still holds {seen['outputs']} outputs of earlier forward passes", cause)
    return None


def _judge_loss(got: float | None, batch: Batch, right: float) -> Problem | None:
    if got is not None and abs(got - right) <= 1e-5 * abs(right):
        return None
    cause = "" if got is not None else classic("on the last stage self.loss adds up the weighted losses", 4)
    if got is not None and got != got:
        cause = classic(
            "a micro-batch without targets has a mean over nothing, which is not a number: it counts as 0", 4
        )
    elif got is not None:
        tokens, targets = (rows.tensor_split(batch.micro_batches) for rows in batch.rows())
        model = batch.model()
        with torch.no_grad():
            means = [float(model(*pair)) for pair in zip(tokens, targets) if (pair[1] != -100).any()]
            last = float(model(tokens[-1], targets[-1]))
        weight = batch.scale * float((targets[-1] != -100).sum()) / float((batch.rows()[1] != -100).sum())
        known = {
            "this is the sum of the micro-batches' means: each counts by its weight": sum(means),
            "this is the mean of the micro-batches' means: each counts by its number of targets": sum(means)
            / len(means),
            "this is the last micro-batch's share alone: the loss adds up": last * weight,
        }
        cause = next((classic(text, 4) for text, value in known.items() if abs(got - value) < 1e-5 * abs(value)), "")
    return Problem(f"the pipeline's loss is {got}, one process has {right:.6g}", cause)


def _judge_gradients(
    gradients: Sequence[Mapping[str, Tensor | None]], right: Mapping[str, Tensor | None], batch: Batch
) -> Problem | None:
    wrong = [
        (rank, name)
        for rank, of in enumerate(gradients)
        for name, gradient in of.items()
        if not _close(gradient, right[name])
    ]
    if not wrong:
        return None
    tied = ("embedding.weight", "head.weight")  # the first and the last stage add up what each of them has got
    rank, name = ([place for place in wrong if place[1] not in tied] or wrong)[-1]
    gradient, expected, cause = gradients[rank][name], right[name], ""
    before = [gradient for of in gradients[:-1] for name, gradient in of.items() if name not in tied]
    if rank < len(gradients) - 1 and not any(gradient is not None and gradient.any() for gradient in before):
        cause = _NO_GRADIENT
    elif gradient is not None and expected is not None and expected.any():
        ratio = float((gradient * expected).sum() / expected.square().sum())
        if torch.allclose(gradient, ratio * expected, rtol=1e-3, atol=1e-6):
            cause = f"it is {ratio:.3g} times the right one"
        elif rank == len(gradients) - 1 and _close(gradient, _of_means(name, batch)):
            cause = classic("the loss is right, but the backward pass starts from another one: end has its weight", 4)
    shown = "None" if gradient is None or expected is None else f"off by {(gradient - expected).abs().max():.2g}"
    return Problem(f"stage {rank}: the gradient of {name} differs from one process ({shown})", cause)


def _of_means(name: str, batch: Batch) -> Tensor | None:
    """A parameter's gradient if each micro-batch's mean counts the same."""
    model = batch.model()
    for tokens, targets in zip(*(rows.tensor_split(batch.micro_batches) for rows in batch.rows()), strict=True):
        if (targets != -100).any():
            model(tokens, targets).backward()
    return dict(model.named_parameters(remove_duplicate=False))[name].grad


def _close(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-6)


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    usual = Batch(seed)
    batches = {
        "three stages, 1F1B": usual,
        "three stages, GPipe": replace(usual, order="gpipe"),
        "a micro-batch without targets": replace(usual, empty=2, scale=0.5),
        "a first stage that is frozen": replace(usual, frozen=True),
    }
    if draw is not None:
        batches = {
            f"Pipeline, {name}": replace(
                batch, layers=3 + (draw.between(0, 1) and not batch.frozen), micro_batches=draw.between(4, 6)
            )
            for name, batch in batches.items()
        }
        batches["Pipeline of two micro-batches"] = replace(usual, micro_batches=2)
    stuck = "every item of communication_plan is done, in its order: a message that one rank leaves out is waited for"
    return [
        RankScenario(name, _play, _judge, {"batch": batch}, stuck=stuck, same_calls=False,
                     raised={**_RAISED, **(_FROZEN_RAISED if batch.frozen else {})},
                     values=("loss", "gradients", "peak"))
        for name, batch in batches.items()
    ]  # fmt: skip


PIPELINE = Exercise(
    "4.9",
    "pipeline step",
    points=8,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=Tolerance(1e-4, 1e-7),
)
CHECK = DistributedCheck(
    PIPELINE, _scenarios, "the gradients are those of one process; a stage holds what is in flight, and nothing else"
)


@PIPELINE.checked_by
def check_pipeline(Pipeline: Callable, split_gpt: Callable, seed: int | None = None) -> None:
    """Exercise 4.9: one step of a pipeline, in a given order.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(Pipeline, split_gpt, seed=seed)
