"""Clients for a server's overload: each asks once, at its own time, and every one of them notes how its request ended.

Closed-loop clients, which ask again when they are answered, measure what a server can do. Open-loop clients come
whether it keeps up or not, as the public does; the gaps between them are exponential (a Poisson process).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

#: Lengths of answers. They differ, so that the requests of a batch end one by one.
TOKENS = (80, 160, 240)
PROMPTS = ("It was the best of times", "Call me", "In the beginning", "My dear sister")
#: Of each kind of client its part of all.
KINDS = {"whole": 0.35, "chat": 0.2, "stream": 0.3, "hangs up": 0.1, "impatient": 0.05}
#: The kinds that wait for their answer.
STAYING = ("whole", "chat", "stream")
#: Seconds that an impatient client waits for its answer.
PATIENCE = 2.0
#: What asks for a text: a path, a prompt and a number of tokens.
Question = tuple[str, str, int]


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Attributes:
        kind: of its client.
        fate: "answered", "told 429" or "told 503" (to come again), "cut off" (by its client), or what went wrong.
        asked, seconds: when, on the clock ``time.perf_counter``, and how long it took.
    """

    kind: str
    fate: str
    asked: float
    seconds: float

    @property
    def ended(self) -> float:
        """When it was over."""
        return self.asked + self.seconds


class CutOff(Exception):
    """The client has hung up."""


@dataclass
class Clients:
    """Clients of one server; what each of them asks is drawn with ``rng``.

    Attributes:
        right: the text that an idle server gives to each question.
        late: seconds by which clients of an open loop came after their time, at most.
    """

    model: str
    rng: random.Random
    right: dict[Question, str] = field(default_factory=dict)
    late: float = 0.0

    async def learn(self, http: httpx.AsyncClient) -> float:
        """Ask each question alone; the seconds that the longest answer took."""
        longest = 0.0
        for question in itertools.product(("completions", "chat/completions"), PROMPTS, TOKENS):
            asked = time.perf_counter()
            answer = await http.post(f"/v1/{question[0]}", json=self._body(question))
            longest = max(longest, time.perf_counter() - asked)
            answer.raise_for_status()
            self.right[question] = _text(answer.json()["choices"][0])
        return longest

    async def ask(self, http: httpx.AsyncClient, kinds: Sequence[str] = STAYING) -> Outcome:
        """One request of a client of one of these kinds."""
        kind = self.rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        path = "chat/completions" if kind == "chat" else "completions"
        question = path, self.rng.choice(PROMPTS), self.rng.choice(TOKENS)
        asked = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE if kind == "impatient" else None):
                fate = await self._fate(http, kind, question)
        except (CutOff, TimeoutError):
            fate = "cut off"
        except httpx.HTTPError as error:
            fate = f"lost: {type(error).__name__}: {error}"
        return Outcome(kind, fate, asked, time.perf_counter() - asked)

    async def closed_loop(self, http: httpx.AsyncClient, clients: int, seconds: float) -> list[Outcome]:
        """What some clients that stay meet when each asks one thing after another, for as long as that."""
        end, outcomes = time.perf_counter() + seconds, []

        async def client() -> None:
            while time.perf_counter() < end:
                outcomes.append(await self.ask(http))

        await asyncio.gather(*(client() for _ in range(clients)))
        return outcomes

    async def open_loop(self, http: httpx.AsyncClient, rate: float, seconds: float) -> list[Outcome]:
        """What clients of all kinds meet that come at ``rate`` per second for as long as that."""
        start, at, tasks = time.perf_counter(), self.rng.expovariate(rate), []
        while at < seconds:
            await asyncio.sleep(start + at - time.perf_counter())
            self.late = max(self.late, time.perf_counter() - start - at)
            tasks.append(asyncio.create_task(self.ask(http, tuple(KINDS))))
            at += self.rng.expovariate(rate)
        return await asyncio.gather(*tasks)

    def _body(self, question: Question, stream: bool = False) -> dict[str, Any]:
        path, prompt, tokens = question
        asked = {"messages": [{"role": "user", "content": prompt}]} if path.startswith("chat") else {"prompt": prompt}
        body = {"model": self.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        return body | asked

    async def _fate(self, http: httpx.AsyncClient, kind: str, question: Question) -> str:
        stream, right = kind in ("stream", "hangs up"), self.right[question]
        async with http.stream("POST", f"/v1/{question[0]}", json=self._body(question, stream)) as answer:
            if answer.status_code in (429, 503) and "Retry-After" in answer.headers:
                await answer.aread()
                return f"told {answer.status_code}"
            if answer.status_code != 200:
                return f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            if stream:
                return await _end_of_stream(answer, right, self.rng.randint(1, 20) if kind == "hangs up" else None)
            choice = json.loads(await answer.aread())["choices"][0]
            return _judged(_text(choice), choice["finish_reason"], right)


async def _end_of_stream(answer: httpx.Response, right: str, patience: int | None) -> str:
    """How a stream ended that had begun.

    Raises:
        CutOff: so many pieces have come as its client wanted.
    """
    text, pieces, reason = "", 0, None
    async for data in _events(answer):
        if data == "[DONE]":
            return _judged(text, reason, right)
        body = json.loads(data)
        if "error" in body:
            return f"error in a stream: {body['error']['message']}"
        (choice,) = body["choices"]
        text, reason, pieces = text + choice["text"], choice["finish_reason"] or reason, pieces + 1
        if pieces == patience:
            raise CutOff
    return f"a stream without its end, after {pieces} pieces"


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


def _text(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def _judged(text: str, reason: str | None, right: str) -> str:
    if (text, reason) == (right, "length"):
        return "answered"
    return f"{text!r} (finish_reason {reason}) instead of {right!r}"
