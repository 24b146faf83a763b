"""``launch`` with generous timeouts, for tests that must pass on a loaded machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from utils import distributed

launch = functools.partial(distributed.launch, timeout=400.0, collective_timeout=60.0)


def once(job: Callable[[int], Any]) -> Callable[[int], Any]:
    """A job that is carried out once for each world size: every test gets its result, or the error that it raised."""

    @functools.cache
    def outcome(world_size: int) -> Any:
        try:
            return job(world_size)
        except Exception as error:  # every test of this world size says the same
            return error

    @functools.wraps(job)
    def result(world_size: int) -> Any:
        found = outcome(world_size)
        if isinstance(found, Exception):
            raise found
        return found

    return result
