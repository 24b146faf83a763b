"""What became of every request: counted once, under its own reason, and shown to Prometheus.

One request is one choice of one prompt, as the engine sees it: ``n = 2`` for three prompts makes six. A body that
cannot be read, or that is refused before its choices are known, counts as one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum

from utils.serving.prometheus import Histogram, Metric, exposition


class Fate(StrEnum):
    """How a request can end."""

    LENGTH = "length"  # as many tokens as it asked for, or as the model has positions
    END_TOKEN = "end_token"  # the model ended the text
    STOP_STRING = "stop_string"  # the text reached one of the request's stop texts
    CLIENT_GONE = "client_gone"  # the client hung up
    SHUTDOWN = "shutdown"  # under way when the server stopped
    FAILED = "failed"  # within the engine or the server
    INVALID = "invalid"  # refused: can never be served (400, 404, 413)
    FULL = "full"  # refused: too many requests at the moment (429)
    UNAVAILABLE = "unavailable"  # refused: the server shuts down, or its engine is broken (503)


#: Upper bounds of the histograms' buckets, in seconds: 1 ms to 1 min for whole requests, 0.1 ms to 1 s between tokens.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
#: What an engine's ``stats()`` may hold: counts since its start, and what there is now.
ENGINE_COUNTERS = {
    "steps": "Steps of the engine",
    "computed_tokens": "Tokens that went through the model",
    "cached_tokens": "Tokens of prompts that a shared prefix saved",
    "preemptions": "Requests that lost their blocks to others and were computed again",
    "drafted_tokens": "Tokens that the draft model proposed",
    "accepted_tokens": "Drafted tokens that the target accepted",
}
ENGINE_GAUGES = {
    "waiting": "Requests that wait for a place in the batch",
    "running": "Requests in the batch",
    "blocks_used": "KV blocks in use",
    "blocks_free": "KV blocks that are free",
}


class Ledger:
    """The counts of a server. Of one thread: its event loop's."""

    def __init__(self) -> None:
        self.received = Metric("mlf_requests_received_total", "Requests, one for each choice of each prompt")
        self.ended = Metric("mlf_requests_total", "Requests that are over, by how they ended", label="fate")
        self.ended.values = {fate.value: 0 for fate in Fate}
        self.prompt_tokens = Metric("mlf_prompt_tokens_total", "Tokens of the prompts that were taken")
        self.output_tokens = Metric("mlf_output_tokens_total", "Tokens that clients were given or told of")
        self.ttft = Histogram("mlf_time_to_first_token_seconds", "From the request to its first token", SECONDS)
        self.tpot = Histogram("mlf_time_per_output_token_seconds", "Mean gap between a request's tokens", TOKEN_SECONDS)
        self.latency = Histogram("mlf_request_seconds", "From the request to its last token, if it was served", SECONDS)

    @property
    def in_flight(self) -> int:
        """Requests that are not over."""
        return int(sum(self.received.values.values()) - sum(self.ended.values.values()))

    def open(self) -> Fates:
        """A new HTTP request."""
        return Fates(self)

    def page(self, stats: Mapping[str, float]) -> str:
        """All of it in Prometheus' text form, beside the engine's ``stats``."""
        engine = [
            Metric(f"mlf_engine_{name}{end}", help, kind, values={"": stats[name]})
            for names, kind, end in ((ENGINE_COUNTERS, "counter", "_total"), (ENGINE_GAUGES, "gauge", ""))
            for name, help in names.items()
            if name in stats
        ]
        flight = Metric("mlf_requests_in_flight", "Requests that are not over", "gauge", values={"": self.in_flight})
        own = (self.received, self.ended, flight, self.prompt_tokens, self.output_tokens)
        return exposition([*own, self.ttft, self.tpot, self.latency, *engine])


class Fates:
    """The requests of one HTTP request; each ends once, and what is said of it afterwards does not count."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._start = ledger, time.perf_counter()
        self._first: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._open = {0}
        ledger.received.add()

    def split(self, count: int) -> None:
        """The body has been read: it asks for ``count`` requests, at least one."""
        self._ledger.received.add(count - 1)
        self._open = set(range(count))

    def tokens(self, index: int, count: int) -> None:
        """So many tokens have come for a request."""
        if count and index in self._open:
            now = time.perf_counter()
            if index not in self._first:
                self._first[index] = now
                self._ledger.ttft.observe(now - self._start)
            self._tokens[index] = self._tokens.get(index, 0) + count
            self._ledger.output_tokens.add(count)

    def end(self, index: int, fate: Fate) -> None:
        """A request is over."""
        if index not in self._open:
            return
        self._open.discard(index)
        self._ledger.ended.add(1, fate.value)
        if fate in (Fate.LENGTH, Fate.END_TOKEN, Fate.STOP_STRING):
            now, count = time.perf_counter(), self._tokens.get(index, 0)
            self._ledger.latency.observe(now - self._start)
            if count > 1:
                self._ledger.tpot.observe((now - self._first[index]) / (count - 1))

    def end_all(self, fate: Fate) -> None:
        """All requests that are still open are over."""
        for index in sorted(self._open):
            self.end(index, fate)
