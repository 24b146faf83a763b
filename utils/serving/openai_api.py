"""The completions protocol of OpenAI's HTTP interface: what a request may say, and how answers and errors look.

Of the request's options those are served that change which tokens are drawn. Options that this server does not know
how to serve are refused by name; silently ignoring one would give a wrong answer that looks right. What completions and
chat completions (:mod:`utils.serving.openai_chat`) have in common is in :class:`Options`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from utils.serving.chat_template import ChatTemplate
from utils.serving.generate import SamplingParams
from utils.serving.logprobs import ScoredParams, TokenScore
from utils.serving.token_bytes import token_text
from utils.serving.tokenizer import Tokenizer

#: Options whose only accepted value is that which asks for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
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


class Options(BaseModel):
    """The options that both protocols know. ``top_k`` and ``ignore_eos`` are this server's own."""

    model_config = ConfigDict(extra="forbid", strict=True)
    default_max_tokens: ClassVar[int]
    #: The option that holds what the model is to continue.
    input_name: ClassVar[str]
    #: What the answer, and a piece of it in a stream, is called; and how its id begins.
    object_name: ClassVar[str]
    piece_name: ClassVar[str]
    id_prefix: ClassVar[str]

    model: str
    max_tokens: int | None = Field(default=None, ge=1, description="16 by default, 256 for a chat")
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False, description="1 by default")
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _served(self) -> Options:
        for name, accepted in NOT_SERVED.items():
            if getattr(self, name, None) not in accepted:
                raise ValueError(f"{name} is not supported by this server; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        if len(self.stops) > MOST_STOPS or "" in self.stops:
            raise ValueError(f"stop must be at most {MOST_STOPS} texts, none of them empty, got {self.stop!r}")
        return self

    @property
    def stops(self) -> list[str]:
        """The texts that the client wants to end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def prompts(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
        """The prompts as tokens.

        Raises:
            ValueError: the template refuses the messages of a chat.
        """
        raise NotImplementedError

    def ends(self, template: ChatTemplate) -> list[str]:
        """All texts that end an answer."""
        return self.stops

    @property
    def scored(self) -> int | None:
        """How many of the likeliest tokens are to be reported beside each chosen one; None: no log probabilities."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int:
        """Tokens of the answer at most."""
        return self.max_tokens or self.default_max_tokens

    def params(self) -> list[SamplingParams]:
        """How each of the ``n`` choices is drawn: the same options, and a seed of its own."""
        seed = secrets.randbits(31) if self.seed is None else self.seed % 2**62
        kind, extra = (SamplingParams, {}) if self.scored is None else (ScoredParams, {"logprobs": self.scored})
        return [
            kind(
                max_new_tokens=self.most_tokens,
                temperature=1.0 if self.temperature is None else float(self.temperature),
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else float(self.top_p),
                seed=seed + i,
                ignore_eos=bool(self.ignore_eos),
                **extra,
            )
            for i in range(self.n or 1)
        ]

    def choice(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One choice of an answer."""
        raise NotImplementedError

    def piece(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One choice's part of a piece of a stream."""
        raise NotImplementedError

    def logprobs_body(self, tokenizer: Tokenizer, scores: Sequence[TokenScore], offsets: Sequence[int]) -> Any:
        """The log probabilities of some tokens of a choice, which begin at these characters of its text."""
        raise NotImplementedError


class CompletionRequest(Options):
    """The body of ``POST /v1/completions``."""

    default_max_tokens: ClassVar[int] = 16
    input_name: ClassVar[str] = "prompt"
    object_name: ClassVar[str] = "text_completion"
    piece_name: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl"

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is not supported by this server beyond n; got {self.best_of}")
        if not self.prompt and self.prompt != "":
            raise ValueError("prompt must hold at least one text or token")
        return self

    @property
    def scored(self) -> int | None:
        """As :attr:`Options.scored`."""
        return self.logprobs

    def prompts(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
        """As :meth:`Options.prompts`; a completion needs no template."""
        if isinstance(self.prompt, str):
            return [tokenizer.encode(self.prompt)]
        if isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in self.prompt]

    def choice(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """As :meth:`Options.choice`."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    piece = choice

    def logprobs_body(
        self, tokenizer: Tokenizer, scores: Sequence[TokenScore], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """As :meth:`Options.logprobs_body`. Of two tokens that look alike, the likelier is in ``top_logprobs``."""
        tops: list[Mapping[str, float]] = []
        for score in scores:
            best: dict[str, float] = {}
            for token, logprob in (*score.top, (score.token, score.logprob)):
                best.setdefault(token_text(tokenizer, token), logprob)
            tops.append(best)
        return {
            "tokens": [token_text(tokenizer, score.token) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops,
            "text_offset": list(offsets),
        }


class AnswerText:
    """Turns one choice's tokens into text as they come, and ends it before the first of its stop texts.

    What could be the beginning of a stop text is held back until it is known.

    Attributes:
        offsets: where in the text each token's own begins, in characters.
        stopped: whether the text has reached a stop text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops, self._held = tokenizer.stream(), list(stops), ""
        self.offsets: list[int] = []
        self.stopped = False
        self._decoded = 0  # characters

    @property
    def tokens(self) -> int:
        """Tokens that the text took; with the last one it may have reached a stop text."""
        return len(self.offsets)

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain now; after a stop text nothing more. ``last``: no more tokens will come."""
        for token in tokens:
            if not self.stopped:
                self.offsets.append(self._decoded)
                self._take(self._decoder.push(token))
        if last and not self.stopped:
            self._take(self._decoder.finish())
        keep = 0 if self.stopped or last else self._undecided()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def _take(self, piece: str) -> None:
        self._held += piece
        self._decoded += len(piece)
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
