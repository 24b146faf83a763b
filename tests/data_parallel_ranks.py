"""What each rank does in the tests of data parallelism: many cases in one job, since starting ranks takes seconds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import parallel_training as training
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from solutions import lab4_zero as lab
from solutions.lab4_zero.buckets import Bucket
from utils import gpt
from utils.distributed import record_collectives

BUCKET_BYTES = 20_000  # a few of the test model's parameters, so that there are several buckets
KINDS = ("ddp", "zero1", "zero2")
CASES = {
    "plain": {},
    "accumulated": {"accumulation": 2},
    "clipped": {"clip": 0.5},
    "accumulated, clipped": {"accumulation": 2, "clip": 0.5},
}
#: World size, form and case of all runs; four ranks, which take longest on few cores, have two things at a time.
RUNS = [
    (size, kind, case)
    for size in (2, 3, 4)
    for kind in KINDS
    for case in (("plain", "accumulated, clipped") if size == 4 else ("plain", "accumulated", "clipped"))
]


# ---- training ------------------------------------------------------------------------------------------------------


class Trainer:
    """A model with one of the forms of data parallelism."""

    def __init__(self, kind: str, model: nn.Module, clip: float | None = None, **options: Any) -> None:
        options = {**training.ADAMW, **options}
        self.kind, self.model, self.clip, self.forward = kind, model, clip, model
        if kind == "ddp":
            self.forward = lab.DistributedDataParallel(model, bucket_bytes=BUCKET_BYTES)
            self.optimizer = torch.optim.AdamW(self.trainable(), **options)
        elif kind == "zero1":
            self.optimizer = lab.Zero1Optimizer(
                model.parameters(), torch.optim.AdamW, bucket_bytes=BUCKET_BYTES, **options
            )
        else:
            self.forward = self.optimizer = lab.Zero2(model, torch.optim.AdamW, bucket_bytes=BUCKET_BYTES, **options)

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def buckets(self) -> list[Bucket]:
        return (self.forward if self.kind == "ddp" else self.optimizer).buckets

    def step(self) -> float | None:
        norm = None
        if self.clip is not None:
            clip = self.optimizer.clip_grad_norm if self.kind != "ddp" else self._clip
            norm = float(clip(self.clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.trainable(), max_norm)

    def train(self, accumulation: int = 1, **options: Any) -> training.Run:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        before = None
        if self.kind == "ddp":
            before = lambda micro: self.forward.no_sync() if micro < accumulation - 1 else nullcontext()  # noqa: E731
        run = training.train(
            self.forward, self.step, rank, world_size, accumulation=accumulation, before_micro=before, **options
        )
        run.parameters = training.parameters_of(self.model)
        return run


def runs() -> dict[tuple[str, str], training.Run]:
    """Ten steps of each form in each case; every rank starts from other weights, which rank 0's replace."""
    return {
        (kind, case): Trainer(kind, training.model_of(seed=dist.get_rank()), CASES[case].get("clip")).train(
            accumulation=CASES[case].get("accumulation", 1)
        )
        for size, kind, case in RUNS
        if size == dist.get_world_size()
    }


def halves() -> dict[str, Any]:
    """bfloat16 parameters with float32 masters: parameters, masters and bytes after five steps."""
    found = {}
    for kind in ("zero1", "zero2"):
        model = gpt.GPT(training.CONFIG, dtype=torch.bfloat16)
        trainer = Trainer(kind, model)
        trainer.train(steps=5)
        state = trainer.optimizer.state_dict()
        shards = trainer.optimizer.sharded.shards
        gradients = trainer.optimizer.flat_gradients if kind == "zero1" else trainer.optimizer.gradients
        found[kind] = {
            "run": training.parameters_of(model),
            "masters": list(state["parameters"].values()),
            "weight_bytes": sum(shard.flat.nbytes for shard in shards),
            "gradient_bytes": sum(gradient.nbytes for gradient in gradients),
            "master_bytes": sum(shard.master.nbytes for shard in shards),
            "moments": moments(trainer.optimizer.sharded.inner),
        }
    return found


def moments(optimizer: torch.optim.Optimizer) -> int:
    """Elements of momentum and variance that this rank keeps."""
    return sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim)


# ---- what is sent and kept -----------------------------------------------------------------------------------------


