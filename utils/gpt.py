"""The common test model of the chapters on parallel training: a small pre-norm GPT with everything that trips them.

Its embedding and its head share one weight, its table of positions is a parameter that is never trained, and on request
it has a parameter that no forward pass uses. Widths, heads, layers and vocabulary of :data:`TINY` are such that 2, 3 or
4 ranks cannot share them evenly.

The parts have the field's shapes: B batch, N sequence, C hidden width, V vocabulary::

    tokens (B, N) -> embed -> (B, N, C) -> blocks -> (B, N, C) -> logits (B, N, V) -> loss ()
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from utils.operators import require_sizes

#: Of every 16 tokens that :func:`batch` makes, about one does not follow from the one before it.
_SURPRISES = 16


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and peculiarities of a :class:`GPT`.

    Args:
        vocabulary, context: number of tokens there are, and the longest sequence.
        layers, heads, hidden: blocks, attention heads of each, width C of the residual stream.
        mlp_ratio: width of the feed-forward layer over ``hidden``.
        tied: the head's weight is the embedding's.
        bias: linear layers and norms have biases (the head has none).
        frozen_positions: the table of positions is a parameter with ``requires_grad=False`` (sines); otherwise trained.
        unused_parameter: the model has a trainable parameter, ``unused`` (context,), that the forward pass leaves out.
        checkpointing: blocks keep only their input and compute their activations again in the backward pass.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below 1, ``heads`` that do not divide ``hidden``.
    """

    vocabulary: int = 67
    context: int = 13
    layers: int = 5
    heads: int = 5
    hidden: int = 35
    mlp_ratio: int = 4
    tied: bool = True
    bias: bool = True
    frozen_positions: bool = True
    unused_parameter: bool = False
    checkpointing: bool = False

    def __post_init__(self) -> None:
        require_sizes(
            vocabulary=self.vocabulary, context=self.context, layers=self.layers, heads=self.heads, hidden=self.hidden,
            mlp_ratio=self.mlp_ratio,
        )  # fmt: skip
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got hidden {self.hidden} and heads {self.heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def feed_forward(self) -> int:
        """Inner width of the MLP."""
        return self.mlp_ratio * self.hidden

    def replace(self, **changes: object) -> GPTConfig:
        """The same configuration with some fields changed: ``TINY.replace(layers=2, tied=False)``."""
        return dataclasses.replace(self, **changes)


#: For tests: layers, heads, widths, vocabulary and totals that neither 2, 3 nor 4 share evenly.
TINY = GPTConfig(mlp_ratio=7)
#: For measurements on GPUs: 1.417 billion parameters.
GPT_1_4B = GPTConfig(
    vocabulary=50304, context=1024, layers=24, heads=16, hidden=2048, tied=False, frozen_positions=False
)


class Attention(nn.Module):
    """Causal self-attention, (B, N, C) to (B, N, C).

    Rows of ``qkv.weight`` (3C, C) are the queries of head 0, 1, ..., then all keys, then all values; each head has
    ``head_dim`` rows of each. Columns of ``output.weight`` (C, C) follow the heads in the same order.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        self.output = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, N, head_dim)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers around a GeLU (its tanh form), (B, N, C) to (B, N, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.feed_forward, bias=config.bias)
        self.down = nn.Linear(config.feed_forward, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream, (B, N, C) to (B, N, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer whose weights follow from ``seed``.

    Args:
        config: its sizes.
        seed: the same seed gives the same weights on every machine (on a CUDA device: others than on a CPU).
        device, dtype: where and in which format the parameters are made; ``device="meta"`` makes none, for counting.

    The parts may be called one by one, as a pipeline's stages do: :meth:`embed`, each of ``blocks``, :meth:`logits`,
    and :func:`loss_of`.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(device or "cpu"):
            self.embedding = nn.Embedding(config.vocabulary, config.hidden)
            self.positions = nn.Parameter(
                torch.empty(config.context, config.hidden), requires_grad=not config.frozen_positions
            )
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.hidden, bias=config.bias)
            self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
            if config.unused_parameter:
                self.unused = nn.Parameter(torch.empty(config.context))
        if config.tied:
            self.head.weight = self.embedding.weight
        if not self.positions.is_meta:
            self._fill(seed)
        if dtype is not None:
            self.to(dtype)

    @torch.no_grad()
    def _fill(self, seed: int) -> None:
        """GPT-2's start: deviation 0.02, smaller by sqrt(2 layers) where a layer adds to the residual stream."""
        generator = torch.Generator(self.positions.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            else:
                adds = name.endswith(("output.weight", "down.weight"))
                parameter.normal_(0, 0.02 / math.sqrt(2 * self.config.layers) if adds else 0.02, generator=generator)
        if self.config.frozen_positions:
            self.positions.copy_(_sines(self.config.context, self.config.hidden))

    def embed(self, tokens: Tensor) -> Tensor:
        """Vectors of tokens at their positions: (B, N) int64 to (B, N, C).

        Raises:
            ValueError: the sequence is longer than the context.
        """
        if tokens.shape[-1] > self.config.context:
            raise ValueError(f"the context is {self.config.context} tokens, got a sequence of {tokens.shape[-1]}")
        return self.embedding(tokens) + self.positions[: tokens.shape[-1]]

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the next token, (B, N, C) to (B, N, V)."""
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, N, V); or, given ``targets`` (B, N) int64, the mean cross-entropy as a scalar."""
        x = self.embed(tokens)
        for block in self.blocks:
            if self.config.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # no dropout: nothing random
            else:
                x = block(x)
        logits = self.logits(x)
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of all tokens, in at least float32: logits (B, N, V), targets (B, N) int64, to a scalar."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, -2).to(wide), targets.flatten())


def batch(
    config: GPTConfig, size: int, seed: int = 0, device: torch.device | str | None = None, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sequences that can be learned: mostly, a token follows from the one before it by a fixed rule.

    Args:
        size: number of sequences; row k of a larger batch of the same seed is row k of a smaller one.
        length: tokens of each, by default the context.

    Returns:
        Tokens and targets (the tokens moved on by one), both (size, length) int64; the same on every machine.
    """
    length = config.context if length is None else length
    require_sizes(size=size, length=length)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(config.vocabulary * _SURPRISES, (size, length + 1), generator=generator)
    fresh, surprise = draws // _SURPRISES, draws % _SURPRISES == 0
    rows = [fresh[:, 0]]
    for k in range(1, length + 1):
        rows.append(torch.where(surprise[:, k], fresh[:, k], (5 * rows[-1] + 7) % config.vocabulary))
    sequence = torch.stack(rows, dim=1).to(device or "cpu")
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def _sines(context: int, hidden: int) -> Tensor:
    """Sines and cosines of positions (Vaswani et al. 2017, section 3.5), scaled to the embedding's size."""
    rates = 10000.0 ** (-torch.arange(0, hidden, 2, dtype=torch.float64) / hidden)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :hidden]
    return (0.02 * waves).float()
