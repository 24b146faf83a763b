"""A tiny decoder that notes down what it is asked: tokens, positions, and which rows become logits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from utils.serving import Attend, Decoder, ModelConfig
from utils.serving.model import attend_causally


def tiny_config(rng: random.Random, eos: tuple[int, ...] = (), vocabulary: int = 23) -> ModelConfig:
    """A model of two layers whose key heads are shared; positions matter to it from the first token on."""
    groups = rng.choice((1, 2, 3))
    return ModelConfig(
        family="qwen3", vocab_size=vocabulary, hidden_size=24, intermediate_size=32, num_layers=2,
        num_heads=groups * rng.choice((2, 3)), num_kv_heads=groups, head_dim=8, max_seq_len=64, rope_theta=50.0,
        qk_norm=True, eos_token_ids=eos,
    )  # fmt: skip


def tiny_model(rng: random.Random, eos: tuple[int, ...] = (), vocabulary: int = 23) -> SpiedModel:
    """Random weights in float64, so that two right computations agree far beyond the distance of two tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.getrandbits(32))
        model = SpiedModel(tiny_config(rng, eos, vocabulary))
        for layer in model.layers:  # the past shall weigh in what comes out
            torch.nn.init.normal_(layer.self_attn.v_proj.weight, std=0.6)
            torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.6)
        torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    return model.double().eval()


_NUMBERS = itertools.count()


@dataclass
class Asked:
    """One pass: ``tokens`` and ``positions`` as given, ``hidden`` (..., C) that came out; its number among all."""

    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    number: int


@dataclass
class Notes:
    """All passes through a model, and the rows of which logits were asked for."""

    passes: list[Asked] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(asked.tokens.numel() for asked in self.passes)


class SpiedModel(Decoder):
    """A :class:`Decoder` with ``notes`` of what it was asked since :meth:`forget`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.notes = Notes()

    def forget(self) -> None:
        """Begin new notes."""
        self.notes = Notes()

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = super().hidden(tokens, positions, attend)
        self.notes.passes.append(Asked(tokens.clone(), positions.clone(), hidden, next(_NUMBERS)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self.notes.rows.append(hidden)
        return super().logits(hidden)


@torch.no_grad()
def without_cache(model: Decoder, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy decoding as it is defined: the whole text goes through the model for every token."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_new_tokens, model.config.max_seq_len):
        ids = torch.tensor(tokens)
        tokens.append(int(model(ids, torch.arange(len(tokens)), attend_causally)[-1].argmax()))
        if tokens[-1] in model.config.eos_token_ids:
            break
    return tokens[len(prompt) :]
