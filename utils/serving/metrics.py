"""How well a serving engine serves: latencies of each request as its client sees them, and throughput of all.

Times are in seconds from the start of the run. The definitions are those of lecture 10, section 7, which names their
source: time to first token (TTFT) from the arrival to the first token, waiting included; time per output token (TPOT)
the mean gap between tokens after that; end-to-end latency from the arrival to the last token, so that it is
TTFT + TPOT x (tokens - 1), equation (10).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: The percentiles that summaries give.
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestRecord:
    """What became of one request.

    ``token_times``: when each output token came, ascending. ``finish_reason``: "stop", "length", "abort" or "error";
    ``error``: what was wrong, for the last. ``end``: when it was known to be over.
    """

    id: str
    arrival: float
    prompt_tokens: int
    token_times: tuple[float, ...]
    finish_reason: str
    end: float
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return len(self.token_times)

    @property
    def completed(self) -> bool:
        """Whether it got its answer."""
        return self.finish_reason in ("stop", "length")

    @property
    def ttft(self) -> float:
        """Time to first token; NaN without a token. Its model is in `utils.transformer_math.serving_bounds`."""
        return self.token_times[0] - self.arrival if self.token_times else math.nan

    @property
    def tpot(self) -> float:
        """Time per output token; NaN with fewer than two."""
        if self.output_tokens < 2:
            return math.nan
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def latency(self) -> float:
        """End-to-end latency; NaN without a token."""
        return self.token_times[-1] - self.arrival if self.token_times else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed, between neighbours by a straight line.

    NaN are left out; NaN if nothing is left.

    Raises:
        ValueError: a percentage outside 0..100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be between 0 and 100, got {percent!r}")
    ordered = sorted(v for v in values if not math.isnan(v))
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Report:
    """A run of a workload.

    Args:
        requests: one record each, in order of arrival.
        duration: seconds from the start to the last event.
        steps: iterations of the engine.
        busy: seconds of those iterations; the rest was waiting for requests.
        utilisation: named shares in [0, 1], averaged over the iterations' time: "slots" (requests in a step over the
            maximum batch), "blocks" (KV blocks in use over all).
    """

    requests: tuple[RequestRecord, ...]
    duration: float
    steps: int = 0
    busy: float = 0.0
    utilisation: Mapping[str, float] = field(default_factory=dict)

    @property
    def completed(self) -> tuple[RequestRecord, ...]:
        """The requests that got their answer; latencies are theirs."""
        return tuple(r for r in self.requests if r.completed)

    @property
    def output_tokens(self) -> int:
        """Tokens generated for all requests."""
        return sum(r.output_tokens for r in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of the requests that got their answer."""
        return sum(r.prompt_tokens for r in self.completed)

    @property
    def throughput(self) -> float:
        """Output tokens a second, over the whole run."""
        return self.output_tokens / self.duration if self.duration else math.nan

    @property
    def request_rate(self) -> float:
        """Completed requests a second."""
        return len(self.completed) / self.duration if self.duration else math.nan

    def values(self, metric: str) -> list[float]:
        """``"ttft"``, ``"tpot"`` or ``"latency"`` of each completed request, in seconds."""
        if metric not in ("ttft", "tpot", "latency"):
            raise ValueError(f'metric must be "ttft", "tpot" or "latency", got {metric!r}')
        return [getattr(r, metric) for r in self.completed]

    def percentiles(self, metric: str, percents: Sequence[float] = PERCENTILES) -> dict[str, float]:
        """``{"p50": ..., "p90": ..., "p99": ...}`` of a metric, in seconds."""
        values = self.values(metric)
        return {f"p{percent:g}": percentile(values, percent) for percent in percents}

    def as_dict(self) -> dict[str, object]:
        """The figures of the run as plain data, without the single requests: for a record."""
        return {
            "requests": len(self.requests),
            "completed": len(self.completed),
            "duration": self.duration,
            "steps": self.steps,
            "output_tokens": self.output_tokens,
            "throughput": self.throughput,
            "request_rate": self.request_rate,
            "utilisation": dict(self.utilisation),
            **{metric: self.percentiles(metric) for metric in ("ttft", "tpot", "latency")},
        }

    def __str__(self) -> str:
        lines = [
            f"{len(self.completed)} of {len(self.requests)} requests answered in {self.duration:.2f} s: "
            f"{self.throughput:,.0f} tokens/s, {self.request_rate:.2f} requests/s, {self.steps} iterations"
        ]
        names = {"ttft": "time to first token", "tpot": "time per output token", "latency": "end-to-end latency"}
        for metric, name in names.items():
            shown = "  ".join(f"{p} {1e3 * v:9.1f} ms" for p, v in self.percentiles(metric).items())
            lines.append(f"  {name:22}{shown}")
        lines += [f"  {name} in use: {share:.1%}" for name, share in self.utilisation.items()]
        return "\n".join(lines)
