"""What the forward pass keeps for the backward pass: each tensor that autograd saves, counted from the configuration.

A block of hidden width C on T = B N tokens keeps 16 T C elements when F = 4 C (32 bytes a token and channel in 16 bits;
Korthikanti et al. 2022, equation 1, has 34 with two dropout masks), plus the statistics of norms and softmax, plus the
matrix of attention weights where the attention kernel does not compute it again.
"""

from __future__ import annotations

from utils.gpt import GPTConfig
from utils.operators import require_sizes


def block_activations(
    config: GPTConfig, batch: int, seq_len: int | None = None, *, element_size: int = 2, materialise: bool = False
) -> dict[str, int]:
    """Bytes that one block of :class:`utils.gpt.GPT` keeps between its forward and its backward pass.

    Args:
        batch, seq_len: sequences and tokens of each, by default the context.
        element_size: bytes of an activation. Statistics (mean and 1/std of a row, logsumexp) take as many, but at least
            4 bytes each.
        materialise: the attention weights (B, heads, N, N) are kept, once, instead of one logsumexp a row.

    Returns:
        ``norms`` (their inputs and statistics), ``attention`` (inputs of its linear layers; q, k, v), ``weights`` (of
        attention, or logsumexp), ``mlp`` (inputs of its linear layers and of the GeLU).
    """
    n = config.context if seq_len is None else seq_len
    require_sizes(batch=batch, seq_len=n, element_size=element_size)
    tokens, wide = batch * n, max(4, element_size)
    c, f = config.hidden, config.feed_forward
    rows = batch * config.heads * n
    return {
        "norms": 2 * (tokens * c * element_size + 2 * tokens * wide),
        "attention": (1 + 3 + 1) * tokens * c * element_size,  # norm_1's output; q, k, v; the mixed values
        "weights": rows * n * element_size if materialise else rows * wide,
        "mlp": (c + 2 * f) * tokens * element_size,  # norm_2's output; before and after the GeLU
    }


def activations(
    config: GPTConfig,
    batch: int,
    seq_len: int | None = None,
    *,
    element_size: int = 2,
    materialise: bool = False,
    checkpointing: bool | None = None,
) -> dict[str, int]:
    """Bytes that the whole model keeps at the end of its forward pass, by component.

    With checkpointing of its blocks the model keeps each block's input, and one block's activations at a time during
    the backward pass.

    Args:
        checkpointing: by default as the configuration says.

    Returns:
        ``blocks`` (their activations, or with checkpointing their inputs), ``recomputed`` (with checkpointing: the one
        block that is being computed again), ``head`` (the last norm, the head's input and the loss's probabilities and
        count in fp32 or wider), ``tokens`` (indices of the embedding and of the loss, int64).
    """
    n = config.context if seq_len is None else seq_len
    again = config.checkpointing if checkpointing is None else checkpointing
    block = sum(block_activations(config, batch, n, element_size=element_size, materialise=materialise).values())
    tokens, c, wide = batch * n, config.hidden, max(4, element_size)
    found = {
        "blocks": config.layers * (tokens * c * element_size if again else block),
        "head": 2 * tokens * c * element_size + 2 * tokens * wide + (tokens * config.vocabulary + 1) * wide,
        "tokens": 2 * tokens * 8,
    }
    return found | ({"recomputed": block} if again else {})
