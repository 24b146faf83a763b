"""The model that the checks of data parallelism train: small, with everything that trips an implementation.

Two layers share one weight, one parameter is frozen, one is never used, one is used by some ranks alone, and there are
two buffers, of which ``state_dict()`` has one. Three ranks do not share its trainable elements evenly.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from utils.checks.hidden import Draw

ROWS = 2  # of each rank
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


class Block(nn.Module):
    """Two linear layers around a tanh, added to what comes in: (rows, width) to (rows, width)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class TinyModel(nn.Module):
    """The model; ``forward(x, y)`` is the mean squared error.

    Args:
        seed: draws parameters and buffer; the same seed gives the same model.
        width, inner, layers: sizes.
        growth: by how much each block's inner size exceeds that of the block before it.

    Attributes:
        watch: called with "forward" when the last block starts, and with "backward" when the gradient of the first
            block's input is known: nearly at the end of the backward pass.
        used_first: whether the parameter that some ranks use comes before the first block, not after the last: its
            gradient, of the first bucket, is then one of the last to be known, and none is unused.
        checkpointed: whether the blocks keep their inputs alone, and compute a second time in the backward pass.
    """

    def __init__(self, seed: int, width: int = 5, inner: int = 7, layers: int = 3, growth: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.empty(width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, inner + growth * k) for k in range(layers))
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.empty(3))
        self.register_buffer("scale", torch.empty(width))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.spare = nn.Module()
        self.spare.sometimes = nn.Parameter(torch.empty(width))  # the last parameter: in the first bucket
        self.watch: Callable[[str], None] | None = None
        self.used_first = self.checkpointed = False
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=source) * 0.6)
            self.scale += 2

    def forward(self, x: Tensor, y: Tensor, sometimes: bool = False) -> Tensor:
        h = self.first(x) + self.frozen
        if self.watch is not None and h.requires_grad:
            h.register_hook(lambda gradient: self.watch("backward"))
        if sometimes and self.used_first:
            h = h * (1 + self.spare.sometimes) + self.unused.mean()
        for block in self.blocks:
            if self.watch is not None and block is self.blocks[-1]:
                self.watch("forward")
            with set_checkpoint_early_stop(False):  # the second forward pass goes to its end, and meets all hooks
                h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        if sometimes and not self.used_first:
            h = h * (1 + self.spare.sometimes)
        return (self.last(h * self.scale.to(h.dtype) + self.shift.to(h.dtype)) - y).square().mean()


@dataclass
class Reference:
    """What one process computes of one step: gradients by name, of each rank's rows and their mean; None if unused."""

    start: dict[str, Tensor]
    local: list[dict[str, Tensor | None]]
    mean: dict[str, Tensor | None]
    losses: list[float]


