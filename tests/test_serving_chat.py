"""Chats: from messages to tokens by a template, and `/v1/chat/completions` as OpenAI's own client uses it."""

import json

import httpx
import pytest
import torch

from solutions.lab5_serving import Engine
from solutions.lab5_serving.logprobs import scored
from tests.scripted_engine import Scripted
from utils.serving import MODELS, ConfigError, SamplingParams, generate, load_model, load_tokenizer
from utils.serving.chat_template import ChatTemplate, load_chat_template, plain_template
from utils.serving.openai_chat import ChatRequest
from utils.serving.server import create_app, serving

pytestmark = pytest.mark.slow
FOLDER = MODELS / "draft"
CHAT = [
    {"role": "system", "content": "Answer from the book."},
    {"role": "user", "content": "Who is the captain?"},
    {"role": "assistant", "content": 'Ahab, "the old man".'},
    {"role": "user", "content": "And {{ the }} whale?"},
]
PLAIN_TEXT = (
    "Answer from the book.\n\nUser: Who is the captain?\n\n"
    'Assistant: Ahab, "the old man".\n\nUser: And {{ the }} whale?\n\nAssistant:'
)
#: What models' own templates are made of, each in its own style.
TEMPLATES = {
    "marked turns": (
        "{% for m in messages %}\n    {{- '<|im_start|>' + m['role'] + '\\n' }}{{ m.content | trim }}"
        "{{ '<|im_end|>\\n' }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{% endif %}"
    ),
    "system within the first turn": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = m['content'] %}{% continue %}{% endif %}{% if loop.index0 <= 1 %}[INST] {{ ns.system }} "
        "{% else %}[INST] {% endif %}{{ m['content'] }} [/INST]{% endfor %}"
    ),
    "as JSON": "{% for m in messages %}\n  {{ m | tojson }}\n{% endfor %}{{ eos_token }}",
}


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def url(model, tokenizer):
    engine = scored(Engine)(model, num_blocks=64, max_batch=8, token_budget=64, max_waiting=16, history=10)
    with serving(create_app(engine, tokenizer, name="draft")) as url:
        yield url


@pytest.fixture
def client(url):
    import openai  # here, for the sake of all who only collect these tests

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **changes):
    return client.chat.completions.create(
        **{"model": "draft", "messages": CHAT, "max_tokens": 12, "temperature": 0, **changes}
    )


def expected(model, tokenizer, **params):
    tokens = generate(model, tokenizer.encode(PLAIN_TEXT), SamplingParams(**params)).tokens
    return tokens, tokenizer.decode(tokens)


# ---- templates ----


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja", "several"])
def test_a_models_own_template_gives_the_text_that_transformers_gives(tmp_path, name, file):
    import transformers

    source = TEMPLATES[name]
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(source)
    elif file == "several":
        named = [{"name": "tool_use", "template": "{{ 1 / 0 }}"}, {"name": "default", "template": source}]
        config["chat_template"] = named
    else:
        config["chat_template"] = source
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    right = theirs.apply_chat_template(CHAT, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert template.render(CHAT) == right and template.stops == ()
    own = load_tokenizer(FOLDER)
    assert template.encode(own, CHAT) == own.encode(right, special=False)


def test_a_template_that_cannot_be_read_or_refuses_is_an_error_in_words():
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        ChatTemplate("{% for m in messages %}")
    picky = ChatTemplate("{{ raise_exception('the first turn must be the user’s') }}")
    with pytest.raises(ValueError, match="the first turn must be the user’s"):
        picky.render(CHAT)
    with pytest.raises(ValueError, match="refuses these messages"):  # templates come with models: no Python from them
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(CHAT)


def test_a_folder_without_a_template_gets_the_courses_plain_one(tokenizer):
    assert load_chat_template(FOLDER) is None and load_chat_template(MODELS / "target") is None
    assert plain_template().render(CHAT) == PLAIN_TEXT
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    body = ChatRequest(model="m", messages=[{"role": "developer", "content": "Be brief."}, *parts])
    assert body.prompts(tokenizer, plain_template()) == [tokenizer.encode("Be brief.\n\nUser: AB\n\nAssistant:")]


# ---- the endpoint ----


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
def test_a_chat_is_answered_by_what_the_model_writes_after_the_template(client, model, tokenizer, params):
    answer = ask(client, **params)
    tokens, text = expected(model, tokenizer, max_new_tokens=12, **params)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and choice.logprobs is None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PLAIN_TEXT))
    assert answer.usage.completion_tokens == len(tokens) == 12
    assert client.models.retrieve("draft").chat_template == "plain"


