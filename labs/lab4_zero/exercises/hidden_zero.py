"""Hidden scenarios of exercises 4.4 to 4.6: steps whose state, gradients and weights lie in shards."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.hidden import Tolerance
from utils.distributed import CollectiveLog

from .hidden_model import Layer, Net, Noted, full_gradients, rows, weights
from .hidden_ranks import RankResult, elements, named, of_some, record_collectives

ADAMW = {"lr": 2e-2, "weight_decay": 0.2, "eps": 1e-5}
#: Elements by which padding may make shards and what travels larger.
PADDING = 60


def zero1_steps(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a step of SGD, and steps clipped by the norm."""
    seen = named("Zero1Optimizer, one step", _zero1_step(package, seed))
    seen |= named("Zero1Optimizer, a clipped step", _zero1_step(package, seed, clip=0.4))
    return seen | named("Zero1Optimizer, a step that needs no clipping", _zero1_step(package, seed, clip=1e4))


def zero1_training(package: ModuleType, seed: int) -> RankResult:
    """On each rank: steps of AdamW, and small steps of bfloat16 weights."""
    seen = named("Zero1Optimizer, trained", _zero1_trained(package, seed))
    return seen | named("Zero1Optimizer with bfloat16 weights", _zero1_bfloat16(package, seed))


