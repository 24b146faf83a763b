"""What the ranks print: rank 0's at once, the others' at the end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: PyTorch's C++ log lines: ``[W1121 05:14:03.123 ...]``, ``[rank1]:[W1121 ...]``
_NOISE = re.compile(r"^(\[rank\d+\]:)?\[[IWE]\d{4} .*\n?", re.MULTILINE)

#: What faulthandler writes: other threads, then the current one down to utils.distributed, then loaded modules
_CRASH = re.compile(
    r"(?:^Thread 0x.*\n(?:  File .*\n)*\n)*^(Current thread.*\n(?:  File (?!.*distributed.worker\.py).*\n)*)"
    r"(?:  File .*\n)*(?:\n*^(?:Thread 0x.*\n(?:  File .*\n)*\n?)+)?(?:\n*Extension modules: .*\n?)?",
    re.MULTILINE,
)

#: What it writes on Python 3.14 beside that: the functions of compiled code
_C_STACK = re.compile(r"\n?^Current thread's C stack trace.*\n(?:  .*\n)*", re.MULTILINE)


class Output:
    """The files that take the ranks' standard output and errors."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world_size = folder, world_size
        self._shown = 0
        self._mid_line = False
        self._paths: dict[tuple[int, str], Path] = {}

    def _bytes(self, rank: int, stream: str, start: int = 0) -> bytes:
        path = self._paths.get((rank, stream))
        if path is None:
            path = next(self._folder.glob(f"logs/*/attempt_*/{rank}/{stream}.log"), None)
            if path is None:
                return b""
            self._paths[rank, stream] = path
        with path.open("rb") as file:
            file.seek(start)
            return file.read()

    def show_rank_0(self, *, all: bool = False) -> None:
        """Print the lines of rank 0 that are new; with ``all`` also a line that is not finished."""
        new = self._bytes(0, "stdout", self._shown)
        if not all:
            new = new[: new.rfind(b"\n") + 1]
        if new:
            self._shown += len(new)
            self._mid_line = not new.endswith(b"\n")
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()

    def show_rest(self, told: int | None = None) -> None:
        """Print what else the ranks wrote, in order of rank: ``[rank 1] ...``; errors to the standard error.

        The errors of the rank ``told`` are left out.
        """
        self.show_rank_0(all=True)
        for rank in range(self._world_size):
            for stream, target in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                if (rank, stream) in ((0, "stdout"), (told, "stderr")):
                    continue
                text = self._bytes(rank, stream).decode(errors="replace")
                if stream == "stderr":
                    text = _C_STACK.sub("", _NOISE.sub("", text))
                if text.strip():
                    if self._mid_line and target is sys.stdout:
                        target.write("\n")
                        self._mid_line = False
                    target.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))

    def errors(self, rank: int, lines: int = 30) -> str:
        """The last lines that a rank wrote to its standard error; of a crash only the stack of the thread at fault."""
        text = _CRASH.sub(r"\1", _C_STACK.sub("", self._bytes(rank, "stderr").decode(errors="replace")))
        return "\n".join(text.strip().splitlines()[-lines:])
