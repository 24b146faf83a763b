"""A byte-level BPE tokenizer of the corpus (Sennrich et al. 2016; bytes as in GPT-2, so that any text has tokens)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from utils.serving.training.corpus import read_corpus, split

#: Ends a document, and stands before the first token of a sample without a prompt. Token 0.
END_OF_TEXT = "<|endoftext|>"


def train_vocabulary(documents: list[str], size: int) -> tokenizers.Tokenizer:
    """A tokenizer of at most ``size`` tokens: the end of text, 256 bytes, the rest merges.

    Raises:
        ValueError: a size below 257, which would leave some bytes without a token.
    """
    if size < 257:
        raise ValueError(f"size must be at least 257 (256 bytes and the end of text), got {size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_vocabulary(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m utils.serving.training.vocabulary", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--out", type=Path, required=True, help="a folder for tokenizer.json")
    args = parser.parse_args()
    training, held_out = split(read_corpus(args.corpus))
    tokenizer = train_vocabulary(training, args.size)
    save_vocabulary(tokenizer, args.out)
    text = "".join(held_out)
    tokens = len(tokenizer.encode(text).ids)
    print(f"{tokenizer.get_vocab_size():,} tokens; held-out text: {len(text) / tokens:.2f} characters a token")


if __name__ == "__main__":
    main()
