"""Lab 6's extensions behind lab 5's server: which go together, and that no client sees another text."""

import pytest
from fastapi.testclient import TestClient

from solutions.lab5_serving import Engine
from solutions.lab5_serving.serve import create_server
from solutions.lab6_frontiers import OverlappedEngine, SharedPrefixRunner, TreeEngine
from solutions.lab6_frontiers import __main__ as command
from solutions.lab6_frontiers.serve import create_engine
from utils.serving import MODELS, SamplingParams, load_tokenizer

POOL = {"num_blocks": 64, "max_batch": 4, "attention": "torch"}
EXTENSIONS = {
    "none": {},
    "overlap": {"overlap": True},
    "shared prefix": {"shared_prefix": True},
    "both": {"overlap": True, "shared_prefix": True},
    "heads": {"draft": "heads", "tree_nodes": 8},
}


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(MODELS / "target")
    common = "It was the best of times, it was the worst of times, it was the age of wisdom, " * 2
    return [tokenizer.encode(common + own) for own in ("and", "but", "it was", "the whale", "she")]


@pytest.fixture(scope="module")
def plain(prompts):
    engine = create_engine(MODELS / "target", **POOL)
    assert type(engine) is Engine
    return texts(engine, prompts)


def texts(engine, prompts):
    return [answer.tokens for answer in engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_extension_gives_the_texts_of_the_plain_engine(name, prompts, plain):
    engine = create_engine(MODELS / "target", **POOL, **EXTENSIONS[name])
    if name in ("shared prefix", "both"):
        assert isinstance(engine.runner, SharedPrefixRunner)
        engine.runner.min_saved = 1  # or these prompts would be too short to share
        texts(engine, prompts[:1])  # now the beginning is in the prefix cache
    assert texts(engine, prompts) == plain
    assert isinstance(engine, OverlappedEngine) == ("overlap" in (name, "overlap" if name == "both" else ""))
    assert isinstance(engine, TreeEngine) == (name == "heads")
    if name in ("shared prefix", "both"):
        assert engine.runner.shared_steps > 0
    if name == "heads":
        assert sum(engine.accepted) > 0
    while engine.has_work:  # what was launched for nobody
        engine.step()
    assert engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft": "heads", "overlap": True}, "a draft head goes with neither overlap nor shared_prefix"),
        ({"draft": "heads", "shared_prefix": True}, "a draft head goes with neither overlap nor shared_prefix"),
        ({"draft": "heads", "tree_nodes": 65}, "tree_nodes must be between 1 and 64, got 65"),
    ],
)
def test_what_does_not_go_together_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        create_engine(MODELS / "target", **options)


@pytest.mark.slow
def test_the_command_line_makes_a_server_that_answers(monkeypatch, capsys):
    made = []
    monkeypatch.setattr("solutions.lab5_serving.__main__.run", lambda app, **settings: made.append((app, settings)))
    command.main(["--overlap", "--shared-prefix", "--attention", "torch", "--num-blocks", "64", "--port", "8123"])
    (app, settings), said = made[0], capsys.readouterr().out
    assert settings["port"] == 8123 and "serving 'target' on http://127.0.0.1:8123" in said
    with TestClient(app) as client:
        body = {"model": "target", "prompt": "It was", "max_tokens": 5, "temperature": 0}
        answer = client.post("/v1/completions", json=body).json()
        scored = client.post("/v1/completions", json={**body, "logprobs": 1})
    assert answer["usage"]["completion_tokens"] == 5
    assert scored.status_code == 400 and "log" in scored.text
    command.main(["--draft", "heads", "--tree-nodes", "8", "--attention", "torch", "--num-blocks", "64"])
    with TestClient(made[1][0]) as client, TestClient(create_server(MODELS / "target", attention="torch")) as other:
        assert (
            client.post("/v1/completions", json=body).json()["choices"]
            == other.post("/v1/completions", json=body).json()["choices"]
        )
