"""What a decoder looks like, read from the ``config.json`` of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Families whose checkpoints load: biases on (queries, keys, values) and on the output; ``None``: config.json says.
FAMILIES: dict[str, tuple[bool | None, bool | None]] = {
    "llama": (None, None),
    "qwen2": (True, False),
    "qwen3": (None, None),
    "mistral": (False, False),
}
_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class ConfigError(ValueError):
    """A ``config.json`` that is unreadable, incomplete, or that asks for what this decoder cannot do."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of pre-training.

    Args:
        kind: ``"linear"`` (each frequency over ``factor``; Chen et al. 2023) or ``"llama3"`` (only the slow ones, with
            a ramp between; as Llama 3.1's own code does).
        factor: the stretch, at least 1.
        low_freq_factor, high_freq_factor, original_context: where the ramp of ``"llama3"`` lies: frequencies that turn
            fewer than ``low_freq_factor`` times in ``original_context`` positions are divided by ``factor``, those that
            turn more than ``high_freq_factor`` times are kept.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and peculiarities of a decoder of the Llama kind.

    ``num_heads`` query heads share ``num_kv_heads`` key and value heads (GQA); ``max_seq_len`` counts positions;
    ``qk_norm`` is the RMSNorm over ``head_dim`` of Qwen3; ``tied_head``: the head's weight is the embedding's.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"model_type {self.family!r} is not supported (supported: {', '.join(FAMILIES)})")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_seq_len"):  # fmt: skip
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {size!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads must divide num_attention_heads, got {self.num_kv_heads} and {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even (rotary embedding turns pairs), got {self.head_dim}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        attention += self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden_size
        attention += self.qk_norm * 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes that one token's keys and values take in the cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """The configuration of a Hugging Face folder: ``config.json``, and the stops of ``generation_config.json``.

        Raises:
            ConfigError: no such file, not JSON, or what :meth:`from_dict` refuses.
        """
        settings = _read_json(Path(folder) / "config.json")
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            stops = _ids(_read_json(generation).get("eos_token_id"), "eos_token_id")
            own = _ids(settings.get("eos_token_id"), "eos_token_id")
            settings["eos_token_id"] = [*own, *(stop for stop in stops if stop not in own)]
        return cls.from_dict(settings)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ModelConfig:
        """The configuration that the keys of a ``config.json`` describe.

        A sliding window of W keys is served up to W positions, where it hides nothing: ``max_seq_len`` says so.

        Raises:
            ConfigError: an unknown family, a missing key, a value or a rope scaling that this decoder cannot follow.
        """
        family = settings.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
        _refuse_what_is_missing(settings)
        if settings.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act must be 'silu' (SwiGLU), got {settings['hidden_act']!r}")
        heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
        head_dim = settings.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise ConfigError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; name head_dim")
            head_dim = hidden // heads
        qkv_bias, output_bias = FAMILIES[family]
        said = bool(settings.get("attention_bias", False))
        kv_heads = settings.get("num_key_value_heads")
        context, window = settings["max_position_embeddings"], _window(settings, family)
        theta, scaling = _rope(settings)
        return cls(
            family=family,
            vocab_size=settings["vocab_size"],
            hidden_size=hidden,
            intermediate_size=settings["intermediate_size"],
            num_layers=settings["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_seq_len=context if window is None else min(context, window),
            rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=said if qkv_bias is None else qkv_bias,
            output_bias=said if output_bias is None else output_bias,
            mlp_bias=family == "llama" and bool(settings.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied_head=bool(settings.get("tie_word_embeddings", False)),
            bos_token_id=settings.get("bos_token_id"),
            eos_token_ids=_ids(settings.get("eos_token_id"), "eos_token_id"),
            dtype=settings.get("dtype") or settings.get("torch_dtype"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of a ``config.json`` of this configuration, for :meth:`from_dict` and others' loaders."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            rope |= {"rope_type": self.rope_scaling.kind, "factor": self.rope_scaling.factor}
            if self.rope_scaling.kind == "llama3":
                scaling = self.rope_scaling
                values = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context)
                rope |= dict(zip(_LLAMA3_KEYS, values, strict=True))
        return {
            "architectures": [f"{self.family.capitalize()}ForCausalLM"],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "attention_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "hidden_act": "silu",
            "sliding_window": None,
            "tie_word_embeddings": self.tied_head,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _one_or_list(self.eos_token_ids),
            "dtype": self.dtype,
        }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model's folder holds config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold an object, got {type(settings).__name__}")
    return settings


def _refuse_what_is_missing(settings: Mapping[str, Any]) -> None:
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "max_position_embeddings")  # fmt: skip
    missing = [key for key in needed if settings.get(key) is None]
    if missing:
        raise ConfigError(f"config.json of a {settings['model_type']} model lacks {', '.join(missing)}")
    for key in needed:
        if not isinstance(settings[key], int) or isinstance(settings[key], bool) or settings[key] < 1:
            raise ConfigError(f"{key} must be an integer of at least 1, got {settings[key]!r}")


def _ids(value: object, key: str) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{key} must be a token or a list of tokens, got {value!r}")
    return ids


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _window(settings: Mapping[str, Any], family: str) -> int | None:
    """Keys that a sliding-window layer sees, or None where every layer sees all."""
    if family.startswith("qwen") and not settings.get("use_sliding_window", False):
        return None
    return settings.get("sliding_window") if family != "llama" else None


def _rope(settings: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; ``rope_parameters`` (transformers 5) goes before ``rope_theta`` and ``rope_scaling`` (4)."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_scaling must be an object, got {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError("rope_parameters that differ from layer to layer are not supported")
    theta = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", settings.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported (supported: default, linear, llama3)")
    missing = [key for key in ("factor", *(_LLAMA3_KEYS if kind == "llama3" else ())) if rope.get(key) is None]
    if missing:
        raise ConfigError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    if not rope["factor"] >= 1:
        raise ConfigError(f"the factor of rope scaling must be at least 1, got {rope['factor']!r}")
    ramp = [rope[key] for key in _LLAMA3_KEYS] if kind == "llama3" else []
    if ramp and not 0 < ramp[0] < ramp[1]:
        raise ConfigError(f"rope scaling needs 0 < low_freq_factor < high_freq_factor, got {ramp[0]} and {ramp[1]}")
    return theta, RopeScaling(kind, float(rope["factor"]), *ramp)