def zero1_in_a_group(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a group of two of them."""
    with of_some((1, 2)) as group:
        found = {} if group is None else _zero1_step(package, seed, clip=0.4, group=group)
    return named("Zero1Optimizer in a group of two ranks", found)


def zero2_step(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a step of SGD."""
    return named("Zero2, one step", _zero2_step(package, seed, users=(1,)))


def zero2_training(package: ModuleType, seed: int) -> RankResult:
    """On each rank: steps of AdamW, with one backward pass each and with two."""
    seen = named("Zero2, trained", _zero2_trained(package, seed, passes=1, users=(0, 2)))
    return seen | named("Zero2, two backward passes a step", _zero2_trained(package, seed, passes=2, users=(0, 1, 2)))


def zero2_in_a_group(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a group of two of them."""
    with of_some((1, 2)) as group:
        found = {} if group is None else _zero2_step(package, seed, users=(1,), group=group)
    return named("Zero2 in a group of two ranks", found)


def zero3_step(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a step of SGD."""
    return named("Zero3, one step", _zero3_step(package, seed, users=(1,)))


def zero3_training(package: ModuleType, seed: int) -> RankResult:
    """On each rank: steps of AdamW, with one backward pass each and with two."""
    seen = named("Zero3, trained", _zero3_trained(package, seed, passes=1, users=(0, 2)))
    return seen | named("Zero3, two backward passes a step", _zero3_trained(package, seed, passes=2, users=(0, 1, 2)))


def zero3_in_a_group(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a group of two of them."""
    with of_some((1, 2)) as group:
        found = {} if group is None else _zero3_step(package, seed, users=(1,), group=group)
    return named("Zero3 in a group of two ranks", found)


def _among(group: ProcessGroup | None) -> dict[str, Any]:
    return {} if group is None else {"group": group}


def _travelled(ledger: CollectiveLog, psi: int) -> RankResult:
    """Whether gradients and weights travelled as often as the exercise says, and not in all-reduces."""
    scattered, gathered = elements(ledger, "reduce_scatter"), elements(ledger, "all_gather")
    return {
        "each gradient is reduce-scattered once": psi <= scattered <= psi + PADDING,
        "each weight is gathered once": psi <= gathered <= psi + PADDING,
        "no gradient is all-reduced": 2 * elements(ledger, "all_reduce") <= psi,
    }


def _kept(noted: Noted, psi: int) -> RankResult:
    """Whether this rank's optimizer keeps two moments of its shard and no more."""
    return {
        "the optimizer keeps its shard's state alone": noted.elements()
        <= 2 * (-(-psi // dist.get_world_size()) + PADDING // 2)
    }


# ---- ZeRO-1
def _zero1_step(
    package: ModuleType, seed: int, clip: float | None = None, group: ProcessGroup | None = None
) -> RankResult:
    net, rank = Net(seed, seed), dist.get_rank(group)
    optimizer = package.Zero1Optimizer(net.parameters(), torch.optim.SGD, lr=0.5, **_among(group))
    norm = None
    with record_collectives() as ledger:
        net(*rows(net, seed, 0, rank)).backward()
        if clip is not None:
            norm = float(optimizer.clip_grad_norm(clip))
        optimizer.step()
    return {"norm": norm, "weights": weights(net), **_travelled(ledger, net.trained_elements)}


def _zero1_trained(package: ModuleType, seed: int) -> RankResult:
    net, rank, noted = Net(seed, seed), dist.get_rank(), Noted(torch.optim.AdamW)
    optimizer = package.Zero1Optimizer(net.parameters(), noted.optimizer_class, bucket_bytes=300, **ADAMW)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = net(*rows(net, seed, number, rank), sometimes=rank in (0, 2))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return {
        "losses": [step(number) for number in range(4)],
        "weights": weights(net),
        **_kept(noted, net.trained_elements),
    }


def _zero1_bfloat16(package: ModuleType, seed: int) -> RankResult:
    """Steps smaller than what bfloat16 tells apart: how far they bring the large weights in all."""
    net, rank, noted = Net(seed, seed).bfloat16(), dist.get_rank(), Noted(torch.optim.AdamW)
    optimizer = package.Zero1Optimizer(net.parameters(), noted.optimizer_class, lr=1e-3, weight_decay=0.0)
    before = weights(net).float()
    for _ in range(10):
        optimizer.zero_grad()
        net(*rows(net, seed, 0, rank, torch.bfloat16)).backward()
        optimizer.step()
    far = (weights(net).float() - before).abs()[before.abs() > 0.5]
    return {"how far the weights get": float(far.mean()), "dtypes of the optimizer": noted.dtypes()}


# ---- ZeRO-2
def _zero2_step(
    package: ModuleType, seed: int, users: tuple[int, ...], group: ProcessGroup | None = None
) -> RankResult:
    rank, early = dist.get_rank(group), []
    net = Net(seed + rank, seed)
    zero = package.Zero2(net, torch.optim.SGD, bucket_bytes=300, lr=0.5, **_among(group))
    with record_collectives() as ledger:
        net.look = lambda: early.append(elements(ledger, "reduce_scatter"))
        zero(*rows(net, seed, 0, rank), sometimes=rank in users).backward()
        net.look, left = None, full_gradients(net)
        in_backward = elements(ledger, "reduce_scatter")
        zero.step()
    psi = net.trained_elements
    return {
        "weights": weights(net),
        "full gradients that are left": left,
        "all gradients travel in the backward pass": in_backward >= psi,
        **_travelled(ledger, psi),
    }


def _zero2_trained(package: ModuleType, seed: int, passes: int, users: tuple[int, ...]) -> RankResult:
    net, rank, noted, losses = Net(seed, seed), dist.get_rank(), Noted(torch.optim.AdamW), []
    zero = package.Zero2(net, noted.optimizer_class, bucket_bytes=300, **ADAMW)
    for number in range(3):
        for turn in range(passes):
            loss = zero(*rows(net, seed, number * passes + turn, rank), sometimes=rank in users)
            loss.backward()
            losses.append(float(loss.detach()))
        zero.step()
    return {"losses": losses, "weights": weights(net), **_kept(noted, net.trained_elements)}


# ---- ZeRO-3
def _whole(zero: Any, net_names: list[str]) -> Tensor:
    """All parameters in one piece, in the model's order."""
    state = zero.state_dict()
    return torch.cat([state[name].detach().flatten().float() for name in net_names])


def _names(net: Net) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def _zero3_step(
    package: ModuleType, seed: int, users: tuple[int, ...], group: ProcessGroup | None = None
) -> RankResult:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    net = Net(seed + rank, seed)
    names, psi = _names(net), net.trained_elements
    inputs = rows(net, seed, 0, rank)
    zero = package.Zero3(net, Layer, **_among(group))
    optimizer = torch.optim.SGD(zero.parameters(), lr=0.5)
    kept = sum(parameter.numel() for parameter in zero.parameters() if parameter.requires_grad)
    with record_collectives() as ledger:
        loss = zero(*inputs, sometimes=rank in users)
        forward = elements(ledger, "all_gather")
        layers = sum(parameter.untyped_storage().nbytes() for parameter in net.layers.parameters())
        loss.backward()
        optimizer.step()
    gathered, scattered = elements(ledger, "all_gather"), elements(ledger, "reduce_scatter")
    return {
        "loss": float(loss.detach()),
        "weights": _whole(zero, names),
        "bytes of the layers' weights between the passes": layers,
        "a rank keeps its share": kept <= -(-psi // world_size) + PADDING // 2,
        "weights are gathered for each pass": forward >= psi - PADDING
        and 1.5 * psi < gathered <= 2 * psi + 3 * PADDING,
        "each gradient is reduce-scattered once": psi <= scattered <= psi + PADDING,
        "no gradient is all-reduced": 2 * elements(ledger, "all_reduce") <= psi,
    }


def _zero3_trained(package: ModuleType, seed: int, passes: int, users: tuple[int, ...]) -> RankResult:
    rank, noted, losses = dist.get_rank(), Noted(torch.optim.AdamW), []
    net = Net(seed, seed)
    names, psi, read = _names(net), net.trained_elements, [rows(net, seed, k, rank) for k in range(4 * passes)]
    zero = package.Zero3(net, Layer)
    optimizer = noted.optimizer_class([p for p in zero.parameters() if p.requires_grad], **ADAMW)
    for number in range(4):
        optimizer.zero_grad()
        for turn in range(passes):
            loss = zero(*read[number * passes + turn], sometimes=rank in users)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return {"losses": losses, "weights": _whole(zero, names), **_kept(noted, psi)}


TOLERANCE = Tolerance(1e-4, 5e-6, of="element")


def tolerances(name: str) -> dict[str, Tolerance]:
    """What holds for the observations of a class where training or a 16-bit dtype adds to the error."""
    trained = Tolerance(3e-4, 3e-5, of="element")
    return {
        f"{name}, trained": trained,
        f"{name}, two backward passes": trained,
        f"{name} with bfloat16 weights: how far": Tolerance(0.15),
    }


ZERO1 = (zero1_steps, zero1_training, zero1_in_a_group)
ZERO2 = (zero2_step, zero2_training, zero2_in_a_group)
ZERO3 = (zero3_step, zero3_training, zero3_in_a_group)
