"""Small modules that are no plain stack of blocks, and how the tests of ZeRO-3 train them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5
ADAMW = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1, "foreach": False}


class Layer(nn.Module):
    """A block: tanh of a linear layer, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y if scale is None else y * scale)


class Stack(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SharedWeight(Stack):
    """Two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight = self.layers[0].linear.weight


class SharedModule(Stack):
    """Two blocks hold the same linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear = self.layers[0].linear


class UsedTwice(Stack):
    """The same block stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[0])


class Nested(Stack):
    """A block within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner = Layer()
        self.layers[1].forward = self.around

    def around(self, x: Tensor) -> Tensor:
        return x + self.layers[1].inner(self.layers[1].linear(x))


class Skipped(Stack):
    """A block that no pass uses, and a parameter of a used block that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[2](self.layers[0](x)))


class OnOneRank(Stack):
    """A bias that only one rank's rows use (those whose first feature is far out)."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        far = x[:, :1] > 50
        y = super().forward(x.clamp(max=2))
        return y + self.rare * far if far.any() else y


class Frozen(Stack):
    """A frozen block, and a block with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].linear.bias.requires_grad_(False)


class Small(Stack):
    """Blocks with fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(2))


class Scale(Layer):
    """A block of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = None
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Arguments(Stack):
    """Blocks with keyword arguments that need gradients; results in a dictionary."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scale = self.layers[0](x)
        y = self.layers[1](x, scale=scale)
        return {"out": [self.head(self.layers[2](y, scale=scale))], "none": None}


class Reentrant(Stack):
    """Blocks checkpointed by a backward pass within the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=True) if torch.is_grad_enabled() else layer(x)
        return self.head(x)


class Buffered(Stack):
    """A buffer that starts different on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class NoRoot(Stack):
    """Nothing but blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer()


KINDS = [Stack, SharedWeight, SharedModule, UsedTwice, Nested, Skipped, OnOneRank, Frozen, Small, Arguments, Reentrant]
MODULES = {kind.__name__: kind for kind in (*KINDS, Buffered, NoRoot)}


def rows(step: int) -> Tensor:
    """Twelve rows of a step; one row far out in the last rank's part."""
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    x[11, 0] = 100
    return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y["out"][0] if isinstance(y, dict) else y).square().mean()


def made(kind: type[Stack], seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return kind()


def steps(model: nn.Module, halves: Callable[[Tensor], Tensor], count: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(count):
        loss_of(model, halves(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def own_rows(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]
