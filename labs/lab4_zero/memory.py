"""What one parameter costs in training, and what ZeRO's stages leave of it on each rank (exercise 4.2)."""

from __future__ import annotations

STAGES = (0, 1, 2, 3)


def bytes_per_rank(
    parameters: int,
    world_size: int,
    stage: int,
    *,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> float:
    """Bytes that each rank holds of weights, gradients and the optimizer's state: no activations, no padding.

    Mixed-precision Adam keeps 16 bytes per parameter: a 16-bit weight and gradient, and in float32 the master weight,
    the momentum and the variance. Stage 1 gives each rank its part of the optimizer's state alone, stage 2 of the
    gradients too, stage 3 of the weights too (Rajbhandari et al. 2020, figure 1).

    Args:
        parameters: number of parameters.
        world_size: ranks that share them.
        stage: 0 (plain data parallelism), 1, 2 or 3.
        weight_bytes, gradient_bytes, optimizer_bytes: bytes per parameter of each.

    Raises:
        ValueError: an unknown stage, a negative number of parameters, or no rank.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if parameters < 0 or world_size < 1:
        raise ValueError(f"there must be 0 parameters or more and a rank or more, got {parameters} and {world_size}")
    raise NotImplementedError("Lab 4, exercise 4.2: bytes on each rank")
