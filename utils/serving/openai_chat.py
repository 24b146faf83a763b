"""The chat protocol of OpenAI's HTTP interface: the body of ``POST /v1/chat/completions``, and how answers look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from utils.serving.chat_template import ChatTemplate
from utils.serving.logprobs import MOST_LOGPROBS, TokenScore
from utils.serving.openai_api import Options
from utils.serving.token_bytes import token_bytes, token_text
from utils.serving.tokenizer import Tokenizer


class TextPart(BaseModel):
    """A part of a message; images and sounds are not served."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat. ``developer`` is what newer models call ``system``; a name is not shown to the model."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as templates expect it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Options):
    """The body of ``POST /v1/chat/completions``."""

    default_max_tokens: ClassVar[int] = 256
    input_name: ClassVar[str] = "messages"
    object_name: ClassVar[str] = "chat.completion"
    piece_name: ClassVar[str] = "chat.completion.chunk"
    id_prefix: ClassVar[str] = "chatcmpl"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        return self

    @property
    def scored(self) -> int | None:
        """As :attr:`Options.scored`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int:
        """As :attr:`Options.most_tokens`."""
        return self.max_completion_tokens or super().most_tokens

    def prompts(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
        """As :meth:`Options.prompts`: one, the chat."""
        return [template.encode(tokenizer, [message.plain() for message in self.messages])]

    def ends(self, template: ChatTemplate) -> list[str]:
        """As :meth:`Options.ends`: the template's too."""
        return [*self.stops, *template.stops]

    def choice(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """As :meth:`Options.choice`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        """What a choice's stream begins with: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """As :meth:`Options.piece`."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs_body(
        self, tokenizer: Tokenizer, scores: Sequence[TokenScore], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """As :meth:`Options.logprobs_body`; a chat's have no offsets, but bytes."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": token_bytes(tokenizer, token)}

        content = [
            entry(score.token, score.logprob) | {"top_logprobs": [entry(*each) for each in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}
