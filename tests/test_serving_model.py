"""The decoder against ``transformers`` on tiny random checkpoints, its cache, its checkpoints' errors, its sampling."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from utils.serving import (
    CheckpointError,
    ConfigError,
    Decoder,
    KVCache,
    ModelConfig,
    RopeScaling,
    SamplingParams,
    attend_causally,
    generate,
    load_model,
    probabilities,
    sample,
    save_model,
    stream,
)

SEED = 1729
SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
CASES = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 10},
    "llama linear": {"model_type": "llama", "rope_parameters": LINEAR},
    "llama llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 tied, biased": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, window": {"model_type": "mistral", "head_dim": 8, "sliding_window": 40},
}
TINY = ModelConfig("qwen3", 97, 48, 80, 3, 6, 2, 8, 64, qk_norm=True, tied_head=True, eos_token_ids=(1,))


def their_model(settings: dict):
    transformers = pytest.importorskip("transformers", reason="a test extra: pip install -e '.[test]'")
    torch.manual_seed(SEED)
    settings = SIZES | settings
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(settings.pop("model_type"), **settings), attn_implementation="eager"
    ).eval()
    for name, weight in model.named_parameters():  # biases start at 0 and norms at 1: a swapped one would not show
        if weight.ndim == 1:
            torch.nn.init.normal_(weight.data, mean=1.0 if "norm" in name else 0.0, std=0.3)
        else:
            torch.nn.init.normal_(weight.data, std=0.2)
    return model


def tiny_model(config: ModelConfig = TINY) -> Decoder:
    torch.manual_seed(SEED)
    model = Decoder(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(mean=float(weight.ndim == 1), std=0.2)
    return model


def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, torch.arange(tokens.shape[-1]).expand_as(tokens), attend_causally)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, tmp_path):
    theirs = their_model(CASES[case])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    tokens = torch.randint(97, (2, 37), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert (logits_of(ours, tokens) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert ours.config.parameters == sum(weight.numel() for weight in theirs.parameters())


@pytest.mark.slow
def test_a_checkpoint_in_several_files_loads_by_its_index(tmp_path):
    theirs = their_model(CASES["qwen2 tied"])
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and (tmp_path / "model.safetensors.index.json").exists()
    tokens = torch.arange(20)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(load_model(tmp_path), tokens), theirs(tokens[None]).logits[0])


@pytest.mark.slow
def test_transformers_reads_what_save_model_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    for name, config in {
        "qwen3": TINY,
        "llama": ModelConfig("llama", 97, 48, 80, 2, 6, 3, 8, 64, rope_scaling=scaling, mlp_bias=True),
    }.items():
        ours = tiny_model(config)
        save_model(ours, tmp_path / name)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        tokens = torch.arange(30)
        with torch.no_grad():
            torch.testing.assert_close(logits_of(ours, tokens), theirs(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    model = tiny_model()
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == ModelConfig(**(vars(TINY) | {"dtype": "float32"}))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert again.lm_head.weight is again.embed_tokens.weight
    assert load_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    save_model(model, tmp_path / "half", dtype="float16")
    assert load_model(tmp_path / "half").dtype == torch.float16


def test_a_cache_says_what_does_not_fit():
    with pytest.raises(ValueError, match="between 1 and max_seq_len = 64, got 65"):
        KVCache(TINY, 65)
    cache = KVCache(TINY, 4)
    with pytest.raises(ValueError, match="reserved for 4 tokens, 5 are wanted"):
        tiny_model()(torch.arange(5), torch.arange(5), cache)
    with pytest.raises(ValueError, match=r"within 0\.\.4, got 0 \+ -1"):
        cache.advance(-1)
    with pytest.raises(ValueError, match=r"tokens \(5,\) and positions \(4,\)"):
        tiny_model()(torch.arange(5), torch.arange(4), attend_causally)


# ---- configuration ---------------------------------------------------------------------------------------------------

LLAMA = SIZES | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SIZES, "model_type None is not supported .supported: llama, qwen2, qwen3, mistral"),
        (LLAMA | {"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({k: v for k, v in LLAMA.items() if k not in ("hidden_size", "vocab_size")}, "lacks vocab_size, hidden_size"),
        (LLAMA | {"hidden_size": -3}, "hidden_size must be an integer of at least 1, got -3"),
        (LLAMA | {"num_attention_heads": 5}, "hidden_size 48 is no multiple of num_attention_heads 5"),
        (LLAMA | {"num_key_value_heads": 4}, "num_key_value_heads must divide num_attention_heads, got 4 and 6"),
        (LLAMA | {"head_dim": 7}, "head_dim must be even"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' lacks factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1, got 0.5"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor < high_freq_factor"),
        (LLAMA | {"rope_scaling": 4}, "rope_scaling must be an object, got 4"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ from layer to layer"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id must be a token or a list of tokens"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(settings)


def test_both_generations_of_config_keys_mean_the_same():
    old = {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    assert ModelConfig.from_dict(LLAMA | old) == ModelConfig.from_dict(LLAMA | {"rope_parameters": LLAMA3})
    config = ModelConfig.from_dict(LLAMA | {"torch_dtype": "bfloat16", "eos_token_id": [1, 2]})
    assert config.dtype == "bfloat16" and config.eos_token_ids == (1, 2) and config.rope_scaling is None


def test_a_sliding_window_bounds_the_context_and_is_ignored_where_it_is_off():
    mistral = ModelConfig.from_dict(SIZES | {"model_type": "mistral", "sliding_window": 40})
    qwen = ModelConfig.from_dict(SIZES | {"model_type": "qwen2", "sliding_window": 40, "use_sliding_window": False})
    assert (mistral.max_seq_len, qwen.max_seq_len) == (40, 128)


def test_the_stops_of_a_generation_config_are_added(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (1, 5)


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("{", "is not JSON"), ("[]", "an object")])
def test_a_folder_without_a_readable_config_is_named(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_keys_and_values_of_a_token_take_the_bytes_of_the_formula():
    cache = KVCache(TINY, 10)
    assert TINY.kv_bytes_per_token(4) * 10 == cache.keys.nbytes + cache.values.nbytes


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    save_model(tiny_model(), tmp_path)
    return tmp_path


def change(folder, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def test_missing_unknown_and_misshapen_tensors_are_named(saved):
    def edit(weights):
        del weights["model.layers.1.self_attn.q_norm.weight"]
        weights["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(48)
        weights["model.norm.weight"] = torch.zeros(47)

    change(saved, edit)
    with pytest.raises(CheckpointError) as caught:
        load_model(saved)
    assert "missing: layers.1.self_attn.q_norm.weight" in str(caught.value)
    assert "unknown: layers.1.self_attn.q_proj.bias" in str(caught.value)
    assert "of another shape: norm.weight is (47,) instead of (48,)" in str(caught.value)


def test_a_tied_head_that_is_stored_all_the_same_and_old_frequencies_are_no_trouble(saved):
    def edit(weights):
        weights["lm_head.weight"] = torch.full((97, 48), 9.0)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change(saved, edit)
    assert torch.equal(load_model(saved).lm_head.weight, tiny_model().embed_tokens.weight)


def test_a_file_that_is_cut_off_is_named(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read, perhaps it is cut off"):
        load_model(saved)


def test_a_folder_without_weights_is_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load_model(saved)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"model.norm.weight": "elsewhere.safetensors"}}, "lacks elsewhere.safetensors"),
        ({"weight_map": {"model.none.weight": "model.safetensors"}}, "lacks model.none.weight, which its index names"),
        ({}, "not an index with a weight_map"),
        ([], "not an index with a weight_map"),
    ],
)
def test_an_index_that_does_not_hold_is_named(index, message, saved):
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_a_tensor_in_two_files_is_refused(saved):
    (saved / "other.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is in two files"):
        load_model(saved)


def test_a_dtype_that_no_weights_have_is_refused(saved):
    with pytest.raises(ValueError, match=r"float32, float16, bfloat16, got torch\.int8"):
        load_model(saved, dtype=torch.int8)


# ---- generation ------------------------------------------------------------------------------------------------------


def test_greedy_generation_takes_the_likeliest_token_of_the_uncached_model():
    model, tokens = tiny_model(), [5, 6, 7]
    for token in generate(model, [5, 6, 7], SamplingParams(max_new_tokens=20, ignore_eos=True)).tokens:
        assert token == int(logits_of(model, torch.tensor(tokens))[-1].argmax())
        tokens.append(token)
    assert len(tokens) == 23


def test_generation_stops_at_the_end_of_text_and_says_so():
    model = tiny_model()
    free = generate(model, [5, 6], SamplingParams(12, ignore_eos=True)).tokens
    object.__setattr__(model, "config", ModelConfig(**(vars(TINY) | {"eos_token_ids": (free[4],)})))
    stopped = generate(model, [5, 6], SamplingParams(12))
    assert stopped.tokens == free[: free.index(free[4]) + 1] and stopped.finish_reason == "stop"
    assert generate(model, [5, 6], SamplingParams(2)).finish_reason == "length"


def test_generation_ends_where_the_positions_end():
    answer = generate(tiny_model(), list(range(60)), SamplingParams(50, ignore_eos=True))
    assert len(answer.tokens) == 4 and answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([5, 97], "prompt token 97 is outside"), ([5] * 64, "shorter than max_seq_len = 64")],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_the_first_token(prompt, message):
    with pytest.raises(ValueError, match=message):
        stream(tiny_model(), prompt)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"top_k": 1.5}, "top_k must be an integer of at least 0, got 1.5"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_p": 0.0}, "top_p must be over 0 and at most 1, got 0.0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_probabilities_follow_temperature_top_k_and_top_p():
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    close = lambda params, wanted: torch.testing.assert_close(probabilities(logits, params), torch.tensor(wanted))  # noqa: E731
    close(SamplingParams(temperature=1.0), [0.5, 0.2, 0.15, 0.1, 0.05])
    close(SamplingParams(temperature=1.0, top_k=2), [5 / 7, 2 / 7, 0.0, 0.0, 0.0])
    close(SamplingParams(temperature=1.0, top_p=0.6), [5 / 7, 2 / 7, 0.0, 0.0, 0.0])
    close(SamplingParams(temperature=1.0, top_p=0.01), [1.0, 0.0, 0.0, 0.0, 0.0])
    close(SamplingParams(), [1.0, 0.0, 0.0, 0.0, 0.0])
    squared = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).square()
    close(SamplingParams(temperature=0.5), (squared / squared.sum()).tolist())
    # after top-k the two that are left weigh 5/7 and 2/7: top-p counts those, not the first ones' 0.5 and 0.2
    close(SamplingParams(temperature=1.0, top_k=2, top_p=0.7), [1.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.slow
def test_samples_have_the_distribution_they_are_drawn_from():
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    generator, params = torch.Generator().manual_seed(SEED), SamplingParams(temperature=1.0, top_k=4)
    drawn = torch.tensor([sample(logits, params, generator) for _ in range(4000)]).bincount(minlength=5)
    expected = probabilities(logits, params) * 4000
    chi_square = ((drawn[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert drawn[4] == 0 and chi_square < 16.3, (SEED, drawn)  # 3 degrees of freedom, 0.1%
