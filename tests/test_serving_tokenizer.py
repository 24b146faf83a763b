"""Text to tokens and back, whole and as a stream; the course's own vocabulary and its training at toy size."""

from __future__ import annotations

import json
import random
import struct
import zlib

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from utils.serving import (
    ConfigError,
    Decoder,
    ModelConfig,
    SamplingParams,
    Tokenizer,
    generate,
    load_model,
    load_tokenizer,
)
from utils.serving.training.__main__ import SIZES, main, model_config
from utils.serving.training.books import read_books
from utils.serving.training.corpus import HELD_OUT_EVERY, SEPARATOR, chapters, r_strings, read_corpus, split
from utils.serving.training.train import Plan, Trainer, evaluate, new_model, tokenize
from utils.serving.training.vocabulary import END_OF_TEXT, save_vocabulary, train_vocabulary

SEED = 1729
SENTENCES = [
    "the sea was calm and the ship was slow. ",
    "she walked by the sea, and he walked behind her. ",
    "no ship came. ",
]
TEXTS = [
    "",
    " ",
    "the sea",
    "naïve café — “quoted”",
    "日本語のテキスト",
    "🐳🚢 emoji 👩‍👩‍👧",
    "tab\tand\nnew line\r\n",
    "\x00\x7f",
    "a" * 50,
]