def ledgers() -> dict[Any, Any]:
    """What the second step sends, where every parameter is used, and where one is not."""
    found: dict[Any, Any] = {}
    for unused in (False, True):
        config = training.CONFIG.replace(unused_parameter=unused)
        for kind in KINDS:
            trainer = Trainer(kind, gpt.GPT(config))
            trainer.train(steps=1, config=config)
            with record_collectives() as ledger:
                trainer.train(steps=1, config=config)
            numels = [bucket.numel for bucket in trainer.buckets()]
            found[kind, unused] = ledger, sum(numels), len(numels)
    return found


class LiveElements(TorchDispatchMode):
    """Counts the elements of tensors made in the block that still exist, and the most that did at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()).data_ptr() not in known | self._seen
            ):
                self._count(storage, tensor.element_size())
        self.most = max(self.most, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        elements, address = storage.nbytes() // size, storage.data_ptr()
        self.now += elements
        self._seen.add(address)

        def freed() -> None:
            self.now -= elements
            self._seen.discard(address)

        weakref.finalize(storage, freed)


def live_gradients() -> dict[str, Any]:
    """Most gradient elements alive at a time in a backward pass, of a deep model whose activations are tiny."""
    found: dict[str, Any] = {}
    for kind in (None, *KINDS):
        model = nn.Sequential(*(nn.Linear(61, 61) for _ in range(20)))
        trainer = Trainer(kind, model) if kind else None
        for _ in range(2):
            loss = (trainer.forward if kind else model)(torch.ones(1, 61)).square().mean()
            with LiveElements() as live:
                loss.backward()
            kept, after = sum(p.grad is not None for p in model.parameters()), live.now
            trainer.step() if kind else model.zero_grad()
        found[kind] = {
            "most": live.most,
            "after": after,
            "kept": kept,
            "bucket": max(bucket.numel for bucket in trainer.buckets()) if kind else 0,
            "all": sum(p.numel() for p in model.parameters()),
        }
    return found


# ---- who uses what -------------------------------------------------------------------------------------------------


class Choosy(nn.Module):
    """Layers that some ranks use, in an order that differs: the gradients of one rank come in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.even, self.odd, self.none = (nn.Linear(5, 5) for _ in range(4))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        if rank % 2:
            return self.both(self.odd(x)).square().mean() * self.scale
        return self.even(self.both(x)).square().mean() * self.scale


def choosy(kind: str | None, steps: int = 3) -> dict[str, Tensor]:
    """Train the choosy model; with ``kind=None``, as one process that visits the ranks one after the other."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = Choosy()
    if kind is None:
        optimizer = torch.optim.AdamW(model.parameters(), **training.ADAMW)
        for step in range(steps):
            loss = sum(model(torch.full((2, 5), 1.0 + step + rank), rank) for rank in range(world_size)) / world_size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        trainer = Trainer(kind, model)
        for step in range(steps):
            rank = dist.get_rank()
            trainer.forward(torch.full((2, 5), 1.0 + step + rank), rank).backward()
            trainer.step()
    return training.parameters_of(model)


class Tiny(nn.Module):
    """Fewer elements than ranks: a number, nothing at all, and two more numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.layer(x)).square().mean() + self.empty.sum()


def tiny(kind: str | None, optimizer: str, steps: int = 3) -> dict[str, Any]:
    """Train the tiny model with another optimizer, half of it from a state; ``kind=None`` is one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer_class, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    model = Tiny()
    x = torch.arange(1.0, 1 + 2 * world_size).view(-1, 1)
    forward = model
    if kind is None:
        trainer = optimizer_class(model.parameters(), **options)
    else:
        x = x.chunk(world_size)[rank]
        if kind == "zero1":
            trainer = lab.Zero1Optimizer(model.parameters(), optimizer_class, bucket_bytes=4, **options)
        else:
            forward = trainer = lab.Zero2(model, optimizer_class, bucket_bytes=4, **options)
    for _ in range(steps):
        forward(x).backward()
        trainer.step()
        trainer.zero_grad()
        for _ in range(2 if kind else 0):  # the second time from what has just been loaded
            trainer.load_state_dict(trainer.state_dict())
    return training.parameters_of(model)


OPTIMIZERS = {
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "foreach": (torch.optim.Adam, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "plain": (torch.optim.SGD, {"lr": 1e-2}),
}


def everything() -> dict[str, Any]:
    """All cases."""
    return {
        "runs": runs(),
        "halves": halves(),
        "ledgers": ledgers(),
        "live": live_gradients(),
        "tiny": {(kind, name): tiny(kind, name) for kind in (None, "zero1", "zero2") for name in OPTIMIZERS},
        "choosy": {kind: choosy(kind) for kind in (None, *KINDS)},
    }
