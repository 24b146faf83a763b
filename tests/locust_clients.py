"""Clients of a server for the load generator locust: completions, chats and streams, as many at once as it is told.

::

    python -m solutions.lab5_serving --attention torch &
    locust -f tests/locust_clients.py --headless --users 50 --spawn-rate 50 --run-time 60s --stop-timeout 60 \\
           --host http://127.0.0.1:8000

A client that is told to come again (429, 503) does so after as long as it was told; that is no failure. An answer that
is not what the protocol promises is one: a missing piece, another number of tokens, a stream without its end.
"""

import json
import random
import time

from locust import HttpUser, events, task

TOKENS = 8
PROMPTS = ("It was the best of times", "Call me", "In the beginning", "My dear sister")


class Client(HttpUser):
    """Asks one thing after another."""

    model = ""

    def on_start(self):
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def ask(self, path, check, **body):
        body |= {"model": self.model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        with self.client.post(f"/v1/{path}", json=body, name=path, catch_response=True) as answer:
            if answer.status_code in (429, 503):
                answer.success()
                time.sleep(float(answer.headers["Retry-After"]) * random.uniform(1, 1.5))
            elif answer.status_code != 200:
                answer.failure(f"status {answer.status_code}: {answer.text[:200]}")
            elif wrong := check(answer):
                answer.failure(wrong)
            else:
                answer.success()

    @task
    def complete(self):
        self.ask("completions", whole, prompt=random.choice(PROMPTS))

    @task
    def chat(self):
        self.ask("chat/completions", whole, messages=[{"role": "user", "content": random.choice(PROMPTS)}])

    @task
    def stream(self):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        self.ask("completions", streamed, prompt=random.choice(PROMPTS), **options)


def whole(answer):
    """What is wrong with an answer in one piece, or None."""
    return counted(answer.json())


def streamed(answer):
    """What is wrong with a stream, or None."""
    *pieces, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    if end != "[DONE]":
        return f"the stream ends with {end!r}"
    last = json.loads(pieces[-1])
    return last["error"]["message"] if "error" in last else counted(last)


def counted(body):
    """What is wrong with an answer's usage, or None."""
    used = body["usage"]["completion_tokens"]
    return None if used == TOKENS else f"{used} tokens instead of {TOKENS}"


@events.quitting.add_listener
def nothing_served_is_a_failure(environment, **_):
    if not environment.stats.total.num_requests:
        environment.process_exit_code = 1
