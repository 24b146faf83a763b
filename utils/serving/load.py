"""A :class:`Decoder` from a Hugging Face folder, and back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from utils.serving.config import ModelConfig
from utils.serving.model import Decoder, rotary_frequencies

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"
_NAMED = 6  # tensors that an error names before it says how many more there are


class CheckpointError(ValueError):
    """Weights that are not there, cannot be read, or do not fit the configuration."""


def load_model(
    folder: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> Decoder:
    """The model of a folder, ready to generate (evaluation mode, no gradients).

    Args:
        folder: holds ``config.json`` and ``*.safetensors``, with ``model.safetensors.index.json`` if there are several.
        dtype: of the weights; by default what ``config.json`` names, and float32 if it names nothing.
        device: by default the CPU.

    Raises:
        ConfigError: see :meth:`ModelConfig.from_folder`.
        CheckpointError: no weights, a file that is cut off, tensors that are missing, unknown or of another shape.
        ValueError: a dtype that is not one of ``DTYPES``.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    dtype = _dtype(dtype if dtype is not None else config.dtype or "float32")
    with torch.device("meta"):
        model = Decoder(config)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tied_head:
        del wanted["lm_head.weight"]
    weights = {}
    for name, tensor in _tensors(folder):
        short = name.removeprefix("model.")
        # A tied head may be stored all the same, old checkpoints store rotary frequencies: both follow from the rest.
        if short.endswith("rotary_emb.inv_freq") or (short == "lm_head.weight" and config.tied_head):
            continue
        weights[short] = tensor
    _refuse_what_does_not_fit(folder, wanted, weights)
    weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights.items()}
    if config.tied_head:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if config.tied_head:
        model.lm_head.weight = model.embed_tokens.weight
    model.frequencies = rotary_frequencies(config).to(device)
    return model.eval().requires_grad_(False)


def save_model(model: Decoder, folder: str | Path, *, dtype: torch.dtype | str | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors`` as Hugging Face has them; a tied head is stored once.

    Each file is written beside its place and moved there, so that a folder never holds half of one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _dtype(dtype if dtype is not None else model.dtype)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tied_head:
            continue
        stored = name if name == "lm_head.weight" else f"model.{name}"
        weights[stored] = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    save_file(weights, folder / ".model.safetensors", metadata={"format": "pt"})
    (folder / ".model.safetensors").chmod(0o644)  # the library writes for its owner alone
    os.replace(folder / ".model.safetensors", folder / "model.safetensors")
    settings = model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / ".config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    os.replace(folder / ".config.json", folder / "config.json")


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[name]


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Each weight file's name, with the tensors that the index says it holds (None without an index)."""
    if (folder / _INDEX).exists():
        try:
            listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            files: dict[str, set[str] | None] = {}
            for tensor, file in listed.items():
                files.setdefault(file, set()).add(tensor)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder / _INDEX} is not an index with a weight_map: {error!r}") from None
        missing = [file for file in files if not (folder / file).exists()]
        if missing:
            raise CheckpointError(f"{folder} lacks {_some(missing)}, which its index names")
        return files
    found = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not found:
        raise CheckpointError(f"{folder} holds no *.safetensors (weights in other formats are not read)")
    return dict.fromkeys(found)


def _tensors(folder: Path) -> list[tuple[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for file, listed in _files(folder).items():
        try:
            with safe_open(folder / file, framework="pt") as opened:
                names = set(opened.keys())
                if listed is not None and listed - names:
                    raise CheckpointError(f"{folder / file} lacks {_some(listed - names)}, which its index names")
                twice = names & tensors.keys()
                if twice:
                    raise CheckpointError(f"{folder}: {_some(twice)} is in two files; an index would say which counts")
                tensors.update((name, opened.get_tensor(name)) for name in names if listed is None or name in listed)
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file} cannot be read, perhaps it is cut off: {error}") from None
    return sorted(tensors.items())


def _refuse_what_does_not_fit(folder: Path, wanted: dict[str, torch.Size], weights: dict[str, Tensor]) -> None:
    missing, extra = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    wrong = [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(shape)}"
        for name, shape in wanted.items()
        if name in weights and weights[name].shape != shape
    ]
    troubles = [f"missing: {_some(missing)}"] * bool(missing)
    troubles += [f"unknown: {_some(extra)}"] * bool(extra)
    troubles += [f"of another shape: {_some(wrong)}"] * bool(wrong)
    if troubles:
        raise CheckpointError(f"the weights of {folder} do not fit its config.json; {'; '.join(troubles)}")


def _some(names: set[str] | list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
