"""A decoder of the Llama kind in plain PyTorch, with attention left to whoever calls it.

Letters: T tokens of a step (any leading shape: ``(T,)`` for a ragged batch laid end to end, ``(B, N)`` for training),
C hidden size, H query heads, G key and value heads, D head dimension, V vocabulary.

A step's tokens may belong to many requests, each with its own past. Every operation but one treats each token by
itself, so only attention needs to know: :class:`Decoder` computes the queries, keys and values and passes them to
``attend(layer, q, k, v)``, which stores the keys and values where it keeps them and returns what the queries see.
:class:`KVCache` is the plain way to do so, for one sequence; a serving engine passes its paged cache instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.serving.config import ModelConfig

#: ``attend(layer, q (..., H, D), k (..., G, D), v (..., G, D)) -> (..., H, D)``.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, the mean in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of a head, (D/2,) float32: ``theta^(-2i/D)`` (Su et al. 2021), then scaled."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float()
    frequencies = 1.0 / (config.rope_theta ** (pairs / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * slow + kept * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (..., H, D) turned by their positions' angles; ``cos`` and ``sin`` (..., 1, D), both halves alike."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """The projections around an attention that somebody else computes."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm, self.head_dim, self.layer = config.qk_norm, config.head_dim, layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., G, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., G, D)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        seen = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(seen.flatten(-2))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model. Modules carry the names of Hugging Face checkpoints, less the leading ``model.``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.embed_tokens.weight.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last norm, (..., C).

        Args:
            tokens: (...,) integers in [0, V).
            positions: of the same shape, each token's place in its own sequence, from 0.
            attend: called once a layer, in order; see the module's text.

        Raises:
            ValueError: shapes that differ.
        """
        if tokens.shape != positions.shape:
            raise ValueError(
                f"each token has one position, got tokens {tuple(tokens.shape)} and positions {tuple(positions.shape)}"
            )
        x = self.embed_tokens(tokens)
        # Angles in float32 whatever the weights are: position 30,000 times 1 radian has no fraction left in bfloat16.
        angles = positions.unsqueeze(-1).float() * self.frequencies.float()
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)  # (..., 1, D)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (..., V), of the rows of :meth:`hidden` that are wanted (mostly the last)."""
        return self.lm_head(hidden)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``logits(hidden(...))`` of every token, (..., V)."""
        return self.logits(self.hidden(tokens, positions, attend))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last queries of sequences, (..., Nq, H, D), over (..., Nk, G, D): query i sees Nk - Nq + i + 1.

    Scores are scaled by 1/sqrt(D). Query head h reads key head h // (H / G).
    """
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    share = q.shape[-3] // k.shape[-3]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=-3), v.repeat_interleave(share, dim=-3)
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == keys:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif queries == 1:
        out = F.scaled_dot_product_attention(q, k, v)
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(-3, -2)


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The :data:`Attend` of whole sequences (..., N) without a past: training, and decoding that keeps no cache."""
    return causal_attention(q, k, v)


class KVCache:
    """Keys and values of one sequence, in one piece reserved ahead: the :data:`Attend` of plain generation.

    ``Decoder(tokens (T,), positions, cache)`` reads the past and writes T more; ``advance(T)`` then makes them past.

    Args:
        config: sizes.
        capacity: tokens to reserve for; ``config.kv_bytes_per_token`` bytes each.
        dtype, device: of the model.

    Raises:
        ValueError: a capacity below 1 or over the model's ``max_seq_len``; on use, more tokens than reserved.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if not 1 <= capacity <= config.max_seq_len:
            raise ValueError(f"capacity must be between 1 and max_seq_len = {config.max_seq_len}, got {capacity}")
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens reserved."""
        return self.keys.shape[1]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What T queries (T, H, D) see of the past and of themselves; stores k and v (T, G, D) behind the past."""
        end = self.length + k.shape[0]
        if end > self.capacity:
            raise ValueError(f"the cache is reserved for {self.capacity} tokens, {end} are wanted")
        self.keys[layer, self.length : end] = k
        self.values[layer, self.length : end] = v
        return causal_attention(q, self.keys[layer, :end], self.values[layer, :end])

    def advance(self, tokens: int) -> None:
        """Make the tokens of the last step part of the past; a negative number drops as many of the newest."""
        if not 0 <= self.length + tokens <= self.capacity:
            raise ValueError(f"the length must stay within 0..{self.capacity}, got {self.length} + {tokens}")
        self.length += tokens
