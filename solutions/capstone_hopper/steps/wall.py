"""Where plain Triton stops: what ptxas says when a softmax is to run beside a product."""

from __future__ import annotations

import re
from typing import NamedTuple

from .compiler import compile_apart


class Wall(NamedTuple):
    """What ptxas said of a kernel, compiled for sm_90a.

    Attributes:
        warning: Its sentence on serialised products, with its number (C7514 or alike); "" if there is none.
        text: All that it said.
        registers: Of a thread.
        spilled: Bytes that a thread puts into memory for want of registers.
    """

    warning: str
    text: str
    registers: int
    spilled: int


def wall(overlap: bool = True, head_dim: int = 128) -> Wall:
    """Compile plain Triton's forward pass, now and on any computer; nothing runs. Takes a few seconds.

    Args:
        overlap: Whether the output of a tile and the scores of the next one are issued together, so that the next
            softmax could run beside the former (step 9's schedule). Triton leaves the output in flight across the end
            of the loop. ptxas finds other instructions that read its registers meanwhile, and makes every product wait
            for the one before: it serialises them, all of the kernel's. Without ``overlap`` the order is step 6's.
        head_dim: 64 or 128; tiles are step 6's.

    Raises:
        ValueError: another head_dim.
        RuntimeError: the compiler failed, or Triton is not installed.
    """
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim must be 64 or 128, got {head_dim!r}")
    (said,) = compile_apart({"name": "wall_kernel", "head_dim": head_dim, "OVERLAP": bool(overlap)})
    found = re.search(r"\(C75\d\d\)[^\n]*serialized[^\n]*", said["text"])
    return Wall(found[0] if found else "", said["text"], said["registers"], said["spilled_bytes"])
