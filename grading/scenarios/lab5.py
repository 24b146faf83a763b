"""Hidden scenarios of lab 5: a cache, blocks, schedulers, paged attention and speculative sampling."""

from __future__ import annotations

from grading.scenarios import lab5_attention, lab5_blocks, lab5_cache, lab5_sampling, lab5_schedule

SCENARIOS = (
    lab5_cache.SCENARIO,
    lab5_blocks.SCENARIO,
    lab5_schedule.SCENARIO,
    *lab5_attention.SCENARIOS,
    lab5_sampling.SCENARIO,
)
