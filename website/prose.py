"""A notebook's text as the site shows it: links to other lectures and to equations, times and hosts under the title."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

#: Words a minute of a reader who follows; an equation and a figure take their time too.
WORDS_A_MINUTE, SECONDS_AN_EQUATION, SECONDS_A_FIGURE = 200, 15, 15

_KEEP = re.compile(
    r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|`[^`\n]+`|!?\[[^\]\n]*\]\([^)\n]*\)|^#[^\n]*$|<[^>\n]+>|^\([^\n]*\)=$",
    re.S | re.M,
)
_TAGGED = re.compile(r"^\$\$(?:(?!^\$\$|\$\$).)*?\\tag\{(\d+[a-z]?)\}.*?\$\$[ \t]*$", re.S | re.M)


def outside(text: str, change: Callable[[str], str]) -> str:
    """Change what is plain text: not code, mathematics, links, headings or HTML tags."""
    parts, end = [], 0
    for kept in _KEEP.finditer(text):
        parts += [change(text[end : kept.start()]), kept[0]]
        end = kept.end()
    return "".join([*parts, change(text[end:])])


def link_lectures(text: str, pages: Mapping[str, str], own: str) -> str:
    """Make each mention of another lecture or lab ("notebook 05", "lab 3") a link.

    Args:
        text: Markdown.
        pages: What is mentioned -> address relative to the page, e.g. ``{"notebook 05": "05_online_softmax.ipynb"}``.
        own: What the page itself is called; not linked.
    """

    def change(plain: str) -> str:
        def link(found: re.Match[str]) -> str:
            name = f"{'lab' if found[1].lower() == 'lab' else 'notebook'} {found[2]}"
            address = pages.get(name)
            return found[0] if address is None or name == own else f"[{found[0]}]({address})"

        return re.sub(r"\b([Nn]otebook|[Ll]ecture|[Ll]ab)s?\s(\d\d?)\b(?!\.\d)", link, plain)

    return outside(text, change)


def tagged(text: str) -> list[str]:
    """The numbers of the equations that a text displays, in order."""
    return [found[1] for found in _TAGGED.finditer(text)]


def own_lines(text: str) -> str:
    """Keep an equation of several lines as it is: Sphinx would put it into one in which no tag is allowed."""

    def directive(found: re.Match[str]) -> str:
        body = found[1].strip()
        return f"```{{math}}\n:no-wrap:\n\n\\[{body}\\]\n```" if "\\\\" in body else found[0]

    return re.sub(r"^\$\$(.*?)\$\$[ \t]*$", directive, text, flags=re.S | re.M)


def anchor_equations(text: str, prefix: str) -> str:
    """Give each numbered equation a place that can be linked to: ``#eq-05-3`` with the prefix "05"."""
    return _TAGGED.sub(lambda found: f"\n(eq-{prefix}-{found[1]})=\n{found[0]}", text)


def link_equations(text: str, numbers: set[str], prefix: str) -> str:
    """Make "equation (3)" a link to it, if the page displays it."""

    def change(plain: str) -> str:
        def link(found: re.Match[str]) -> str:
            return f"[{found[0]}](#eq-{prefix}-{found[1]})" if found[1] in numbers else found[0]

        return re.sub(r"\b[Ee]quations? \((\d+[a-z]?)\)", link, plain)

    return outside(text, change)


def reading_minutes(texts: list[str], figures: int) -> int:
    """Minutes to read the texts with their equations and figures, without running anything."""
    words = equations = 0
    for text in texts:
        equations += text.count("$$") // 2
        plain = re.sub(r"```.*?```|\$\$.*?\$\$|<[^>]+>", " ", text, flags=re.S)
        words += len(plain.split())
    seconds = 60 * words / WORDS_A_MINUTE + SECONDS_AN_EQUATION * equations + SECONDS_A_FIGURE * figures
    return max(1, round(seconds / 60))


def under_title(text: str, block: str) -> str:
    """Put a block below the first heading of a text; ValueError if it does not begin with one."""
    title, _, rest = text.partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"a page must begin with its title, not with {title[:60]!r}")
    return f"{title}\n\n{block}\n{rest}"
