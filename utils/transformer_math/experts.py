"""Models with experts: parameters of which each token meets a few, what a decode step reads, and what ranks send.

Letters: E experts in a layer, k of them chosen for each token, C numbers in a token's row, F the inner size of an
expert, B tokens in a step, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from utils.operators import element_size, require_sizes
from utils.transformer_math.latent_attention import DEEPSEEK_V3, LatentAttention
from utils.transformer_math.serving_bounds import Device, StepBounds, peak_rate


@dataclass(frozen=True)
class ExpertLayer:
    """Sizes of a layer of SwiGLU experts behind a router.

    Attributes:
        hidden: C.
        inner: F, of each routed expert.
        experts: E.
        chosen: k.
        shared: inner size of the expert that every token meets; 0 for none.
    """

    hidden: int
    inner: int
    experts: int
    chosen: int
    shared: int = 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert: its three matrices, 3 C F."""
        return 3 * self.hidden * self.inner

    @property
    def resident_parameters(self) -> int:
        """Parameters that every token meets: the shared expert and the router."""
        return 3 * self.hidden * self.shared + self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        return self.experts * self.expert_parameters + self.resident_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return self.chosen * self.expert_parameters + self.resident_parameters


@dataclass(frozen=True)
class MoEModel:
    """A decoder some of whose layers have experts; its head is not the embedding, and norms are left out.

    Attributes:
        moe: the layers of experts.
        layers: all layers.
        attention: parameters of one layer's attention.
        vocabulary: tokens that there are.
        dense_layers: of all layers, those that have an ordinary SwiGLU block instead of experts.
        dense_inner: inner size of that block.
    """

    moe: ExpertLayer
    layers: int
    attention: int
    vocabulary: int
    dense_layers: int = 0
    dense_inner: int = 0

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def resident_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but the routed experts and the embedding table."""
        dense = self.layers * self.attention + self.dense_layers * 3 * self.moe.hidden * self.dense_inner
        return dense + self.moe_layers * self.moe.resident_parameters + self.vocabulary * self.moe.hidden

    @property
    def parameters(self) -> int:
        """All parameters, those of the embedding table too."""
        return self.read_parameters(self.moe.experts) + self.vocabulary * self.moe.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with; it only looks up its row of the embedding table."""
        return int(self.read_parameters(self.moe.chosen))

    def read_parameters(self, touched: float) -> float:
        """Parameters that a step reads which touches so many experts in each layer (on average)."""
        return self.resident_parameters + self.moe_layers * touched * self.moe.expert_parameters


def _attention_parameters(attention: LatentAttention, hidden: int, query_latent: int) -> int:
    """Parameters of a layer of DeepSeek's attention: queries, keys and values by way of latents, and the output."""
    heads, head_dim, value_dim = attention.num_heads, attention.head_dim, attention.value_dim
    queries = hidden * query_latent + query_latent * heads * (head_dim + attention.rope_dim)
    keys_values = hidden * attention.cache_numbers + attention.latent_dim * heads * (head_dim + value_dim)
    return queries + keys_values + heads * value_dim * hidden


#: Published sizes: DeepSeek-V3 (technical report 2024, section 4.2; shared expert and dense layers included, the module
#: that predicts a second token left out) and Mixtral 8x7B (Jiang et al. 2024, table 1).
MOE_MODELS = {
    "DeepSeek-V3": MoEModel(
        ExpertLayer(hidden=7168, inner=2048, experts=256, chosen=8, shared=2048),
        layers=DEEPSEEK_V3.layers, attention=_attention_parameters(DEEPSEEK_V3, 7168, 1536), vocabulary=129280,
        dense_layers=3, dense_inner=18432,
    ),
    "Mixtral 8x7B": MoEModel(
        ExpertLayer(hidden=4096, inner=14336, experts=8, chosen=2),
        layers=32, attention=2 * 4096 * 4096 + 2 * 4096 * 8 * 128, vocabulary=32000,
    ),
}  # fmt: skip


