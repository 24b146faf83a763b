"""Clients of a server, good ones and bad ones, in a process of their own; run by :mod:`tests.overload`.

``python -m tests.overload_clients PLAN``: the plan is JSON: url, rate (requests a second; 0: ``workers`` clients, each
of which asks again as soon as it has its answer), seconds, seed, and ``templates``: what is asked, and the text that is
right. Prints one JSON object: how often each kind of client met each outcome, and what went wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

#: Kinds of clients under overload, and how many of a hundred requests are theirs.
KINDS = {"whole": 35, "stream": 35, "hangs up amid a stream": 10, "hangs up while it waits": 5, "too long": 5,
         "invalid": 5, "poison": 5}  # fmt: skip
#: What each may meet. "refused" is a 429 with a Retry-After; "gone" means that the client hung up itself.
ALLOWED = {
    "whole": {"answered", "refused"},
    "stream": {"answered", "refused"},
    "hangs up amid a stream": {"gone", "answered", "refused"},
    "hangs up while it waits": {"gone", "answered", "refused"},
    "too long": {"told: too long", "refused"},
    "invalid": {"told: invalid"},
    "poison": {"told: failed", "refused"},
}
INVALID = (
    {"temperature": -1}, {"top_p": 2}, {"max_tokens": 0}, {"n": 99}, {"beams": 3}, {"logprobs": 5}, {"stop": ""},
)  # fmt: skip


class Clients:
    """Asks, and keeps the books."""

    def __init__(self, plan: dict[str, Any], http: httpx.AsyncClient) -> None:
        self.plan, self.http, self.rng = plan, http, random.Random(plan["seed"])
        self.met: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.wrong: list[str] = []
        self.first_token: list[float] = []
        self.latency: list[float] = []
        self.tokens = 0

    async def ask(self, kind: str) -> None:
        """One request of one kind; its outcome goes into the books."""
        template = self.rng.choice(self.plan["templates"])
        invalid, patience = self.rng.choice(INVALID), self.rng.uniform(0.01, 0.5)
        hang_up = self.rng.randint(0, 6) if kind == "hangs up amid a stream" else None
        body = {"model": self.plan["model"], **template["body"]}
        if kind == "too long":
            body["prompt"] = self.plan["too_long"]
        elif kind == "poison":
            body |= {"prompt": [*self.plan["poison"], *self.rng.sample(range(10, 90), 3)], "ignore_eos": True}
        elif kind == "invalid":
            body |= invalid
        started = time.perf_counter()
        try:
            if kind in ("stream", "hangs up amid a stream") or (kind == "poison" and self.rng.random() < 0.5):
                outcome = await self._stream(body, template, started, hang_up)
            else:
                timeout = patience if kind == "hangs up while it waits" else 120
                answer = await self.http.post("/v1/completions", json=body, timeout=timeout)
                outcome = self._read(answer.status_code, answer.json(), answer.headers, template)
            if outcome == "answered":
                self.latency.append(time.perf_counter() - started)
        except httpx.TimeoutException:
            outcome = "gone" if kind == "hangs up while it waits" else "no answer"
        except Exception as error:
            outcome = f"broken: {type(error).__name__}: {error}"
        self.met[kind][outcome] += 1
        if outcome not in ALLOWED[kind] and len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {outcome}")

    async def _stream(self, body: dict[str, Any], template: dict[str, Any], started: float, hang_up: int | None) -> str:
        text, pieces = "", 0
        async with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}, timeout=120) as answer:
            if answer.status_code != 200:
                return self._read(answer.status_code, json.loads(await answer.aread()), answer.headers, template)
            async for line in answer.aiter_lines():
                if hang_up is not None and pieces >= hang_up:
                    return "gone"
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    return self._told(500, piece["error"]["message"])
                if not pieces:
                    self.first_token.append(time.perf_counter() - started)
                text, pieces = text + piece["choices"][0]["text"], pieces + 1
        self.tokens += template["tokens"]
        return "answered" if text == template["text"] else f"another text: {text!r} for {template['text']!r}"

    def _read(self, status: int, answer: dict[str, Any], headers: Any, template: dict[str, Any]) -> str:
        if status == 200:
            self.tokens += template["tokens"]
            text = answer["choices"][0]["text"]
            return "answered" if text == template["text"] else f"another text: {text!r} for {template['text']!r}"
        if status == 429 and headers.get("retry-after"):
            return "refused"
        return self._told(status, answer["error"]["message"])

    @staticmethod
    def _told(status: int, message: str) -> str:
        if status == 400 and "the pool has" in message:
            return "told: too long"
        if status == 500 and "the model failed" in message:
            return "told: failed"
        return "told: invalid" if status == 400 else f"{status}: {message}"

    async def crowd(self) -> int:
        """Requests at random times, whatever becomes of them; how many were sent."""
        kinds, weights = list(KINDS), list(KINDS.values())
        start, at, tasks, sent = time.perf_counter(), 0.0, set(), 0
        while time.perf_counter() < start + self.plan["seconds"]:  # a machine too slow for the rate sends fewer
            at += self.rng.expovariate(self.plan["rate"])
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            task = asyncio.ensure_future(self.ask(self.rng.choices(kinds, weights)[0]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        self.sending = time.perf_counter() - start
        while tasks:
            await asyncio.wait(tasks)
        return sent

    async def queue(self) -> int:
        """Clients that ask one thing after another: as much as the server can do."""
        end = time.perf_counter() + self.plan["seconds"]

        async def client() -> None:
            while time.perf_counter() < end:
                await self.ask(self.rng.choice(("whole", "stream")))

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(self.plan["workers"])))
        self.sending = time.perf_counter() - start
        return sum(self.met["whole"].values()) + sum(self.met["stream"].values())


async def main(plan: dict[str, Any]) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=plan["url"], limits=limits) as http:
        clients = Clients(plan, http)
        sent = await (clients.crowd() if plan["rate"] else clients.queue())
    return {
        "sent": sent, "seconds": clients.sending, "met": {kind: dict(met) for kind, met in clients.met.items() if met},
        "wrong": clients.wrong, "first_token": clients.first_token, "latency": clients.latency,
        "tokens": clients.tokens,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))))
