"""A sequence spread over ranks: what each rank sends for a layer of attention, when that hides, and what it keeps.

Letters: R ranks with N / R tokens of a sequence each; H query heads, G key and value heads, D head dimension; e bytes
of an element. In the ring each rank passes keys and values on, R - 1 times (Liu et al. 2023, "Ring Attention").
All-to-all exchanges parts of the sequence for heads before attention and back after it (Jacobs et al. 2023,
"DeepSpeed-Ulysses").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from utils.operators import require_sizes

if TYPE_CHECKING:
    from utils.serving.config import ModelConfig

#: Gradients of keys and values are added up in float32 on their way round the ring.
GRADIENT_SIZE = 4


def ring_attention_bytes(
    tokens: int, ranks: int, kv_heads: int, head_dim: int, *, element_size: int = 2, backward: bool = False
) -> float:
    """Bytes that each rank sends in one layer's pass over a sequence of ``tokens`` in equal parts.

    Keys and values travel R - 1 hops in either pass: 2 G D e N (R - 1) / R. In the backward pass their gradients travel
    too, in float32, R hops with the one that takes them home: 2 G D 4 N.

    Args:
        backward: of the backward pass instead of the forward pass.

    Raises:
        TypeError, ValueError: sizes that are not positive integers.
    """
    require_sizes(tokens=tokens, ranks=ranks, kv_heads=kv_heads, head_dim=head_dim, element_size=element_size)
    numbers = 2 * kv_heads * head_dim * tokens
    home = GRADIENT_SIZE * numbers if backward and ranks > 1 else 0
    return numbers * element_size * (ranks - 1) / ranks + home


def all_to_all_attention_bytes(
    tokens: int, ranks: int, num_heads: int, kv_heads: int, head_dim: int, *, element_size: int = 2
) -> float:
    """Bytes that each rank sends in one layer's pass, forward or backward, over a sequence in equal parts.

    Queries and outputs of H heads, keys and values of G: of its N / R tokens a rank keeps a part in R and sends the
    others, (2 H + 2 G) D e N (R - 1) / R^2. The backward pass sends their gradients, which are as many.

    Raises:
        TypeError, ValueError: as :func:`ring_attention_bytes`; ranks that do not divide both numbers of heads.
    """
    require_sizes(tokens=tokens, ranks=ranks, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
    require_sizes(element_size=element_size)
    if num_heads % ranks or kv_heads % ranks:
        raise ValueError(f"ranks must divide num_heads and kv_heads, got {ranks}, {num_heads} and {kv_heads}")
    return 2 * (num_heads + kv_heads) * head_dim * element_size * tokens * (ranks - 1) / ranks**2


def ring_hides_from(
    peak_flops: float,
    bandwidth: float,
    *,
    num_heads: int,
    kv_heads: int,
    causal: bool = True,
    element_size: int = 2,
) -> float:
    """Tokens of a rank, n = N / R, from which a forward step of the ring computes for as long as it sends.

    A step takes 4 n^2 H D FLOPs, with a causal mask in zig-zag half of them, and sends 2 n G D e bytes; so n is
    e G peak / (2 H bandwidth), or twice that: the sequence's length on a rank decides, neither R nor D.

    Args:
        peak_flops: FLOP/s that attention reaches.
        bandwidth: bytes/s that a rank sends while it receives as much.

    Raises:
        ValueError: a rate that is not positive.
    """
    _check_rates(peak_flops, bandwidth)
    require_sizes(num_heads=num_heads, kv_heads=kv_heads, element_size=element_size)
    return (2 if causal else 1) * element_size * kv_heads * peak_flops / (2 * num_heads * bandwidth)


def all_to_all_matches_from(
    peak_flops: float,
    bandwidth: float,
    ranks: int,
    *,
    num_heads: int,
    kv_heads: int,
    causal: bool = True,
    element_size: int = 2,
) -> float:
    """Tokens of a rank from which a layer's forward attention computes for as long as its all-to-alls send.

    They come before and after the attention, so they hide behind nothing of it; from here on they take the shorter
    part. FLOPs are 4 N^2 H D / R, half with a causal mask, bytes those of :func:`all_to_all_attention_bytes`.

    Args, errors: as :func:`ring_hides_from`.
    """
    _check_rates(peak_flops, bandwidth)
    require_sizes(ranks=ranks, num_heads=num_heads, kv_heads=kv_heads, element_size=element_size)
    per_token = 2 * (num_heads + kv_heads) * element_size * (ranks - 1) / ranks / bandwidth
    return per_token * peak_flops / ((2 if causal else 4) * num_heads * ranks)


def _check_rates(peak_flops: float, bandwidth: float) -> None:
    for name, value in (("peak_flops", peak_flops), ("bandwidth", bandwidth)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")


def decoder_block_activations(config: ModelConfig, tokens: int, *, element_size: int = 2) -> dict[str, int]:
    """Bytes that one block of a decoder of the Llama kind keeps between its forward and its backward pass.

    Kernels of their own compute norms and attention and keep their inputs and one statistic of a row in float32 (or
    wider): 1 / rms, and a logsumexp for each head. The SwiGLU is three operators of PyTorch.

    Args:
        tokens: of a rank.
        element_size: bytes of an activation.

    Returns:
        ``norms`` (their inputs and statistics), ``attention`` (the input of its projections; q, k, v; the output of the
        heads), ``logsumexp``, ``mlp`` (the input of gate and up; gate, silu(gate), up, and their product).
    """
    require_sizes(tokens=tokens, element_size=element_size)
    c, wide = config, max(4, element_size)
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return {
        "norms": 2 * tokens * (c.hidden_size * element_size + wide),
        "attention": tokens * (c.hidden_size + heads) * element_size,
        "logsumexp": tokens * c.num_heads * wide,
        "mlp": tokens * (c.hidden_size + 4 * c.intermediate_size) * element_size,
    }


def context_parallel_activations(
    config: ModelConfig, seq_len: int, ranks: int = 1, *, element_size: int = 2, checkpointing: bool = False
) -> dict[str, int]:
    """Bytes of activations of the blocks on the rank with the most tokens, where a sequence is spread over ranks.

    Everything but attention treats each token by itself and attention keeps nothing of N x N, so each rank keeps an
    R-th. What is on its way between ranks, the head and its loss are not counted.

    Args:
        seq_len: N, tokens of the whole sequence.
        ranks: R.
        checkpointing: a block keeps its input only, and one block at a time is computed again.

    Returns:
        ``blocks``, and with checkpointing ``recomputed``.

    Raises:
        TypeError, ValueError: sizes that are not positive integers.
    """
    require_sizes(seq_len=seq_len, ranks=ranks)
    tokens = -(-seq_len // ranks)
    block = sum(decoder_block_activations(config, tokens, element_size=element_size).values())
    if not checkpointing:
        return {"blocks": config.num_layers * block}
    return {"blocks": config.num_layers * tokens * config.hidden_size * element_size, "recomputed": block}
