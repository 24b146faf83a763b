"""A discrete-event simulation of GPUs that serve one workload, each of them for everything or for one phase only.

::

    report = simulate(Disaggregated(prefill=1, decode=3, bandwidth=450e9, bytes_per_token=114688), workload, step_time)
    print(report)

``Disaggregated`` is the arrangement of DistServe (Zhong et al. 2024) and Splitwise (Patel et al. 2024): some GPUs only
prefill, the others only decode. ``Colocated`` mixes both in each step, as Sarathi-Serve does (Agrawal et al. 2024).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from utils.serving.metrics import Report, RequestRecord
from utils.serving.workload import Workload

from .step_time import StepTime
from .workers import Job, Worker


def _whole(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


@dataclass(frozen=True)
class Colocated:
    """GPUs that all do the same: continuous batching with chunked prefill.

    Args:
        gpus: how many; a request goes to the one with the fewest requests.
        token_budget: tokens in a step at most, decoding requests and prompts together.
        max_batch: requests of one GPU at a time at most.
        cache_tokens: tokens whose keys and values fit into one GPU's memory.

    Raises:
        ValueError: a number below 1, or a budget that is less than ``max_batch``.
    """

    gpus: int
    token_budget: int
    max_batch: int = 256
    cache_tokens: int = 400_000

    def __post_init__(self) -> None:
        _whole(**vars(self))
        if self.token_budget < self.max_batch:
            raise ValueError(f"token_budget must be at least max_batch = {self.max_batch}, got {self.token_budget}")

    def __str__(self) -> str:
        return f"{self.gpus} GPUs, token budget {self.token_budget:,}"


@dataclass(frozen=True)
class Disaggregated:
    """GPUs that only prefill and GPUs that only decode; the keys and values of a prompt go from one to the other.

    The prefill worker computes a prompt and its first token, which the client gets at once. The handover then takes
    ``latency + prompt * bytes_per_token / bandwidth`` seconds, during which both GPUs compute; each GPU's link carries
    one prompt at a time. It starts when the decode worker has a place and memory for the request. Until it is over, the
    prompt stays in the prefill worker's memory.

    Args:
        prefill, decode: how many GPUs of each kind; a request goes to the one with the fewest requests.
        bandwidth: of a GPU's link in bytes/s, in one direction.
        bytes_per_token: of keys and values, over all layers: ``config.kv_bytes_per_token(element_size)``.
        latency: seconds of a handover beside those of its bytes.
        token_budget: tokens in a step of a prefill worker at most.
        max_batch, cache_tokens: as in :class:`Colocated`, of every GPU.

    Raises:
        ValueError: a count below 1, a bandwidth that is not over 0, a negative latency.
    """

    prefill: int
    decode: int
    bandwidth: float
    bytes_per_token: int
    latency: float = 0.0
    token_budget: int = 2048
    max_batch: int = 256
    cache_tokens: int = 400_000

    def __post_init__(self) -> None:
        whole = {name: value for name, value in vars(self).items() if name not in ("bandwidth", "latency")}
        _whole(**whole)
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be over 0 bytes/s, got {self.bandwidth!r}")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency must be a finite number of seconds, at least 0, got {self.latency!r}")

    @property
    def gpus(self) -> int:
        """GPUs of both kinds."""
        return self.prefill + self.decode

    def handover(self, prompt: int) -> float:
        """Seconds that the keys and values of a prompt are on their way."""
        return self.latency + prompt * self.bytes_per_token / self.bandwidth

    def __str__(self) -> str:
        return f"{self.prefill} prefill and {self.decode} decode GPUs"


Arrangement = Colocated | Disaggregated


def simulate(arrangement: Arrangement, workload: Workload, step_time: StepTime) -> Report:
    """Serve a workload; when each request got each of its tokens.

    Answers are as long as the workload asks. The same arguments give the same report.

    Returns:
        ``report.steps`` and ``report.busy`` are sums over all GPUs; ``report.utilisation`` holds the share of the time
        that GPUs compute, ``"gpus"`` or ``"prefill"`` and ``"decode"``.

    Raises:
        TypeError: an arrangement of another type.
        ValueError: a request that does not fit into a GPU's memory.
    """
    simulation = _Simulation(arrangement, workload, step_time)
    for _ in simulation.run():
        pass
    return simulation.report()


def finished_requests(arrangement: Arrangement, workload: Workload, step_time: StepTime) -> Iterator[RequestRecord]:
    """The records of :func:`simulate` in the order in which the requests end, each as soon as it does.

    A caller who has seen enough spares the rest of the simulation.

    Raises:
        TypeError, ValueError: as :func:`simulate`.
    """
    return map(_record, _Simulation(arrangement, workload, step_time).run())


def _check(arrangement: Arrangement, workload: Workload) -> None:
    if not isinstance(arrangement, Colocated | Disaggregated):
        raise TypeError(f"arrangement must be Colocated or Disaggregated, got {type(arrangement).__name__}")
    for request in workload:
        if len(request.prompt) + request.output_tokens - 1 > arrangement.cache_tokens:
            raise ValueError(
                f"request {request.id!r} has {len(request.prompt)} + {request.output_tokens} tokens, a GPU's memory "
                f"holds {arrangement.cache_tokens}"
            )


def _record(job: Job) -> RequestRecord:
    return RequestRecord(job.id, job.arrival, job.prompt, tuple(job.times), "length", job.times[-1])


class _Simulation:
    def __init__(self, arrangement: Arrangement, workload: Workload, step_time: StepTime) -> None:
        _check(arrangement, workload)
        self.arrangement, self.step_time = arrangement, step_time
        self.jobs = [Job(r.id, r.arrival, len(r.prompt), r.output_tokens) for r in workload]
        limits = arrangement.max_batch, arrangement.cache_tokens
        self.groups: dict[str, list[Worker]] = {}
        if isinstance(arrangement, Colocated):
            self.groups["gpus"] = [Worker(arrangement.token_budget, *limits) for _ in range(arrangement.gpus)]
        else:
            budget = arrangement.token_budget
            self.groups["prefill"] = [Worker(budget, *limits, most_output=1) for _ in range(arrangement.prefill)]
            self.groups["decode"] = [Worker(arrangement.max_batch, *limits) for _ in range(arrangement.decode)]
        self.first, self.decode = next(iter(self.groups.values())), self.groups.get("decode", [])
        #: Of each decode worker, prompts that wait for room there, and the prefill workers that hold them.
        self.coming: dict[Worker, deque[tuple[Job, Worker]]] = {worker: deque() for worker in self.decode}
        #: (time, number, what happens, its arguments); what happens returns the worker that may start a step then.
        self.events: list[tuple[float, int, Callable[..., Worker], tuple[Any, ...]]] = []
        self.now, self.number = 0.0, 0
        self.ended: list[Job] = []  # now

    def run(self) -> Iterator[Job]:
        """Serve all requests; yields each at the time at which it ends."""
        for job in self.jobs:
            self.at(job.arrival, self.arrive, job)
        while self.events:
            self.now = self.events[0][0]
            touched: dict[Worker, None] = {}  # a set in the order of the events
            while self.events and self.events[0][0] == self.now:
                _, _, happens, arguments = heapq.heappop(self.events)
                touched[happens(*arguments)] = None
            for worker in touched:  # after everything that happens now, so that a step takes all who have come
                self.start(worker)
            if self.ended:
                yield from self.ended
                self.ended.clear()

    def report(self) -> Report:
        """What became of the requests, after all of them have ended."""
        workers = [worker for group in self.groups.values() for worker in group]
        records = tuple(map(_record, self.jobs))
        duration = max(record.end for record in records)
        shares = {
            name: sum(worker.busy for worker in group) / (duration * len(group)) for name, group in self.groups.items()
        }
        return Report(records, duration, sum(w.steps for w in workers), sum(w.busy for w in workers), shares)

    def at(self, time: float, happens: Callable[..., Worker], *arguments: Any) -> None:
        heapq.heappush(self.events, (time, self.number, happens, arguments))
        self.number += 1

    def arrive(self, job: Job) -> Worker:
        worker = min(self.first, key=lambda worker: worker.jobs)
        worker.waiting.append(job)
        return worker

    def start(self, worker: Worker) -> None:
        """Begin a worker's next step, if it has none under way and something to do."""
        if worker.idle:
            work = worker.schedule()
            if work.sequences:
                seconds = self.step_time(work)
                self.at(self.now + seconds, self.end, worker, seconds)

    def end(self, worker: Worker, seconds: float) -> Worker:
        """A step is over: who has all tokens leaves, who has only been prefilled is handed over."""
        for job in worker.finish(self.now, seconds):
            if len(job.times) == job.output:
                worker.release(job)
                self.ended.append(job)
            else:
                target = min(self.decode, key=lambda decode: decode.jobs + len(self.coming[decode]))
                self.coming[target].append((job, worker))
                self.hand_over(target)
        if worker in self.coming:
            self.hand_over(worker)
        return worker

    def hand_over(self, target: Worker) -> None:
        """Send a decode worker the prompts that wait for it and have room there, first come first served."""
        coming = self.coming[target]
        while coming and target.fits(coming[0][0]):
            job, source = coming.popleft()
            target.admit(job)
            begin = max(self.now, source.link_free, target.link_free)
            source.link_free = target.link_free = begin + self.arrangement.handover(job.prompt)
            self.at(source.link_free, self.free, source, job)
            self.at(source.link_free, self.continue_on, target, job)

    def free(self, source: Worker, job: Job) -> Worker:
        source.release(job)
        return source

    def continue_on(self, target: Worker, job: Job) -> Worker:
        target.decode(job)
        return target
