"""Code whose long lines wrap below their own beginning: each line of a block is a box that knows its indentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pygments.formatters import HtmlFormatter

#: Spaces in a step of indentation, and the steps that the style sheet has a class for.
STEP, STEPS = 4, 12
NEWLINE = "\n"


class CodeLines(HtmlFormatter):
    """HTML as Pygments writes it, each line in ``<span class="i2">`` if it is indented by two steps.

    The newline stands behind the box, so that copied code is the code.
    """

    def wrap(self, source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Put the lines into their boxes, and all of them into the block."""
        return super().wrap(_boxes(source))


def _boxes(source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for is_code, line in source:
        text = re.sub(r"<[^>]+>", "", line)
        if not is_code or not text.strip():
            yield is_code, line
            continue
        steps = min((len(text) - len(text.lstrip(" "))) // STEP, STEPS)
        yield is_code, f'<span class="i{steps}">{line.removesuffix(NEWLINE)}</span>{NEWLINE}'
