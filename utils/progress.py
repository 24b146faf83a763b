"""Progress of long work, told to JupyterLab while a cell runs: nothing is printed, and no output is stored.

The course's extension (:mod:`utils.jupyterlab`) shows it below the cell. Where there is no JupyterLab, in a test, in a
terminal or under nbval, telling does nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

TARGET = "making-llms-fast.progress"
#: Seconds between two messages: many short steps shall not fill the connection.
PAUSE = 0.2


def steps(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one; ``what`` names one of them, such as "case", in "case 7 of 30"."""
    comm = _comm()
    told = -PAUSE
    try:
        for done, item in enumerate(items, 1):
            if comm is not None and time.monotonic() - told >= PAUSE:
                told = time.monotonic()
                comm.send({"what": what, "done": done, "total": len(items)})
            yield item
    finally:
        if comm is not None:
            comm.close()


def _comm() -> Any:
    """A channel to JupyterLab, or None where there is none: it names a kernel's notebook in the environment."""
    if "JPY_SESSION_NAME" not in os.environ or "ipykernel" not in sys.modules:
        return None
    from comm import create_comm

    return create_comm(target_name=TARGET)
