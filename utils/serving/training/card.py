"""The model card: data, licence, how it was trained, where, and what came of it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.serving.config import ModelConfig
from utils.serving.generate import SamplingParams, generate
from utils.serving.model import Decoder
from utils.serving.tokenizer import Tokenizer
from utils.serving.training.corpus import HELD_OUT_EVERY, PACKAGES

PROMPTS = (
    "It was a dark and stormy night, and the captain",
    '"My dear sister," said Elizabeth,',
    "And it came to pass in those days, that",
)


def samples(model: Decoder, tokenizer: Tokenizer, tokens: int = 80) -> list[tuple[str, str, str]]:
    """(how, prompt, continuation) of each of :data:`PROMPTS`, greedy and drawn; nothing is picked by hand."""
    room = model.config.max_seq_len // 2  # a toy may have fewer positions than a prompt has tokens
    ways = {
        "greedy": SamplingParams(max_new_tokens=tokens),
        "temperature 0.8, top-p 0.95, seed 1": SamplingParams(tokens, temperature=0.8, top_p=0.95, seed=1),
    }
    return [
        (how, prompt, tokenizer.decode(generate(model, tokenizer.encode(prompt)[:room], params).tokens))
        for prompt in PROMPTS
        for how, params in ways.items()
    ]


def device_name(device: torch.device) -> str:
    """The device as a reader knows it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def write_card(
    folder: Path,
    name: str,
    config: ModelConfig,
    metrics: dict[str, float],
    bytes_per_token: float,
    command: Sequence[str],
    device: str,
    texts: list[tuple[str, str, str]],
) -> None:
    """Write ``README.md``."""
    bits = metrics["loss"] / math.log(2) / bytes_per_token
    heads = f"{config.num_heads} query and {config.num_kv_heads} key heads of {config.head_dim}"
    trained = f"{datetime.date.today().isoformat()}, {device}, PyTorch {torch.__version__}"
    lines = [
        f"# {name}",
        "",
        f"A decoder of {config.parameters:,} parameters in the architecture of {config.family}:",
        f"{config.num_layers} layers, hidden size {config.hidden_size}, {heads}, vocabulary {config.vocab_size:,},",
        f"{config.max_seq_len:,} positions, weights in bfloat16. It is there to be served quickly and read: it writes",
        "English in the manner of its books, knows nothing, and must not be asked for facts.",
        "",
        "## Data",
        "",
        *(f"- {what} (Debian package `{package}`)" for package, what in PACKAGES.items() if package != "bible-kjv"),
        "",
        "The texts are in the public domain: their authors died before 1900. The weights are under the course's own",
        f"licence (MIT). Of every {HELD_OUT_EVERY} chapters one was held out.",
        "",
        "## Training",
        "",
        "```sh",
        " \\\n    ".join(command),
        "```",
        "",
        f"{trained}: {metrics['steps']:,} steps in {metrics['seconds']:.0f} s",
        f"({metrics['tokens_per_second']:,.0f} tokens/s). The weights are those of the best evaluation.",
        "",
        f"Loss on held-out text: {metrics['loss']:.3f} nats a token, {bits:.3f} bits a byte.",
    ]
    if "acceptance" in metrics:
        lines += [f"Probability that speculative sampling accepts a drafted token: {metrics['acceptance']:.3f}."]
    lines += ["", "## Samples", "", "Prompt in bold; nothing was picked by hand.", ""]
    for how, prompt, text in texts:
        quoted = f"**{prompt}**{text}".rstrip().replace("\n", "\n> \n> ")
        lines += [f"{how}:", "", f"> {quoted}", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
