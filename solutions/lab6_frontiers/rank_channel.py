"""What the first rank of a group tells the others, beside the collectives in which they compute together."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

#: Bytes of a message's first broadcast; only what is longer takes a second one.
ROOM = 1024
#: Bytes at its beginning that hold the message's length.
LENGTH = 8
#: How long the others wait for a message. The first rank may have nothing to say for long. If its process ends, the
#: connection is closed, and they wait no longer.
PATIENCE = timedelta(days=30)


class RankChannel:
    """Messages from rank 0 of a group to all others, in order: any plain values, over gloo.

    The group's own backend may be NCCL, which would take each message through the GPUs. All ranks of the group make
    the channel together.

    Args:
        group: the ranks, by default all.
        timeout: seconds that rank 0 waits for the others to hear a message.
    """

    def __init__(self, group: ProcessGroup | None = None, timeout: float = 60.0) -> None:
        ranks, rank = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank(group)
        patience = PATIENCE if rank > 0 else timedelta(seconds=timeout)
        self._group = dist.new_group(ranks, patience, "gloo", use_local_synchronization=True)
        self._sending: list[Any] = []  # what nobody waits for

    def say(self, message: Any, wait: bool = True) -> None:
        """Send a message, on rank 0.

        Args:
            wait: until all others hear it.

        Raises:
            RuntimeError: another rank's process has ended, or it does not listen within the timeout.
        """
        content = pickle.dumps(message)
        content = len(content).to_bytes(LENGTH, "little") + content
        for part in filter(None, (content[:ROOM].ljust(ROOM, b"\0"), content[ROOM:])):
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            if wait:
                self._broadcast(tensor)
            else:
                self._sending.append((tensor, dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)))

    def hear(self) -> Any:
        """The next message, on the other ranks.

        Raises:
            RuntimeError: rank 0's process has ended.
        """
        content = bytes(self._broadcast(torch.empty(ROOM, dtype=torch.uint8)).numpy())
        size = LENGTH + int.from_bytes(content[:LENGTH], "little")
        if size > ROOM:
            content += bytes(self._broadcast(torch.empty(size - ROOM, dtype=torch.uint8)).numpy())
        return pickle.loads(content[LENGTH:size])

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, group=self._group, group_src=0)
        return tensor