def touched_experts(experts: int, chosen: int, batch: int) -> float:
    """Experts of a layer that at least one of ``batch`` tokens goes to, on average: E (1 - (1 - k/E)^B).

    Each token chooses k different experts, all sets equally likely, independently of the others: a given expert is
    missed by one token with probability 1 - k/E.

    Raises:
        TypeError, ValueError: sizes that are not positive integers, more chosen than there are.
    """
    require_sizes(experts=experts, chosen=chosen, batch=batch)
    if chosen > experts:
        raise ValueError(f"chosen must be at most experts, got {chosen} of {experts}")
    return experts * (1 - (1 - chosen / experts) ** batch)


def moe_decode_bounds(
    model: MoEModel, device: Device, batch: int, *, weights: str = "bf16", arithmetic: str = "bf16"
) -> StepBounds:
    """Bounds of a decode step of ``batch`` tokens, caches left out: touched experts are read, active ones multiply.

    Args:
        weights: format of the weights.
        arithmetic: the format whose peak rate multiplies.

    Raises:
        TypeError, ValueError: a batch that is not a positive integer, an unknown format, one that the device has no
            rate for.
    """
    read = model.read_parameters(touched_experts(model.moe.experts, model.moe.chosen, batch))
    return StepBounds(
        read_weights=read * element_size(weights) / device.memory_bandwidth,
        multiply=2 * model.active_parameters * batch / peak_rate(device, arithmetic),
        read_caches=0.0,
        attend=0.0,
    )


def compute_bound_batch(model: MoEModel, device: Device, *, weights: str = "bf16", arithmetic: str = "bf16") -> int:
    """The smallest batch whose decode step multiplies for at least as long as it reads weights.

    With all experts touched it is the ridge's batch of a dense model, times all weights over the active ones.
    """
    low, high = 0, 1
    while True:
        step = moe_decode_bounds(model, device, high, weights=weights, arithmetic=arithmetic)
        if step.multiply >= step.read_weights:
            break
        low, high = high, 2 * high
    while high - low > 1:  # reading grows ever more slowly, multiplying steadily: they cross once
        middle = (low + high) // 2
        step = moe_decode_bounds(model, device, middle, weights=weights, arithmetic=arithmetic)
        low, high = (low, middle) if step.multiply >= step.read_weights else (middle, high)
    return high


def all_to_all_bytes(
    layer: ExpertLayer, tokens: int, world_size: int, element_size: int, training: bool = False
) -> int:
    """Bytes that leave a rank in one layer, with tokens spread evenly over the experts.

    A row of C numbers leaves for each choice of another rank's expert, and its result comes back: two all-to-alls, four
    with the backward pass; and in the forward pass a count of 8 bytes for each of the others' experts.

    Args:
        layer: its sizes.
        tokens: of this rank.
        world_size: N ranks, which share the experts.
        element_size: bytes of a number.
        training: whether there is a backward pass.
    """
    require_sizes(tokens=tokens, world_size=world_size, element_size=element_size)
    away = tokens * layer.chosen * (world_size - 1) // world_size
    rows = (4 if training else 2) * away * layer.hidden * element_size
    return rows + 8 * layer.experts * (world_size - 1) // world_size


def rank_imbalance(counts: Sequence[float], world_size: int) -> float:
    """Rows of the busiest rank over the mean of all ranks, 1 when they are equal: how much longer a layer takes.

    Args:
        counts: tokens of each expert; the first E / N experts are on rank 0, and so on.
        world_size: N.

    Raises:
        ValueError: N does not divide the number of experts, or there are no tokens.
    """
    require_sizes(world_size=world_size)
    if len(counts) % world_size:
        raise ValueError(f"{world_size} ranks must divide the {len(counts)} experts")
    local, total = len(counts) // world_size, sum(counts)
    if not total > 0:
        raise ValueError(f"counts must be above 0 in sum, got {total}")
    return max(sum(counts[at : at + local]) for at in range(0, len(counts), local)) * world_size / total
