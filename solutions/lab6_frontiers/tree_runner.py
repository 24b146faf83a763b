"""Lab 5's runner for requests with trees: one pass of the target over every node, and the hidden states behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solutions.lab5_serving.batch import assemble
from solutions.lab5_serving.block_manager import BlockManager
from solutions.lab5_serving.cuda_graphs import CudaRecorder
from solutions.lab5_serving.runner import ModelRunner
from solutions.lab5_serving.scheduler import Step
from utils.serving import Decoder

from .tree_batch import TreeBatch, TreeGraphs, packed, plant


class TreeRunner(ModelRunner):
    """A :class:`ModelRunner` for :class:`.tree_batch.TreeRequest`; it leaves each request the ``hidden`` of its rows.

    Args:
        model, num_blocks, block_size, options: of :class:`ModelRunner`.
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int = 16, **options: Any) -> None:
        super().__init__(model, num_blocks, block_size, **options)
        if self.graphs is not None:
            recorder = {"record": CudaRecorder()} if model.device.type == "cuda" else {}
            self.graphs = TreeGraphs(self.compute, self._staging, chunks=self.graphs.chunks, **recorder)
        if self._fused is not None:
            # One product gives logits and hidden states: below the head stands the identity.
            head = self._fused.head
            self._fused.head = torch.cat((head, torch.eye(head.shape[1], dtype=head.dtype, device=head.device)))

    @torch.no_grad()
    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> Tensor:
        """Logits (R, V) as of :meth:`ModelRunner.run`; of a tree, a row for each node in order."""
        self.copy_blocks(step.copies)
        vocabulary = self.model.config.vocab_size
        if not step.chunks:
            return self.model.lm_head.weight.new_empty(0, vocabulary)
        arrays, decode = assemble(step.chunks, manager, self._tables, rows)
        plant(arrays, step.chunks)
        found = self.graphs.run(arrays, decode) if self.graphs is not None else None
        if found is None:
            found = self.compute(packed(arrays, self._staging, decode))
        hidden = found[:, vocabulary:].clone()  # a graph writes to the same place again
        ends = np.searchsorted(arrays["rows"], arrays["query_starts"])
        for chunk, first, end in zip(step.chunks, ends[:-1], ends[1:], strict=True):
            chunk.request.hidden = hidden[first:end]
        return found[:, :vocabulary]

    @torch.no_grad()
    def compute(self, batch: TreeBatch) -> Tensor:
        """Logits and last hidden states side by side, (R, V + C)."""
        decode, _, write = self._kernels()
        if self.attention == "torch":
            from .tree_torch import paged_attention_tree
        else:
            from .tree_attention import paged_attention_tree
        keys, values = self.key_cache, self.value_cache

        def attend(layer: int, q: Tensor) -> Tensor:
            cache = keys[layer], values[layer], batch.block_tables
            if batch.decode:
                return decode(q, *cache, batch.context_lens)
            chunks = batch.query_starts, batch.context_lens, batch.tree_starts, batch.bits
            return paged_attention_tree(q, *cache, *chunks)

        if self._fused is not None:
            return self._fused.logits(batch, keys, values, attend)

        def write_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write(k, v, keys[layer], values[layer], batch.slots)
            return attend(layer, q)

        hidden = self.model.hidden(batch.tokens, batch.positions, write_and_attend)[batch.rows]
        return torch.cat((self.model.logits(hidden), hidden), 1)

    @torch.no_grad()
    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of single tokens in all layers, (source slot, target slot) each, all at once."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.model.device).unbind(1)
        for cache in (self.key_cache, self.value_cache):
            cache[:, targets // self.block_size, targets % self.block_size] = cache[
                :, sources // self.block_size, sources % self.block_size
            ]
