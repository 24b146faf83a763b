"""Ten AdamW steps of one process, which every form of parallelism must repeat.

A run of one process (:func:`reference`) and one of N ranks see the same batch; each rank takes its rows
(:func:`shard_of_batch`). Sums of the same numbers in another order differ in the last bits, so runs are compared with a
relative tolerance of 1e-6 (:func:`assert_same_run`). With ``summands=N`` the reference adds gradients as the ranks do:
one backward pass for each rank's rows, then their sum over N. Two numbers have only one order to be added in, so two
ranks must then agree with it bit for bit (``tolerance=0``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from utils import gpt

STEPS = 10
BATCH = 24  # rows of one step: 2, 3 and 4 ranks share them, also in two micro-batches
TOLERANCE = 1e-6

#: Tied, frozen and unused parameters; sizes that 2, 3 and 4 do not divide.
CONFIG = gpt.TINY.replace(layers=2, unused_parameter=True)

#: AdamW of all runs. Adam divides a gradient by its own size, which turns the rounding of a gradient that is zero in
#: exact arithmetic (a key's bias: softmax does not see it) into a step of full size; an epsilon above that rounding
#: (1e-9 here) keeps it what it is.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "foreach": False}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made within are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Run:
    """What a training run leaves: the loss of each step, the norm each step was clipped by, and the parameters."""

    losses: list[float]
    parameters: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)


def model_of(config: gpt.GPTConfig = CONFIG, seed: int = 0, device: object = None) -> gpt.GPT:
    """A GPT whose biases are drawn as its weights are.

    GPT's own start at zero, where a bias that is added twice, or not at all, is not seen; and a bias that has taken ten
    steps from zero is so small that the rounding of its gradients can be more than 1e-6 of it.
    """
    model = gpt.GPT(config, seed=seed, device=device)
    generator = torch.Generator(model.positions.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.02, generator=generator)
    return model


def batch_of_step(
    config: gpt.GPTConfig, step: int, seed: int = 0, size: int = BATCH, device: object = None
) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (size, context) int64 each, of all ranks together in one step."""
    return gpt.batch(config, size, seed=1000 * seed + step, device=device)


def shard_of_batch(batch: tuple[Tensor, Tensor], rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """The rows of ``rank``: equally many each, in the order of ranks.

    Raises:
        ValueError: the ranks cannot share the rows evenly; a mean of their means would not be the mean.
    """
    rows = len(batch[0])
    if rows % world_size:
        raise ValueError(f"{world_size} ranks cannot share {rows} rows evenly")
    return tuple(part.chunk(world_size)[rank] for part in batch)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters on the CPU by name, without what wrappers put before it (``module.``)."""
    return {
        name.removeprefix("module."): parameter.detach().cpu().clone() for name, parameter in module.named_parameters()
    }


def reference(
    config: gpt.GPTConfig = CONFIG,
    steps: int = STEPS,
    seed: int = 0,
    accumulation: int = 1,
    clip: float | None = None,
    summands: int = 1,
    optimizer: Mapping[str, object] = ADAMW,
    device: object = None,
) -> Run:
    """Train in one process.

    Args:
        config, seed: the model and its weights; the seed also draws the batches.
        accumulation: micro-batches of a step; the gradient is the mean over them.
        clip: largest global norm of the gradient, or None.
        summands: parts of each micro-batch whose gradients are computed one by one and averaged, as N ranks do.
    """
    model = model_of(config, seed, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(parameters, **optimizer)
    run = Run([], {})
    for step in range(steps):
        whole = batch_of_step(config, step, seed, device=device)
        losses, sums = [], [None] * len(parameters)
        for part in range(summands):
            adamw.zero_grad()
            rows = shard_of_batch(whole, part, summands)
            for micro in range(accumulation):
                loss = model(*shard_of_batch(rows, micro, accumulation)) / accumulation
                loss.backward()
                losses.append(loss.item())
            for k, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    sums[k] = parameter.grad if sums[k] is None else sums[k] + parameter.grad
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = None if total is None else total / summands
        if clip is not None:
            run.norms.append(float(nn.utils.clip_grad_norm_(parameters, clip)))
        adamw.step()
        run.losses.append(sum(losses) / summands)
    run.parameters = parameters_of(model)
    return run


def train(
    forward: Callable[..., Tensor],
    step_and_clear: Callable[[], float | None],
    rank: int,
    world_size: int,
    *,
    config: gpt.GPTConfig = CONFIG,
    steps: int = STEPS,
    first_step: int = 0,
    seed: int = 0,
    accumulation: int = 1,
    before_micro: Callable[[int], AbstractContextManager] | None = None,
    device: object = None,
) -> Run:
    """Train one rank of N: its rows of each batch, its losses averaged with the others' by :func:`mean_losses`.

    Args:
        forward: tokens and targets to the loss, a scalar.
        step_and_clear: clips, steps and clears the gradients; returns the gradient's norm, or None.
        rank, world_size: which rows of each batch are this rank's.
        steps, first_step: how many steps, and which batch comes first.
        accumulation: micro-batches of a step.
        before_micro: called with the number of each micro-batch; returns a context manager for its forward and backward
            pass (``no_sync`` of all but the last).

    Returns:
        The losses of this rank and the norms; the parameters are for the caller to add.
    """
    run = Run([], {})
    for step in range(first_step, first_step + steps):
        rows = shard_of_batch(batch_of_step(config, step, seed, device=device), rank, world_size)
        total = 0.0
        for micro in range(accumulation):
            with before_micro(micro) if before_micro else nullcontext():
                loss = forward(*shard_of_batch(rows, micro, accumulation)) / accumulation
                loss.backward()
            total += loss.item()
        norm = step_and_clear()
        run.losses.append(total)
        if norm is not None:
            run.norms.append(float(norm))
    return run


def mean_losses(runs: list[Run]) -> list[float]:
    """The loss of each step over all ranks' rows, from what each rank returned."""
    return [sum(losses) / len(runs) for losses in zip(*(run.losses for run in runs), strict=True)]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; 0 only if every element is the same."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-300)) if difference else 0.0


def assert_same_run(runs: list[Run], expected: Run, tolerance: float = TOLERANCE) -> None:
    """Losses, norms and every parameter of every rank are those of one process.

    Args:
        runs: what the ranks returned, in their order; a rank may hold any of the parameters (their whole value).
        tolerance: largest relative difference; 0 asks for the same bits.

    Raises:
        AssertionError: names the step or the parameter, the rank and the difference.
    """
    losses = mean_losses(runs)
    for step, (mine, right) in enumerate(zip(losses, expected.losses, strict=True)):
        difference = abs(mine - right) / abs(right)
        assert difference <= tolerance, f"step {step}: loss {mine!r}, one process {right!r} ({difference:.1e})"
    for rank, run in enumerate(runs):
        for step, (mine, right) in enumerate(zip(run.norms, expected.norms, strict=True)):
            difference = abs(mine - right) / right
            assert difference <= tolerance, f"rank {rank}, step {step}: norm {mine!r}, one process {right!r}"
        for name, parameter in run.parameters.items():
            difference = relative_difference(parameter, expected.parameters[name])
            assert difference <= tolerance, f"rank {rank}: {name} differs by {difference:.1e}, allowed {tolerance:.0e}"
