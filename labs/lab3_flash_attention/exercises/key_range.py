"""What ``causal_key_range`` of exercise 3.4 returns, call by call: every residue of Nk - Nq modulo a tile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils import runtime
from utils.checks.core import classic, generator
from utils.checks.problem import Problem
from utils.interpreter import interpret_launches

import triton  # isort: skip
import triton.language as tl  # isort: skip

BLOCK_M = 16


@dataclass(frozen=True)
class Call:
    """One tile of queries: its first one, and the lengths."""

    start_m: int
    num_queries: int
    num_keys: int

    def __str__(self) -> str:
        return f"causal_key_range({self.start_m}, Nq={self.num_queries}, Nk={self.num_keys}, BLOCK_M={BLOCK_M})"

    @property
    def right(self) -> tuple[int, int]:
        """Keys that all of its queries see, and that one of them sees; 0 where there is none."""
        seen = self.start_m + self.num_keys - self.num_queries
        return max(0, min(self.num_keys, seen + 1)), max(0, min(self.num_keys, seen + BLOCK_M))


@triton.jit
def ask_kernel(calls_ptr, found_ptr, RANGE: tl.constexpr, ROWS: tl.constexpr):
    """One program: what ``RANGE`` returns for one call."""
    call = calls_ptr + tl.program_id(0) * 3
    unmasked_end, key_end = RANGE(tl.load(call), tl.load(call + 1), tl.load(call + 2), ROWS, True)
    tl.store(found_ptr + tl.program_id(0) * 2, unmasked_end)
    tl.store(found_ptr + tl.program_id(0) * 2 + 1, key_end)


def calls(seed: int) -> list[Call]:
    """Two and a half tiles of queries, beside every number of keys from none too few to two tiles more."""
    num_queries = 2 * BLOCK_M + generator(seed).randint(1, BLOCK_M - 1)
    lengths = range(max(1, num_queries - 2 * BLOCK_M - 3), num_queries + 2 * BLOCK_M + 1)
    return [Call(start_m, num_queries, keys) for keys in lengths for start_m in range(0, num_queries, BLOCK_M)]


def answers(causal_key_range: Any, asked: list[Call]) -> list[tuple[int, int]]:
    """What the function gives, as it is compiled for a causal kernel; 0 for what is negative."""
    table = torch.tensor([[c.start_m, c.num_queries, c.num_keys] for c in asked], dtype=torch.int32)
    table = table.to(runtime.DEVICE)
    found = torch.zeros((len(asked), 2), dtype=torch.int32, device=runtime.DEVICE)
    with interpret_launches():
        ask_kernel[(len(asked),)](table, found, RANGE=causal_key_range, ROWS=BLOCK_M)
    return [tuple(row) for row in found.clamp(min=0).tolist()]


def function_of(function: Callable[..., Any]) -> Any:
    """The ``causal_key_range`` that a function's module knows, a kernel's or its caller's; None where there is none."""
    return getattr(sys.modules.get(function.__module__), "causal_key_range", None)


def problem(causal_key_range: Any, seed: int, values: Sequence[str] = ()) -> Problem | None:
    """What is wrong with the numbers that ``causal_key_range`` returns, or None.

    ``values``: names of the numbers that a kernel uses; only what makes its values wrong counts then, not what makes it
    read or mask too much.
    """
    asked = calls(seed)
    got = answers(causal_key_range, asked)
    for place, (name, who) in enumerate((("unmasked_end", "all"), ("key_end", "one"))):
        sign = (1, -1)[place]  # too large, or too small, is what makes values wrong
        wrong = [
            (call, found)
            for call, found in zip(asked, got)
            if found[place] != call.right[place] and (not values or sign * (found[place] - call.right[place]) > 0)
        ]
        wrong = wrong if not values or name in values else []
        if wrong:
            call, found = wrong[0]
            return Problem(
                f"{name} is wrong in {len(wrong)} of {len(asked)} calls",
                _cause(place, asked, got),
                (
                    f"first: {call}",
                    f"expected {call.right[place]}, the keys that {who} of its queries see, got {found[place]}",
                ),
            )
    return None


def _cause(place: int, asked: list[Call], got: list[tuple[int, int]]) -> str:
    """The mistake that gives these numbers, or what they lead to."""
    if got == [call.right[::-1] for call in asked]:
        return classic("unmasked_end and key_end are exchanged", 4)
    more = (1, BLOCK_M)[place]
    if [found[place] for found in got] == [max(0, min(call.num_keys, call.start_m + more)) for call in asked]:
        return classic("these are the numbers of a square: with Nq != Nk the last query sees the last key", 2)
    differences = [found[place] - call.right[place] for call, found in zip(asked, got)]
    if all(difference >= 0 for difference in differences):
        words = ("tiles go without the mask that need it", "tiles are read in which no query sees a key")
        return classic(f"never too small, sometimes too large: {words[place]}", (4, 3)[place])
    if all(difference <= 0 for difference in differences):
        words = ("tiles are masked that need no mask", "tiles are left out in which a query sees a key")
        return classic(f"never too large, sometimes too small: {words[place]}", 4)
    return ""
