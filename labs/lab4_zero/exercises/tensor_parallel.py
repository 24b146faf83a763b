"""The check of exercise 4.7: a linear layer by columns, one by rows, and the MLP that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Tolerance
from utils.checks.problem import Problem
from utils.distributed import record_collectives

from . import groups, hidden_tensor_parallel
from .distributed_check import DistributedCheck, Judge, Part
from .hidden_ranks import on_ranks
from .observations import RankObservation, RankScenario
from .scenario_runs import WORLD_SIZE

WIDTH, INNER = 5, 7
_STUCK = classic("an all-reduce that only some ranks call: every rank passes through the same layers, also backward", 8)
_SHAPES = classic("which dimension is cut? nn.Linear stores the transpose: W1's columns are rows of up.weight", 6)
_DETACHED = classic("autograd does not reach it: .detach(), .data or no_grad cuts what is computed off from it", 10)
_RAISED = {"shape": _SHAPES, "size": _SHAPES, "NoneType": "backward returns a gradient for each argument of forward"}
_RAISED |= {"does not require grad": _DETACHED}


class WholeMLP(nn.Module):
    """down(gelu(up(x))), as one process has it."""

    def __init__(self, seed: int, bias: bool = True, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, inner, bias), nn.Linear(inner, WIDTH, bias))
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _share(value: Tensor, rank: int, dim: int) -> Tensor:
    return value.tensor_split(WORLD_SIZE, dim)[rank]


def _play_layer(answer: Mapping[str, Callable], name: str, seed: int, bias: bool) -> dict:
    """One parallel linear layer, forward and backward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = WholeMLP(seed, bias)
    linear = whole.up if name == "ColumnParallelLinear" else whole.down
    layer = answer[name].from_linear(linear)
    x, dy = (_drawn(seed + 1, 2, 3, linear.in_features), _drawn(seed + 2, 2, 3, linear.out_features))
    if name == "RowParallelLinear":
        x = x.tensor_split(world_size, -1)[rank].clone()
    else:
        dy = dy.tensor_split(world_size, -1)[rank].clone()
    x.requires_grad_()
    with record_collectives() as ledger:
        y = layer(x)
        forward = ledger.count()
        y.backward(dy)
    gradients = {key: None if p.grad is None else p.grad.clone() for key, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "gradients": gradients, "forward": forward, "all": ledger.count()}


def _play_operators(answer: Mapping[str, Callable], seed: int) -> dict[str, bool]:
    """Whether the two operators, where an answer has them by their names, change what they are given."""
    known = getattr(answer["RowParallelLinear"].forward, "__globals__", {})
    known = {**getattr(answer["ColumnParallelLinear"].forward, "__globals__", {}), **known}
    changed = {}
    for name in ("reduce_from_tp_region", "copy_to_tp_region"):
        if not callable(operator := known.get(name)):
            continue
        x, gradient = _drawn(seed + dist.get_rank(), 2, WIDTH), _drawn(seed + 3 + dist.get_rank(), 2, WIDTH)
        given = {"x": (x, x.clone()), "the gradient": (gradient, gradient.clone())}
        x.requires_grad_()
        operator(x).backward(gradient)
        changed |= {f"{name} changes {what} ": not torch.equal(*pair) for what, pair in given.items()}
    return changed


