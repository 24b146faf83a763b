"""What a kernel must move: the record behind every closed formula, and the checks at a host function's door."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from utils import runtime

#: Triton's default integer is 32 bits wide, so a kernel here counts elements up to this.
MOST_ELEMENTS = 2**31 - 1

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Traffic:
    """Exactly what one call of a kernel requests from memory, in bytes, and the FLOPs of its ``tl.dot``.

    Attributes:
        bytes_loaded: Bytes that the unmasked lanes of all programs load; an atomic loads its element too.
        bytes_stored: Bytes that they store; an atomic stores its element too.
        flops: 2 x m x n x k of each ``tl.dot``, whole tiles even where they stick out of the matrix.
        bytes_atomic: The part of ``bytes_loaded`` and of ``bytes_stored`` that atomics account for.
    """

    bytes_loaded: int
    bytes_stored: int
    flops: int = 0
    bytes_atomic: int = 0

    @property
    def bytes_moved(self) -> int:
        """Loaded plus stored."""
        return self.bytes_loaded + self.bytes_stored

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_loaded + other.bytes_loaded,
            self.bytes_stored + other.bytes_stored,
            self.flops + other.flops,
            self.bytes_atomic + other.bytes_atomic,
        )


def cdiv(a: int, b: int) -> int:
    """Ceiling division: how many tiles of ``b`` cover ``a``."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def size(name: str, value: int, least: int = 0) -> int:
    """Return ``value`` if it is an integer of at least ``least``; say which argument is wrong otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def tensor(name: str, value: torch.Tensor, ndim: int, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """Return ``value`` if a kernel here can take it; otherwise name the argument and what would be right."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {allowed}, got {str(value.dtype).removeprefix('torch.')}")
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim != 1)}, got shape {tuple(value.shape)}")
    if value.device.type != runtime.DEVICE.type:
        raise ValueError(f"{name} must be on {runtime.DEVICE} (utils.runtime.DEVICE), got {value.device}")
    if value.numel() > MOST_ELEMENTS:
        raise ValueError(f"{name} must have at most {MOST_ELEMENTS} elements, got {value.numel()}")
    return value


def same_dtype(**tensors: torch.Tensor) -> None:
    """Raise TypeError unless all named tensors have one dtype."""
    (first, reference), *others = tensors.items()
    for name, value in others:
        if value.dtype != reference.dtype:
            raise TypeError(f"{name} must have {first}'s dtype {reference.dtype}, got {value.dtype}")
