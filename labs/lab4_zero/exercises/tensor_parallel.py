"""The check of exercise 4.7: a linear layer by columns, one by rows, and the MLP that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Draw, Tolerance
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck, in_group
from utils.checks.ranks.scenarios import RankObservation, RankScenario
from utils.distributed import record_collectives

_STUCK = classic("an all-reduce that only some ranks call: every rank passes through the same layers, also backward", 8)
_SHAPES = classic("which dimension is cut? nn.Linear stores the transpose: W1's columns are rows of up.weight", 6)
_DETACHED = classic(
    "autograd does not reach it: .detach(), .data or no_grad cuts it off, or a backward returns None for it", 10
)
_RAISED = {
    "incorrect number of gradients": "backward returns a gradient for each argument of forward",
    "does not require grad": _DETACHED,
    "shapes cannot be multiplied": _SHAPES,
}


class WholeMLP(nn.Module):
    """down(gelu(up(x))), as one process has it."""

    def __init__(self, seed: int, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


@dataclass(frozen=True)
class Layers:
    """The whole layers of a scenario, and what goes into them; all of it follows from the seed."""

    seed: int
    width: int = 5
    inner: int = 7
    bias: bool = True

    def mlp(self) -> WholeMLP:
        """Both layers."""
        return WholeMLP(self.seed, self.width, self.inner, self.bias)

    def normal(self, number: int, features: int) -> Tensor:
        """Normal numbers, (2, 3, features): x is number 1, dy number 2."""
        return torch.randn(2, 3, features, generator=torch.Generator().manual_seed(self.seed + number))


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def _play_layer(answer: Mapping[str, Callable], name: str, layers: Layers) -> dict[str, Any]:
    """One parallel linear layer, forward and backward."""
    rank, world_size, mlp = dist.get_rank(), dist.get_world_size(), layers.mlp()
    linear = mlp.up if name == "ColumnParallelLinear" else mlp.down
    layer = answer[name].from_linear(linear)
    x, dy = layers.normal(1, linear.in_features), layers.normal(2, linear.out_features)
    if name == "RowParallelLinear":
        x = x.tensor_split(world_size, -1)[rank].clone()
    else:
        dy = dy.tensor_split(world_size, -1)[rank].clone()
    x.requires_grad_()
    with record_collectives() as ledger:
        y = layer(x)
        forward = ledger.count()
        y.backward(dy)
    return {
        "y": y.detach(), "dx": x.grad, "gradients": _gradients(layer), "forward": forward, "all": ledger.count()
    }  # fmt: skip


def _play_operators(answer: Mapping[str, Callable], layers: Layers, transposed: bool = False) -> dict[str, Any]:
    """What the two operators give, where an answer has them by their names, and whether they change what they are
    given; with ``transposed`` of tensors that lie transposed in memory on every second rank."""
    known = getattr(answer["RowParallelLinear"].forward, "__globals__", {})
    known = {**getattr(answer["ColumnParallelLinear"].forward, "__globals__", {}), **known}
    found: dict[str, Any] = {"changed": {}, "results": {}}
    for name in ("reduce_from_tp_region", "copy_to_tp_region"):
        if not callable(operator := known.get(name)):
            continue
        x, gradient = (layers.normal(number + dist.get_rank(), layers.width) for number in (0, 3))
        if transposed and dist.get_rank() % 2:
            x, gradient = (value.transpose(0, 2).contiguous().transpose(0, 2) for value in (x, gradient))
        given = {"x": (x, x.clone()), "the gradient": (gradient, gradient.clone())}
        x.requires_grad_()
        y = operator(x)
        y.backward(gradient)
        found["changed"] |= {f"{name} changes {what} ": not torch.equal(*pair) for what, pair in given.items()}
        found["results"][name] = [y.detach(), x.grad]
    return found


def _play_mlp(answer: Mapping[str, Callable], layers: Layers, **group: ProcessGroup) -> dict[str, Any]:
    mlp = answer["TensorParallelMLP"](layers.mlp(), **group)
    x = layers.normal(1, layers.width).requires_grad_()
    sizes = {name: tuple(p.shape) for name, p in mlp.named_parameters()}
    # whatever their names and their order in the module: by shape, and where these are alike by what they hold
    places = {name: (p.dim(), tuple(p.shape), p.flatten().tolist()) for name, p in mlp.named_parameters()}
    with record_collectives() as ledger:
        y = mlp(x)
        forward = [(entry.kind, entry.elements) for entry in ledger.entries]
        y.backward(layers.normal(2, layers.width))
    every = [(entry.kind, entry.elements) for entry in ledger.entries]
    gradients = sorted(_gradients(mlp).items(), key=lambda item: places[item[0]])
    return {
        "y": y.detach(), "dx": x.grad, "gradients": dict(gradients), "forward": forward,
        "backward": every[len(forward):], "sizes": sizes, "input": x.detach(),
    }  # fmt: skip


def _close(got: Tensor | None, right: Tensor) -> bool:
    return got is not None and got.shape == right.shape and torch.allclose(got, right, rtol=1e-4, atol=1e-5)


def _wrong(
    what: str, rank: int, got: Tensor | None, right: Tensor, candidates: Mapping[str, tuple[Tensor, int]]
) -> Problem | None:
    """None if right; else what it is, if it is one of the candidates."""
    if _close(got, right):
        return None
    if got is None:
        return Problem(f"{what} on rank {rank} is None", _DETACHED)
    if got.shape != right.shape:
        shown = f"shape {tuple(got.shape)}, expected shape {tuple(right.shape)}"
        return Problem(f"{what} on rank {rank} has {shown}", _SHAPES)
    bad = ~torch.isclose(got, right, rtol=1e-4, atol=1e-5)
    index = bad.flatten().nonzero()[0].item()
    details = (f"[{index}] is {got.flatten()[index].item():.5g}, expected {right.flatten()[index].item():.5g}",)
    cause = next((classic(says, n) for says, (value, n) in candidates.items() if _close(got, value)), "")
    return Problem(f"{what} on rank {rank}: {int(bad.sum())} of {bad.numel()} elements differ", cause, details)


def _wrong_bias(layer: str, rank: int, got: Tensor | None, right: Tensor, ranks: int, cause: str) -> Problem | None:
    """None if a layer's bias has the gradient ``right``."""
    if _close(got, right):
        return None
    found = "another gradient than the whole layer's"
    if got is None:
        found = "no gradient"
    elif _close(got, right / ranks):
        found = "an N-th of its gradient"
    cause = "" if found.startswith("another") else classic(cause, 4)
    return Problem(f"the bias of a {layer}-parallel layer has {found} on rank {rank}", cause)


