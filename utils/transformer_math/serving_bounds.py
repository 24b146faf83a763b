"""How fast a GPU can serve a model at best: bounds of prefill and of a decode step from bytes and FLOPs.

A decode step reads each weight once and everybody's keys and values; prefill passes all tokens of the prompts through
the same weights at once. Both follow from two numbers of the GPU, as in lecture 10: equations (6), (7), (11) and (12).
Kernels' own time, which a real step adds, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from utils.gpt import GPTConfig
from utils.hardware import CPU, GPU, TPU
from utils.operators import element_size, require_sizes
from utils.transformer_math.parameters import MODELS, total_parameters

if TYPE_CHECKING:
    from utils.serving.config import ModelConfig

Device = GPU | TPU | CPU


@dataclass(frozen=True)
class ServedModel:
    """What the bounds need to know of a model.

    Args:
        parameters: all weights, which lie in memory.
        multiplied: Psi, the weights that each step multiplies and reads: all but a table of embeddings that is not also
            the head, and a table of positions.
        layers, num_heads, kv_heads, head_dim: L, H, G and D.
        max_seq_len: longest context in tokens.

    Raises:
        TypeError, ValueError: sizes that are not positive integers, ``kv_heads`` that do not divide ``num_heads``, more
            multiplied than there are.
    """

    parameters: int
    multiplied: int
    layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_seq_len: int

    def __post_init__(self) -> None:
        require_sizes(**vars(self))
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of kv_heads, got {self.num_heads} and {self.kv_heads}")
        if self.multiplied > self.parameters:
            raise ValueError(f"multiplied must be at most parameters, got {self.multiplied} of {self.parameters}")

    @classmethod
    def of(cls, config: GPTConfig | ModelConfig) -> ServedModel:
        """The same of a configuration of :mod:`utils.gpt` or of :mod:`utils.serving`."""
        if isinstance(config, GPTConfig):
            c, every = config, total_parameters(config)
            idle = c.context * c.hidden + (0 if c.tied else c.vocabulary * c.hidden)
            return cls(every, every - idle, c.layers, c.heads, c.heads, c.head_dim, c.context)
        c, every = config, config.parameters
        idle = 0 if c.tied_head else c.vocab_size * c.hidden_size
        return cls(every, every - idle, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.max_seq_len)

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all weights in ``dtype``."""
        return self.parameters * element_size(dtype)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """kappa = 2 L G D e, bytes that the keys and values of one token take in the cache (lecture 10, equation 6)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_size(dtype)


def _llama(vocabulary: int, hidden: int, inner: int, layers: int, kv_heads: int, context: int) -> ServedModel:
    """A model of the Llama kind with heads of 128 and a head of its own: its weights counted matrix by matrix."""
    attention = hidden * (2 * hidden + 2 * kv_heads * 128)
    blocks = layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    table = vocabulary * hidden
    return ServedModel(blocks + 2 * table, blocks + table, layers, hidden // 128, kv_heads, 128, context)


def _qwen3_small() -> ServedModel:
    """Qwen3 0.6B: the head is the embedding, queries are twice as wide as the model, queries and keys are normed."""
    vocabulary, hidden, inner, layers, heads, kv_heads, context = 151936, 1024, 3072, 28, 16, 8, 32768
    attention = hidden * (2 * heads * 128 + 2 * kv_heads * 128) + 2 * 128
    every = vocabulary * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    return ServedModel(every, every, layers, heads, kv_heads, 128, context)


#: Models that the lectures serve: sizes from the released ``config.json`` files (Llama 2 and 3, Qwen3), GPT-2 and GPT-3
#: from :data:`~utils.transformer_math.MODELS`.
SERVED_MODELS: Mapping[str, ServedModel] = MappingProxyType(
    {
        "Qwen3 0.6B": _qwen3_small(),
        "Llama 2 7B": _llama(32000, 4096, 11008, 32, 32, 4096),
        "Llama 3 8B": _llama(128256, 4096, 14336, 32, 8, 8192),
        "Llama 3 70B": _llama(128256, 8192, 28672, 80, 8, 8192),
        **{name: ServedModel.of(config) for name, config in MODELS.items()},
    }
)


class StepBounds(NamedTuple):
    """Least seconds of the parts of a step. Weights are read while others multiply; caches come on top."""

    read_weights: float
    multiply: float
    read_caches: float
    attend: float

    @property
    def seconds(self) -> float:
        """Least time of the step: the longer of reading and multiplying the weights, and the attention."""
        return max(self.read_weights, self.multiply) + self.read_caches + self.attend

    @property
    def bound_by(self) -> str:
        """``"compute"`` when arithmetic takes the larger part of :attr:`seconds`, else ``"memory"``."""
        arithmetic = self.attend + (self.multiply if self.multiply > self.read_weights else 0.0)
        return "compute" if 2 * arithmetic > self.seconds else "memory"


def peak_rate(device: Device, arithmetic: str) -> float:
    """FLOP/s of a device's matrix products in a format.

    Raises:
        TypeError, ValueError: not an entry of the hardware table; a format that it has no rate for.
    """
    if not isinstance(device, Device):
        raise TypeError(f"device must be an entry of the hardware table, such as gpu('H100'), got {device!r}")
    if arithmetic not in device.peak_flops:
        raise ValueError(f"{device.name} has no {arithmetic!r} rate; it has: {', '.join(device.peak_flops)}")
    return device.peak_flops[arithmetic]


def decode_bounds(
    model: ServedModel,
    device: Device,
    batch: int,
    context: float,
    *,
    weights: str = "bf16",
    cache: str = "bf16",
    arithmetic: str = "bf16",
) -> StepBounds:
    """Bounds of one decode step: a token for each of ``batch`` sequences of ``context`` tokens.

    The sum is TPOT(B, n) = max(e Psi / beta, 2 Psi B / pi) + B n kappa / beta (lecture 10, equation 11).

    Args:
        context: tokens in the cache of each sequence; a mean over steps need not be whole.
        weights, cache: formats of the weights and of the keys and values.
        arithmetic: the format whose peak rate multiplies.

    Raises:
        TypeError, ValueError: a batch that is not a positive integer, a negative context, an unknown format, one that
            the device has no rate for.
    """
    require_sizes(batch=batch)
    if isinstance(context, bool) or not isinstance(context, Real):
        raise TypeError(f"context must be a number of tokens, got {context!r}")
    if not 0 <= context < math.inf:
        raise ValueError(f"context must be zero or more tokens, got {context}")
    peak = peak_rate(device, arithmetic)
    return StepBounds(
        read_weights=model.multiplied * element_size(weights) / device.memory_bandwidth,
        multiply=2 * model.multiplied * batch / peak,
        read_caches=batch * context * model.kv_bytes_per_token(cache) / device.memory_bandwidth,
        attend=0.0,
    )


def prefill_bounds(
    model: ServedModel,
    device: Device,
    tokens: int,
    sequences: int = 1,
    *,
    weights: str = "bf16",
    arithmetic: str = "bf16",
) -> StepBounds:
    """Bounds of a prefill: ``sequences`` prompts of ``tokens`` each pass through the model in one step.

    The weights' part is that of a decode step with as many tokens; causal attention adds 4 L H D p^2 / 2 FLOPs a prompt
    (lecture 10, section 7). Errors as in :func:`decode_bounds`.
    """
    require_sizes(tokens=tokens, sequences=sequences)
    step = decode_bounds(model, device, sequences * tokens, 0, weights=weights, arithmetic=arithmetic)
    flops = 4 * model.layers * model.num_heads * model.head_dim * sequences * tokens**2 / 2
    return step._replace(attend=flops / peak_rate(device, arithmetic))


def largest_batch(
    model: ServedModel, memory_bytes: float, tokens: int, *, weights: str = "bf16", cache: str = "bf16"
) -> int:
    """Sequences of ``tokens`` whose caches fit beside the weights, 0 when the weights do not (lecture 10, equation 12).

    Raises:
        TypeError, ValueError: tokens that are not a positive integer, no memory.
    """
    require_sizes(tokens=tokens)
    if not memory_bytes > 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    left = memory_bytes - model.weight_bytes(weights)
    return max(0, math.floor(left / (tokens * model.kv_bytes_per_token(cache))))


class RequestBounds(NamedTuple):
    """Bounds in seconds (:mod:`utils.serving.metrics` defines them) of requests that are served as one batch."""

    ttft: float
    """time to first token: the prefill of all prompts"""
    tpot: float
    """time per output token; NaN with a single one"""
    latency: float
    """end-to-end latency"""
    throughput: float
    """output tokens a second of the whole batch, from the arrival to the last token"""


def request_bounds(
    model: ServedModel,
    device: Device,
    batch: int,
    prompt: int,
    new: int,
    *,
    weights: str = "bf16",
    cache: str = "bf16",
    arithmetic: str = "bf16",
) -> RequestBounds:
    """Least times of ``batch`` requests with prompts of ``prompt`` tokens and ``new`` output tokens each.

    The gap before token i + 1 is a decode step over prompt + i tokens, i = 1 ... new - 1. It grows by the same amount
    each time, so the mean gap is the step over prompt + new / 2 tokens (lecture 10, equations 10 and 11).
    """
    require_sizes(new=new)
    first = prefill_bounds(model, device, prompt, batch, weights=weights, arithmetic=arithmetic).seconds
    formats = {"weights": weights, "cache": cache, "arithmetic": arithmetic}
    gap = decode_bounds(model, device, batch, prompt + new / 2, **formats).seconds if new > 1 else math.nan
    latency = first + (new - 1) * gap if new > 1 else first
    return RequestBounds(first, gap, latency, batch * new / latency)
