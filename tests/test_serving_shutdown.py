"""A server that is told to stop: who is under way finishes or is told, who comes is refused, and it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.scripted_engine import Scripted
from utils.serving import MODELS, load_tokenizer, shutdown
from utils.serving.server import create_app

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODELS / "draft")


@contextlib.contextmanager
def draining(app, seconds):
    """A running server, its address, and the thread that it runs in."""
    server = shutdown.DrainingServer(app, seconds, host="127.0.0.1", port=0, log_level="error")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", thread
    finally:
        server.should_exit = True
        thread.join(20)


def post(url, **body):
    return httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "A", **body}, timeout=30)


def ended(app):
    return {fate: count for fate, count in app.state.ledger.ended.values.items() if count}


def until(happened):
    for _ in range(6000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_who_is_under_way_finishes_and_who_comes_is_refused(tokenizer):
    scripted = Scripted([5] * 400, free_running=False)
    app = create_app(scripted, tokenizer, name="m")
    with draining(app, 30) as (server, url, thread), ThreadPoolExecutor(2) as pool:
        running = [pool.submit(post, url, max_tokens=400, stream=stream) for stream in (False, True)]
        until(lambda: scripted.tick() or len(scripted.added) == 2)
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: not app.state.worker.running)
        refused, health = post(url), httpx.get(f"{url}/health")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "service_unavailable" and "shutting down" in refused.text
        assert health.status_code == 503 and "shutting down" in health.json()["status"]
        assert thread.is_alive() and not any(each.done() for each in running)
        scripted.tick(800)
        whole, stream = (each.result() for each in running)
        assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 400
        assert stream.text.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in stream.text
        thread.join(20)
        assert not thread.is_alive()
    assert ended(app) == {"length": 2, "unavailable": 1} and app.state.ledger.in_flight == 0


@pytest.mark.parametrize("hangs", [False, True])
def test_who_does_not_finish_in_time_is_told_even_if_the_engine_hangs(tokenizer, monkeypatch, hangs):
    monkeypatch.setattr(shutdown, "STOP_SECONDS", 0.3)
    scripted = Scripted([5] * 3000, free_running=False, patience=60 if hangs else 0.02)
    app = create_app(scripted, tokenizer, name="m")
    with draining(app, 0.2) as (server, url, thread), ThreadPoolExecutor(2) as pool:
        whole = pool.submit(post, url, max_tokens=3000, n=2)
        scripted.tick()
        until(lambda: len(scripted.added) == 2)
        streamed, client = [], openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="m", prompt="A", max_tokens=3000, stream=True) if not hangs else []
        server.handle_exit(signal.SIGTERM, None)
        if not hangs:
            with pytest.raises(openai.APIError, match="shutting down"):
                streamed.extend(stream)
        assert whole.result().status_code == 503 and "shutting down" in whole.result().text
        thread.join(20)
        assert not thread.is_alive()
        client.close()
        scripted.tick(2)  # the step that hung
    assert ended(app) == {"shutdown": 2 if hangs else 3} and app.state.ledger.in_flight == 0


def test_a_second_signal_ends_it_at_once(tokenizer):
    scripted = Scripted([5] * 3000, free_running=False, patience=0.02)
    app = create_app(scripted, tokenizer, name="m")
    with draining(app, 1000) as (server, url, thread), ThreadPoolExecutor(1) as pool:
        pool.submit(post, url, max_tokens=3000)
        until(lambda: scripted.added)
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: not app.state.worker.running)
        assert thread.is_alive()
        server.handle_exit(signal.SIGINT, None)
        thread.join(20)
        assert not thread.is_alive()
        app.state.worker.stop()


def test_the_command_drains_on_sigterm_and_leaves_no_process(tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "solutions.lab5_serving", "--model", str(MODELS / "draft"), "--attention", "torch"]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--engine-process", "--num-blocks", "40"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        assert "/v1/chat/completions" in server.stdout.readline()

        def answers():
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health").status_code == 200

        until(answers)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="draft", prompt="It was", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
            )
            pieces = [next(stream)]
            os.killpg(server.pid, signal.SIGTERM)  # as a service manager does: the engine's process gets it too
            until(lambda: post(url, model="draft", max_tokens=1).status_code == 503)
            pieces += stream
        assert pieces[-1].choices[0].finish_reason == "length"
        assert server.wait(30) == 0
        assert server.stdout.read() == ""  # also: the engine's process has closed it, so it has ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()
