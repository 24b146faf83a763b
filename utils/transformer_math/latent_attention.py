"""What one layer of attention reads and computes for a new token: grouped heads, and a latent for all heads.

Grouped-query attention keeps 2 G D numbers for a token and layer (Ainslie et al. 2023). Multi-head latent attention
keeps a latent, from which every head's key and value are projected, and a key of few numbers that carries the position
and is the same for all heads (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A product of matrices counts two operations for each multiply-add; the softmax is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.operators import Cost, require_sizes


def gqa_cache_numbers(kv_heads: int, head_dim: int) -> int:
    """Numbers of a token and layer in the cache: 2 G D."""
    require_sizes(kv_heads=kv_heads, head_dim=head_dim)
    return 2 * kv_heads * head_dim


def gqa_decode_cost(
    num_heads: int, kv_heads: int, head_dim: int, context: int, *, queries: int = 1, element_size: int = 2
) -> Cost:
    """FLOPs and least bytes of one sequence and layer: ``queries`` new tokens that see ``context`` cached ones.

    4 H D FLOPs for each query and key; keys and values are read once, queries once, outputs are written once. For a
    long context the intensity goes to 2 ``queries`` H / (G ``element_size``): in 16 bits, the query heads that share a
    key head.

    Raises:
        TypeError, ValueError: sizes that are not positive integers; ``kv_heads`` that do not divide ``num_heads``.
    """
    require_sizes(num_heads=num_heads, context=context, queries=queries, element_size=element_size)
    cached = gqa_cache_numbers(kv_heads, head_dim)
    if num_heads % kv_heads:
        raise ValueError(f"num_heads must be a multiple of kv_heads, got {num_heads} and {kv_heads}")
    own = 2 * queries * num_heads * head_dim
    return Cost(4 * num_heads * head_dim * queries * context, (cached * context + own) * element_size)


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention.

    Args:
        layers, num_heads: L and H.
        latent_dim: numbers of a token's latent, from which keys and values of all heads are projected.
        rope_dim: numbers of the key that carries the position, one for all heads.
        head_dim: of a head's key and query, without the part with the position.
        value_dim: of a head's value.

    Raises:
        TypeError, ValueError: sizes that are not positive integers.
    """

    layers: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        require_sizes(**vars(self))

    @property
    def cache_numbers(self) -> int:
        """Numbers of a token and layer in the cache: the latent and the key with the position."""
        return self.latent_dim + self.rope_dim

    def cache_bytes(self, tokens: int = 1, element_size: int = 2) -> int:
        """Bytes of the cache of ``tokens`` in all layers."""
        return self.layers * self.cache_numbers * tokens * element_size

    def score_scale(self) -> float:
        """Factor of the scores: 1 / sqrt(head_dim + rope_dim), the length of a query before absorption."""
        return (self.head_dim + self.rope_dim) ** -0.5

    def decode_cost(self, context: int, *, queries: int = 1, element_size: int = 2) -> Cost:
        """FLOPs and least bytes of one sequence and layer with the projections absorbed: queries meet latents.

        A head's score is a product of latent_dim + rope_dim numbers, its value one of latent_dim. Each latent is read
        once for all heads. For a long context the intensity goes to :meth:`intensity_limit`.
        """
        require_sizes(context=context, queries=queries, element_size=element_size)
        each = self.cache_numbers + self.latent_dim
        own = queries * self.num_heads * each  # queries in, sums of latents out
        return Cost(2 * queries * self.num_heads * context * each, (self.cache_numbers * context + own) * element_size)

    def intensity_limit(self, queries: int = 1, element_size: int = 2) -> float:
        """FLOP per byte of :meth:`decode_cost` for a long context: in 16 bits nearly two for each query head.

        2 H (2 latent_dim + rope_dim) / (element_size (latent_dim + rope_dim)).
        """
        each = self.cache_numbers + self.latent_dim
        return 2 * queries * self.num_heads * each / (self.cache_numbers * element_size)

    def expanded_flops(self, context: int, *, queries: int = 1) -> int:
        """FLOPs of one sequence and layer where keys and values of all heads are projected from the latents first.

        2 latent_dim H (head_dim + value_dim) for each token of the context, then products of head_dim + rope_dim and
        value_dim numbers for each query, head and key.
        """
        require_sizes(context=context, queries=queries)
        project = 2 * self.latent_dim * self.num_heads * (self.head_dim + self.value_dim) * context
        return project + self._pair_flops * queries * self.num_heads * context

    @property
    def _pair_flops(self) -> int:
        return 2 * (self.head_dim + self.rope_dim + self.value_dim)

    def fewest_queries_to_expand(self) -> int:
        """New tokens of a sequence from which on projecting keys and values first takes no more FLOPs than absorbing.

        Absorbed pairs cost more, projections cost the same however many queries there are: decoding absorbs, prefill
        expands. 0 where absorbing never costs more.
        """
        more = 2 * (self.cache_numbers + self.latent_dim) - self._pair_flops
        return 0 if more <= 0 else -(-2 * self.latent_dim * (self.head_dim + self.value_dim) // more)


#: DeepSeek-V3 (DeepSeek-AI 2024, section 4.2; its released ``config.json``).
DEEPSEEK_V3 = LatentAttention(layers=61, num_heads=128, latent_dim=512, rope_dim=64, head_dim=128, value_dim=128)