def _collectives(forward: int, backward: int) -> str:
    return f"{forward} collective{'' if forward == 1 else 's'} forward, {backward} backward"


def _judge_operators(
    observations: Sequence[RankObservation], layers: Layers, transposed: bool = False
) -> Problem | None:
    for rank, observed in enumerate(observations):
        changed = [what for what, is_so in observed.value["changed"].items() if is_so]
        if changed:
            cause = "a collective works in place, and autograd may still need what it handed over: all-reduce a clone"
            return Problem(f"{changed[0]}that it is given, on rank {rank}", classic(cause, 9))
    sums = {}
    for first, (name, k) in {0: ("reduce_from_tp_region", 0), 3: ("copy_to_tp_region", 1)}.items():
        sums[name] = k, sum(layers.normal(first + rank, layers.width) for rank in range(len(observations)))
    for rank, observed in enumerate(observations) if transposed else ():
        for name, found in observed.value["results"].items():
            k, right = sums[name]
            if not _close(found[k], right):
                what = "gradient" if k else "sum"
                cause = "an all-reduce adds up what lies at the same place in memory: give it a contiguous clone"
                return Problem(f"the {what} of {name} is wrong on rank {rank}", classic(cause, 9))
    return None


def _judge_column(observations: Sequence[RankObservation], name: str, layers: Layers) -> Problem | None:
    linear, ranks = layers.mlp().up, len(observations)
    x, dy = layers.normal(1, layers.width), layers.normal(2, layers.inner)
    y, dx = linear(x).detach(), dy @ linear.weight.detach()
    for rank, observed in enumerate(observations):
        seen, mine, share = observed.value, *(value.tensor_split(ranks, -1)[rank] for value in (dy, y))
        no_bias = {}
        if layers.bias:
            no_bias = {"the bias is missing": (share - linear.bias.detach().tensor_split(ranks)[rank], 4)}
        if problem := _wrong("a column-parallel layer's output", rank, seen["y"], share, no_bias):
            return problem
        candidates = {
            "this is one rank's part: the gradients of what all ranks read must be summed (copy_to_tp_region)": (
                mine @ linear.weight.detach().tensor_split(ranks)[rank], 1),
            "the sum is divided by N: it is a sum, not a mean": (dx / ranks, 2),
            "the gradient is summed twice": (dx * ranks, 3),
        }  # fmt: skip
        if problem := _wrong("a column-parallel layer's input gradient", rank, seen["dx"], dx, candidates):
            return problem
        right = mine.flatten(0, 1).t() @ x.flatten(0, 1)
        if problem := _wrong("the gradient of a column-parallel weight", rank, seen["gradients"]["weight"], right, {}):
            return problem
        part = "each rank adds its part of the bias to its part of the output, and autograd does the rest"
        bias, right = seen["gradients"].get("bias"), mine.sum((0, 1))
        if layers.bias and (problem := _wrong_bias("column", rank, bias, right, ranks, part)):
            return problem
        if seen["forward"] or seen["all"] != 1:
            calls = seen["forward"], seen["all"] - seen["forward"]
            cause = classic("forward nothing travels; backward one all-reduce, of the input's gradient", 5)
            return Problem(f"a column-parallel layer makes {_collectives(*calls)}", cause)
    return None


