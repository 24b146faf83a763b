"""How many floating-point operations a training step takes: exactly for matrix products, and by the rule 6 Psi T.

Only matrix products are counted, two operations a multiply-add; in the backward pass each costs twice its forward pass
(one product for the gradient of each operand). Norms, GeLU and softmax are a small rest (see lecture 04 for them).
"""

from __future__ import annotations

from utils.gpt import GPTConfig
from utils.operators import require_sizes


def forward_flops(config: GPTConfig, batch: int, seq_len: int | None = None, *, causal: bool = False) -> dict[str, int]:
    """FLOPs of the forward pass by component.

    Args:
        batch, seq_len: sequences and tokens of each, by default the context.
        causal: count only the pairs that a causal mask keeps, N (N + 1) / 2 of N^2. The literature mostly counts all
            pairs; a kernel that skips masked tiles does about half.

    Returns:
        ``attention`` (its linear layers), ``scores`` (QK^T and PV), ``mlp``, ``head``.

    Raises:
        TypeError, ValueError: sizes that are not positive integers.
    """
    n = config.context if seq_len is None else seq_len
    require_sizes(batch=batch, seq_len=n)
    tokens, c, f = batch * n, config.hidden, config.feed_forward
    pairs = n * (n + 1) // 2 if causal else n * n
    return {
        "attention": config.layers * 2 * tokens * 4 * c * c,
        "scores": config.layers * 2 * batch * 2 * pairs * c,  # QK^T and PV, all heads together
        "mlp": config.layers * 2 * tokens * 2 * c * f,
        "head": 2 * tokens * c * config.vocabulary,
    }


def training_flops(
    config: GPTConfig,
    batch: int,
    seq_len: int | None = None,
    *,
    causal: bool = False,
    checkpointing: bool | None = None,
) -> dict[str, int]:
    """FLOPs of one forward and backward pass by component: three forward passes, and a fourth of what is recomputed.

    With checkpointing of the blocks, all counted pairs, and F = 4 C the sum is
    ``96 B N L C^2 (1 + N / (6 C) + V / (16 L C))`` (Narayanan et al. 2021, equation 3).

    Args:
        checkpointing: blocks compute their activations twice; by default as the configuration says.
    """
    again = config.checkpointing if checkpointing is None else checkpointing
    forward = forward_flops(config, batch, seq_len, causal=causal)
    return {part: (3 if part == "head" or not again else 4) * flops for part, flops in forward.items()}


def rule_of_thumb(parameters: int, tokens: int, *, checkpointing: bool = False) -> int:
    """The rule 6 Psi T: each parameter multiplies each token once forward and twice backward, two FLOPs each time.

    With recomputation 8 Psi T. It leaves out QK^T and PV and counts tables that multiply nothing (Kaplan et al. 2020,
    section 2.1).
    """
    return (8 if checkpointing else 6) * parameters * tokens


def training_seconds(flops: float, gpus: int, peak_flops: float, utilisation: float) -> float:
    """Seconds that ``gpus`` take for ``flops`` at ``utilisation`` (0 to 1) of ``peak_flops`` FLOP/s each.

    Raises:
        ValueError: a utilisation outside (0, 1].
    """
    require_sizes(gpus=gpus)
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation must be above 0 and at most 1, got {utilisation}")
    return flops / (gpus * peak_flops * utilisation)