@dataclass(frozen=True)
class TinyTraining:
    """A model of these sizes and what each rank reads; all of it follows from the seed."""

    seed: int
    width: int = 5
    inner: int = 7
    layers: int = 3
    growth: int = 0
    checkpointed: bool = False

    @classmethod
    def drawn(cls, seed: int, draw: Draw | None) -> TinyTraining:
        """The usual sizes, or for a hidden scenario others whose elements three does not divide either."""
        if draw is None:
            return cls(seed)
        choose = draw.random.choice
        return cls(seed, choose((5, 8)), choose((6, 8, 9, 11)), choose((3, 4)))

    def model(self, rank: int = 0) -> TinyModel:
        """The model; each rank starts with weights of its own."""
        model = TinyModel(self.seed + rank, self.width, self.inner, self.layers, self.growth)
        model.checkpointed = self.checkpointed
        return model

    @property
    def psi(self) -> int:
        """Trainable elements."""
        return sum(parameter.numel() for parameter in trainable(self.model()).values())

    def rows(self, step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """What a rank reads in a step: x and y, (ROWS, width) each."""
        source = torch.Generator().manual_seed(10_000 * self.seed + 100 * step + rank)
        x, y = torch.randn(2, ROWS, self.width, generator=source).to(dtype)
        return x, y

    def reference(
        self, ranks: int, step: int = 0, users: tuple[int, ...] = (), model: TinyModel | None = None
    ) -> Reference:
        """One step's gradients in one process; ``users`` are the ranks that use the parameter that not all use."""
        model, local, losses = model or self.model(), [], []
        for rank in range(ranks):
            model.zero_grad()
            loss = model(*self.rows(step, rank, model.first.weight.dtype), sometimes=rank in users)
            loss.backward()
            losses.append(float(loss.detach()))
            local.append(gradients(model))
        model.zero_grad()
        return Reference(weights(model), local, {name: _mean([of[name] for of in local]) for name in local[0]}, losses)

    def trained(
        self, ranks: int, steps: int, users: tuple[int, ...] = (), accumulation: int = 1
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Losses (means over the ranks) and the final weights of one process, after steps of AdamW.

        With ``accumulation`` the mean gradients of so many passes add up before each step; ``users`` as in
        :func:`train`.
        """
        model = self.model()
        optimizer, losses = torch.optim.AdamW(trainable(model).values(), **ADAMW), []
        for step in range(steps):
            sums: dict[str, Tensor | None] = {}
            for micro in range(accumulation):
                found = self.reference(ranks, step * accumulation + micro, () if step % 2 else users, model)
                losses.append(sum(found.losses) / ranks)
                sums = {name: added(sums.get(name), gradient) for name, gradient in found.mean.items()}
            for name, parameter in trainable(model).items():
                parameter.grad = sums[name]
            optimizer.step()
        return losses, weights(model)


def train(
    training: TinyTraining, forward: Callable[..., Tensor], step: Callable[[], object],
    clear: Callable[[], object] = lambda: None, *, steps: int, users: tuple[int, ...], accumulation: int = 1,
) -> list[float]:  # fmt: skip
    """Take steps on this rank, each after so many backward passes; the loss of each pass.

    In every second step no rank uses the parameter that ``users`` use.
    """
    rank, losses = dist.get_rank(), []
    for number in range(steps):
        clear()
        for micro in range(accumulation):
            sometimes = rank in users and number % 2 == 0
            loss = forward(*training.rows(number * accumulation + micro, rank), sometimes=sometimes)
            loss.backward()
            losses.append(float(loss.detach()))
        step()
    return losses


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which one or both may be missing."""
    return first if second is None else second if first is None else first + second


def _mean(gradients: list[Tensor | None]) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(there) / len(gradients) if there else None


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their first names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by their first names."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients of trainable parameters."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in trainable(model).items()}


class Memory:
    """Counts the bytes of the tensors that Python can reach in this process, each memory once, since it was made.

    What was there already is set aside (``gc.freeze``), so that counting again looks at little; a tensor among it whose
    memory grows or goes is noticed all the same. Ends with :meth:`close`.
    """

    def __init__(self) -> None:
        gc.collect()
        self._thaws = "utils.distributed.frozen" not in sys.modules  # a rank was started with all of it set aside
        self._known = [weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        gc.freeze()
        self._before = self._bytes()

    def grown(self) -> int:
        """Bytes more than at the start."""
        return self._bytes() - self._before

    def close(self) -> None:
        """Let the garbage collector look at everything again, but on a rank."""
        if self._thaws:
            gc.unfreeze()

    def _bytes(self) -> int:
        time.sleep(0.03)  # a thread of Gloo lets go of a collective's tensors a moment after the collective has ended
        gc.collect()
        things = [tensor for known in self._known if (tensor := known()) is not None]
        things += [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        sizes = {}
        for thing in things:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
        return sum(sizes.values())


class Recorded:
    """Makes optimizer classes that tell how large their state is."""

    def __init__(self, base: type[torch.optim.Optimizer]) -> None:
        self.made: list[torch.optim.Optimizer] = []
        made = self.made

        class RecordedOptimizer(base):
            def __init__(self, params, *args, **kwargs) -> None:
                super().__init__(params, *args, **kwargs)
                made.append(self)

        RecordedOptimizer.__name__ = RecordedOptimizer.__qualname__ = base.__name__
        self.optimizer_class = RecordedOptimizer

    def _state(self) -> list[Tensor]:
        values = [value for made in self.made for state in made.state.values() for value in state.values()]
        return [value for value in values if isinstance(value, Tensor) and value.dim()]

    def state_elements(self) -> int:
        """Elements of all state tensors, without the counters of steps."""
        return sum(value.numel() for value in self._state())

    def most_steps(self) -> int:
        """How often the tensor that was stepped most often has been stepped, where the optimizer counts."""
        states = [state for made in self.made for state in made.state.values()]
        return max((int(state.get("step", 0)) for state in states), default=0)

    def dtypes(self) -> list[str]:
        """Dtypes of the state tensors and of what is stepped."""
        stepped = [p for made in self.made for group in made.param_groups for p in group["params"]]
        return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in (*self._state(), *stepped)})
