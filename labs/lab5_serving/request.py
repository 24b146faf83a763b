"""A request on its way through the engine, and what the engine says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch

from utils.serving import SamplingParams


class Status(Enum):
    """Where a request is. A preempted request is WAITING again; its tokens are kept, its blocks are not."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One prompt, the tokens generated so far, and how many of all of them have their keys and values in the cache.

    A request is never in a "prefill" or a "decode" phase: it has ``pending`` tokens whose keys and values are missing,
    many at first, then one per step. That is why one scheduler serves prompts, chunks of prompts, decoding and
    recomputation after a preemption alike.

    Args:
        id: unique among the requests that are not finished.
        prompt: at least one token.
        params: how its tokens are chosen.
        arrival: when it came, in seconds of the engine's clock.
        limit: most tokens, prompt included, that it may grow to; 0: prompt and ``params.max_new_tokens``.
    """

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    limit: int = 0

    output: list[int] = field(default_factory=list)  # generated, a preemption keeps them
    tokens: list[int] = field(default_factory=list)  # prompt and output, one list so that a step need not join them
    computed: int = 0  # how many of ``tokens`` have their keys and values in the cache
    status: Status = Status.WAITING
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: str | None = None
    generator: torch.Generator | None = None  # of its own, so that its neighbours cannot change its text
    preemptions: int = 0
    cached: int = 0  # tokens that a shared prefix saved, at its last admission

    first_scheduled: float | None = None  # seconds of the engine's clock, like all times
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt holds at least one token, got none")
        self.tokens = self.prompt + self.output
        self.limit = self.limit or len(self.prompt) + self.params.max_new_tokens
        if not self.params.greedy and self.generator is None:
            self.generator = torch.Generator().manual_seed(self.params.seed)

    @property
    def num_tokens(self) -> int:
        """Tokens that can be run through the model."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens to run through the model before the next one can be chosen, at least 1."""
        return self.num_tokens - self.computed

    @property
    def first_token(self) -> float | None:
        """When the first token was there; less ``arrival`` it is the TTFT."""
        return self.token_times[0] if self.token_times else None

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` to ``stop``."""
        return self.tokens[start:stop]

    def append(self, token: int, now: float) -> None:
        """The next token has been chosen."""
        self.output.append(token)
        self.tokens.append(token)
        self.token_times.append(now)

    def raise_if_failed(self) -> None:
        """RuntimeError if the request ended in an error."""
        if self.error is not None:
            raise RuntimeError(f"request {self.id!r} failed: {self.error}")


class RequestOutput(NamedTuple):
    """What a step brought a request: mostly one token; the last output says why it ended.

    ``finish_reason`` is "stop" (end of text), "length", "abort" or "error", and then ``error`` says what went wrong.
    ``request`` holds the rest: all tokens, times, preemptions.
    """

    id: str
    new_tokens: list[int]
    finished: bool
    finish_reason: str | None
    error: str | None
    request: Request
