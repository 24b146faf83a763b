"""The completions protocol of OpenAI's HTTP interface: what a request may say, and how answers and errors look.

Of the request's options those are served that change which tokens are drawn. Options that this server does not know
how to serve are refused by name; silently ignoring one would give a wrong answer that looks right.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from utils.serving.generate import SamplingParams
from utils.serving.tokenizer import Tokenizer

#: Options whose only accepted value is that which asks for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "logprobs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
MOST_CHOICES, MOST_STOPS = 16, 4


class StreamOptions(BaseModel):
    """``include_usage``: count the tokens in a last piece of the stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of ``POST /v1/completions``. ``top_k`` and ``ignore_eos`` are this server's own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=1, description="16 by default")
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False, description="1 by default")
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    user: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _served(self) -> CompletionRequest:
        for name, accepted in NOT_SERVED.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is not supported by this server beyond n; got {self.best_of}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        if len(self.stops) > MOST_STOPS or "" in self.stops:
            raise ValueError(f"stop must be at most {MOST_STOPS} texts, none of them empty, got {self.stop!r}")
        if not self.prompt and self.prompt != "":
            raise ValueError("prompt must hold at least one text or token")
        return self

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts as tokens."""
        if isinstance(self.prompt, str):
            return [tokenizer.encode(self.prompt)]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in self.prompt]

    def params(self) -> list[SamplingParams]:
        """How each of the ``n`` choices is drawn: the same options, and a seed of its own."""
        seed = secrets.randbits(31) if self.seed is None else self.seed % 2**62
        return [
            SamplingParams(
                max_new_tokens=self.max_tokens or 16,
                temperature=1.0 if self.temperature is None else float(self.temperature),
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else float(self.top_p),
                seed=seed + i,
                ignore_eos=bool(self.ignore_eos),
            )
            for i in range(self.n or 1)
        ]


class AnswerText:
    """Turns one choice's tokens into text as they come, and ends it before the first of its stop texts.

    What could be the beginning of a stop text is held back until it is known.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops, self._held = tokenizer.stream(), list(stops), ""
        self.tokens = 0
        self.stopped = False

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain now; after a stop text nothing more. ``last``: no more tokens will come."""
        for token in tokens:
            if not self.stopped:
                self.tokens += 1
                self._take(self._decoder.push(token))
        if last and not self.stopped:
            self._take(self._decoder.finish())
        keep = 0 if self.stopped or last else self._undecided()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _take(self, piece: str) -> None:
        self._held += piece
        places = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self._held, self.stopped = self._held[: min(places)], True

    def _undecided(self) -> int:
        """Characters at the end that are the beginning of a stop text."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


def completion(
    id: str, created: int, model: str, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None
) -> dict[str, Any]:
    """A ``text_completion``: the whole answer, or a piece of a stream (then without usage)."""
    body = {"id": id, "object": "text_completion", "created": created, "model": model, "choices": list(choices)}
    return body if usage is None else body | {"usage": usage}


def choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    """One choice of a completion."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """How many tokens an answer took."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