def story(documents: int = 12, sentences: int = 30) -> list[str]:
    draw = random.Random(SEED)
    return ["".join(draw.choice(SENTENCES) for _ in range(sentences)) for _ in range(documents)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_vocabulary(train_vocabulary(story(), 300), folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(vocabulary) -> Tokenizer:
    return load_tokenizer(vocabulary)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A vocabulary of the Llama 2 kind: a space is a character of the token, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlnorstw", "▁the", "▁sea"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=(2,))


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_tokens(text, byte_level):
    assert byte_level.decode(byte_level.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_adds_up_to_the_text_and_never_splits_a_character(text, kind, request):
    tokenizer = request.getfixturevalue(kind)
    tokens = tokenizer.encode(text)
    decoder, told = tokenizer.stream(), ""
    whole = tokenizer.decode(tokens)
    for token in tokens:
        told += decoder.push(token)
        assert whole.startswith(told)
    assert told + decoder.finish() == whole
    assert "\N{REPLACEMENT CHARACTER}" not in told


def test_a_character_of_four_tokens_comes_out_with_its_last_or_at_the_end_as_a_replacement(byte_level):
    decoder, whale = byte_level.stream(), byte_level.encode("🐳")
    assert [decoder.push(token) for token in whale] == ["", "", "", "🐳"]
    assert [decoder.push(token) for token in whale[:3]] == ["", "", ""]
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.push(byte_level.encode("b")[0]) == "b"


def test_a_stream_of_random_tokens_adds_up_to_their_text(byte_level):
    draw = random.Random(SEED)
    for _ in range(30):
        tokens = [draw.randrange(byte_level.vocab_size) for _ in range(40)]
        decoder = byte_level.stream()
        assert "".join(map(decoder.push, tokens)) + decoder.finish() == byte_level.decode(tokens), (SEED, tokens)


def test_special_tokens_are_kept_out_of_the_text_unless_wanted(byte_level):
    tokens = byte_level.encode("the sea" + END_OF_TEXT)
    assert tokens[-1] == byte_level.eos_token_ids[0] == byte_level.bos_token_id == 0
    assert byte_level.special_tokens == {0: END_OF_TEXT}
    assert byte_level.decode(tokens) == "the sea"
    assert byte_level.decode(tokens, skip_special=False) == "the sea" + END_OF_TEXT
    decoder = byte_level.stream()
    assert "".join(map(decoder.push, tokens)) == "the sea"


def test_what_is_no_text_and_no_token_is_refused(byte_level):
    with pytest.raises(TypeError, match="text must be a string, got bytes"):
        byte_level.encode(b"the sea")
    with pytest.raises(ValueError, match=f"token {byte_level.vocab_size} is outside the vocabulary"):
        byte_level.decode([5, byte_level.vocab_size])
    with pytest.raises(ValueError, match="token -1 is outside"):
        byte_level.decode([-1])


def test_a_folder_without_a_readable_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_tokens_equal_those_of_transformers(vocabulary, byte_level):
    transformers = pytest.importorskip("transformers", reason="a test extra: pip install -e '.[test]'")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(vocabulary)
    for text in TEXTS:
        assert byte_level.encode(text) == theirs.encode(text)
    assert theirs.eos_token_id == byte_level.eos_token_ids[0]


def test_stops_of_both_configurations_count(vocabulary, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((vocabulary / name).read_bytes())
    settings = model_config("toy", 300, 64, 0).to_dict() | {"eos_token_id": [7, 8], "bos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (3, (7, 8, 0))


# ---- corpus and training ---------------------------------------------------------------------------------------------


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ValueError, match="size must be at least 257"):
        train_vocabulary(story(), 256)


def test_strings_come_out_of_an_r_package(tmp_path):
    def record(strings: list[bytes], kind: int = 16) -> bytes:
        data = (
            b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8" + struct.pack(">ii", kind, len(strings))
        )
        data += b"".join(struct.pack(">ii", 0x40009, len(text)) + text for text in strings)
        return struct.pack(">I", len(data)) + zlib.compress(data)

    path = tmp_path / "Rdata.rdb"
    path.write_bytes(record([b"CHAPTER I", b"", "é".encode()]) + record([], kind=19) + record([b"two"]))
    assert list(r_strings(path)) == [["CHAPTER I", "", "é"], ["two"]]


def test_a_novel_is_cut_into_chapters_without_what_its_distributor_wrote():
    body = ["It was a dark", "and stormy night, ", "", "_All_ slept.", "word " * 100, ""]
    lines = ["*** START OF THIS PROJECT GUTENBERG EBOOK X ***", "CONTENTS", "CHAPTER 1. A", "CHAPTER 2. B", ""]
    lines += ["CHAPTER 1. A", "", *body, "CHAPTER 2. B", "", *body, "End of Project Gutenberg's X", "licence " * 100]
    first, second = chapters(lines)
    assert first.startswith("CHAPTER 1. A\nIt was a dark and stormy night,\nAll slept. word")
    assert second.startswith("CHAPTER 2. B\n") and "licence" not in second


def test_every_document_is_either_trained_on_or_held_out(tmp_path):
    documents = [f"document {i}\n" for i in range(3 * HELD_OUT_EVERY)]
    (tmp_path / "corpus.txt").write_text(SEPARATOR.join(documents))
    training, held_out = split(read_corpus(tmp_path / "corpus.txt"))
    assert len(held_out) == 3 and sorted(training + held_out) == sorted(documents)
    assert split(["a", "b"]) == (["a"], ["b"])
    (tmp_path / "corpus.txt").write_text("alone")
    with pytest.raises(ValueError, match="holds 1 document"):
        read_corpus(tmp_path / "corpus.txt")


def test_the_corpus_of_the_course_is_read_from_its_archive():
    documents = read_books()
    whole = "".join(documents)
    assert len(documents) > 1_500 and len(whole) > 9_000_000
    for word in ("Pemberley", "Ishmael", "Nebuchadnezzar"):
        assert word in whole
    assert "Gutenberg" not in whole


@pytest.mark.slow
def test_training_leaves_a_folder_that_serves_and_a_draft_learns_from_it(vocabulary, tmp_path):
    (tmp_path / "corpus.txt").write_text(SEPARATOR.join(story()))
    common = ["--corpus", str(tmp_path / "corpus.txt"), "--tokenizer", str(vocabulary), "--device", "cpu"]
    common += ["--size", "toy", "--minutes", "1", "--batch", "4", "--context", "32", "--evaluate-every", "10"]
    main([*common, "--epochs", "3", "--out", str(tmp_path / "target"), "--lr", "0.02"])
    main([*common, "--epochs", "1", "--out", str(tmp_path / "draft"), "--teacher", str(tmp_path / "target")])
    for name in ("target", "draft"):
        model, tokenizer = load_model(tmp_path / name), load_tokenizer(tmp_path / name)
        assert model.dtype == torch.bfloat16 and model.config.vocab_size == tokenizer.vocab_size
        assert len(generate(model, tokenizer.encode("the"), SamplingParams(8, ignore_eos=True)).tokens) == 8
        card = (tmp_path / name / "README.md").read_text()
        assert "public domain" in card and "nats a token" in card and str(tmp_path) not in card
    target, draft = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("target", "draft"))
    assert target["loss"] < 4.5  # a uniform guess over all tokens loses 5.7 nats
    assert 0 < draft["acceptance"] <= 1 and "acceptance" not in target


def test_training_says_what_it_cannot_do(byte_level):
    tokens = tokenize(byte_level, story(1))
    plan, config = Plan(1, 1, 2, 16, 1e-2, 0.0), model_config("toy", byte_level.vocab_size, 16, 0)
    with pytest.raises(ValueError, match="too little text"):
        Trainer(Decoder(config), tokens[:10], tokens, plan)
    other = Decoder(model_config("toy", 301, 16, 0))
    with pytest.raises(ValueError, match="must share a vocabulary, got 301 and 296"):
        Trainer(Decoder(config), tokens, tokens, plan, other)
    with pytest.raises(ValueError, match="minutes must be over 0, got 0"):
        Plan(0, 1, 2, 16, 1e-2, 0.0)
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, got 1"):
        Plan(1, 1, 2, 16, 1e-2, 1)


def test_a_model_accepts_everything_it_drafts_for_itself(byte_level):
    model = new_model(model_config("toy", byte_level.vocab_size, 32, 0), 1)
    tokens = tokenize(byte_level, story(2))
    metrics = evaluate(model, tokens, 32, teacher=model)
    assert metrics["acceptance"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss"] == pytest.approx(5.7, abs=0.1)  # the logarithm of 296


def test_the_two_models_of_the_course_have_their_sizes():
    sizes = {size: model_config(size, 4096, 1024, 0).parameters for size in SIZES}
    assert 5e6 < sizes["target"] < 10e6 and 0.8e6 < sizes["draft"] < 1.3e6
    assert isinstance(model_config("draft", 4096, 1024, 0), ModelConfig)
