"""Lab 5's checks, one for each exercise."""

from utils.checks.lab5.cached import check_kv_cache

__all__ = ["check_kv_cache"]
