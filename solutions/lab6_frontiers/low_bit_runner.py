"""Lab 5's runner with weights of 4 bits and a cache of 8.

Letters: L layers, T tokens of a step, R rows of logits, V vocabulary, G key and value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from solutions.lab5_serving.batch import Batch
from solutions.lab5_serving.fused_decoder import FusedDecoder
from solutions.lab5_serving.runner import ModelRunner
from utils.serving import Decoder

from .fp8_cache import empty_fp8_cache
from .int4_model import Int4FusedDecoder, quantize_weights

WEIGHTS, CACHES = (None, "int4"), (None, "fp8")


class LowBitRunner(ModelRunner):
    """A model and the memory of its keys and values, either of them in few bits.

    Args:
        model: in evaluation mode, on the device that it runs on; it is not changed.
        num_blocks, block_size: of the cache.
        weights: ``"int4"``: the layers' weights rounded to the nearest of 4 bits, in groups of 128; None: as they are.
        cache: ``"fp8"``: keys and values in e4m3 with a scale for each block and head; None: in the model's dtype.
        attention, fused, cuda_graphs, graph_chunks: as for :class:`solutions.lab5_serving.ModelRunner`; ``"torch"``
            also multiplies by dequantised weights. Kernels take float16 and bfloat16 only.

    Attributes:
        key_cache, value_cache: (L, num_blocks, block_size, G, D).
        k_scale, v_scale: (L, num_blocks, G) float32, of an fp8 cache.

    Raises:
        ValueError: weights or a cache that are not known, inputs of a layer that are no multiple of 128, or what
            :class:`solutions.lab5_serving.ModelRunner` refuses.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        weights: str | None = None,
        cache: str | None = None,
        attention: str | None = None,
        fused: bool | None = None,
        cuda_graphs: bool | None = None,
        graph_chunks: Sequence[int] = (),
    ) -> None:
        for name, value, known in (("weights", weights, WEIGHTS), ("cache", cache, CACHES)):
            if value not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}")
        if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
            raise ValueError(f"num_blocks must be an integer of at least 1, got {num_blocks!r}")
        on_gpu = model.device.type == "cuda"
        attention = attention or ("triton" if on_gpu else "torch")
        if weights == "int4":
            model = quantize_weights(model, kernels=attention == "triton")
        options = {"attention": attention, "cuda_graphs": cuda_graphs, "graph_chunks": graph_chunks}
        super().__init__(model, num_blocks if cache is None else 1, block_size, fused=False, **options)
        self.cache = cache
        config = model.config
        if cache == "fp8":
            self.num_blocks = num_blocks
            sizes = num_blocks, block_size, config.num_kv_heads, config.head_dim
            made = empty_fp8_cache(*sizes, model.device, config.num_layers)
            self.key_cache, self.value_cache, self.k_scale, self.v_scale = made
        if on_gpu if fused is None else fused:
            positions = min(config.max_seq_len, num_blocks * block_size)
            self._fused = (Int4FusedDecoder if weights == "int4" else FusedDecoder)(model, positions)

    @torch.no_grad()
    def compute(self, batch: Batch) -> Tensor:
        """Logits (R, V) of a batch on the device."""
        if self.cache is None:
            return super().compute(batch)
        if self._fused is None:
            hidden = self.model.hidden(batch.tokens, batch.positions, self._attend(batch))
            return self.model.logits(hidden[batch.rows])
        return self._compute_fused(batch)

    def _compute_fused(self, batch: Batch) -> Tensor:
        """As :meth:`compute`: the fused kernels leave keys and values in a cache of the step's tokens, a block each."""
        config, attend = self.model.config, self._attend(batch)
        tokens = len(batch.tokens)
        shape = (tokens, 1, config.num_kv_heads, config.head_dim)
        keys, values = (torch.empty(shape, dtype=self.model.dtype, device=self.model.device) for _ in range(2))
        layers = (config.num_layers, *shape)  # the next layer's overwrite them
        own = replace(batch, slots=torch.arange(tokens, dtype=torch.int32, device=self.model.device))
        return self._fused.logits(
            own, keys.expand(layers), values.expand(layers), lambda layer, q: attend(layer, q, keys[:, 0], values[:, 0])
        )

    def _attend(self, batch: Batch) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """What a layer calls: quantises its keys and values into the cache, and attends over it."""
        decode, extend, write = self._kernels()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.key_cache[layer], self.value_cache[layer]
            scales = self.k_scale[layer], self.v_scale[layer]
            write(k, v, keys, values, batch.slots, *scales)
            if batch.decode:
                return decode(q, keys, values, batch.block_tables, batch.context_lens, *scales)
            return extend(q, keys, values, batch.block_tables, batch.query_starts, batch.context_lens, *scales)

        return attend

    @torch.no_grad()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of keys and values in all layers, (source, target) each, with their scales."""
        if self.cache is None or not pairs:
            return super().copy_blocks(pairs)
        sources, targets = torch.tensor(pairs, device=self.model.device).unbind(1)
        for codes in (self.key_cache, self.value_cache):  # indexing takes bytes, but not every dtype of 8 bits
            codes.view(torch.uint8)[:, targets] = codes.view(torch.uint8)[:, sources]
        for scales in (self.k_scale, self.v_scale):
            scales[:, targets] = scales[:, sources]

    def _kernels(self) -> tuple[Callable[..., Any], ...]:
        """What attends to one new token a sequence, to chunks of them, and what writes keys and values."""
        if self.cache is None:
            return super()._kernels()
        if self.attention == "torch":
            from .fp8_torch import paged_attention_decode, paged_attention_extend, write_kv
        else:
            from .fp8_write import write_kv
            from .paged_attention_fp8 import paged_attention_decode
            from .paged_extend_fp8 import paged_attention_extend
        return paged_attention_decode, paged_attention_extend, write_kv
