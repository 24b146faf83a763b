"""Runs the model on what a scheduler chose: one ragged batch a step, keys and values in a paged cache.

Letters: S sequences in a step, T tokens in a step (laid end to end), R rows of logits, V vocabulary, H query heads, G
key and value heads, D head dimension, L layers.

Every operation but attention treats each token by itself, so the tokens of all requests go through one matrix product
together ("selective batching", Yu et al. 2022, section 4.2). Attention reads each sequence's own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.serving import Decoder

if TYPE_CHECKING:
    from .block_manager import BlockManager
    from .scheduler import Step

ATTENTIONS = ("triton", "torch")
ROWS = ("last", "all")


@dataclass(frozen=True)
class Batch:
    """A step as tensors on the model's device; ``rows``: which of the T positions want logits."""

    tokens: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    slots: Tensor  # (T,) int64: where each token's keys and values go
    block_tables: Tensor  # (S, most blocks) int32, padded with 0
    query_starts: Tensor  # (S + 1,) int32
    context_lens: Tensor  # (S,) int32: tokens in the cache after this step's are written
    rows: Tensor  # (R,) int64


def known_tokens(request: object, start: int, count: int) -> list[int]:
    """Tokens ``start .. start + count`` of a request's prompt and output, without joining the two.

    Raises:
        ValueError: the request does not have them yet.
    """
    prompt, output, end = request.prompt, request.output, start + count
    if not 0 <= start < end <= len(prompt) + len(output):
        raise ValueError(f"request {request.id!r} has {len(prompt) + len(output)} tokens, a chunk wants {start}..{end}")
    if start >= len(prompt):
        return output[start - len(prompt) : end - len(prompt)]
    return [*prompt[start:end], *output[: max(0, end - len(prompt))]]


class ModelRunner:
    """A model and the memory of its keys and values.

    Args:
        model: in evaluation mode, on the device that it runs on.
        num_blocks: blocks of the cache.
        block_size: token slots of a block.
        attention: ``"triton"`` (the kernels of this lab), ``"torch"`` (plain PyTorch); None: triton on a GPU.
        cuda_graphs: replay decode steps as CUDA graphs; None: on a GPU.

    Attributes:
        key_cache, value_cache: (L, num_blocks, block_size, G, D) of the model's dtype.

    Raises:
        ValueError: an attention that is not one of ``ATTENTIONS``, sizes below 1.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        attention: str | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        for name, size in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
        attention = attention or ("triton" if model.device.type == "cuda" else "torch")
        if attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
        self.model, self.num_blocks, self.block_size, self.attention = model, num_blocks, block_size, attention
        config = model.config
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.key_cache, self.value_cache = (
            torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)
        )

    @torch.no_grad()
    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> Tensor:
        """Compute a step: copies its blocks, writes its keys and values, returns logits, (R, V).

        Args:
            step: what the scheduler chose; ``manager`` has blocks for all of it.
            rows: ``"last"``: the last position of each chunk that ends its request's known tokens, in the order of
                ``step.chunks``; ``"all"``: every position of the step, chunk after chunk.

        Raises:
            ValueError: another ``rows``, a chunk of tokens that its request does not have.
        """
        if rows not in ROWS:
            raise ValueError(f"rows must be one of {', '.join(ROWS)}, got {rows!r}")
        self.copy_blocks(step.copies)
        if not step.chunks:
            return torch.empty(0, self.model.config.vocab_size, dtype=self.model.dtype, device=self.model.device)
        batch = self.batch(step, manager, rows)
        hidden = self.model.hidden(batch.tokens, batch.positions, self._attend(batch))
        return self.model.logits(hidden[batch.rows])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of keys and values in all layers, (source, target) each: copy-on-write."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.model.device).unbind(1)
        for cache in (self.key_cache, self.value_cache):
            cache[:, targets] = cache[:, sources]

    def batch(self, step: Step, manager: BlockManager, rows: str = "last") -> Batch:
        """The tensors of a step."""
        tokens, positions, slots, tables, lengths, wanted, starts = [], [], [], [], [], [], [0]
        for chunk in step.chunks:
            request, end = chunk.request, chunk.start + chunk.count
            tokens += known_tokens(request, chunk.start, chunk.count)
            positions += range(chunk.start, end)
            table = manager.table(request.id)
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size for p in range(chunk.start, end)
            ]
            tables.append(table)
            lengths.append(end)
            starts.append(starts[-1] + chunk.count)
            if rows == "all":
                wanted += range(starts[-2], starts[-1])
            elif end == len(request.prompt) + len(request.output):
                wanted.append(starts[-1] - 1)
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        device = self.model.device
        return Batch(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            torch.tensor(padded, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.tensor(wanted, dtype=torch.int64, device=device),
        )

    def _attend(self, batch: Batch):
        """The :data:`utils.serving.Attend` of one step."""
        if self.attention == "triton":
            from .cache_write import write_kv
            from .paged_extend import paged_attention_extend
        else:
            from .attention_torch import paged_attention_extend, write_kv

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.key_cache[layer], self.value_cache[layer]
            write_kv(k, v, keys, values, batch.slots)
            return paged_attention_extend(q, keys, values, batch.block_tables, batch.query_starts, batch.context_lens)

        return attend
