"""Ways to train a GPT on several ranks that each see other rows: lab 4's and PyTorch's, in one precision and with one
optimizer.

All of them compute in bf16 and step fp32 master weights with AdamW. DDP and ZeRO-1 and 2 have bf16 parameters and
gradients and an optimizer over fp32 copies; ZeRO-3 and ``fully_shard`` keep fp32 shards and gather them as bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import ranks
from benchmarks.ranks import ADAMW
from solutions.lab4_zero.async_collectives import all_reduce_mean
from solutions.lab4_zero.distributed_data_parallel import DistributedDataParallel
from solutions.lab4_zero.fully_sharded import FullyShardedDataParallel
from solutions.lab4_zero.precision import MasterWeightOptimizer
from solutions.lab4_zero.saved_tensor_meter import SavedTensorMeter
from solutions.lab4_zero.zero1 import Zero1Optimizer
from solutions.lab4_zero.zero2 import Zero2
from utils.gpt import GPT, Block, GPTConfig

AdamW = torch.optim.AdamW


@dataclass
class Method:
    """A model that trains on this rank.

    Attributes:
        forward: tokens and targets, (B, N) int64, to the loss, a scalar.
        update: steps the optimizer.
        clear: lets go of the gradients; given True it keeps their memory and fills it with zeros.
        parallel: the wrapped model, for what only it can do.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[], object]
    clear: Callable[[bool], None]
    parallel: object = field(default=None, repr=False)

    def step(self, tokens: Tensor, targets: Tensor, keep: bool = False) -> None:
        """One training step. With ``keep`` the gradients' memory stays, as when a later backward pass adds to them."""
        with torch.profiler.record_function("forward"):
            loss = self.forward(tokens, targets)
        with torch.profiler.record_function("backward"):
            loss.backward()
        with torch.profiler.record_function("optimizer"):
            self.update()
        self.clear(keep)


def _clear(optimizer: torch.optim.Optimizer | MasterWeightOptimizer) -> Callable[[bool], None]:
    return lambda keep: optimizer.zero_grad(set_to_none=not keep)


def _bf16(config: GPTConfig, device: torch.device) -> GPT:
    return GPT(config, device=device, dtype=torch.bfloat16)


def ddp(config: GPTConfig, device: torch.device) -> Method:
    """Lab 4's data parallelism."""
    parallel = DistributedDataParallel(_bf16(config, device))
    optimizer = MasterWeightOptimizer(parallel.parameters(), AdamW, **ADAMW)
    return Method(parallel, optimizer.step, _clear(optimizer), parallel)


def torch_ddp(config: GPTConfig, device: torch.device) -> Method:
    """PyTorch's, gradients as views of its buckets (which saves it memory and copies), with lab 4's optimizer."""
    parallel = nn.parallel.DistributedDataParallel(_bf16(config, device), gradient_as_bucket_view=True)
    optimizer = MasterWeightOptimizer(parallel.parameters(), AdamW, **ADAMW)
    return Method(parallel, optimizer.step, _clear(optimizer), parallel)


def zero1(config: GPTConfig, device: torch.device) -> Method:
    """Lab 4's ZeRO-1."""
    model = _bf16(config, device)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, **ADAMW)
    return Method(model, optimizer.step, lambda keep: None, model)  # it clears in its step, its buckets stay


def zero2(config: GPTConfig, device: torch.device) -> Method:
    """Lab 4's ZeRO-2."""
    parallel = Zero2(_bf16(config, device), AdamW, **ADAMW)
    return Method(parallel, parallel.step, lambda keep: None, parallel)  # the same


def zero3(config: GPTConfig, device: torch.device) -> Method:
    """Lab 4's ZeRO-3: a unit for each block, one for the rest."""
    parallel = FullyShardedDataParallel(GPT(config, device=device), Block, compute_dtype=torch.bfloat16)
    optimizer = AdamW(parallel.parameters(), **ADAMW)
    return Method(parallel, optimizer.step, _clear(optimizer), parallel)


def torch_fully_shard(config: GPTConfig, device: torch.device) -> Method:
    """PyTorch's ``fully_shard`` with the same units; gradients are reduced in bf16 too."""
    model = GPT(config, device=device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = AdamW(model.parameters(), **ADAMW)
    return Method(model, optimizer.step, _clear(optimizer), model)


#: Name -> (stage of ZeRO, how it is built).
METHODS: dict[str, tuple[int, Callable[[GPTConfig, torch.device], Method]]] = {
    "ddp": (0, ddp),
    "torch ddp": (0, torch_ddp),
    "zero1": (1, zero1),
    "zero2": (2, zero2),
    "zero3": (3, zero3),
    "torch fully_shard": (3, torch_fully_shard),
}
#: What is in memory, and is compared, at one time: 64 and 67 GB on two GPUs.
TOGETHER = (("ddp", "torch ddp"), ("zero1", "zero2", "zero3", "torch fully_shard"))
#: Ours and PyTorch's of the same stage.
BASELINES = {"ddp": "torch ddp", "zero3": "torch fully_shard"}


def overlap_steps(method: Method, tokens: Tensor, targets: Tensor) -> dict[str, Callable[[], None]]:
    """Steps of lab 4's DDP that show what overlap hides: all-reduces after the backward pass, none at all, and alone.

    Without all-reduce the ranks' weights drift apart, which changes no time.
    """
    parallel: DistributedDataParallel = method.parallel

    def backward() -> None:
        with parallel.no_sync():
            method.forward(tokens, targets).backward()

    def reduce() -> None:
        for pending in [all_reduce_mean(flat, parallel.group) for flat in parallel.flat_gradients]:
            pending.wait()

    def finish() -> None:
        method.update()
        method.clear(False)

    def afterwards() -> None:
        backward()
        reduce()
        finish()

    def without() -> None:
        backward()
        finish()

    return {"reduced afterwards": afterwards, "not reduced": without, "all-reduces alone": reduce}


def activations(config: GPTConfig, device: torch.device, tokens: Tensor, targets: Tensor) -> int:
    """Bytes that a forward and a backward pass need at their peak beyond parameters and gradients, both in bf16.

    Measured on the plain model of this rank, with the gradients' memory in place from a pass before. On a CPU what
    autograd keeps for the backward pass.
    """
    model = _bf16(config, device)

    def passes() -> None:
        model(tokens, targets).backward()

    passes()
    if device.type != "cuda":
        with SavedTensorMeter() as held:
            passes()
        return held.peak
    return ranks.peak(passes, base=ranks.allocated())
