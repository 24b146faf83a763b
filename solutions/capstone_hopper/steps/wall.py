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
        beside: Exponentials that a thread computes while a product is under way, as the PTX has them.
    """

    warning: str
    text: str
    registers: int
    spilled: int
    beside: int


def exponentials_beside_products(ptx: str) -> int:
    """How many exponentials of a kernel's PTX come between a product and the wait for it, read from top to bottom."""
    beside = under_way = 0
    for word, may_stay in re.findall(r"\b(wgmma\.commit_group|wgmma\.wait_group|ex2)\b(?:\.sync\.aligned (\d+))?", ptx):
        if word == "wgmma.commit_group":
            under_way += 1
        elif may_stay:
            under_way = min(under_way, int(may_stay))
        else:
            beside += under_way > 0
    return beside


def wall(overlap: bool = True, head_dim: int = 128) -> Wall:
    """Compile plain Triton's forward pass, now and on any computer; nothing runs. Takes a few seconds.

    Args:
        overlap: Whether the output of a tile and the scores of the next one are issued together, so that the next
            softmax could run beside the former (step 9's schedule). Up to Triton 3.7 the PTX copies the output's
            registers before the wait for them. ptxas then makes every product wait for the one before: it serialises
            them, all of the kernel's. From 3.8 on Triton waits right behind each product, and ptxas has no remark.
            Without ``overlap`` the order is step 6's.
        head_dim: 64 or 128; tiles are step 6's.

    Raises:
        ValueError: another head_dim.
        RuntimeError: the compiler failed, or Triton is not installed.
    """
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim must be 64 or 128, got {head_dim!r}")
    (said,) = compile_apart({"name": "wall_kernel", "head_dim": head_dim, "OVERLAP": bool(overlap)}, ptx=True)
    found = re.search(r"\(C75\d\d\)[^\n]*serialized[^\n]*", said["text"])
    beside = exponentials_beside_products(said["ptx"])
    return Wall(found[0] if found else "", said["text"], said["registers"], said["spilled_bytes"], beside)
