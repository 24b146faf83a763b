"""Lab 5's runner, whose decode steps read what requests have in common once per group."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from solutions.lab5_serving.batch import ALIGNMENT, Batch, Layout, assemble, table_width
from solutions.lab5_serving.block_manager import BlockManager
from solutions.lab5_serving.cuda_graphs import CudaRecorder, bucket, buckets
from solutions.lab5_serving.runner import ModelRunner
from solutions.lab5_serving.scheduler import Step
from utils.serving import Decoder

from .shared_prefix import Group, find_groups, whole_blocks
from .shared_prefix_batch import SharedBatch, SharedGraphs, SharedLayout, share

#: Tokens that a step must save to be run with groups. An estimate, not a measurement: with 8 key heads of 128 in bf16
#: they are 32 MiB per layer, 10 us at 3.35 TB/s, which the three additional launches of a layer may well take.
MIN_SAVED = 8192


class SharedPrefixRunner(ModelRunner):
    """A :class:`ModelRunner` whose decode steps go through :mod:`.shared_prefix_attention` where that saves enough.

    All other steps are run as in lab 5. Steps with groups have CUDA graphs of their own: a graph is recorded for a
    number of requests, and the groups are inputs of it, so that it serves whatever the groups are.

    Args:
        model, num_blocks, block_size, options: of :class:`ModelRunner`.
        min_requests: of a group.
        min_saved: tokens that the groups of a step together must save, counted as (requests - 1) x common tokens. Each
            layer pays for sharing with three more launches and with partial results. Below it, a step is run as in lab
            5.

    Attributes:
        shared_steps: steps that were run with groups.
        saved_tokens: whose keys and values were not read again in these, in each layer.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        min_requests: int = 2,
        min_saved: int = MIN_SAVED,
        **options: Any,
    ) -> None:
        super().__init__(model, num_blocks, block_size, **options)
        self.min_requests, self.min_saved = min_requests, min_saved
        self.shared_steps = self.saved_tokens = 0
        self.shared_graphs = None
        if self.graphs is not None:
            recorder = {"record": CudaRecorder()} if model.device.type == "cuda" else {}
            self.shared_graphs = SharedGraphs(self.compute, self._staging, **recorder)

    @torch.no_grad()
    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> Tensor:
        """Logits (R, V) as of :meth:`ModelRunner.run`."""
        self.copy_blocks(step.copies)
        if not step.chunks:
            return self.model.lm_head.weight.new_empty(0, self.model.config.vocab_size)
        arrays, decode = assemble(step.chunks, manager, self._tables, rows)
        groups = self._groups(arrays) if decode else []
        graphs, layouts = (self.shared_graphs, SharedLayout) if groups else (self.graphs, Layout)
        if groups:
            sequences = len(arrays["context_lens"])
            arrays = share(arrays, groups, self.block_size, sequences if graphs is None else bucket(sequences))
        if graphs is not None and (logits := graphs.run(arrays, decode)) is not None:
            return logits
        layout = layouts.of(arrays)
        return self.compute(layout.unpack(self._staging.send(arrays, layout), decode))

    @torch.no_grad()
    def compute(self, batch: Batch) -> Tensor:
        """Logits (R, V) of a batch on the device."""
        if not isinstance(batch, SharedBatch):
            return super().compute(batch)
        if self.attention == "torch":
            from .shared_prefix_torch import shared_prefix_attention
        else:
            from .shared_prefix_attention import shared_prefix_attention
        _, _, write = self._kernels()
        keys, values = self.key_cache, self.value_cache
        suffixes = batch.block_tables, batch.context_lens
        groups = batch.prefix_tables, batch.prefix_lens, batch.group_starts, batch.members

        def attend(layer: int, q: Tensor) -> Tensor:
            return shared_prefix_attention(q, keys[layer], values[layer], *suffixes, *groups)

        if self._fused is not None:
            return self._fused.logits(batch, keys, values, attend)

        def write_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write(k, v, keys[layer], values[layer], batch.slots)
            return attend(layer, q)

        hidden = self.model.hidden(batch.tokens, batch.positions, write_and_attend)
        return self.model.logits(hidden[batch.rows])

    def warm_up(self, max_batch: int, max_tokens: int) -> None:
        """Record graphs ahead of the first step that needs them, as :meth:`ModelRunner.warm_up`; also for groups."""
        super().warm_up(max_batch, max_tokens)
        if self.shared_graphs is not None:
            width = table_width(-(-max_tokens // self.block_size))
            while width >= ALIGNMENT:
                for sequences in buckets(max_batch)[:-1]:  # a group has two requests at least
                    self.shared_graphs.prepare(sequences, 1, width)
                width //= 2

    def _groups(self, arrays: dict[str, np.ndarray]) -> list[Group]:
        """The groups of a decode step; none if they save too little."""
        whole = whole_blocks(arrays["context_lens"], self.block_size)
        groups = find_groups(arrays["block_tables"], whole, self.min_requests)
        saved = sum(group.saved for group in groups) * self.block_size
        if not groups or saved < self.min_saved:
            return []
        self.shared_steps += 1
        self.saved_tokens += saved
        return groups
