"""Lab 5's engine over weights of 4 bits and a cache of 8."""

from __future__ import annotations

from typing import Any

import torch

from solutions.lab5_serving.engine import Engine as ServingEngine
from solutions.lab5_serving.memory import CPU_BYTES, GPU_SHARE, default_num_blocks
from solutions.lab5_serving.runner import ModelRunner
from utils.serving import Decoder, ModelConfig

from .low_bit_runner import LowBitRunner


def fp8_block_bytes(config: ModelConfig, block_size: int) -> int:
    """Bytes of a block in an fp8 cache, in all layers, with its scales of keys and values."""
    return block_size * config.kv_bytes_per_token(1) + 2 * 4 * config.num_layers * config.num_kv_heads


def default_num_fp8_blocks(model: Decoder, block_size: int, max_batch: int) -> int:
    """Blocks for ``max_batch`` requests of the greatest length, or as many as the device's memory allows."""
    config = model.config
    enough = max_batch * -(-config.max_seq_len // block_size)
    memory = CPU_BYTES
    if model.device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(model.device)[0] * GPU_SHARE)
    return max(1, min(enough, memory // fp8_block_bytes(config, block_size)))


class Engine(ServingEngine):
    """Serves many requests at a time with one model, its weights and its cache in few bits.

    Lab 5's engine knows nothing of that: the runner computes its steps, and only the runner differs.

    Args:
        model: in evaluation mode; it is not changed.
        weights: ``"int4"`` or None; see :class:`.low_bit_runner.LowBitRunner`.
        cache: ``"fp8"`` or None; likewise.
        num_blocks, block_size, max_batch, runner: as in lab 5. A ``runner`` brings its own weights and cache.
        options: the other arguments of :class:`solutions.lab5_serving.Engine`.

    Raises:
        ValueError: as :class:`.low_bit_runner.LowBitRunner`, or weights or a cache are given beside a runner.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        weights: str | None = None,
        cache: str | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 64,
        runner: ModelRunner | None = None,
        **options: Any,
    ) -> None:
        if runner is None:
            if num_blocks is None:
                count = default_num_blocks if cache is None else default_num_fp8_blocks
                num_blocks = count(model, block_size, max_batch)
            runner = LowBitRunner(model, num_blocks, block_size, weights=weights, cache=cache)
        elif weights is not None or cache is not None:
            raise ValueError(f"a runner brings its weights and its cache, got weights={weights!r} and cache={cache!r}")
        super().__init__(runner.model, runner=runner, max_batch=max_batch, **options)