def _judge_row(observations: Sequence[RankObservation], name: str, layers: Layers) -> Problem | None:
    linear, ranks = layers.mlp().down, len(observations)
    x, dy = layers.normal(1, layers.inner), layers.normal(2, layers.width)
    weight, y = linear.weight.detach(), linear(x).detach()
    b = linear.bias.detach() if layers.bias else torch.zeros(layers.width)
    for rank, observed in enumerate(observations):
        seen, mine, cut = observed.value, *(value.tensor_split(ranks, -1)[rank] for value in (x, weight))
        own = mine @ cut.t()
        sum_it = "their sum over the ranks is the output"
        candidates = {
            f"these are one rank's summands: {sum_it} (reduce_from_tp_region)": (own, 1),
            f"these are one rank's summands and the bias: {sum_it}": (own + b, 1),
            "the bias is added on every rank, so N times: add it once, to the sum": (y + (ranks - 1) * b, 4),
            "the bias is missing": (y - b, 4),
            "the sum is divided by N: it is a sum, not a mean": ((y - b) / ranks + b, 2),
            "the sum and the bias are divided by N": (y / ranks, 2),
        }
        if problem := _wrong("a row-parallel layer's output", rank, seen["y"], y, candidates):
            return problem
        dx = dy @ cut
        twice = "the gradient of a sum is handed on as it is: an all-reduce in this backward pass makes it N times"
        candidates = {
            f"{twice} too large": (dx * ranks, 3),
            "it is divided by N: the gradient of a sum is handed on as it is": (dx / ranks, 3),
        }
        if problem := _wrong("a row-parallel layer's input gradient", rank, seen["dx"], dx, candidates):
            return problem
        right = dy.flatten(0, 1).t() @ mine.flatten(0, 1)
        if problem := _wrong("the gradient of a row-parallel weight", rank, seen["gradients"]["weight"], right, {}):
            return problem
        once = (
            "added before the sum, on one rank or in parts, the bias gives the right output, but its copies get "
            "different gradients and drift apart: every rank adds the whole bias to the sum"
        )
        bias, right = seen["gradients"].get("bias"), dy.sum((0, 1))
        if layers.bias and (problem := _wrong_bias("row", rank, bias, right, ranks, once)):
            return problem
        if seen["forward"] != 1 or seen["all"] != 1:
            calls = seen["forward"], seen["all"] - seen["forward"]
            cause = classic("forward one all-reduce, of the output; backward nothing travels", 5)
            return Problem(f"a row-parallel layer makes {_collectives(*calls)}", cause)
    return None


