"""How many blocks of keys and values an engine's device has room for."""

from __future__ import annotations

import torch

from utils.serving import Decoder

#: What the cache may take: bytes on a CPU, and the part of a GPU's free memory (the rest is for activations).
CPU_BYTES, GPU_SHARE = 2**28, 0.8


def default_num_blocks(model: Decoder, block_size: int, max_batch: int) -> int:
    """Blocks for ``max_batch`` requests of the greatest length, or as many as the device's memory allows."""
    config = model.config
    enough = max_batch * -(-config.max_seq_len // block_size)
    memory = CPU_BYTES
    if model.device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(model.device)[0] * GPU_SHARE)
    return max(1, min(enough, memory // (block_size * config.kv_bytes_per_token(model.dtype.itemsize))))
