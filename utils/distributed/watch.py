"""Compares the collectives that the ranks of a job call, while they call them."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

from utils.distributed.faults import DistributedError, name

_WORDS = {"send": "send to rank {peer}", "recv": "recv from rank {peer}", "broadcast": "broadcast from rank {peer}"}
_WORDS |= {"scatter": "scatter from rank {peer}", "reduce": "reduce to rank {peer}", "gather": "gather to rank {peer}"}


def words(call: dict[str, Any]) -> str:
    """``"all_reduce of 5 float32 elements, at train.py:12 in step"``."""
    text = _WORDS.get(call["kind"], call["kind"]).format(**call)
    if call["kind"] != "barrier":
        text += f" of {call['elements']:,} {call['dtype']} element{'' if call['elements'] == 1 else 's'}"
    return text + (f", at {call['at']}" if call["at"] else "")


def _signature(call: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same on each rank; the parts of an all-to-all may differ in size."""
    size = None if call["kind"] == "all_to_all" else call["elements"]
    return call["kind"], size, call["dtype"], call["peer"]


class Watch:
    """Reads the ranks' call logs and finds ranks that disagree or that do not arrive."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.last: dict[int, dict[str, Any]] = {}  # last call of each rank
        self._logs = [folder / f"calls{rank}" for rank in range(world_size)]
        self._read = [0] * world_size
        self._disagreed: tuple[float, dict[int, dict[str, Any]]] | None = None  # since when, and the ranks' calls
        self._open: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}  # (group, ranks, number) -> who called what
        self._sent: dict[tuple[Any, ...], deque] = defaultdict(deque)  # (group, from, to, tag) -> messages without
        self._wanted: dict[tuple[Any, ...], deque] = defaultdict(deque)  # their counterpart

    def is_settling(self) -> bool:
        """Whether ranks disagree and the others' calls are still awaited, to tell which one is alone."""
        return self._disagreed is not None

    def update(self, *, settle: float = 1.0) -> DistributedError | None:
        """Read what is new; return the fault if ranks disagree, at the latest ``settle`` seconds after it is seen."""
        for rank, log in enumerate(self._logs):
            try:
                with log.open("rb") as file:
                    file.seek(self._read[rank])
                    new = file.read()
            except FileNotFoundError:
                continue
            whole = new[: new.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            for line in whole.splitlines():
                call = self.last[rank] = json.loads(line)
                if call["kind"] not in ("send", "recv"):
                    self._collective(rank, call)
                elif (fault := self._message(rank, call)) is not None:
                    return fault
        if self._disagreed is not None:
            since, calls = self._disagreed
            if len(calls) == len(next(iter(calls.values()))["members"]) or time.monotonic() - since > settle:
                return self._disagreement(calls)
        return None

    def _collective(self, rank: int, call: dict[str, Any]) -> None:
        place = (call["group"], tuple(call["members"]), call["number"])
        calls = self._open.setdefault(place, {})
        calls[rank] = call
        if len({_signature(other) for other in calls.values()}) > 1:
            self._disagreed = self._disagreed or (time.monotonic(), calls)
        elif len(calls) == len(call["members"]):
            del self._open[place]

    def _disagreement(self, calls: dict[int, dict[str, Any]]) -> DistributedError:
        common = Counter(_signature(call) for call in calls.values()).most_common()
        alone = [rank for rank, call in sorted(calls.items()) if _signature(call) != common[0][0]]
        # with as many ranks on either side, the one named is not the lowest
        odd = alone[-1] if len(common) == 1 or common[0][1] > common[1][1] else max(calls)
        by_words: dict[str, list[int]] = defaultdict(list)
        for rank, call in sorted(calls.items()):
            by_words[words(call)].append(rank)
        some = next(iter(calls.values()))
        lines = "\n".join(f"  {name(ranks)} called {text}" for text, ranks in by_words.items())
        return DistributedError(
            f"rank {odd} called another collective than its peers: call {some['number']} in the group of "
            f"{name(some['members'])} must be the same on each of them, but\n{lines}",
            rank=odd,
            kind="mismatch",
        )

    def _message(self, rank: int, call: dict[str, Any]) -> DistributedError | None:
        if call["peer"] is None:  # from any source
            return None
        sends = call["kind"] == "send"
        ends = (rank, call["peer"]) if sends else (call["peer"], rank)
        key = (call["group"], *ends, call["tag"])  # messages between the same two ranks arrive in order
        mine, theirs = (self._sent, self._wanted) if sends else (self._wanted, self._sent)
        if not theirs[key]:
            mine[key].append(call)
            return None
        other = theirs[key].popleft()
        if (call["elements"], call["dtype"]) == (other["elements"], other["dtype"]):
            return None
        send, recv = (call, other) if sends else (other, call)
        return DistributedError(
            f"rank {ends[1]} expects another message than rank {ends[0]} sends it:\n"
            f"  rank {ends[0]} called {words(send)}\n  rank {ends[1]} called {words(recv)}",
            rank=ends[1],
            kind="mismatch",
        )

    def absent(self, now: float, patience: float, returned: dict[int, float]) -> tuple[list[int], str] | None:
        """The ranks that others wait for in vain, with words for it.

        Args:
            now: Time on the monotonic clock, in seconds.
            patience: Seconds to wait for a rank that is still running.
            returned: Ranks that have returned from the function, with the time; they are waited for one second.
        """
        for calls in self._open.values():
            call = next(iter(calls.values()))
            missing = [rank for rank in call["members"] if rank not in calls]
            since = max(other["time"] for other in calls.values())
            if all(rank in returned for rank in missing):
                late = all(now - max(since, returned[rank]) > 1 for rank in missing)
                late = late and any(rank not in returned for rank in calls)
            else:
                late = now - min(other["time"] for other in calls.values()) > patience
            if late:
                return missing, self._waiting(calls, call, missing, returned)
        return None

    def _waiting(
        self, calls: dict[int, dict[str, Any]], call: dict[str, Any], missing: list[int], returned: dict[int, float]
    ) -> str:
        waits = "wait" if len(calls) > 1 else "waits"
        text = f"{name(missing)} never arrived: {name(calls)} {waits} in {words(call)} (call {call['number']} in the "
        text += f"group of {name(call['members'])})"
        for rank in missing:
            if rank in returned:
                text += f"\n  rank {rank} has returned from the function without calling it"
            elif rank in self.last:
                text += f"\n  the last that rank {rank} called was {words(self.last[rank])}"
            else:
                text += f"\n  rank {rank} has called no collective"
        return text

    def unanswered(self, rank: int) -> tuple[int, str] | None:
        """The peer that ``rank`` waits for a message from or to, with words for it."""
        for table in (self._wanted, self._sent):
            for queue in table.values():
                for call in queue:
                    if call == self.last.get(rank):
                        verb = "has not sent it" if call["kind"] == "recv" else "does not receive it"
                        return call["peer"], f"rank {call['peer']} {verb}: rank {rank} waits in {words(call)}"
        return None
