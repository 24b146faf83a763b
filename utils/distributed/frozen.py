"""Imported last by the server that ranks are forked from: what is there by then is left out of garbage collection.

A collection looks at every object and writes to it, so each rank would go through, and copy, all of what is imported.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
