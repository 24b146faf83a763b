"""The HTTP server: OpenAI's own client talks to it, and whatever a client does wrong gets a clear answer."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from solutions.lab5_serving import Engine, ModelRunner
from solutions.lab5_serving import __main__ as command
from tests.scripted_engine import Scripted
from utils.serving import MODELS, SamplingParams, generate, load_model, load_tokenizer
from utils.serving.server import create_app, serving
from utils.serving.worker import MOST_FAILURES

pytestmark = pytest.mark.slow
PROMPT = "It was the best of times"


@pytest.fixture(scope="module")
def model():
    return load_model(MODELS / "draft", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODELS / "draft")


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, num_blocks=64, max_batch=8, token_budget=64, max_waiting=16, history=10)


@pytest.fixture(scope="module")
def url(engine, tokenizer):
    with serving(create_app(engine, tokenizer, name="draft", max_body_bytes=50_000)) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(url, timeout=20, **body):
    body = {"model": "m", "prompt": "A", "temperature": 0, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)


def expected(model, tokenizer, prompt=PROMPT, **params):
    """The tokens and the text of plain generation."""
    tokens = generate(model, tokenizer.encode(prompt), SamplingParams(**params)).tokens
    return tokens, tokenizer.decode(tokens)


# ---- OpenAI's client ----


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
def test_openais_client_gets_the_text_of_plain_generation(client, model, tokenizer, params):
    answer = client.completions.create(model="draft", prompt=PROMPT, max_tokens=12, **params)
    tokens, text = expected(model, tokenizer, max_new_tokens=12, **params)
    assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model, answer.choices[0].index) == ("text_completion", "draft", 0)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == len(tokens) == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streams_pieces_add_up_to_the_same_text(client, model, tokenizer):
    pieces = list(
        client.completions.create(
            model="draft", prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *pieces, last = pieces
    assert "".join(p.choices[0].text for p in pieces) == expected(model, tokenizer, max_new_tokens=12)[1]
    assert len(pieces) > 6 and [p.choices[0].finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert len({p.id for p in pieces}) == 1


def test_several_prompts_and_choices_are_numbered_and_drawn_independently(client, model, tokenizer):
    prompts = [PROMPT, tokenizer.encode("She said")]
    answer = client.completions.create(model="draft", prompt=[PROMPT, "She said"], n=2, max_tokens=8, seed=5)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(answer.choices):
        prompt, seed = (PROMPT, "She said")[index // 2], 5 + index % 2
        assert choice.text == expected(model, tokenizer, prompt, max_new_tokens=8, temperature=1.0, seed=seed)[1]
    assert answer.usage.completion_tokens == 32
    same = client.completions.create(model="draft", prompt=prompts[1], max_tokens=8, seed=5)  # as tokens
    assert same.choices[0].text == answer.choices[2].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_before_it_and_frees_the_blocks(client, engine, model, tokenizer, stream):
    _, text = expected(model, tokenizer, max_new_tokens=40)
    stop = text[15:21]  # somewhere within, across tokens
    answer = client.completions.create(
        model="draft", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop, "never"], stream=stream
    )
    pieces = list(answer) if stream else [answer]
    assert "".join(p.choices[0].text for p in pieces) == text[: text.index(stop)]
    assert pieces[-1].choices[0].finish_reason == "stop"
    if not stream:
        assert answer.usage.completion_tokens < 40
    client.completions.create(model="draft", prompt="A", max_tokens=1)  # the abort is carried out before this
    assert engine.stats()["running"] == 0 and engine.manager.num_used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ended_by_a_stop_text_counts_as_stopped_and_not_as_aborted(client, url, model, tokenizer, stream):
    before = httpx.get(f"{url}/health").json()
    stop = expected(model, tokenizer, max_new_tokens=40)[1][15:21]
    answer = client.completions.create(
        model="draft", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, stream=stream
    )
    assert (list(answer)[-1] if stream else answer).choices[0].finish_reason == "stop"
    for _ in range(2):  # when the second is served, the counts after the first are there
        client.completions.create(model="draft", prompt="A", max_tokens=1, temperature=0)
    after = httpx.get(f"{url}/health").json()
    assert {end: after[end] - before[end] for end in ("stop", "length", "abort", "error")} == {
        "stop": 1, "length": 2, "abort": 0, "error": 0,
    }  # fmt: skip


def test_models_are_listed_and_health_tells_what_the_engine_does(client, url):
    assert [m.id for m in client.models.list()] == ["draft"] and client.models.retrieve("draft").object == "model"
    health = httpx.get(f"{url}/health")
    assert health.status_code == 200 and health.json()["status"] == "ok" and health.json()["blocks_free"] == 64


# ---- requests that are wrong ----


@pytest.mark.parametrize(
    ("changes", "status", "param", "words"),
    [
        ({"model": "gpt-9"}, 404, "model", "'gpt-9' does not exist"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"temperature": "warm"}, 400, "temperature", "valid number"),
        ({"top_p": 0}, 400, "top_p", "greater than 0"),
        ({"top_k": -3}, 400, "top_k", "greater than or equal to 0"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, 400, "max_tokens", "valid integer"),
        ({"n": 99}, 400, "n", "less than or equal to 16"),
        ({"best_of": 5}, 400, None, "best_of is not supported"),
        ({"logprobs": 3}, 400, "logprobs", "logprobs is not supported"),
        ({"logprobs": 6}, 400, "logprobs", "less than or equal to 5"),
        ({"echo": True}, 400, None, "echo is not supported"),
        ({"logit_bias": {"5": 1.0}}, 400, None, "logit_bias is not supported"),
        ({"frequency_penalty": 0.5}, 400, None, "frequency_penalty is not supported"),
        ({"stop": ["a"] * 5}, 400, None, "at most 4 texts"),
        ({"stop": ""}, 400, None, "none of them empty"),
        ({"stream_options": {"include_usage": True}}, 400, None, "needs stream = true"),
        ({"beams": 4}, 400, "beams", "not known"),
        ({"prompt": ""}, 400, "prompt", "at least one token"),
        ({"prompt": []}, 400, None, "at least one text or token"),
        ({"prompt": [5, 99_999]}, 400, "prompt", "99999 is outside the vocabulary"),
        ({"prompt": [["a"]]}, 400, "prompt", "valid"),
        ({"prompt": {"text": "a"}}, 400, "prompt", "valid"),
        ({"prompt": None}, 400, "prompt", "valid"),
        ({"prompt": "word " * 3000}, 400, "prompt", "shorter than max_seq_len = 1024"),
        ({"prompt": [7] * 1024}, 400, "prompt", "shorter than max_seq_len = 1024"),
        ({"prompt": "word " * 20_000}, 413, None, "longer than 50,000 bytes"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(url, changes, status, param, words):
    answer = post(url, **{"model": "draft", **changes})
    error = answer.json()["error"]
    assert answer.status_code == status and error["param"] == param, answer.text
    assert words in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("POST", "/v1/completions", b"{", 400, "no valid JSON"),
        ("POST", "/v1/completions", b"\xff", 400, "no valid JSON"),
        ("POST", "/v1/completions", b"[]", 400, "object"),
        ("POST", "/v1/completions", b"", 400, "no valid JSON"),
        ("GET", "/v1/completions", None, 405, "Not Allowed"),
        ("POST", "/v1/chat/completions", b"{}", 400, "Field required"),
        ("POST", "/v1/embeddings", b"{}", 404, "Not Found"),
        ("GET", "/v1/models/other", None, 404, "does not exist"),
    ],
)
def test_what_is_no_request_at_all_gets_an_error_in_the_same_form(url, method, path, content, status, words):
    headers = {"Content-Type": "application/json"}
    answer = httpx.request(method, f"{url}{path}", content=content, headers=headers)
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


def test_a_body_of_unknown_length_is_not_read_to_its_end(url):
    sent = []

    def endless():
        for _ in range(1000):
            sent.append(1)
            yield b" " * 10_000

    headers = {"Content-Type": "application/json"}
    try:
        answer = httpx.post(f"{url}/v1/completions", content=endless(), headers=headers)
        assert answer.status_code == 413
    except httpx.TransportError:
        pass  # the server hung up while the client was still talking
    assert httpx.get(f"{url}/health").status_code == 200


# ---- an engine that is full, breaks, or stops ----


def test_all_choices_of_a_request_are_taken_or_none(tokenizer):
    scripted = Scripted(most=2)
    with serving(create_app(scripted, tokenizer, name="m")) as url:
        assert post(url, n=3).status_code == 429
        assert len(scripted.aborted) == 2 and not scripted.requests
        assert post(url, prompt=[[5], [0]]).status_code == 400 and not scripted.requests


@pytest.mark.parametrize("given", [0, 2])
def test_a_client_that_hangs_up_amid_a_stream_is_given_up(tokenizer, given):
    scripted = Scripted([5] * 3000, free_running=False)
    with serving(create_app(scripted, tokenizer, name="m")) as url:
        body = {"model": "m", "prompt": "A", "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            scripted.tick(given)
            lines = answer.iter_lines()
            for _ in range(given):
                assert next(lines).startswith("data: ") and next(lines) == ""
            scripted.patience = 0.01
            scripted.tick()
        assert scripted.someone_gone.wait(20) and not scripted.requests
        assert post(url, max_tokens=3).status_code == 200


def test_a_client_that_hangs_up_while_it_waits_is_given_up(tokenizer):
    scripted = Scripted([5] * 3000, free_running=False)
    scripted.patience = 0.01
    with serving(create_app(scripted, tokenizer, name="m")) as url:
        with pytest.raises(httpx.ReadTimeout):
            post(url, max_tokens=3000, timeout=0.1)
        assert scripted.someone_gone.wait(20) and not scripted.requests


def test_a_client_that_hangs_up_while_it_sends_is_no_error_of_the_server(tokenizer):
    sent = []

    async def hang_up():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    app = create_app(Scripted(), tokenizer, name="m")
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(app(scope, hang_up, send))
    assert sent[0]["status"] == 499


def test_openais_client_raises_an_error_that_comes_amid_a_stream(tokenizer):
    scripted = Scripted(poisoned=tokenizer.encode("X")[:1])
    with (
        serving(create_app(scripted, tokenizer, name="m")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        pytest.raises(openai.APIError, match="cannot say that"),
    ):
        list(client.completions.create(model="m", prompt="X", stream=True))


def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(tokenizer):
    scripted = Scripted()
    with serving(create_app(scripted, tokenizer, name="m")) as url:
        scripted.failing_steps = 1
        answer = post(url)
        assert answer.status_code == 500 and "the machine is on fire" in answer.json()["error"]["message"]
        assert post(url).status_code == 200 and httpx.get(f"{url}/health").status_code == 200
        scripted.failing_steps = MOST_FAILURES
        assert [post(url).status_code for _ in range(MOST_FAILURES)] == [500] * MOST_FAILURES
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and "the machine is on fire" in health.json()["status"]
        assert post(url).status_code == 503 and post(url).headers["retry-after"] == "1"


class Fragile(ModelRunner):
    """A runner that breaks on prompts that begin with ``POISON``."""

    def run(self, step, *arguments, **options):
        if any(chunk.request.prompt[:3] == POISON for chunk in step.chunks):
            raise ArithmeticError("poison")
        return super().run(step, *arguments, **options)


#: Of each kind of client: its part of the crowd, what it asks, and what it may meet: (status, words), or a hang-up.
POISON = [91, 92, 93]
FULL, GONE = (429, "the server is full"), (None, "gone")
CROWD = {
    "good": (70, {}, {(200, ""), FULL}),
    "hangs up": (15, {}, {(200, ""), FULL, GONE}),
    "too long": (5, {"prompt": [7] * 600}, {(400, "the pool has"), FULL}),
    "invalid": (5, {"temperature": -1}, {(400, "greater than or equal to 0")}),
    "poison": (5, {"prompt": [*POISON, 20, 30], "ignore_eos": True}, {(500, "the model failed"), FULL}),
}


async def crowd(url, count, questions, seed):
    """Ask all at once; of each request its kind, the right text, the status and what was answered."""
    rng = random.Random(seed)
    kinds = 2 * list(CROWD) + rng.choices(list(CROWD), [part for part, *_ in CROWD.values()], k=count)

    async def ask(http, kind):
        prompt, params, text = rng.choice(questions)
        stream, patience = rng.random() < 0.5, rng.uniform(0.01, 0.5) if kind == "hangs up" else 120
        body = {"model": "m", "prompt": prompt, **params, **CROWD[kind][1], "stream": stream}
        try:
            async with asyncio.timeout(patience):
                answer = await http.post("/v1/completions", json=body)
        except TimeoutError:
            return kind, text, None, "gone"
        if answer.status_code != 200:
            assert answer.status_code != 429 or answer.headers["retry-after"] == "1"
            return kind, text, answer.status_code, answer.json()["error"]["message"]
        if not stream:
            return kind, text, 200, answer.json()["choices"][0]["text"]
        pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        if "error" in pieces[-1]:
            return kind, text, 500, pieces[-1]["error"]["message"]
        return kind, text, 200, "".join(piece["choices"][0]["text"] for piece in pieces)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as http:
        return await asyncio.gather(*(ask(http, kind) for kind in kinds))


def test_under_ten_times_the_load_every_request_gets_its_answer_or_a_clear_error_and_nothing_leaks(model, tokenizer):
    batch, waiting = 4, 6
    engine = Engine(model, runner=Fragile(model, 32, 16), max_batch=batch, token_budget=128, max_waiting=waiting)
    questions = []
    for seed, prompt in enumerate(("It was", "In the beginning", "My dear", "At last the ship")):
        params = {"temperature": 0.8 * (seed % 2), "seed": seed}
        text = expected(model, tokenizer, prompt, max_new_tokens=12 + 4 * seed, **params)[1]
        questions.append((prompt, params | {"max_tokens": 12 + 4 * seed}, text))
    app = create_app(engine, tokenizer, name="m")
    with serving(app) as url:
        met = asyncio.run(crowd(url, 10 * (batch + waiting), questions, seed=1))
        for kind, text, status, answer in met:
            assert any(status == code and words in answer for code, words in CROWD[kind][2]), (kind, status, answer)
            assert status != 200 or answer == text, (kind, answer, text)
        statuses = [status for _, _, status, _ in met]
        assert {200, 400} <= set(statuses) and statuses.count(429) > statuses.count(200)
        assert post(url, **CROWD["poison"][1]).status_code == 500
        assert post(url, prompt=questions[0][0], **questions[0][1]).json()["choices"][0]["text"] == questions[0][2]
        worker = app.state.worker
        assert not (engine.requests or engine.has_work or worker._listeners or worker._commands or worker._pending)
    engine.manager.check()
    assert engine.manager.num_used == 0


def test_a_server_that_stops_tells_those_who_wait(tokenizer):
    scripted = Scripted(range(5, 60), free_running=False)
    app = create_app(scripted, tokenizer, name="m")
    with serving(app) as url, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, url, max_tokens=50)
        assert scripted.someone_came.wait(10)
        scripted.tick()
        app.state.worker.stop(0)
        scripted.tick()
        assert waiting.result().status_code == 503 and "shutting down" in waiting.result().text
        assert post(url).status_code == 503


def test_the_command_serves_the_model_that_comes_with_the_course(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(command, "run", lambda app, **options: ran.append((app, options)))
    command.main(["--model", str(MODELS / "draft"), "--port", "8123", "--max-batch", "2", "--num-blocks", "9"])
    app, options = ran[0]
    assert options == {"host": "127.0.0.1", "port": 8123, "drain_seconds": 20.0}
    assert app.state.worker.engine.manager.num_blocks == 9
    assert "serving 'draft' on http://127.0.0.1:8123/v1/completions" in capsys.readouterr().out
