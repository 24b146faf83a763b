"""Launches of tests in which nothing is to fail: on a machine that is busy with other things ranks may be slow."""

from __future__ import annotations

import functools

from utils import distributed

launch = functools.partial(distributed.launch, timeout=400.0, collective_timeout=60.0)
