"""A client of the server at the end of the lab."""

from __future__ import annotations

import json
import urllib.error
import urllib.request


class Refused(RuntimeError):
    """The server's own words for what went wrong."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the words alone."""
        return [str(self)]


def ask(url: str, prompt: str, max_tokens: int, model: str = "target") -> str:
    """The text that a server continues a prompt with, greedily.

    Args:
        url: of the server, ``http://127.0.0.1:8000``.

    Raises:
        Refused: an error of the server's.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        raise Refused(json.load(error)["error"]["message"]) from None
