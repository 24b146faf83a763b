"""One request at a time, with a contiguous cache: the plain generation that a serving engine is held against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.serving.model import Decoder, KVCache


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen.

    Args:
        max_new_tokens: tokens to generate at most.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens may be drawn; 0: all.
        top_p: only the fewest tokens whose probabilities sum to at least this may be drawn; 1: all
            (Holtzman et al. 2020).
        seed: of the request's own random numbers, so that its text does not depend on the requests beside it.
        ignore_eos: go on after the end-of-text token (benchmarks).

    Raises:
        ValueError: a value out of range, named.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be over 0 and at most 1, got {self.top_p!r}")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn at random."""
        return self.temperature == 0


@dataclass(frozen=True)
class Generation:
    """What came of a request: ``tokens`` (stop included, prompt not), ``finish_reason`` ``"stop"`` or ``"length"``."""

    tokens: list[int]
    finish_reason: str


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that a token is drawn from, (..., V) float32, of logits (..., V).

    Greedy decoding puts everything on the likeliest token, of equals on the first. Otherwise the temperature comes
    first, then top-k, then top-p over what is left (Hugging Face's order). The likeliest token always stays.
    """
    logits = logits.float()
    if params.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    kept = logits.softmax(-1)
    if params.top_p < 1:
        ordered, order = kept.sort(dim=-1, descending=True, stable=True)
        # A token stays while those before it have not reached top_p.
        stays = ordered.cumsum(-1) - ordered < params.top_p
        stays[..., 0] = True
        kept = torch.zeros_like(kept).scatter_(-1, order, ordered * stays)
        kept = kept / kept.sum(-1, keepdim=True)
    return kept


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token of logits (V,): the distribution's inverse at one uniform number of a CPU generator.

    One number a token, whatever the batch and the device: the same seed gives the same text beside any other requests.
    """
    if params.greedy:
        return int(logits.argmax(-1))
    upto = probabilities(logits, params).double().cumsum(-1)
    drawn = torch.rand((), dtype=torch.float64, generator=generator).to(upto.device) * upto[-1]
    # right=True: never a token of probability 0, even if 0 itself is drawn.
    return int(torch.searchsorted(upto, drawn.reshape(1), right=True).clamp(max=_last(upto)))


def _last(upto: Tensor) -> int:
    """The last token that has any probability."""
    return int((upto < upto[-1]).sum())


def stream(model: Decoder, prompt: Sequence[int], params: SamplingParams | None = None) -> Iterator[int]:
    """The tokens after a prompt, one at a time, each as soon as it is known.

    Args:
        model: in evaluation mode.
        prompt: at least one token.
        params: greedy, 64 tokens, by default.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a prompt that leaves no room for a token.
    """
    params = params or SamplingParams()
    tokens = check_prompt(model, prompt)
    room = min(len(tokens) + params.max_new_tokens, model.config.max_seq_len)
    return _steps(model, tokens, params, room)


def check_prompt(model: Decoder, prompt: Sequence[int]) -> list[int]:
    """The prompt as a list, if the model can continue it; otherwise ValueError, as :func:`stream` says."""
    tokens, config = [int(token) for token in prompt], model.config
    if not tokens:
        raise ValueError("a prompt holds at least one token, got none")
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"prompt token {token} is outside the vocabulary of {config.vocab_size}")
    if len(tokens) >= config.max_seq_len:
        raise ValueError(f"a prompt must be shorter than max_seq_len = {config.max_seq_len}, got {len(tokens)} tokens")
    return tokens


@torch.no_grad()
def _steps(model: Decoder, tokens: list[int], params: SamplingParams, room: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(params.seed)
    cache = KVCache(model.config, room, model.dtype, model.device)
    length, step = len(tokens), tokens
    while length < room:
        ids = torch.tensor(step, device=model.device)
        positions = torch.arange(cache.length, cache.length + len(step), device=model.device)
        last = model.hidden(ids, positions, cache)[-1]
        cache.advance(len(step))
        token = sample(model.logits(last), params, generator)
        yield token
        if token in model.config.eos_token_ids and not params.ignore_eos:
            return
        length, step = length + 1, [token]


def generate(model: Decoder, prompt: Sequence[int], params: SamplingParams | None = None) -> Generation:
    """All tokens of :func:`stream`, and why they ended: ``"stop"`` at an end of text, ``"length"`` otherwise."""
    params = params or SamplingParams()
    tokens = list(stream(model, prompt, params))
    stopped = bool(tokens) and tokens[-1] in model.config.eos_token_ids and not params.ignore_eos
    return Generation(tokens, "stop" if stopped else "length")
