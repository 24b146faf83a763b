"""The page of a reader's predictions: every prompt of the course; ``predict.js`` fills in the guesses.

The guesses stay in the reader's browser. Without JavaScript the page lists the prompts, each linked to its place.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import nbformat

from utils import predictions
from utils.claims.page import title
from website.notebooks import anchor
from website.places import labs, lectures, page_of

_HEAD = """\
# Your predictions

Lectures and labs ask you to predict a number or to choose before they show what is right. This page lists what you
committed to and how it fared. Your guesses stay in this browser: nobody else sees them, and another browser does not
know them.

"""
_SYMBOLS = {"cdot": "·", "times": "×", "to": "→", "le": "≤", "ge": "≥", "approx": "≈", "oplus": "⊕", "infty": "∞",
            "varnothing": "∅", "dots": "…", "ldots": "…", "alpha": "α", "beta": "β", "pi": "π", "Psi": "Ψ", "rho": "ρ",
            "log": "log ", "sqrt": "√", "quad": " ", "qquad": " "}  # fmt: skip


def write(source: Path) -> None:
    """Write ``predictions.md`` into the folder of the site's sources."""
    (source / "predictions.md").write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as MyST Markdown."""
    prompts = found()
    data = html.escape(json.dumps(prompts, ensure_ascii=False, separators=(",", ":")))
    parts = [f'<div class="predict-report" data-prompts="{data}">']
    for name in dict.fromkeys(prompt["title"] for prompt in prompts):
        items = [
            f'<li><a href="{prompt["href"]}">{html.escape(prompt["question"])}</a></li>'
            for prompt in prompts
            if prompt["title"] == name
        ]
        parts += [f"<p><b>{html.escape(name)}</b></p>", "<ul>", *items, "</ul>"]
    parts.append("</div>")
    loads = '<link rel="stylesheet" href="_static/predict.css">\n<script src="_static/predict.js" defer></script>\n'
    return _HEAD + "```{raw} html\n" + loads + "\n".join(parts) + "\n```\n"


def found() -> list[dict[str, str]]:
    """All prompts of the course: name, lecture, its title, the address of the prompt, and the question as text."""
    return [
        {
            "name": prompt.name,
            "lecture": path.stem.partition("_")[0],
            "title": title(path).split(":")[0],
            "href": f"{page_of(path)}.html#{anchor(prompt)}",
            "question": plain(prompt.question),
        }
        for path in (*lectures(), *labs())
        for prompt in predictions.predictions(nbformat.read(path, as_version=4).cells)
    ]


def plain(text: str) -> str:
    """Markdown with formulas as one line of text: ``$e^{m}$ is **exact**`` -> ``e^m is exact``."""
    text = re.sub(r"\$+([^$]+)\$+", lambda formula: _formula(formula[1]), text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"\*\*|`|<!--.*?-->|(?<!\w)[*_]|[*_](?!\w)", "", text).split())


def _formula(text: str) -> str:
    text = re.sub(r"\\(?:mathbf|mathrm|text|boldsymbol|tilde|hat|bigl|bigr|left|right|operatorname)\b\s*", "", text)
    text = re.sub(r"\\[lr]ceil|\\[,;! ]", " ", text)
    text = re.sub(r"\\d?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda name: _SYMBOLS.get(name[1], name[1]), text)
    text = text.replace("{,}", ",").replace("\\", "")
    while (simpler := re.sub(r"(\^?)\{([^{}]*)\}", _group, text)) != text:
        text = simpler
    return text


def _group(found: re.Match[str]) -> str:
    return f"^({found[2]})" if found[1] and len(found[2]) > 1 else found[1] + found[2]
