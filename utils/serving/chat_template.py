"""From the messages of a chat to the one text that a language model continues.

A model that was trained on chats brings the template that was used: a Jinja template in ``chat_template.jinja`` or in
``tokenizer_config.json``, as Hugging Face stores it. The models that come with the course were trained on books and
bring none. For them, and for every other folder without one, the course defines :data:`PLAIN`: a dialogue in plain
text. The model continues that dialogue as it would any other text; it does not know that it is being asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from utils.serving.config import ConfigError
from utils.serving.tokenizer import Tokenizer

#: The course's template: what the system says stands first, then each turn in a paragraph that names its speaker.
PLAIN = """\
{% for message in messages %}
{% if message.role == "system" %}
{{ message.content }}{{ "\\n\\n" }}
{%- else %}
{{ message.role | capitalize }}: {{ message.content }}{{ "\\n\\n" }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}Assistant:{% endif %}
"""
#: Where an answer to PLAIN ends at the latest: there the model would go on with the user's next turn.
PLAIN_STOPS = ("\n\nUser:", "\nUser:")


class ChatTemplate:
    """A template, compiled.

    Args:
        source: in Jinja, with the names that Hugging Face gives it: ``messages``, ``add_generation_prompt``, the
            special tokens, ``raise_exception`` and ``strftime_now``.
        names: special tokens by name, ``{"bos_token": "<s>"}``.
        stops: texts that end every answer.
        adds_special: whether the tokenizer still adds the first token; a model's own template writes it itself.

    Raises:
        ConfigError: not a template.
    """

    def __init__(
        self,
        source: str,
        *,
        names: Mapping[str, str] | None = None,
        stops: Sequence[str] = (),
        adds_special: bool = False,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from None
        self._names, self.stops, self._adds_special = dict(names or {}), tuple(stops), adds_special

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the model is to continue.

        Args:
            messages: each with ``role`` and ``content``, both texts.

        Raises:
            ValueError: the template refuses them, in its own words.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of :meth:`render`."""
        return tokenizer.encode(self.render(messages), special=self._adds_special)


def plain_template() -> ChatTemplate:
    """The course's own template, for models without one."""
    return ChatTemplate(PLAIN, stops=PLAIN_STOPS, adds_special=True)


def load_chat_template(folder: str | Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder; None if it has none.

    Raises:
        ConfigError: one that cannot be read.
    """
    folder = Path(folder)
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    source = config.get("chat_template")
    if isinstance(source, list):  # several, for tools and for retrieval beside the usual one
        source = {each["name"]: each["template"] for each in source}.get("default")
    if (folder / "chat_template.jinja").exists():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if source is None:
        return None
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    return ChatTemplate(source, names={n: t for n, t in tokens.items() if n.endswith("_token") and isinstance(t, str)})


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
