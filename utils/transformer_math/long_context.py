"""Where a long context costs more than the weights: in FLOPs of attention, and in bytes of the cache.

Letters: N tokens of a sequence, L layers, H query heads, G key and value heads, D head dimension, C hidden size, F
inner size of the MLP, V vocabulary. A product of matrices counts two operations for each multiply-add; norms, rotary
embedding and softmax are a small rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from utils.operators import require_sizes

if TYPE_CHECKING:
    from utils.serving.config import ModelConfig


def seen_pairs(tokens: int, window: int | None = None, sinks: int = 0) -> int:
    """Query-key pairs of a causal sequence, of which a query sees ``window`` keys at most and the first ``sinks``.

    Query i sees key j where j <= i, and either j > i - window (Beltagy et al. 2020, section 3.1) or j < sinks (Xiao et
    al. 2023, "StreamingLLM", section 3.2).

    Args:
        window: None for no limit; then ``sinks`` change nothing.

    Raises:
        TypeError, ValueError: sizes that are not positive integers, sinks that are negative.
    """
    require_sizes(tokens=tokens)
    if isinstance(sinks, bool) or not isinstance(sinks, int):
        raise TypeError(f"sinks must be an integer, got {sinks!r}")
    if sinks < 0:
        raise ValueError(f"sinks must not be negative, got {sinks}")
    if window is None:
        return tokens * (tokens + 1) // 2
    require_sizes(window=window)
    near = min(window, tokens)
    inside = near * (near + 1) // 2 + (tokens - near) * near
    # query i has lost i + 1 - window keys, of which min(sinks, i + 1 - window) are sinks
    lost = max(0, tokens - window)
    first = min(sinks, lost)
    return inside + first * (first + 1) // 2 + (lost - first) * sinks


def multiplied_weights(config: ModelConfig, *, head: bool = False) -> int:
    """Weights that multiply each token: those of all blocks, L (C (2 H D + 2 G D) + 3 C F), and of the head, V C.

    Args:
        head: whether logits are computed for every token, as in training; a prefill needs those of the last only.
    """
    c = config
    attention = c.hidden_size * 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
    blocks = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    return blocks + (c.vocab_size * c.hidden_size if head else 0)


def decoder_flops(
    config: ModelConfig,
    tokens: int,
    *,
    causal: bool = True,
    head: bool = False,
    window: int | None = None,
    sinks: int = 0,
) -> dict[str, int]:
    """FLOPs of a forward pass over one sequence: 2 W N of the weights W, and 4 L H D for each pair of query and key.

    Args:
        causal: count the pairs that the mask leaves, N (N + 1) / 2 of N^2.
        head: as for :func:`multiplied_weights`.
        window, sinks: as for :func:`seen_pairs`; they need ``causal``.

    Returns:
        ``weights`` and ``attention`` (QK^T and PV). A backward pass takes twice as many of each.

    Raises:
        TypeError, ValueError: as :func:`seen_pairs`, or a window without ``causal``.
    """
    if not causal and window is not None:
        raise ValueError(f"a window needs causal=True, got window={window}")
    pairs = seen_pairs(tokens, window, sinks)
    if not causal:
        pairs = tokens * tokens
    wide = config.num_layers * config.num_heads * config.head_dim
    return {"weights": 2 * multiplied_weights(config, head=head) * tokens, "attention": 4 * wide * pairs}


def attention_overtakes(config: ModelConfig, *, causal: bool = True, head: bool = False) -> int:
    """Shortest context whose attention takes at least as many FLOPs as its weights (:func:`decoder_flops`).

    Causal: 2 L H D N (N + 1) >= 2 W N, so N >= W / (L H D) - 1; without a mask N >= W / (2 L H D).
    """
    weights, wide = multiplied_weights(config, head=head), config.num_layers * config.num_heads * config.head_dim
    return max(1, -(-weights // wide) - 1 if causal else -(-weights // (2 * wide)))


def cache_overtakes_weights(config: ModelConfig, *, weight_size: float = 2, cache_size: float = 2) -> int:
    """Fewest tokens, of all sequences together, whose cache takes at least as many bytes as all weights.

    Args:
        weight_size, cache_size: bytes of a weight and of a number in the cache; half a byte is 4 bits.

    Raises:
        ValueError: a size that is not positive.
    """
    for name, size in (("weight_size", weight_size), ("cache_size", cache_size)):
        if not 0 < size < math.inf:
            raise ValueError(f"{name} must be positive, got {size}")
    return math.ceil(config.parameters * weight_size / (config.kv_bytes_per_token(1) * cache_size))
