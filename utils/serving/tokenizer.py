"""Text to tokens and back, and back piece by piece as tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from utils.serving.config import ConfigError, ModelConfig

#: What a decoder puts where bytes are no character (yet).
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A thin coat over the ``tokenizers`` library.

    Args:
        backend: the library's tokenizer.
        bos_token_id: the token that :meth:`encode` puts first on request, if the model has one.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_token_id: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[int, str]:
        """The tokens that are no text, by number."""
        added = self.backend.get_added_tokens_decoder()
        return {token: str(entry.content) for token, entry in sorted(added.items()) if entry.special}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text.

        Args:
            text: any string; the names of special tokens in it become those tokens, as in every Hugging Face tokenizer.
            special: add what the tokenizer's own template adds (a first token, for instance).

        Raises:
            TypeError: ``text`` is no string.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some tokens; bytes that are no character become U+FFFD.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        tokens = [int(token) for token in tokens]
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self.backend.decode(tokens, skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder that turns tokens into text as they come."""
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Decodes a stream of tokens; the pieces add up to the text of :meth:`Tokenizer.decode`, no character is split.

    A character of four bytes may be four tokens, and the first three say nothing yet: :meth:`push` holds them back
    until the character is whole. A window of the last tokens is decoded twice, without and with the new one, since a
    decoder may treat a text's first token apart (its leading space).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []  # given out, kept so that the next decode as in the whole text
        self._pending: list[int] = []  # not given out yet

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
        self._pending.append(token)
        piece, whole = self._piece()
        if not whole:
            return ""
        if piece:
            self._context, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never became whole; the decoder then starts afresh."""
        piece, _ = self._piece()
        self._context, self._pending = [], []
        return piece

    def _piece(self) -> tuple[str, bool]:
        decode = self._tokenizer.decode
        before = decode(self._context, skip_special=self._skip_special)
        after = decode(self._context + self._pending, skip_special=self._skip_special)
        return after[len(before) :], not after.endswith(_REPLACEMENT)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: ``tokenizer.json``, and first and last tokens from ``config.json``.

    Raises:
        ConfigError: no ``tokenizer.json``, or one that the library cannot read.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{path} does not exist; tokenizers in other formats are not read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} cannot be read: {error}") from None
    bos, eos = None, []
    if (folder / "config.json").exists():
        config = ModelConfig.from_folder(folder)
        bos, eos = config.bos_token_id, list(config.eos_token_ids)
    if (folder / "tokenizer_config.json").exists():
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        bos = bos if bos is not None else _named(backend, named.get("bos_token"))
        stop = _named(backend, named.get("eos_token"))
        eos += [stop] if stop is not None and stop not in eos else []
    return Tokenizer(backend, bos_token_id=bos, eos_token_ids=eos)


def _named(backend: tokenizers.Tokenizer, token: object) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None
