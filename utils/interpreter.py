"""Triton's interpreter, repaired."""

from __future__ import annotations


def repair() -> None:
    """Placeholder until the repairs are committed; idempotent."""
