"""ZeRO-3 (lab 4) of modules that are no plain stack of blocks, and what may happen to them in a training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from solutions.lab4_zero.fully_sharded import FullyShardedDataParallel
from utils.distributed import launch

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


KINDS = [Stack, SharedWeight, SharedModule, UsedTwice, Nested, Skipped, OnOneRank, Frozen, Small, Arguments, Reentrant]
MODULES = {kind.__name__: kind for kind in (*KINDS, Buffered)}


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


def differences(kind: type[Stack], **options: object) -> list[str]:
    """What differs between three steps on the ranks and three in this process alone."""
    alone, model = made(kind), FullyShardedDataParallel(made(kind, seed=dist.get_rank()), Layer, **options)
    steps(alone, lambda x: x)
    steps(model, own_rows)
    expected, found = alone.state_dict(), model.state_dict()
    wrong = [] if list(expected) == list(found) else [f"names {list(found)}"]
    for key, value in expected.items():
        if not torch.allclose(found[key], value, rtol=1e-5, atol=1e-6):
            wrong.append(f"{key}: {(found[key] - value).abs().max():.1e}")
    if model.gathered_bytes:
        wrong.append(f"{model.gathered_bytes} bytes still gathered")
    model.eval()
    with torch.no_grad():
        with torch.inference_mode():
            model(rows(7))
        if not torch.allclose(loss_of(model, rows(7)), loss_of(alone, rows(7)), rtol=1e-4):
            wrong.append("the loss of an evaluation")
    return wrong


@functools.cache
def all_differences(world_size: int) -> list[dict[str, list[str]]]:
    def job() -> dict[str, list[str]]:
        torch.set_num_threads(1)
        return {name: differences(kind) for name, kind in MODULES.items()}

    return launch(job, world_size=world_size, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("name", MODULES)
def test_three_steps_equal_those_of_one_process(name, world_size):
    assert [rank[name] for rank in all_differences(world_size)] == [[]] * world_size


# ---- what may happen in a training loop ----
class Loops:
    """Each method trains ``model`` in one unusual way; the module alone must come to the same weights."""

    @staticmethod
    def two_forwards_before_one_backward(model, halves):
        x, y = halves(rows(0)), halves(rows(1))
        (loss_of(model, x) + loss_of(model, y)).backward()

    @staticmethod
    def a_forward_whose_loss_is_never_used(model, halves):
        loss_of(model, halves(rows(0)))
        loss_of(model, halves(rows(1))).backward()

    @staticmethod
    def two_backwards_through_one_graph(model, halves):
        loss = loss_of(model, halves(rows(0)))
        loss.backward(retain_graph=True)
        loss.backward()

    @staticmethod
    def the_whole_model_checkpointed(model, halves):
        x = halves(rows(0)).requires_grad_()
        checkpoint(model, x, use_reentrant=False).square().mean().backward()

    @staticmethod
    def an_error_in_a_forward(model, halves):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            loss_of(model, torch.ones(4, WIDTH + 1))
        loss_of(model, halves(rows(0))).backward()

    @staticmethod
    def an_error_in_a_backward(model, halves):
        def fail(gradient: Tensor) -> None:
            raise RuntimeError("on purpose")

        x = halves(rows(0)).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(model, x).backward()
        model.zero_grad()
        loss_of(model, halves(rows(1))).backward()

    @staticmethod
    def groups_of_parameters_by_name(model, halves):
        loss_of(model, halves(rows(0))).backward()
        decayed = [value for name, value in model.named_parameters() if name.endswith("weight")]
        others = [value for name, value in model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.03}]
        torch.optim.AdamW(groups, **ADAMW).step()
        model.zero_grad()
        loss_of(model, halves(rows(1))).backward()


LOOPS = [name for name in vars(Loops) if not name.startswith("_")]


def loop_differences(name: str, **options: object) -> list[str]:
    """What differs after an unusual loop."""
    alone, model = made(Stack), FullyShardedDataParallel(made(Stack), Layer, **options)
    for trained, part in ((alone, lambda x: x), (model, own_rows)):
        getattr(Loops, name)(trained, part)
        torch.optim.AdamW(trained.parameters(), **ADAMW).step()
    expected, found = alone.state_dict(), model.state_dict()
    wrong = [key for key in expected if not torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6)]
    return wrong + ([f"{model.gathered_bytes} bytes still gathered"] if model.gathered_bytes else [])


@functools.cache
def all_loops() -> list[dict[str, list[str]]]:
    def job() -> dict[str, list[str]]:
        return {name: loop_differences(name) + loop_differences(name, keep_root=True) for name in LOOPS}

    return launch(job, world_size=2, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_an_unusual_loop_comes_to_the_weights_of_one_process(name):
    assert [rank[name] for rank in all_loops()] == [[], []]


def refusals() -> dict[str, str]:
    """What is said to wrong uses."""

    class Integers(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)

    def mixed() -> Stack:
        module = Stack()
        module.layers[0].linear.weight.data = module.layers[0].linear.weight.data.double()
        return module

    model = FullyShardedDataParallel(Stack(), Layer)
    weights = Stack().state_dict()
    wrong_uses = {
        "no block": lambda: FullyShardedDataParallel(Stack(), (nn.LSTM, nn.GRU)),
        "negative prefetch": lambda: FullyShardedDataParallel(Stack(), Layer, prefetch=-1),
        "integers": lambda: FullyShardedDataParallel(nn.Sequential(Integers()), Layer),
        "two dtypes": lambda: FullyShardedDataParallel(mixed(), Layer),
        "moved": lambda: model.half(),
        "missing weight": lambda: model.load_state_dict({k: v for k, v in weights.items() if k != "head.bias"}),
        "wrong shape": lambda: model.load_state_dict({**weights, "head.bias": torch.ones(4)}),
    }
    said = {}
    for name, use in wrong_uses.items():
        with pytest.raises((ValueError, TypeError, RuntimeError, KeyError)) as caught:
            use()
        said[name] = f"{caught.type.__name__}: {caught.value}"
    return said


@pytest.mark.slow
def test_wrong_uses_are_refused_by_name():
    (said,) = launch(refusals, world_size=1, backend="gloo")
    assert said["no block"].startswith(
        "ValueError: block_class must name modules within Stack, and it has no LSTM, GRU"
    )
    assert said["negative prefetch"] == "ValueError: prefetch must be at least 0, got -1"
    assert said["integers"] == "TypeError: parameter '0.table' must be floating point, got torch.int8"
    assert "several dtypes (torch.float32, torch.float64): give compute_dtype" in said["two dtypes"]
    assert said["moved"].startswith("RuntimeError: a sharded module cannot be moved or cast")
    assert "missing: ['head.bias']" in said["missing weight"]
    assert said["wrong shape"] == "ValueError: head.bias must have shape (3,), got (4,)"