def _play_mlp(answer: Mapping[str, Callable], seed: int, inner: int = INNER, group: ProcessGroup | None = None) -> dict:
    among = {} if group is None else {"group": group}
    mlp = answer["TensorParallelMLP"](WholeMLP(seed, inner=inner), **among)
    x = _drawn(seed + 1, 2, 3, WIDTH).requires_grad_()
    sizes = {name: tuple(p.shape) for name, p in mlp.named_parameters()}
    with record_collectives() as ledger:
        y = mlp(x)
        forward = [(entry.kind, entry.elements) for entry in ledger.entries]
        y.backward(_drawn(seed + 2, 2, 3, WIDTH))
    every = [(entry.kind, entry.elements) for entry in ledger.entries]
    gradients = {key: None if p.grad is None else p.grad.clone() for key, p in mlp.named_parameters()}
    return {
        "y": y.detach(), "dx": x.grad, "gradients": gradients, "forward": forward, "backward": every[len(forward):],
        "sizes": sizes,
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


def _wrong_bias(layer: str, rank: int, got: Tensor | None, right: Tensor, cause: str) -> Problem | None:
    """None if a layer's bias has the gradient ``right``."""
    if _close(got, right):
        return None
    found = "another gradient than the whole layer's"
    if got is None:
        found = "no gradient"
    elif _close(got, right / WORLD_SIZE):
        found = "an N-th of its gradient"
    return Problem(f"the bias of a {layer}-parallel layer has {found} on rank {rank}", classic(cause, 4))


def _collectives(forward: int, backward: int) -> str:
    return f"{forward} collective{'' if forward == 1 else 's'} forward, {backward} backward"


def _judge_operators(observations: list[RankObservation]) -> Problem | None:
    for rank, observed in enumerate(observations):
        changed = [what for what, is_so in observed.value.items() if is_so]
        if changed:
            cause = "a collective works in place, and autograd may still need what it handed over: all-reduce a clone"
            return Problem(f"{changed[0]}that it is given, on rank {rank}", classic(cause, 9))
    return None


def _judge_column(seed: int, bias: bool) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        linear = WholeMLP(seed, bias).up
        x, dy = _drawn(seed + 1, 2, 3, WIDTH), _drawn(seed + 2, 2, 3, INNER)
        y, dx = linear(x).detach(), dy @ linear.weight.detach()
        for rank, observed in enumerate(observations):
            seen, mine = observed.value, _share(dy, rank, -1)
            share = _share(y, rank, -1)
            no_bias = {} if not bias else {"the bias is missing": (share - _share(linear.bias.detach(), rank, 0), 4)}
            if problem := _wrong("a column-parallel layer's output", rank, seen["y"], share, no_bias):
                return problem
            candidates = {
                "this is one rank's part: the gradients of what all ranks read must be summed (copy_to_tp_region)": (
                    mine @ _share(linear.weight.detach(), rank, 0), 1),
                "the sum is divided by N: it is a sum, not a mean": (dx / WORLD_SIZE, 2),
                "the gradient is summed twice": (dx * WORLD_SIZE, 3),
            }  # fmt: skip
            if problem := _wrong("a column-parallel layer's input gradient", rank, seen["dx"], dx, candidates):
                return problem
            right = mine.flatten(0, 1).t() @ x.flatten(0, 1)
            if problem := _wrong(
                "the gradient of a column-parallel weight", rank, seen["gradients"]["weight"], right, {}
            ):
                return problem
            part = "each rank adds its part of the bias to its part of the output, and autograd does the rest"
            if bias and (problem := _wrong_bias("column", rank, seen["gradients"].get("bias"), mine.sum((0, 1)), part)):
                return problem
            if seen["forward"] or seen["all"] != 1:
                calls = seen["forward"], seen["all"] - seen["forward"]
                cause = classic("forward nothing travels; backward one all-reduce, of the input's gradient", 5)
                return Problem(f"a column-parallel layer makes {_collectives(*calls)}", cause)
        return None

    return judge


def _judge_row(seed: int, bias: bool) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        linear = WholeMLP(seed, bias).down
        x, dy = _drawn(seed + 1, 2, 3, INNER), _drawn(seed + 2, 2, 3, WIDTH)
        weight, y = linear.weight.detach(), linear(x).detach()
        for rank, observed in enumerate(observations):
            seen, own = observed.value, _share(x, rank, -1) @ _share(weight, rank, 1).t()
            b = linear.bias.detach() if bias else torch.zeros(WIDTH)
            candidates = {
                "these are one rank's summands: their sum over the ranks is the output (reduce_from_tp_region)": (
                    own,
                    1,
                ),
                "these are one rank's summands and the bias: their sum over the ranks is the output": (own + b, 1),
                "the bias is added on every rank, so N times: add it once, to the sum": (y + (WORLD_SIZE - 1) * b, 4),
                "the bias is missing": (y - b, 4),
                "the sum is divided by N: it is a sum, not a mean": ((y - b) / WORLD_SIZE + b, 2),
                "the sum and the bias are divided by N": (y / WORLD_SIZE, 2),
            }
            if problem := _wrong("a row-parallel layer's output", rank, seen["y"], y, candidates):
                return problem
            dx = dy @ _share(weight, rank, 1)
            twice = "the gradient of a sum is handed on as it is: an all-reduce in this backward pass makes it N times"
            candidates = {
                f"{twice} too large": (dx * WORLD_SIZE, 3),
                "it is divided by N: the gradient of a sum is handed on as it is": (dx / WORLD_SIZE, 3),
            }
            if problem := _wrong("a row-parallel layer's input gradient", rank, seen["dx"], dx, candidates):
                return problem
            right = dy.flatten(0, 1).t() @ _share(x, rank, -1).flatten(0, 1)
            candidates = {f"{twice} too large": (right * WORLD_SIZE, 3)}
            got = seen["gradients"]["weight"]
            if problem := _wrong("the gradient of a row-parallel weight", rank, got, right, candidates):
                return problem
            once = (
                "added before the sum, on one rank or in parts, the bias gives the right output, but its copies get "
                "different gradients and drift apart: every rank adds the whole bias to the sum"
            )
            if bias and (problem := _wrong_bias("row", rank, seen["gradients"].get("bias"), dy.sum((0, 1)), once)):
                return problem
            if seen["forward"] != 1 or seen["all"] != 1:
                calls = seen["forward"], seen["all"] - seen["forward"]
                cause = classic("forward one all-reduce, of the output; backward nothing travels", 5)
                return Problem(f"a row-parallel layer makes {_collectives(*calls)}", cause)
        return None

    return judge


def _judge_mlp(seed: int, inner: int = INNER, ranks: int = WORLD_SIZE) -> Judge:
    def judge(observations: list[RankObservation]) -> Problem | None:
        whole, x = WholeMLP(seed, inner=inner), _drawn(seed + 1, 2, 3, WIDTH).requires_grad_()
        y = whole(x)
        y.backward(_drawn(seed + 2, 2, 3, WIDTH))
        elements = sum(p.numel() for p in whole.parameters())
        most = -(-inner // ranks) * (2 * WIDTH + 1) + WIDTH
        erf = whole.down(F.gelu(whole.up(x))).detach()
        relu = whole.down(F.relu(whole.up(x))).detach()
        linear = whole.down(whole.up(x)).detach()
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
            candidates = {
                "the function between is GeLU in its tanh form": (erf, 7),
                "the function between is GeLU, not ReLU": (relu, 7),
                "the GeLU between the layers is missing": (linear, 7),
            }
            if problem := _wrong("the MLP's output", rank, seen["y"], y.detach(), candidates):
                return problem
            candidates = {"the gradient is N times too large: one all-reduce too many backward": (x.grad * ranks, 3)}
            if problem := _wrong("the MLP's input gradient", rank, seen["dx"], x.grad, candidates):
                return problem
            wanted = [("all_reduce", x.numel())]
            if seen["forward"] != wanted or seen["backward"] != wanted:
                cause = classic(f"one all-reduce of {x.numel()} elements forward, one backward, and nothing else", 5)
                return Problem(
                    f"the MLP calls {seen['forward'] or 'nothing'} forward, {seen['backward'] or 'nothing'} backward",
                    cause,
                )
        return None

    return judge


def _parts(seed: int) -> list[Part]:
    def part(title: str, play: Callable, judge: Judge, stuck: str = _STUCK, **arguments: object) -> Part:
        return Part(RankScenario(title, play, {"seed": seed, **arguments}), judge, stuck, _RAISED)

    parts = []
    for bias in (True, False):
        name = "with bias" if bias else "without bias"
        parts += [
            part(f"a column-parallel layer {name}", _play_layer, _judge_column(seed, bias),
                 name="ColumnParallelLinear", bias=bias),
            part(f"a row-parallel layer {name}", _play_layer, _judge_row(seed, bias),
                 name="RowParallelLinear", bias=bias),
        ]  # fmt: skip
    without = classic("a rank without features adds nothing, but is waited for: it calls what all ranks call", 8)
    return [
        *parts,
        part("the MLP", _play_mlp, _judge_mlp(seed)),
        part("an MLP of two features: the last rank has none", _play_mlp, _judge_mlp(seed, 2), without, inner=2),
        part("what the operators are given", _play_operators, _judge_operators),
        groups.group_part(_play_mlp, _judge_mlp(seed, ranks=2), 11, _STUCK, seed=seed),
    ]


TENSOR_PARALLEL = Exercise(
    "4.7",
    "tensor-parallel MLP",
    points=12,
    observe=on_ranks(hidden_tensor_parallel.PARTS),
    tolerance=Tolerance(1e-4, 1e-5),
)
CHECK = DistributedCheck(
    TENSOR_PARALLEL,
    ("ColumnParallelLinear", "RowParallelLinear", "TensorParallelMLP"),
    _parts,
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
