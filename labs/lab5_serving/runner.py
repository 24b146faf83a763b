"""Runs the model on what a scheduler chose: one ragged batch a step, keys and values in a paged cache.

Letters: S sequences in a step, T tokens in a step (laid end to end), R rows of logits, V vocabulary, H query heads, G
key and value heads, D head dimension, L layers.

Every operation but attention treats each token by itself, so the tokens of all requests go through one matrix product
together ("selective batching", Yu et al. 2022, section 4.2). Attention reads each sequence's own blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.serving import Decoder

from .batch import ALIGNMENT, Batch, Layout, Staging, TableRows, assemble, table_width
from .cuda_graphs import CudaRecorder, StepGraphs, buckets

if TYPE_CHECKING:
    from .block_manager import BlockManager
    from .scheduler import Step

ATTENTIONS = ("triton", "torch")


class ModelRunner:
    """A model and the memory of its keys and values.

    Args:
        model: in evaluation mode, on the device that it runs on.
        num_blocks: blocks of the cache.
        block_size: token slots of a block.
        attention: ``"triton"`` (the kernels of this lab) or ``"torch"`` (plain PyTorch); None: triton on a GPU.
        fused: run the layers by :class:`.fused_decoder.FusedDecoder`, which moves the model's weights together, instead
            of by the model itself; None: on a GPU.
        cuda_graphs: run decode steps in the buckets of :class:`.cuda_graphs.StepGraphs`, which on a GPU are CUDA
            graphs; None: on a GPU.
        graph_chunks: and steps of at most so many tokens per sequence, in graphs of these sizes: k + 1 for drafts of k,
            4 and 8 where requests with prompts of a few hundred tokens join some 64 that run.

    Attributes:
        key_cache, value_cache: (L, num_blocks, block_size, G, D) of the model's dtype. In memory a head's tokens of a
            block lie together.

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
        fused: bool | None = None,
        cuda_graphs: bool | None = None,
        graph_chunks: Sequence[int] = (),
    ) -> None:
        for name, size in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            *(("a graph's chunk", n) for n in graph_chunks),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
        on_gpu = model.device.type == "cuda"
        attention = attention or ("triton" if on_gpu else "torch")
        if attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
        self.model, self.num_blocks, self.block_size, self.attention = model, num_blocks, block_size, attention
        config = model.config
        shape = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.key_cache, self.value_cache = (
            torch.zeros(shape, dtype=model.dtype, device=model.device).transpose(2, 3) for _ in range(2)
        )
        self._fused = None
        if on_gpu if fused is None else fused:
            from .fused_decoder import FusedDecoder

            self._fused = FusedDecoder(model, min(config.max_seq_len, num_blocks * block_size))
        self._tables, self._staging = TableRows(), Staging(model.device)
        self.graphs = None
        if on_gpu if cuda_graphs is None else cuda_graphs:
            recorder = {"record": CudaRecorder()} if on_gpu else {}
            self.graphs = StepGraphs(self.compute, self._staging, chunks=graph_chunks, **recorder)

    @torch.no_grad()
    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> Tensor:
        """Compute a step: copies its blocks, writes its keys and values, returns logits (R, V) without waiting.

        The logits may be valid only until the next step is run (see :meth:`.cuda_graphs.StepGraphs.run`).

        Args:
            step: what the scheduler chose; ``manager`` has slots for all of it.
            rows: ``"last"``: of each chunk that ends what is known of its request, the positions whose next token is
                wanted, the last token's and those of a draft, in the order of ``step.chunks``. ``"all"``: every
                position, chunk after chunk.

        Raises:
            ValueError: another ``rows``, a chunk of tokens that its request does not have.
        """
        self.copy_blocks(step.copies)
        if not step.chunks:
            return self.model.lm_head.weight.new_empty(0, self.model.config.vocab_size)
        arrays, decode = assemble(step.chunks, manager, self._tables, rows)
        if self.graphs is not None and (logits := self.graphs.run(arrays, decode)) is not None:
            return logits
        layout = Layout.of(arrays)
        return self.compute(layout.unpack(self._staging.send(arrays, layout), decode))

    @torch.no_grad()
    def compute(self, batch: Batch) -> Tensor:
        """Logits (R, V) of a batch on the device."""
        decode, extend, write = self._kernels()
        keys, values = self.key_cache, self.value_cache

        def attend(layer: int, q: Tensor) -> Tensor:
            cache = keys[layer], values[layer], batch.block_tables
            if batch.decode:
                return decode(q, *cache, batch.context_lens)
            return extend(q, *cache, batch.query_starts, batch.context_lens)

        if self._fused is not None:
            return self._fused.logits(batch, keys, values, attend)

        def write_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write(k, v, keys[layer], values[layer], batch.slots)
            return attend(layer, q)

        hidden = self.model.hidden(batch.tokens, batch.positions, write_and_attend)
        return self.model.logits(hidden[batch.rows])

    @torch.no_grad()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of keys and values in all layers, (source, target) each: copy-on-write."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.model.device).unbind(1)
        for cache in (self.key_cache, self.value_cache):
            cache[:, targets] = cache[:, sources]

    def warm_up(self, max_batch: int, max_tokens: int) -> None:
        """Record graphs ahead of the first step that needs them.

        Args:
            max_batch: sequences of a step at most.
            max_tokens: of a sequence at most.
        """
        if self.graphs is not None:
            width = table_width(-(-max_tokens // self.block_size))
            while width >= ALIGNMENT:
                for sequences in buckets(max_batch):
                    for tokens in (1, *self.graphs.chunks):
                        self.graphs.prepare(sequences, tokens, width)
                width //= 2

    def _kernels(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., None]]:
        """What attends to one new token per sequence, to chunks of them, and what writes keys and values."""
        if self.attention == "torch":
            from .attention_torch import paged_attention_decode, paged_attention_extend, write_kv
        else:
            from .cache_write import write_kv
            from .paged_decode import paged_attention_decode
            from .paged_extend import paged_attention_extend
        return paged_attention_decode, paged_attention_extend, write_kv
