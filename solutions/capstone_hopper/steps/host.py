"""What every step's launch begins with: which tensors it takes, what it returns, how tiles are described."""

from __future__ import annotations

import functools

import torch

from ..tile_order import tile_table

LOG2_E = 1.4426950408889634
HEAD_DIMS = (64, 128)
#: Every step's tiles divide this many queries and keys.
ROWS = 128
#: Bytes of keys and values that heads side by side may have in the L2 cache.
L2_BYTES = 32 * 2**20


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse what a step cannot take; the package's own functions take it all.

    Raises:
        TypeError: another dtype than float16 and bfloat16, or not the same for all three.
        ValueError: a shape or strides that a step does not have.
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k, v must all be float16 or all bfloat16, got {', '.join(str(x.dtype)[6:] for x in (q, k, v))}"
        )
    if q.dim() != 4 or not q.shape == k.shape == v.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v must have one shape (B, H, N, D), got {shapes}")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head_dim must be 64 or 128, got {q.shape[3]}")
    if q.shape[2] % ROWS or not q.numel():
        raise ValueError(f"N must be a positive multiple of {ROWS} and B and H positive, got {tuple(q.shape)}")
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v)):
        raise ValueError("q, k, v must be contiguous and begin at a multiple of 16 bytes (x.contiguous() makes a copy)")


def outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty o (B, H, N, D) of q's dtype and an empty logsumexp (B, H, N), float32."""
    return torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def scale_of(q: torch.Tensor) -> float:
    """Factor of the scores, 1 / sqrt(D)."""
    return q.shape[3] ** -0.5


def heads_together(q: torch.Tensor) -> int:
    """How many heads go side by side: as many as fit into the L2 cache with keys and values, and divide B * H."""
    heads = q.shape[0] * q.shape[1]
    most = max(1, L2_BYTES // (2 * q.shape[2] * q.shape[3] * q.element_size()))
    return next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) as rows (B * H * N, D)."""
    return x.view(-1, x.shape[3])


@functools.lru_cache(maxsize=64)
def _tile_lists(device: torch.device, *shape: int | bool) -> torch.Tensor:
    tiles, counts = tile_table(device, *shape)
    return torch.cat((counts[:, None], tiles), 1).contiguous()


def tile_lists(q: torch.Tensor, rows: int, columns: int, causal: bool) -> torch.Tensor:
    """What each program works on: (programs, 1 + longest list + 1) int32, in each row a count and that many tiles.

    Args:
        rows, columns: Queries and keys of a tile.
    """
    batch, heads, length, _ = q.shape
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    return _tile_lists(
        q.device, batch * heads, length, length, rows, columns, causal, programs, heads_together(q)
    )  # fmt: skip
