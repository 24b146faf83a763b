"""What is asked of a serving engine: requests with their times, drawn at random or recorded, and playing them.

::

    workload = Workload.draw(64, arrivals=poisson(8), prompts=uniform(16, 64), outputs=lognormal(40, 0.9), tokens=4096)
    report = replay_workload(engine, workload)
    print(report)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from utils.serving.generate import SamplingParams
from utils.serving.lengths import Draw, at_once, fixed


class TraceError(ValueError):
    """A recorded trace that cannot be read; names the file and the line."""


@dataclass(frozen=True)
class TimedRequest:
    """One request of a workload: ``arrival`` in seconds from the start, ``prompt`` in tokens."""

    id: str
    arrival: float
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def output_tokens(self) -> int:
        """Tokens that it asks for; exactly what it gets if it ignores the end of text."""
        return self.params.max_new_tokens


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Raises:
        ValueError: no requests, two of one name, or arrivals that are negative or out of order.
    """

    requests: tuple[TimedRequest, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("a workload needs at least one request")
        if len({r.id for r in self.requests}) != len(self.requests):
            raise ValueError("two requests of a workload have the same id")
        last = 0.0
        for request in self.requests:
            if not request.arrival >= last:
                raise ValueError(f"request {request.id!r} arrives at {request.arrival} s, before {last} s")
            last = request.arrival

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TimedRequest]:
        return iter(self.requests)

    @classmethod
    def draw(
        cls,
        count: int,
        *,
        prompts: Draw | int,
        outputs: Draw | int,
        tokens: int | Sequence[int],
        arrivals: Draw | None = None,
        shared: int = 0,
        groups: int = 1,
        longest: int | None = None,
        params: SamplingParams | None = None,
        seed: int = 0,
    ) -> Workload:
        """A random workload; the same arguments give the same requests.

        Args:
            count: requests.
            prompts, outputs: lengths in tokens: a draw of :mod:`utils.serving.lengths`, or one number.
            tokens: a vocabulary's size, for random tokens; or a long text's tokens, for pieces of it.
            arrivals: a draw of times; by default all requests come at once.
            shared: tokens that the prompts of a group have in common at their start (a system prompt). They count as
                part of the prompt; a shorter prompt takes as many of them as it has tokens.
            groups: among how many such beginnings the requests choose.
            longest: the model's context: prompt and output together are cut to it, the output first.
            params: everything but the length and the seed; by default greedy and through the end of text, so that
                an answer is as long as was drawn.
            seed: of the draws; request i samples with seed + i.

        Raises:
            ValueError: a count below 1, a text too short for a prompt, an impossible number.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        if shared < 0 or groups < 1:
            raise ValueError(f"shared must be at least 0 and groups at least 1, got {shared} and {groups}")
        params = params or SamplingParams(ignore_eos=True)
        rng = np.random.default_rng(seed)
        times = (arrivals or at_once())(rng, count)
        sizes = _lengths(prompts)(rng, count)
        answers = _lengths(outputs)(rng, count)
        if longest is not None:
            sizes = np.clip(sizes, 1, longest - 1)
            answers = np.clip(answers, 1, longest - sizes)
        heads = [_piece(tokens, shared, rng) for _ in range(groups)] if shared else [()]
        requests = []
        for i in range(count):
            size = int(sizes[i])
            head = heads[int(rng.integers(groups))][:size] if shared else ()
            prompt = (*head, *_piece(tokens, size - len(head), rng))
            own = replace(params, max_new_tokens=int(answers[i]), seed=seed + i)
            requests.append(TimedRequest(f"r{i}", float(times[i]), prompt, own))
        return cls(tuple(requests))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(r.prompt) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens that are asked for, all together."""
        return sum(r.output_tokens for r in self.requests)

    @property
    def variation(self) -> float:
        """Standard deviation of the output lengths over their mean."""
        lengths = np.array([r.output_tokens for r in self.requests], dtype=float)
        return float(lengths.std() / lengths.mean())

    def at_rate(self, factor: float) -> Workload:
        """The same requests, ``factor`` times as fast."""
        if not factor > 0:
            raise ValueError(f"factor must be over 0, got {factor!r}")
        return Workload(tuple(replace(r, arrival=r.arrival / factor) for r in self.requests))

    def save(self, path: str | Path) -> None:
        """Write the requests as JSON lines: id, arrival, prompt and sampling parameters."""
        lines = [
            json.dumps({"id": r.id, "arrival": r.arrival, "prompt": list(r.prompt), **asdict(r.params)})
            for r in self.requests
        ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """The workload that :meth:`save` wrote.

        Raises:
            TraceError: a line that is no such request; requests out of order.
        """
        requests = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                id, arrival, prompt = str(entry.pop("id")), float(entry.pop("arrival")), entry.pop("prompt")
                requests.append(TimedRequest(id, arrival, tuple(int(t) for t in prompt), SamplingParams(**entry)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise TraceError(f"{path}, line {number}: {error!r} is not a recorded request") from None
        try:
            return cls(tuple(requests))
        except ValueError as error:
            raise TraceError(f"{path}: {error}") from None


def _lengths(draw: Draw | int) -> Draw:
    return fixed(draw) if isinstance(draw, int) else draw


def _piece(tokens: int | Sequence[int], count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """``count`` random tokens of a vocabulary, or a piece of a text from a random place."""
    if isinstance(tokens, int):
        return tuple(rng.integers(0, tokens, count).tolist())
    if len(tokens) < count:
        raise ValueError(f"a prompt of {count} tokens cannot be cut from a text of {len(tokens)}")
    start = int(rng.integers(0, len(tokens) - count + 1))
    return tuple(int(t) for t in tokens[start : start + count])
