"""What training keeps in memory for each parameter, and how the stages of ZeRO divide it among ranks.

Stage 0 is plain data parallelism: every rank keeps everything. Stage 1 divides the optimizer's state by the number of
ranks, stage 2 the gradients too, stage 3 the parameters too (Rajbhandari et al. 2020, section 5 and figure 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.operators import require_sizes

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Precision:
    """Bytes that training keeps for one parameter, by component; 0 where there is none."""

    parameters: int = 2
    gradients: int = 2
    master: int = 4
    """the copy in full precision that the optimizer updates"""
    momentum: int = 4
    variance: int = 4

    def __post_init__(self) -> None:
        for name, size in self.components().items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"bytes of {name} must be an integer, got {size!r}")
            if size < 0:
                raise ValueError(f"bytes of {name} must not be negative, got {size}")

    def components(self) -> dict[str, int]:
        """Bytes of one parameter by component."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "master": self.master,
            "momentum": self.momentum,
            "variance": self.variance,
        }

    @property
    def total(self) -> int:
        """Bytes of one parameter, all together: 16 in mixed precision with Adam."""
        return sum(self.components().values())

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state, the K of the ZeRO paper: 12 in mixed precision with Adam."""
        return self.master + self.momentum + self.variance


#: bf16 or fp16 parameters and gradients; Adam in fp32 on fp32 master weights: 2 + 2 + 4 + 4 + 4 bytes.
MIXED_ADAM = Precision()
#: The same with Adam's moments in bf16: 12 bytes.
BF16_MOMENTS = Precision(momentum=2, variance=2)
#: The same with gradients kept and summed in fp32, as when many micro-batches are accumulated: 18 bytes.
FP32_GRADIENTS = Precision(gradients=4)
#: Everything in fp32, no copy: 16 bytes.
FP32_ADAM = Precision(4, 4, 0, 4, 4)
#: Everything in bf16, no copy: 8 bytes (small updates round away).
PURE_BF16 = Precision(2, 2, 0, 2, 2)
#: Mixed precision with momentum only (SGD, or Lion): 12 bytes.
MIXED_MOMENTUM = Precision(variance=0)

#: From which stage on a component is divided among the ranks.
SHARDED_FROM = {"master": 1, "momentum": 1, "variance": 1, "gradients": 2, "parameters": 3}


def check_stage(stage: int) -> None:
    """Refuse a stage that is not 0, 1, 2 or 3."""
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"stage must be 0 (plain data parallelism), 1, 2 or 3, got {stage!r}")


def memory_per_rank(
    parameters: int, world_size: int, stage: int, precision: Precision = MIXED_ADAM
) -> dict[str, float]:
    """Bytes that each rank keeps for the model's state, by component; activations and buffers come on top.

    Args:
        parameters: Psi, elements of the whole model.
        world_size: N, ranks that share it.
        stage: 0 to 3.
        precision: bytes a parameter by component.

    Returns:
        ``parameters``, ``gradients``, ``master``, ``momentum``, ``variance`` in bytes. With :data:`MIXED_ADAM` the sums
        are 16 Psi, 4 Psi + 12 Psi/N, 2 Psi + 14 Psi/N and 16 Psi/N.

    Raises:
        TypeError, ValueError: sizes that are not positive integers, an unknown stage.
    """
    require_sizes(parameters=parameters, world_size=world_size)
    check_stage(stage)
    return {
        name: size * parameters / (world_size if stage >= SHARDED_FROM[name] else 1)
        for name, size in precision.components().items()
    }


def largest_model(memory_bytes: float, world_size: int, stage: int, precision: Precision = MIXED_ADAM) -> int:
    """The most parameters whose state fits into ``memory_bytes`` on each of ``world_size`` ranks, activations aside.

    Raises:
        ValueError: no memory, or a precision that keeps nothing.
    """
    each = sum(memory_per_rank(1, world_size, stage, precision).values())
    if not memory_bytes > 0 or not each > 0:
        raise ValueError(f"memory_bytes and bytes a parameter must be positive, got {memory_bytes} and {each}")
    return math.floor(memory_bytes / each)


def fewest_ranks(parameters: int, memory_bytes: float, stage: int, precision: Precision = MIXED_ADAM) -> int | None:
    """The fewest ranks on which the state of ``parameters`` fits into ``memory_bytes`` each; None if no number does."""
    alone = memory_per_rank(parameters, 1, stage, precision)
    kept = sum(size for name, size in alone.items() if stage < SHARDED_FROM[name])
    shared = sum(alone.values()) - kept
    if kept + shared <= memory_bytes:
        return 1
    if kept >= memory_bytes:
        return None
    return math.ceil(shared / (memory_bytes - kept))
