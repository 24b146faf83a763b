"""Ten times as many requests as a server can answer: every one is answered or told, and nothing leaks.

For five minutes, with the figures that were measured::

    MLF_OVERLOAD_SECONDS=300 python -m pytest -s tests/test_serving_overload.py
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.overload_clients import STAYING, Clients, Outcome
from utils.serving import MODELS

ROOT = Path(__file__).parent.parent
#: Seconds of the overload, of the time before the server's capacity is measured, and of that measurement.
SECONDS, WARM_UP, MEASURED = float(os.environ.get("MLF_OVERLOAD_SECONDS", "30")), 5.0, 15.0
TIMES, SEED = 10, 20
#: Bytes by which the server's memory may grow after the first tenth of the overload.
GROWTH = 4 * 2**20
#: Requests in the batch and in the queue, and KV blocks: so few that some requests lose theirs and are computed again.
BATCH, WAITING, BLOCKS = 32, 64, 240
SERVERS = {
    "lab 5": ["solutions.lab5_serving"],
    "lab 5, the engine in a process of its own": ["solutions.lab5_serving", "--engine-process"],
    "lab 6, a step ahead, shared beginnings": ["solutions.lab6_frontiers", "--overlap", "--shared-prefix"],
}


class Server:
    """The course's server in a process of its own, which serves the smaller of the two models on the CPU."""

    def __init__(self, arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = f"--port {port} --max-batch {BATCH} --max-waiting {WAITING} --num-blocks {BLOCKS} --attention torch"
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--model", str(MODELS / "draft"), *options.split()],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "MLF_DEVICE": "cpu"}, start_new_session=True,
        )  # fmt: skip
        self._main = psutil.Process(self._process.pid)

    def stop(self):
        self._process.terminate()
        try:
            assert self._process.wait(30) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def held(self):
        """What the server's processes hold: bytes of memory, file descriptors, threads."""
        each = [self._main, *self._main.children(recursive=True)]
        return Counter(
            memory=sum(process.memory_info().rss for process in each),
            descriptors=sum(process.num_fds() for process in each),
            threads=sum(process.num_threads() for process in each),
        )

    def processor(self):
        """Seconds of the processor that the server's processes have taken."""
        each = [self._main, *self._main.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in each)

    def healthy(self):
        return httpx.get(f"{self.url}/health").status_code == 200

    def metrics(self):
        return numbers(httpx.get(f"{self.url}/metrics").text)

    def idle(self):
        """Whether no request is on its way, and nobody connected."""
        metrics = self.metrics()
        gauges = ("requests_in_flight", "engine_running", "engine_waiting", "engine_blocks_used")
        connected = [each for each in self._main.net_connections() if each.status != psutil.CONN_LISTEN]
        return not connected and not any(metrics[f"mlf_{name}"] for name in gauges)


@pytest.fixture(params=SERVERS.values(), ids=SERVERS)
def server(request):
    running = Server(request.param)
    try:
        until(running.healthy)
        yield running
    finally:
        running.stop()


def until(happened):
    for _ in range(1500):
        with contextlib.suppress(httpx.TransportError):
            if happened():
                return
        time.sleep(0.02)
    raise AssertionError("it never happened")


def numbers(page):
    """Counters and gauges of a page of metrics by name, requests that are over by their fate."""
    families = [family for family in text_string_to_metric_families(page) if family.type != "histogram"]
    return Counter({s.labels.get("fate", s.name): int(s.value) for family in families for s in family.samples})


@dataclass
class Overload:
    """What was seen; times in seconds.

    Attributes:
        capacities: answers per second to clients that wait for them, before the overload and after it.
        alone: the longest answer of a server that has nothing else to do.
        late: by how much the clients came after their time, at most.
        measured, overloaded, own: the processor's seconds per second that the server took at each measurement of its
            capacity and under overload, and the clients. A machine that is busy otherwise gives it less.
        seen: each second, what the server held and its metrics.
    """

    capacities: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    overloaded: float = 0.0
    own: float = 0.0
    alone: float = 0.0
    late: float = 0.0
    start: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    seen: list[tuple[Counter, Counter]] = field(default_factory=list)

    def of(self, fate):
        """Seconds that each request with this fate took, ascending."""
        return sorted(outcome.seconds for outcome in self.outcomes if outcome.fate == fate)

    @property
    def throughput(self):
        """Answers per second, without the first tenth: by then the queue is full."""
        return answered_per_second(self.outcomes, self.start + SECONDS / 10, self.start + SECONDS)

    @property
    def capacity(self):
        """The mean of before and after, since a machine's speed may change."""
        return statistics.mean(self.capacities)

    @property
    def available(self):
        """The capacity with the processor's time that the server got under overload."""
        return self.capacity * self.overloaded / statistics.mean(self.measured)

    @property
    def memory(self):
        """Bytes after the first tenth, and at the end."""
        return [self.seen[place][0]["memory"] for place in (len(self.seen) // 10, -1)]

    def _longest_and_median(self, fate):
        seconds = self.of(fate) or [0.0]
        return seconds[-1], statistics.median(seconds)

    def __str__(self):
        (longest, median), (longest_told, median_told) = map(self._longest_and_median, ("answered", "told 429"))
        return "\n".join(
            (
                f"{len(self.outcomes)} requests in {SECONDS:g} s, {dict(Counter(o.fate for o in self.outcomes))}",
                f"sent {len(self.outcomes) / SECONDS:.1f} per second",
                "capacity {:.2f} and {:.2f} per second".format(*self.capacities),
                f"answered {self.throughput:.2f} per second, {self.throughput / self.capacity:.3f} of the capacity, "
                f"{self.throughput / self.available:.3f} with the processor's time that the server got",
                f"answers took {longest:.2f} s at most, median {median:.2f} s",
                f"refusals took {longest_told:.2f} s at most, median {median_told:.3f} s",
                "memory {:.1f} MiB after a tenth, {:.1f} MiB at the end".format(*(m / 2**20 for m in self.memory)),
                f"clients came {self.late:.2f} s late at most",
                "processors: server {:.2f} before, {:.2f} after, {:.2f} under overload, clients {:.2f}".format(
                    *self.measured, self.overloaded, self.own
                ),
            )
        )


def answered_per_second(outcomes, start, end):
    return sum(o.fate == "answered" and start <= o.ended < end for o in outcomes) / (end - start)


def connections(url):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=2)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=120)


