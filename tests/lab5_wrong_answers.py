"""All wrong answers to lab 5: importing this registers them."""

from __future__ import annotations

import lab5_wrong_blocks  # noqa: F401
import lab5_wrong_cache  # noqa: F401
import lab5_wrong_kernels  # noqa: F401
import lab5_wrong_schedulers  # noqa: F401
import lab5_wrong_speculation  # noqa: F401
from lab5_registry import WRONG_ANSWERS

__all__ = ["WRONG_ANSWERS"]
