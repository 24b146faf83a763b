"""Run a function on several ranks, from a notebook or a script, and count what the ranks send one another."""

from utils.distributed.faults import DistributedError
from utils.distributed.launcher import launch
from utils.distributed.ledger import Entry, Ledger, record_collectives
from utils.distributed.pool import shutdown, warm
from utils.distributed.worker import device

__all__ = ["DistributedError", "Entry", "Ledger", "device", "launch", "record_collectives", "shutdown", "warm"]
