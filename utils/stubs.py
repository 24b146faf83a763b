"""What a released place raises until a student fills it: written, recognized, and told as a line.

Here nothing imports PyTorch: what hands out, collects and packs files needs none of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

#: What a released place raises until it is filled, see :func:`stub_line`.
STUB = re.compile(r"Lab \d+, exercise (?P<number>\d+\.\d+)\b")


def stub_line(message: str) -> str:
    """The line of a released file that stands in for a solution; the message is ``Lab 3, exercise 3.1: merge``."""
    return f"raise NotImplementedError({json.dumps(message, ensure_ascii=False)})"


def not_written(error: BaseException, folders: Iterable[Path]) -> str:
    """A stub's error in a line, ``3.1 is not written yet: merge.py, line 24``; empty if a stub did not raise it.

    A compiled kernel and another process leave no traceback, so the place is looked up in the files of ``folders``.
    """
    stub = STUB.match(str(error)) if isinstance(error, NotImplementedError) else None
    if stub is None:
        return ""
    raised = stub_line(str(error))
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
            if line.strip() == raised:
                return f"{stub['number']} is not written yet: {path.name}, line {number}"
    return f"{stub['number']} is not written yet"
