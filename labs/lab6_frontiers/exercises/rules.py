"""What the exercises' rules ask about the cases that failed."""

from __future__ import annotations

from utils.checks.diagnoses import Evidence


def one_group_is_right(e: Evidence) -> bool:
    """Whether every case of one group along K is right, and every case of several is wrong."""
    return all(trial.failed == (trial.case.sizes["G"] > 1) for trial in e.trials)
