"""Log probabilities: those of the model itself, from every engine, and in both forms of OpenAI's."""

import math

import openai
import pytest
import torch

from solutions.lab5_serving import Engine, SpeculativeEngine
from solutions.lab5_serving.logprobs import scored
from tests.serving_runs import right_logits, tiny_model
from utils.serving import MODELS, SamplingParams, load_model, load_tokenizer
from utils.serving.logprobs import ScoredParams, token_scores
from utils.serving.server import create_app, serving
from utils.serving.token_bytes import token_bytes, token_text

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9, 3], [2, 3, 8, 4, 6, 2, 6, 4, 3]]


def engine_of(kind, model, **settings):
    settings = {"num_blocks": 12, "block_size": 4, "max_batch": 3, "token_budget": 8, **settings}
    if kind == "plain":
        return scored(Engine)(model, **settings)
    return scored(SpeculativeEngine)(model, tiny_model(layers=1), draft_tokens=3, **settings)


def served(engine, prompts, params):
    """Each request's tokens and scores, by index."""
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    tokens, scores = {id: [] for id in ids}, {id: [] for id in ids}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.id] += output.new_tokens
            scores[output.id] += output.logprobs
    return [(tokens[id], scores[id]) for id in ids]


@pytest.mark.parametrize("kind", ["plain", "speculative"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_scores_are_the_models_own_whoever_is_beside_and_however_tokens_are_drawn(kind, temperature):
    model = tiny_model()
    drawn = {"max_new_tokens": 14, "temperature": temperature, "top_k": 5 * (temperature > 0)}
    params = [ScoredParams(**drawn, seed=i, logprobs=i) for i in range(3)] + [SamplingParams(**drawn, seed=3)]
    engine = engine_of(kind, model, num_blocks=8)
    *asked, unasked = served(engine, PROMPTS, params)
    assert engine.stats()["preemptions"] > 0  # the pool is too small for all: scores survive that too
    assert unasked[1] == [] and len(unasked[0]) > 0
    for count, (prompt, (tokens, scores)) in enumerate(zip(PROMPTS, asked, strict=False)):
        logprobs = right_logits(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        assert [s.token for s in scores] == tokens and [len(s.top) for s in scores] == [count] * len(tokens)
        for row, score in zip(logprobs, scores, strict=True):
            assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-4)
            values = [value for _, value in score.top]
            assert values == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
            assert [float(row[token]) for token, _ in score.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("kind", ["plain", "speculative"])
def test_asking_for_scores_changes_no_token(kind):
    model = tiny_model()
    drawn = {"max_new_tokens": 10, "temperature": 0.9}
    with_scores, without = (
        served(engine_of(kind, model), PROMPTS, [cls(**drawn, seed=i) for i in range(len(PROMPTS))])
        for cls in (ScoredParams, SamplingParams)
    )
    assert [tokens for tokens, _ in with_scores] == [tokens for tokens, _ in without]


def test_scores_that_cannot_be_computed_fail_their_own_request_only(monkeypatch):
    def fail(logits, tokens, count):
        raise MemoryError("no room for a softmax")

    monkeypatch.setattr("solutions.lab5_serving.logprobs.token_scores", fail)
    engine = engine_of("plain", tiny_model())
    asking, other = engine.add([5], ScoredParams(max_new_tokens=3)), engine.add([6], SamplingParams(max_new_tokens=3))
    ends = {}
    while engine.has_work:
        ends |= {o.id: (o.finish_reason, o.error) for o in engine.step() if o.finished}
    assert ends[asking] == ("error", "log probabilities failed: MemoryError: no room for a softmax")
    assert ends[other] == ("length", None) and engine.manager.num_used == 0


def test_scores_of_logits_by_hand():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)], [0.0, 0.0, 0.0]])
    first, second = token_scores(logits, [1, 0], 5)
    assert first.logprob == pytest.approx(math.log(2 / 8)) and second.logprob == pytest.approx(math.log(1 / 3))
    assert [token for token, _ in first.top] == [2, 1, 0] and first.top[0][1] == pytest.approx(math.log(5 / 8))
    for wrong in (-1, 21, 1.5):
        with pytest.raises(ValueError, match="logprobs must be an integer from 0 to 20"):
            ScoredParams(logprobs=wrong)


# ---- over HTTP ----


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODELS / "draft")


@pytest.fixture(scope="module")
def client(tokenizer):
    engine = scored(Engine)(load_model(MODELS / "draft", dtype=torch.float32), num_blocks=64, max_batch=8)
    with (
        serving(create_app(engine, tokenizer, name="draft")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, ["never", "y glad t"]])
def test_completions_report_tokens_log_probabilities_and_where_each_token_begins(client, tokenizer, stop):
    options = {"model": "draft", "prompt": "My dear", "max_tokens": 20, "temperature": 0, "stop": stop, "logprobs": 2}
    whole = client.completions.create(**options)
    (choice,) = whole.choices
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == whole.usage.completion_tokens
    text = "".join(scores.tokens)
    assert text.startswith(choice.text) and (text == choice.text) == (choice.finish_reason == "length")
    assert choice.finish_reason == ("stop" if stop else "length")
    assert scores.text_offset == [len("".join(scores.tokens[:i])) for i in range(len(scores.tokens))]
    for token, logprob, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert len(top) == 2 and top[token] == logprob == max(top.values())  # greedy: the chosen one is the likeliest
    pieces = [p.choices[0] for p in client.completions.create(**options, stream=True)]
    assert [t for p in pieces for t in p.logprobs.tokens] == scores.tokens
    assert [o for p in pieces for o in p.logprobs.text_offset] == scores.text_offset


@pytest.mark.slow
def test_a_chats_scores_have_bytes_and_the_same_values_in_a_stream(client, tokenizer):
    options = {"model": "draft", "messages": [{"role": "user", "content": "Well?"}], "max_tokens": 16, "seed": 3}
    options |= {"n": 2, "logprobs": True, "top_logprobs": 4}
    whole = client.chat.completions.create(**options)
    streamed = [[], []]
    for piece in client.chat.completions.create(**options, stream=True):
        if piece.choices[0].logprobs:
            streamed[piece.choices[0].index] += piece.choices[0].logprobs.content
    for choice, pieces in zip(whole.choices, streamed, strict=True):
        entries = choice.logprobs.content
        assert bytes(b for entry in entries for b in entry.bytes).decode() == choice.message.content
        assert [e.token for e in entries] == [e.token for e in pieces] and len(entries) == 16
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in pieces], abs=1e-4)
        assert all(len(e.top_logprobs) == 4 and e.logprob <= e.top_logprobs[0].logprob <= 0 for e in entries)


def test_a_tokens_bytes_add_up_to_the_text_even_within_a_character(tokenizer):
    text = "naïve “whale” \U0001f433 — \n\t\x00<|endoftext|>"
    tokens = tokenizer.encode(text)
    assert bytes(b for token in tokens for b in token_bytes(tokenizer, token)) == text.encode()
    assert any("�" in token_text(tokenizer, token) for token in tokens)  # a part of a character is no text
    every = {token_bytes(tokenizer, token)[0] for token in range(tokenizer.vocab_size) if token}
    assert every == set(range(256))
