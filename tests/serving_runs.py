"""Tiny models and requests for the tests of lab 5's runner."""

from __future__ import annotations

import torch

from solutions.lab5_serving import BlockManager, Request
from utils import runtime
from utils.serving import Decoder, ModelConfig, attend_causally
from utils.serving.model import rotary_frequencies

SEED = 7
BLOCK_SIZE = 4
FAMILIES = {
    "qwen3": {"qk_norm": True, "tied_head": True},
    "qwen2": {"qkv_bias": True, "num_kv_heads": 1},
    "llama": {"output_bias": True, "qkv_bias": True, "mlp_bias": True},
}


def tiny_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, layers: int = 2) -> Decoder:
    """Every weight random, so that a swapped or forgotten one shows."""
    sizes = {"num_kv_heads": 2} | FAMILIES[family]
    config = ModelConfig(
        family=family, vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=layers, num_heads=4, head_dim=16,
        max_seq_len=64, **sizes,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = Decoder(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(mean=float(weight.ndim == 1), std=0.3)
    model = model.to(dtype).to(runtime.DEVICE)
    model.frequencies = rotary_frequencies(config).to(runtime.DEVICE)
    return model


def request(id: str, length: int) -> Request:
    chance = torch.Generator().manual_seed(sum(map(ord, id)) * 1000 + length)
    return Request(id, torch.randint(61, (length,), generator=chance).tolist())


def held(manager: BlockManager, *requests: Request) -> None:
    for each in requests:
        manager.allocate(each.id, each.tokens)


def right_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits (tokens, V) of the model itself, without a cache."""
    ids = torch.tensor(tokens, device=model.device)
    return model(ids, torch.arange(len(tokens), device=model.device), attend_causally)