async def watch(server, http, seen):
    while True:
        assert (await http.get("/health")).status_code == 200
        seen.append((server.held(), numbers((await http.get("/metrics")).text)))
        await asyncio.sleep(1)


async def measure(server, clients, run):
    """What the server can do for clients that wait for their answers, once more."""
    async with connections(server.url) as http:
        start, taken = time.perf_counter(), server.processor()
        outcomes = await clients.closed_loop(http, 2 * BATCH, WARM_UP + MEASURED)
        run.measured.append((server.processor() - taken) / (time.perf_counter() - start))
    assert {outcome.fate for outcome in outcomes} == {"answered"}
    run.capacities.append(answered_per_second(outcomes, start + WARM_UP, start + WARM_UP + MEASURED))


async def learn(server, clients):
    async with connections(server.url) as http:
        return await clients.learn(http)


async def overload(server, clients, run):
    async with connections(server.url) as http:
        watching = asyncio.create_task(watch(server, http, run.seen))
        run.start, own, taken = time.perf_counter(), time.process_time(), server.processor()
        run.outcomes = await clients.open_loop(http, TIMES * run.capacities[0], SECONDS)
        seconds = time.perf_counter() - run.start
        run.own = (time.process_time() - own) / seconds
        run.overloaded = (server.processor() - taken) / seconds
        run.late = clients.late
        assert not watching.done(), watching.exception()
        watching.cancel()


async def ask(server, clients):
    async with connections(server.url) as http:
        return await clients.ask(http)


def check_fates(run, counted):
    """Each request has one fate, and the server counts it as its client does.

    A client may hang up while its answer, or the refusal, is on its way: that request has another fate for the server.
    """
    met = Counter(outcome.fate for outcome in run.outcomes)
    assert set(met) <= {"answered", "told 429", "told 503", "cut off"}, met
    assert counted["mlf_requests_received_total"] == len(run.outcomes)
    served = counted["length"] + counted["end_token"] + counted["stop_string"]
    more = {
        "answered": served - met["answered"],
        "told 429": counted["full"] - met["told 429"],
        "told 503": counted["unavailable"] - met["told 503"],
    }
    assert min(more.values()) >= 0 and sum(more.values()) == met["cut off"] - counted["client_gone"], (met, counted)
    assert not counted["failed"] + counted["invalid"] + counted["shutdown"]
    assert met["told 429"] and counted["mlf_engine_preemptions_total"]
    assert counted["client_gone"] > 0.8 * met["cut off"]
    assert set(STAYING) <= {outcome.kind for outcome in run.outcomes if outcome.fate == "answered"}
    assert {"hangs up", "impatient"} == {outcome.kind for outcome in run.outcomes if outcome.fate == "cut off"}


def check_bounds(run):
    assert len(run.outcomes) > 0.9 * TIMES * run.capacities[0] * SECONDS and run.late < 1
    assert run.available > 0.5 * run.capacity, "the server waits, or the machine is too busy"
    assert run.throughput > 0.7 * run.available
    assert run.of("answered")[-1] < 3 * (WAITING + BATCH) / run.available and run.of("told 429")[-1] < 2
    for _, metrics in run.seen:  # those that lost their blocks wait once more, beyond the limit of the queue
        assert metrics["mlf_engine_running"] <= BATCH
        assert metrics["mlf_engine_running"] + metrics["mlf_engine_waiting"] <= BATCH + WAITING
    first, last = run.memory
    assert last < first + GROWTH
    assert run.seen[-1][0]["threads"] <= run.seen[len(run.seen) // 10][0]["threads"] + 2


@pytest.mark.thorough
@pytest.mark.timed
def test_at_ten_times_what_a_server_can_do_every_request_is_answered_or_told_and_nothing_leaks(server):
    clients, run = Clients("draft", random.Random(SEED)), Overload()
    run.alone = asyncio.run(learn(server, clients))
    asyncio.run(measure(server, clients, run))
    until(server.idle)
    held, before = server.held(), server.metrics()
    asyncio.run(overload(server, clients, run))
    until(server.idle)
    after = server.metrics()
    assert after["mlf_engine_blocks_free"] == BLOCKS and server.held()["descriptors"] <= held["descriptors"]
    afterwards = asyncio.run(ask(server, clients))
    asyncio.run(measure(server, clients, run))
    print(f"\n{run}")
    check_fates(run, after - before)
    check_bounds(run)
    assert afterwards.fate == "answered" and afterwards.seconds < 3 * run.alone
