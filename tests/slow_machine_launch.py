"""``launch`` with generous timeouts, for tests that must pass on a loaded machine."""

from __future__ import annotations

import functools

from utils import distributed

launch = functools.partial(distributed.launch, timeout=400.0, collective_timeout=60.0)