def _judge_mlp(observations: Sequence[RankObservation], layers: Layers) -> Problem | None:
    whole, ranks = layers.mlp(), len(observations)
    x = layers.normal(1, layers.width).requires_grad_()
    y = whole(x)
    y.backward(layers.normal(2, layers.width))
    elements = sum(p.numel() for p in whole.parameters())
    most = -(-layers.inner // ranks) * (2 * layers.width + 1) + layers.width
    others = {
        "the function between is GeLU in its tanh form": (whole.down(F.gelu(whole.up(x))).detach(), 7),
        "the function between is GeLU, not ReLU": (whole.down(F.relu(whole.up(x))).detach(), 7),
        "the GeLU between the layers is missing": (whole.down(whole.up(x)).detach(), 7),
    }
    twice = {"the gradient is N times too large: one all-reduce too many backward": (x.grad * ranks, 3)}
    for rank, observed in enumerate(observations):
        seen = observed.value
        kept = sum(int(torch.Size(shape).numel()) for shape in seen["sizes"].values())
        if kept > most:
            cause = classic("up is cut by columns and down by rows: each rank keeps its columns, and its rows", 6)
            shapes = ", ".join(f"{name} {shape}" for name, shape in seen["sizes"].items())
            return Problem(
                f"rank {rank} keeps {kept} of the MLP's {elements} parameters, its share is {most} at most",
                cause, (shapes,),
            )  # fmt: skip
        if problem := _wrong("the MLP's output", rank, seen["y"], y.detach(), others):
            return problem
        if problem := _wrong("the MLP's input gradient", rank, seen["dx"], x.grad, twice):
            return problem
        wanted = [("all_reduce", x.numel())]
        if seen["forward"] != wanted or seen["backward"] != wanted:
            cause = classic(f"one all-reduce of {x.numel()} elements forward, one backward, and nothing else", 5)
            return Problem(
                f"the MLP calls {seen['forward'] or 'nothing'} forward, {seen['backward'] or 'nothing'} backward",
                cause,
            )
    return None


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    usual = Layers(seed) if draw is None else Layers(seed, draw.between(4, 9), draw.random.choice((7, 8, 10)))

    def scenario(
        title: str, play: Callable, judge: Callable, *values: str, stuck: str = _STUCK, **arguments: Any
    ) -> RankScenario:
        arguments = {"layers": usual, **arguments}
        return RankScenario(title, play, judge, arguments, stuck=stuck, raised=_RAISED, values=values)

    mlp = scenario("TensorParallelMLP", _play_mlp, _judge_mlp, "y", "dx", "gradients", "input")
    few = "a rank without features adds nothing, but is waited for: it calls what all ranks call"
    return [
        *(
            scenario(f"{name} {'with' if bias else 'without'} bias", _play_layer, judge, "y", "dx", "gradients",
                     name=name, layers=replace(usual, bias=bias))
            for bias in (True, False)
            for name, judge in (("ColumnParallelLinear", _judge_column), ("RowParallelLinear", _judge_row))
        ),
        mlp,
        replace(mlp, name="TensorParallelMLP of two features: the last rank has none", stuck=classic(few, 8),
                arguments={"layers": replace(usual, inner=2)}),
        scenario("what the operators are given", _play_operators, _judge_operators, "results"),
        scenario("operators on tensors that lie otherwise on some ranks", _play_operators, _judge_operators, "results",
                 transposed=True),
        in_group(mlp, 11),
    ]  # fmt: skip


TENSOR_PARALLEL = Exercise(
    "4.7",
    "tensor-parallel MLP",
    points=10,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=Tolerance(1e-4, 1e-5),
)
CHECK = DistributedCheck(
    TENSOR_PARALLEL,
    _scenarios,
    "one all-reduce forward, one backward; the wide activation between the layers never exists on one rank",
)


@TENSOR_PARALLEL.checked_by
def check_tensor_parallel(
    ColumnParallelLinear: Callable, RowParallelLinear: Callable, TensorParallelMLP: Callable, seed: int | None = None
) -> None:
    """Exercise 4.7: an MLP whose matrices are cut over the ranks.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(ColumnParallelLinear, RowParallelLinear, TensorParallelMLP, seed=seed)
