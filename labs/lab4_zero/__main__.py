"""Train a small GPT with what this package holds, on the ranks of one machine or of several.

``torchrun`` starts the ranks and tells each who it is. On one machine, in the folder of the course::

    torchrun --nproc-per-node 2 -m solutions.lab4_zero --method zero2

In the folder ``labs``, ``-m lab4_zero`` trains by what you have written. On two machines run the same line on both;
each starts its own ranks, and all meet at one address::

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m solutions.lab4_zero

Slurm starts that line once on every node, with the first of them as the meeting place::

    #SBATCH --nodes 2 --ntasks-per-node 1 --gpus-per-node 8
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \\
        --rdzv-endpoint "$host:29500" -m solutions.lab4_zero --method zero3

Every method prints the losses of one process on the whole batch, to rounding.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from utils import distributed, gpt

from .distributed_data_parallel import DistributedDataParallel
from .fully_sharded import FullyShardedDataParallel
from .prefetch import PrefetchZero3
from .zero1 import Zero1Optimizer
from .zero2 import Zero2
from .zero3 import Zero3

#: Tokens and targets, (B, N) int64 each, to the loss; and what steps the optimizer and clears the gradients.
Trained = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], object]]
AdamW = torch.optim.AdamW


def _ddp(model: gpt.GPT, lr: float) -> Trained:
    parallel = DistributedDataParallel(model)
    return parallel, _stepper(AdamW(model.parameters(), lr=lr))


def _zero1(model: gpt.GPT, lr: float) -> Trained:
    return model, _stepper(Zero1Optimizer(model.parameters(), AdamW, lr=lr))


def _zero2(model: gpt.GPT, lr: float) -> Trained:
    parallel = Zero2(model, AdamW, lr=lr)
    return parallel, _stepper(parallel)


def _sharded(kind: Callable[..., Zero3 | FullyShardedDataParallel]) -> Callable[[gpt.GPT, float], Trained]:
    def build(model: gpt.GPT, lr: float) -> Trained:
        parallel = kind(model, gpt.Block)
        return parallel, _stepper(AdamW(parallel.parameters(), lr=lr))

    return build


def _stepper(optimizer: torch.optim.Optimizer | Zero2) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


METHODS: dict[str, Callable[[gpt.GPT, float], Trained]] = {
    "ddp": _ddp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _sharded(Zero3),
    "zero3-prefetch": _sharded(PrefetchZero3),
    "fsdp": _sharded(FullyShardedDataParallel),
}


def train(method: str, steps: int, rows: int, lr: float) -> list[float]:
    """Train ``gpt.TINY`` on this rank's rows.

    Args:
        method: a name in ``METHODS``.
        steps: of AdamW.
        rows: sequences of a step on all ranks together.
        lr: the learning rate.

    Returns:
        The loss of each step on all rows, the same on every rank.

    Raises:
        ValueError: the ranks cannot share the rows evenly.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rows % ranks:
        raise ValueError(f"{ranks} ranks cannot share {rows} rows evenly: choose --rows accordingly")
    forward, step = METHODS[method](gpt.GPT(gpt.TINY, device=distributed.device()), lr)
    losses = []
    for number in range(steps):
        tokens, targets = gpt.batch(gpt.TINY, rows, seed=number, device=distributed.device())
        loss = forward(tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank])
        loss.backward()
        step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0:
            print(f"step {number}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the ranks that ``torchrun`` started, and train."""
    parser = argparse.ArgumentParser(prog=f"torchrun ... -m {__package__}", description="Train a small GPT on ranks.")
    parser.add_argument("--method", choices=METHODS, default="ddp", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=24, help="sequences of a step on all ranks (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate of AdamW (%(default)s)")
    options = vars(parser.parse_args(arguments))
    if "RANK" not in os.environ:
        parser.error(f"start it with torchrun: torchrun --nproc-per-node 2 -m {__package__}")
    if torch.cuda.is_available():
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", device_id=gpu)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    try:
        if dist.get_rank() == 0:
            nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
            print(
                f"{options['method']}: {dist.get_world_size()} ranks on {nodes} nodes, {dist.get_backend()}", flush=True
            )
        train(**options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
