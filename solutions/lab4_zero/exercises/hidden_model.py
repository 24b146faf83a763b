"""What the scenarios of data parallelism train: a small model with everything that trips an implementation.

Two layers share a weight, one parameter is frozen, one is never used, one by some ranks alone, and there is a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from utils.checks.hidden import Draw, Observation

#: Rows that a rank reads in a step.
ROWS = 3


class Layer(nn.Module):
    """A norm and two linear layers around a GeLU, added to what comes in: (rows, width) to (rows, width)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    """The model; ``forward(x, y)`` is the mean squared error. The same seed gives the same one.

    Args:
        seed: draws the weights. The sizes follow from ``sizes`` alone, so that ranks with other weights agree in them.
        sizes: the seed of the sizes.

    Attributes:
        look: called when the gradient of the first layer's input is known: late in the backward pass.
        first_rows: whether the parameter that some ranks use stands before the layers, where its gradient comes late.
    """

    def __init__(self, seed: int, sizes: int) -> None:
        super().__init__()
        draw = Draw(sizes, "sizes")
        self.width, inner = draw.random.choice((4, 5, 7)), draw.random.choice((6, 9, 11))
        self.enter = nn.Linear(self.width, self.width)
        self.still = nn.Parameter(torch.empty(self.width), requires_grad=False)
        self.layers = nn.ModuleList(Layer(self.width, inner) for _ in range(draw.between(2, 3)))
        self.leave = nn.Linear(self.width, self.width, bias=False)
        self.leave.weight = self.enter.weight
        self.never = nn.Parameter(torch.empty(draw.between(2, 4)))
        self.register_buffer("factor", torch.empty(self.width))
        self.spare = nn.Module()  # comes last, so that its parameter is in the first bucket
        self.spare.at_times = nn.Parameter(torch.empty(self.width))
        self.look: Callable[[], None] | None = None
        self.first_rows = False
        source = Draw(seed, "weights")
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(source.normal(*tensor.shape, scale=0.6))
            self.factor += 2

    def forward(self, x: Tensor, y: Tensor, sometimes: bool = False) -> Tensor:
        h = self.enter(x) + self.still
        if self.look is not None and h.requires_grad:
            h.register_hook(lambda gradient: self.look())
        if sometimes and self.first_rows:
            h = h * (1 + self.spare.at_times)
        for layer in self.layers:
            h = layer(h)
        if sometimes and not self.first_rows:
            h = h * (1 + self.spare.at_times)
        return (self.leave(h * self.factor.to(h.dtype)) - y).square().mean()

    @property
    def trained_elements(self) -> int:
        """Psi: trainable elements, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


def rows(net: Net, seed: int, step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x and y of a rank in a step, (ROWS, width) each."""
    draw = Draw(seed, f"rows {step} {rank}")
    return draw.normal(ROWS, net.width, dtype=dtype), draw.normal(ROWS, net.width, dtype=dtype)


def weights(net: nn.Module) -> Tensor:
    """All parameters, frozen ones too, in one piece."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def gradients(net: nn.Module) -> list[Observation]:
    """The gradient of each trainable parameter; None for one without."""
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters() if p.requires_grad]


def full_gradients(net: nn.Module) -> int:
    """Elements of all gradients that there are now."""
    return sum(p.grad.numel() for p in net.parameters() if p.requires_grad and p.grad is not None)


class Noted:
    """Makes an optimizer class that tells what its optimizers keep."""

    def __init__(self, base: type[torch.optim.Optimizer]) -> None:
        made = self.made = []

        class NotedOptimizer(base):
            def __init__(self, params, *args, **kwargs) -> None:
                super().__init__(params, *args, **kwargs)
                made.append(self)

        NotedOptimizer.__name__ = NotedOptimizer.__qualname__ = base.__name__
        self.optimizer_class = NotedOptimizer

    def _state(self) -> Collection[Tensor]:
        values = [value for each in self.made for state in each.state.values() for value in state.values()]
        return [value for value in values if isinstance(value, Tensor) and value.dim()]

    def elements(self) -> int:
        """Elements of the state tensors, without counters of steps."""
        return sum(value.numel() for value in self._state())

    def dtypes(self) -> list[str]:
        """Of the state tensors and of what is stepped."""
        stepped = [p.dtype for each in self.made for group in each.param_groups for p in group["params"]]
        return sorted({str(dtype) for dtype in (*(value.dtype for value in self._state()), *stepped)})
