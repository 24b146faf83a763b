"""bfloat16 in NumPy: Triton's interpreter stores it as the upper 16 bits of a float32."""

from __future__ import annotations

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """The float32 values that bfloat16 ``bits`` (any shape, uint16) stand for; exact."""
    return (np.asarray(bits).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Bits (uint16) of the bfloat16 nearest to each float32, ties to even, as a GPU rounds; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
