"""Single tokens as clients are shown them beside their log probabilities: as text and as bytes."""

from __future__ import annotations

import tokenizers

from utils.serving.tokenizer import Tokenizer


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in a vocabulary of bytes, as in GPT-2: its own if that can be seen."""
    seen = [byte for byte in range(256) if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


_BYTES = _byte_characters()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token as text by itself, special ones by name; bytes that are no character become U+FFFD."""
    return tokenizer.decode([token], skip_special=False)


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """The bytes of one token, which may be a part of a character.

    None where the vocabulary does not tell: it holds bytes only if the tokenizer's decoder is "ByteLevel".
    """
    if token in tokenizer.special_tokens:
        return list(token_text(tokenizer, token).encode())
    if not isinstance(tokenizer.backend.decoder, tokenizers.decoders.ByteLevel):
        text = token_text(tokenizer, token)
        return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return [_BYTES[character] for character in tokenizer.backend.id_to_token(token)]