def test_several_choices_of_a_streamed_chat_add_up_to_those_of_the_whole_one(client):
    from openai import NOT_GIVEN

    options = {"n": 3, "seed": 11, "temperature": 1.0, "max_completion_tokens": 10, "max_tokens": NOT_GIVEN}
    whole = ask(client, **options)
    *pieces, last = ask(client, **options, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == whole.usage and last.usage.completion_tokens == 30
    assert {p.object for p in pieces} == {"chat.completion.chunk"} and len({p.id for p in pieces}) == 1
    assert all(p.usage is None for p in pieces)
    for index, choice in enumerate(whole.choices):
        own = [p.choices[0] for p in pieces if p.choices[0].index == index]
        assert own[0].delta.role == "assistant" and own[0].delta.content == ""
        assert "".join(p.delta.content or "" for p in own) == choice.message.content
        assert [p.finish_reason for p in own] == [None] * (len(own) - 1) + [choice.finish_reason]
    assert len({choice.message.content for choice in whole.choices}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_ends_before_a_stop_text_that_crosses_tokens(client, model, tokenizer, stream):
    _, text = expected(model, tokenizer, max_new_tokens=40)
    answer = ask(client, max_tokens=40, stop=["never", text[10:17]], stream=stream)
    pieces = list(answer) if stream else []
    said = "".join(p.choices[0].delta.content or "" for p in pieces) if stream else answer.choices[0].message.content
    assert said == text[: text.index(text[10:17])]
    assert (pieces[-1] if stream else answer).choices[0].finish_reason == "stop"


def test_an_answer_ends_where_the_model_would_speak_for_the_user(model, tokenizer):
    turn = tokenizer.encode(" Aye.\n\nUser: And then?")
    with serving(create_app(Scripted(turn), tokenizer, name="draft")) as url:
        body = {"model": "draft", "messages": CHAT, "max_tokens": 30}
        (choice,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" Aye.", "stop")


def test_a_model_with_a_template_is_asked_by_it_and_its_refusal_reaches_the_client(tokenizer):
    scripted = Scripted()
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}Q{{ bos_token }}"
    template = ChatTemplate(source, names={"bos_token": "<|endoftext|>"})
    with serving(create_app(scripted, tokenizer, name="m", chat_template=template)) as url:
        body = {"model": "m", "messages": CHAT}
        refused = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "no system here" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "messages"
        # token 0, which Scripted does not take, is the special token: the template's text was read as tokens
        refused = httpx.post(f"{url}/v1/chat/completions", json=body | {"messages": CHAT[1:]})
        assert refused.status_code == 400 and "token 0 is not welcome" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "status", "param", "words"),
    [
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": "Hello"}, 400, "messages", "valid"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "'system', 'developer', 'user'"),
        ({"messages": [{"role": "user"}]}, 400, "messages", "Field required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "valid string"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages", "shorter than max_seq_len"),
        ({"model": "gpt-9"}, 404, "model", "does not exist"),
        ({"top_logprobs": 3}, 400, None, "top_logprobs needs logprobs = true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 3}, 400, "logprobs", "valid boolean"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, 400, None, "give one of them"),
        ({"tools": []}, 400, "tools", "not known"),
        ({"prompt": "Hello"}, 400, "prompt", "not known"),
        ({"presence_penalty": 1}, 400, None, "presence_penalty is not supported"),
        ({"stop": ["a"] * 5}, 400, None, "at most 4 texts"),
    ],
)
def test_a_wrong_chat_is_told_what_is_wrong(url, changes, status, param, words):
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "draft", "messages": CHAT, **changes}, timeout=20)
    error = answer.json()["error"]
    assert answer.status_code == status and error["param"] == param, answer.text
    assert words in error["message"] and error["type"] == "invalid_request_error"
