"""Hidden scenarios of exercise 4.3: gradients of all ranks' rows, in buckets, while the backward pass goes on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .hidden_model import Net, gradients, rows, weights
from .hidden_ranks import RankResult, elements, named, of_some, record_collectives

ADAMW = {"lr": 2e-2, "weight_decay": 0.2, "eps": 1e-5}


def start(package: ModuleType, seed: int) -> RankResult:
    """On each rank: what it starts with, and a pass with one large bucket."""
    net, _ = _wrapped(package, seed, 300)
    seen: RankResult = {"DistributedDataParallel at the start: parameters": weights(net)}
    seen["DistributedDataParallel at the start: buffers"] = net.factor.clone()
    found = _pass(package, seed, bucket_bytes=2**20, users=(0, 1, 2))
    return seen | named("DistributedDataParallel with one bucket", found)


def buckets(package: ModuleType, seed: int) -> RankResult:
    """On each rank: passes in small buckets, that get full in this order or another."""
    seen: RankResult = {}
    for what, settings in (
        ("with small buckets", {"bucket_bytes": 300, "users": (0, 1, 2), "several": True}),
        ("where one rank uses a parameter", {"bucket_bytes": 300, "users": (1,)}),
        ("with a first bucket that gets full late", {"bucket_bytes": 200, "users": (0, 1, 2), "first_rows": True}),
        ("with a first bucket that one rank fills", {"bucket_bytes": 200, "users": (1,), "first_rows": True}),
    ):
        seen |= named(f"DistributedDataParallel {what}", _pass(package, seed, **settings))
    return seen


def in_a_group(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a group of two of them."""
    with of_some((1, 2)) as group:
        if group is None:
            return {}
        found = _pass(package, seed, bucket_bytes=300, users=(1,), group=group)
        return named("DistributedDataParallel in a group of two ranks", found)


def _wrapped(package: ModuleType, seed: int, bucket_bytes: int, group: ProcessGroup | None = None) -> tuple[Net, Any]:
    """A model with weights of this rank's own, and the same wrapped: only a broadcast can make the ranks equal."""
    net = Net(seed + dist.get_rank(group), seed)
    among = {} if group is None else {"group": group}
    return net, package.DistributedDataParallel(net, bucket_bytes=bucket_bytes, **among)


def _pass(
    package: ModuleType, seed: int, *, bucket_bytes: int, users: tuple[int, ...], several: bool = False,
    first_rows: bool = False, group: ProcessGroup | None = None,
) -> RankResult:  # fmt: skip
    """One forward and backward pass, and what travelled meanwhile."""
    net, parallel = _wrapped(package, seed, bucket_bytes, group)
    net.first_rows, rank, psi = first_rows, dist.get_rank(group), net.trained_elements
    parameters, early = len(list(net.parameters())), []
    before = weights(net)
    with record_collectives() as ledger:
        net.look = lambda: early.append(elements(ledger, "all_reduce"))
        parallel(*rows(net, seed, 0, rank), sometimes=rank in users).backward()
        net.look = None
    sent = elements(ledger, "all_reduce")
    seen: RankResult = {"gradients": gradients(net), "the weights stay": torch.equal(before, weights(net))}
    seen["each gradient travels once"] = sent <= psi + 2 * parameters and ledger.count("all_reduce") <= parameters
    if several:
        seen["several buckets travel"] = ledger.count("all_reduce") > 2
        seen["the first travel during the backward pass"] = bool(early) and early[0] > 0
    if first_rows and len(users) > 1:
        seen["full buckets follow one another"] = bool(early) and 2 * early[0] >= sent
    return seen


def accumulated(package: ModuleType, seed: int) -> RankResult:
    """On each rank: a pass in ``no_sync`` and one after it."""
    net, parallel = _wrapped(package, seed, 300)
    rank = dist.get_rank()
    with record_collectives() as ledger:
        with parallel.no_sync():
            parallel(*rows(net, seed, 0, rank)).backward()
        quiet = ledger.count() == 0
        parallel(*rows(net, seed, 1, rank)).backward()
    name = "DistributedDataParallel with no_sync"
    return {f"{name}: gradients": gradients(net), f"{name}: nothing travels inside": quiet}


def trained(package: ModuleType, seed: int) -> RankResult:
    """On each rank: some steps of AdamW."""
    net, parallel = _wrapped(package, seed, 300)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], **ADAMW)
    rank, losses = dist.get_rank(), []
    for step in range(4):
        optimizer.zero_grad()
        loss = parallel(*rows(net, seed, step, rank), sometimes=rank in (0, 2))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "DistributedDataParallel, trained: losses": losses,
        "DistributedDataParallel, trained: weights": weights(net),
    }


PARTS = (start, buckets, accumulated, trained, in_a_group)
