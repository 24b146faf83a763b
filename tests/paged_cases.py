"""Paged caches for tests: ragged contexts in blocks in random order, NaN wherever nobody may read."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from utils import reference, runtime

#: What stands in a block table where there is no block: reading the cache there is out of bounds.
NO_BLOCK = 1 << 30
LAYOUTS = ("token-major", "head-major", "padded", "strided")


@dataclass
class Paged:
    """A cache, and the keys and values (context, G, D) that it holds for each sequence."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def cache(self) -> tuple[torch.Tensor, ...]:
        """What the kernels take after q."""
        return self.k_cache, self.v_cache, self.block_tables, self.context_lens


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values on the device where kernels run, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(runtime.DEVICE)


def paged(
    contexts: Sequence[int],
    G: int = 2,
    D: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    layout: str = "token-major",
    seed: int = 0,
) -> Paged:
    """Sequences of these lengths in a cache with free blocks; slots, blocks and table entries not in use are poison."""
    draw = random.Random(seed)
    needed = [-(-n // block_size) for n in contexts]
    ids = draw.sample(range(sum(needed) + 2), sum(needed))
    size = (sum(needed) + 2, block_size, G, D)
    k_cache, v_cache = (empty_cache(size, dtype, layout) for _ in range(2))
    tables = torch.full((len(contexts), max([1, *needed]) + 1), NO_BLOCK, dtype=torch.int32)
    keys, values = [], []
    for s, n in enumerate(contexts):
        mine, ids = ids[: needed[s]], ids[needed[s] :]
        tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        keys.append(normal(n, G, D, dtype=dtype, seed=seed + 3 * s + 1))
        values.append(normal(n, G, D, dtype=dtype, seed=seed + 3 * s + 2))
        for t in range(n):
            k_cache[mine[t // block_size], t % block_size] = keys[s][t]
            v_cache[mine[t // block_size], t % block_size] = values[s][t]
    lengths = torch.tensor(list(contexts), dtype=torch.int32)
    return Paged(k_cache, v_cache, tables.to(runtime.DEVICE), lengths.to(runtime.DEVICE), keys, values)


def empty_cache(size: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A cache (num_blocks, block_size, G, D) full of NaN, in one of :data:`LAYOUTS`."""
    blocks, tokens, heads, D = size
    made = {"device": runtime.DEVICE, "dtype": dtype}
    if layout == "head-major":
        return torch.full((blocks, heads, tokens, D), math.nan, **made).transpose(1, 2)
    if layout == "padded":
        return torch.full((blocks + 1, tokens, heads + 1, D + 3), math.nan, **made)[1:, :, 1:, 2 : 2 + D]
    if layout == "strided":
        return torch.full((blocks, tokens, heads, 2 * D), math.nan, **made)[..., ::2]
    return torch.full(tuple(size), math.nan, **made)


def right(
    q: torch.Tensor, given: Paged, starts: Sequence[int] | None = None, scale: float | None = None
) -> torch.Tensor:
    """Float64 attention of the chunks ``starts[s]`` to ``starts[s + 1]`` of q (T, H, D); one query each by default."""
    starts = starts or range(len(given.keys) + 1)
    chunks = []
    for s, (k, v) in enumerate(zip(given.keys, given.values, strict=True)):
        chunk = q[starts[s] : starts[s + 1]]
        if len(k) == 0 or len(chunk) == 0:
            chunks.append(torch.zeros(chunk.shape, dtype=torch.float64))
            continue
        batch = (x.cpu().double().transpose(0, 1)[None] for x in (chunk, k, v))
        chunks.append(reference.attention(*batch, True, scale)[0][0].transpose(0, 1))
    return torch.cat(chunks)


def peer(q: torch.Tensor, given: Paged, starts: Sequence[int] | None = None) -> torch.Tensor:
    """What PyTorch gives operator by operator in q's dtype; arguments as for :func:`right`."""
    starts = starts or range(len(given.keys) + 1)
    group = q.shape[1] // given.k_cache.shape[2]
    chunks = []
    for s, (k, v) in enumerate(zip(given.keys, given.values, strict=True)):
        chunk = q[starts[s] : starts[s + 1]]
        if len(k) == 0:
            chunks.append(torch.zeros_like(chunk))
            continue
        past = len(k) - len(chunk)
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))  # (H, context, D)
        scores = chunk.transpose(0, 1) @ k.mT / math.sqrt(q.shape[2])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(past + 1)
        chunks.append((torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v).transpose(0, 1))
    return torch.cat(chunks)


def assert_close(found: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor | None = None) -> None:
    """No further from ``exact`` than twice what PyTorch errs, and a few roundings."""
    allowed = 4 * torch.finfo(found.dtype).eps * (1 + exact.abs().max().item() if exact.numel() else 1)
    if theirs is not None:
        allowed += 2 * (theirs.cpu().double() - exact).abs().max().item()
    error = (found.cpu().double() - exact).abs().nan_to_num(math.inf).max().item() if exact.numel() else 0.0
    assert found.shape == exact.shape and error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
