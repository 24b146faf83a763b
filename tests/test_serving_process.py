"""An engine in a process of its own: the same answers, and when either process is killed nobody is left waiting."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from solutions.lab5_serving import Engine
from solutions.lab5_serving.logprobs import scored
from tests.scripted_engine import Scripted
from tests.serving_runs import tiny_model
from utils.serving import MODELS, SamplingParams, load_tokenizer
from utils.serving.engine_process import EngineDied, EngineProcess
from utils.serving.logprobs import ScoredParams
from utils.serving.server import create_app, serving

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODELS / "draft")


def tiny_engine():
    torch.set_num_threads(1)
    return scored(Engine)(tiny_model(), num_blocks=12, block_size=4, max_batch=3, max_waiting=4)


def no_engine():
    raise FileNotFoundError("no weights here")


def gone(pid):
    """Whether a process has ended and been waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def served(engine):
    """What two requests get, the second with scores; ids, tokens, ends and scores of every step."""
    engine.add([3, 1, 4], SamplingParams(max_new_tokens=5), id="a")
    engine.add([9, 2], ScoredParams(max_new_tokens=4, temperature=1.0, seed=3, logprobs=2), id="b")
    steps = []
    while engine.has_work:
        steps.append([(o.id, o.new_tokens, o.finished, o.finish_reason, o.error, o.logprobs) for o in engine.step()])
    return steps


def test_it_serves_as_the_engine_does_and_ends_when_it_is_closed():
    here, there = tiny_engine(), EngineProcess(tiny_engine)
    try:
        assert there.serves_logprobs and there.alive and not gone(there.pid)
        assert served(there) == served(here) and there.stats() == here.stats()
        with pytest.raises(ValueError, match="prompt token 99 is outside the vocabulary of 61"):
            there.add([99])
        for number in range(4):
            there.add([5], SamplingParams(max_new_tokens=3), id=str(number))
        with pytest.raises(RuntimeError, match="4 requests wait, and no more than 4 may"):
            there.add([5], SamplingParams(max_new_tokens=3))
        assert there.abort("0") and not there.abort("0") and there.has_work
    finally:
        there.close()
    assert gone(there.pid) and not there.alive
    with pytest.raises(EngineDied, match="closed"):
        there.step()
    there.close()  # a second time: nothing


def test_an_engine_that_cannot_be_made_says_why():
    with pytest.raises(RuntimeError, match="the engine did not start: FileNotFoundError: no weights here"):
        EngineProcess(no_engine)


async def killed_amid(url, engine, scripted_most):
    """Ask for more than the engine takes, kill it when all are under way; each one's status and text."""

    async def ask(http, number):
        body = {"model": "m", "prompt": "A", "max_tokens": 3000, "n": 1 + number % 2, "stream": number % 3 == 0}
        return await http.post("/v1/completions", json=body)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        asked = [asyncio.ensure_future(ask(http, number)) for number in range(12)]
        while (await http.get("/health")).json().get("running", 0) < scripted_most - 1:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGKILL)
        asked += [asyncio.ensure_future(ask(http, number)) for number in range(6)]
        return [(answer.status_code, answer.text) for answer in await asyncio.gather(*asked)]


def test_when_the_engines_process_is_killed_everyone_is_answered_or_told_and_nothing_leaks(tokenizer):
    most = 10
    engine = EngineProcess(partial(Scripted, [5] * 3000, free_running=False, most=most, patience=0.02))
    files = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    app = create_app(engine, tokenizer, name="m")
    with serving(app) as url:
        met = asyncio.run(killed_amid(url, engine, most))
        for status, text in met:
            told = "has died (SIGKILL)" in text
            assert (status in (200, 500) and told) or status in (429, 503), (status, text)
            assert status != 200 or text.endswith("data: [DONE]\n\n")  # a stream's last words are the error
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and "has died (SIGKILL)" in health.json()["status"]
        late = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "A"})
        assert late.status_code == 503 and late.headers["retry-after"] == "1"
        ledger, worker = app.state.ledger, app.state.worker
        counts = {fate: count for fate, count in ledger.ended.values.items() if count}
        assert ledger.in_flight == 0 and counts.keys() <= {"failed", "full", "unavailable"}
        assert most - 1 <= counts["failed"] <= most and counts["unavailable"] >= 1
        assert not (worker._listeners or worker._commands or worker._pending)
    assert gone(engine.pid)
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files - 1  # its pipe and its process's handle are closed


def test_an_idle_server_notices_that_its_engine_is_gone(tokenizer):
    engine = EngineProcess(Scripted)
    with serving(create_app(engine, tokenizer, name="m")) as url:
        assert httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "A"}).status_code == 200
        os.kill(engine.pid, signal.SIGKILL)
        while httpx.get(f"{url}/health").status_code == 200:
            pass
        assert httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "A"}).status_code == 503


def test_when_the_server_is_killed_the_engines_process_ends():
    script = (
        "import time\nfrom tests.scripted_engine import Scripted\n"
        "from utils.serving.engine_process import EngineProcess\n"
        "if __name__ == '__main__':\n"
        "    engine = EngineProcess(Scripted)\n    print(engine.pid, flush=True)\n    time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert int(server.stdout.readline())
        server.kill()
        # Both hold the pipe's writing end: it ends when the engine's process has ended too.
        assert server.communicate(timeout=60)[0] == ""
    finally:
        server.kill()
        server.wait()
