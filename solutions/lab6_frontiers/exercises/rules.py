"""What the exercises' rules ask about the cases that failed, and what they allow."""

from __future__ import annotations

from utils.checks.diagnoses import Evidence

#: What PyTorch may do with ``cu_seqlens``, or with the counts of experts, before the launch.
OF_TABLES = (
    "add",
    "sub",
    "rsub",
    "floor_divide",
    "cumsum",
    "diff",
    "index",
    "bucketize",
    "searchsorted",
    "repeat_interleave",
    "index_select",
)


def one_group_is_right(e: Evidence) -> bool:
    """Whether every case of one group along K is right, and every case of several is wrong."""
    return all(trial.failed == (trial.case.sizes["G"] > 1) for trial in e.trials)
