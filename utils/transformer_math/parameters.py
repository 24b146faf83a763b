"""How many parameters a GPT has, part by part, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from utils.gpt import GPTConfig

#: Published models in the shape of :class:`utils.gpt.GPT`: GPT-2 (Radford et al. 2019; weights as released, vocabulary
#: 50,257) and GPT-3 (Brown et al. 2020, table 2.1; its smaller sizes have the same shape).
MODELS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "GPT-2 small": GPTConfig(50257, 1024, layers=12, heads=12, hidden=768, frozen_positions=False),
        "GPT-2 XL": GPTConfig(50257, 1024, layers=48, heads=25, hidden=1600, frozen_positions=False),
        "GPT-3 6.7B": GPTConfig(50257, 2048, layers=32, heads=32, hidden=4096, frozen_positions=False),
        "GPT-3 13B": GPTConfig(50257, 2048, layers=40, heads=40, hidden=5120, frozen_positions=False),
        "GPT-3 175B": GPTConfig(50257, 2048, layers=96, heads=96, hidden=12288, frozen_positions=False),
    }
)


def block_parameters(config: GPTConfig) -> dict[str, int]:
    """Parameters of one block: ``attention``, ``mlp`` and its two ``norms``.

    With hidden width C, inner width F and biases these are 4 C^2 + 4 C, 2 C F + F + C and 4 C: together 12 C^2 + 13 C
    when F = 4 C.
    """
    c, f, bias = config.hidden, config.feed_forward, int(config.bias)
    return {
        "attention": 3 * c * c + c * c + bias * (3 * c + c),  # queries, keys and values; output
        "mlp": 2 * c * f + bias * (f + c),
        "norms": 2 * (1 + bias) * c,
    }


def parameters(config: GPTConfig) -> dict[str, int]:
    """Parameters by component; their sum is the model's count, a tied head counted once.

    Keys: ``embedding``, ``positions``, ``attention``, ``mlp``, ``norms`` (of all blocks and the last), ``head`` (0 when
    it is the embedding's weight), and ``unused`` when the model has it. A frozen table of positions is counted here.
    """
    c, block = config.hidden, block_parameters(config)
    count = {
        "embedding": config.vocabulary * c,
        "positions": config.context * c,
        "attention": config.layers * block["attention"],
        "mlp": config.layers * block["mlp"],
        "norms": config.layers * block["norms"] + (1 + int(config.bias)) * c,
        "head": 0 if config.tied else config.vocabulary * c,
    }
    if config.unused_parameter:
        count["unused"] = config.context
    return count


def total_parameters(config: GPTConfig) -> int:
    """All parameters of the model, frozen ones too: Psi."""
    return sum(parameters(config).values())


def trainable_parameters(config: GPTConfig) -> int:
    """Parameters that have a gradient and an optimizer state: all but a frozen table of positions."""
    return total_parameters(config) - (config.context * config.hidden if config.frozen_positions else 0)


def kv_cache_bytes(config: GPTConfig, tokens: int = 1, element_size: int = 2) -> int:
    """Bytes of keys and values that ``tokens`` leave behind when decoding: two vectors of width C in every layer."""
    return 2 * config.layers * config.hidden * tokens * element_size
