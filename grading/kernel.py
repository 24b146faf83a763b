"""A Jupyter kernel in the sandbox, and running cells in it so that one that dies or hangs costs nothing but itself.

The kernel talks through sockets in the sandbox's runtime folder (transport ``ipc``; there is no network inside). The
path in ``ip`` is absolute and the same on both sides, or client and kernel would miss each other.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from traitlets import Any as AnyTrait

from grading.graded_copy import CHECK, PRELUDE, STUDENT
from grading.sandbox import Sandbox

PRINTED = 2**20  # bytes that one cell may print, all told
LARGEST_MESSAGE = 16 * 2**20  # bytes of one message that is still received
STARTS = 3


class KernelUnavailable(RuntimeError):
    """The kernel, or the course's own cells in it, did not run: nothing that a submission could be blamed for."""


class SandboxedKernelManager(AsyncKernelManager):
    """Starts ipykernel inside a :class:`~grading.sandbox.Sandbox`."""

    sandbox = AnyTrait()

    def __init__(self, **settings: Any) -> None:
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        super().__init__(transport="ipc", transport_encryption="disabled", context=context, **settings)
        self.ip = str(self.sandbox.folder / "k")
        self.connection_file = str(self.sandbox.folder / "connection.json")

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """The command line of the kernel, in its sandbox."""
        program = [sys.executable, "-P", "-m", "ipykernel_launcher", "-f", self.connection_file]
        return self.sandbox.command([*program, *(extra_arguments or [])])

    async def _async_launch_kernel(self, kernel_cmd: list[str], **settings: Any) -> None:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        settings.update(quiet, env=self.sandbox.outer_environment(), cwd="/")
        await super()._async_launch_kernel(kernel_cmd, **settings)
        self.sandbox.watch(self.provisioner.process)


def run_checks(
    notebook: NotebookNode,
    make_sandbox: Callable[[], Sandbox],
    *,
    verify: str = "",
    seconds: int = 120,
    import_seconds: int = 60,
    budget: float = 900.0,
) -> None:
    """Execute the check cells of ``notebook`` in place, in sandboxed kernels, until none is left to try.

    Cells carry ``metadata.grading["role"]``: ``prelude`` cells (the course's own) and ``student`` cells (imports of the
    submission) run first in every kernel; each ``check`` cell runs after them. When a check ends its kernel or takes
    too long, a new kernel runs these again and goes on with the next check. ``metadata.grading["ran"]`` of a check
    holds ``outcome`` (``ok``, ``error``, ``timed out`` or ``crashed``), ``why``, ``seconds``, ``intact`` (whether the
    course still was, afterwards) and ``imported`` (False: the import of the submission failed).

    Args:
        notebook: the cells to run; see :func:`grading.graded_copy.graded_copy`.
        make_sandbox: makes a fresh sandbox for each kernel.
        verify: source that is run after each check; it raises if the course was changed.
        seconds: time limit of a check.
        import_seconds: time limit of the cell that imports the submission.
        budget: seconds for all cells together, kernel starts included.

    Raises:
        KernelUnavailable: no kernel starts, or the course's own cells fail in it.
    """
    pending = [cell for cell in notebook.cells if _role(cell) == CHECK]
    deadline = time.monotonic() + budget
    failures = 0
    while pending:
        if time.monotonic() > deadline:
            _skip(pending, "timed out", f"the submission took more than {budget:g} seconds")
            break
        with make_sandbox() as sandbox:
            try:
                _Kernel(notebook, sandbox, {CHECK: seconds, STUDENT: import_seconds}).run(pending, verify)
            except KernelUnavailable:
                failures += 1
                if failures == STARTS:
                    raise


class _Kernel(NotebookClient):
    """One kernel in one sandbox; ``seconds`` holds the time limit of a cell by its role."""

    def __init__(self, notebook: NotebookNode, sandbox: Sandbox, seconds: Mapping[str, int]) -> None:
        super().__init__(
            notebook,
            SandboxedKernelManager(sandbox=sandbox),
            allow_errors=True,
            startup_timeout=120,
            raise_on_iopub_timeout=True,
            timeout_func=lambda cell: seconds.get(_role(cell), seconds[CHECK]),
            on_cell_executed=self._note_reply,
        )
        self._sandbox, self._printed = sandbox, 0
        self._reply: Mapping[str, Any] = {}

    def run(self, pending: list[NotebookNode], verify: str) -> None:
        """Run as many of the ``pending`` cells as this kernel survives; they are taken off the list.

        Raises:
            KernelUnavailable: the kernel does not start, or the course's own cells fail in it.
        """
        ready = False
        try:
            with self.setup_kernel():
                self.wait_for_reply(self.kc.kernel_info())
                for cell in (cell for cell in self.nb.cells if _role(cell) in (PRELUDE, STUDENT)):
                    ran = self._try(cell)
                    if ran["outcome"] != "ok" and _role(cell) == PRELUDE:
                        raise KernelUnavailable(f"the course's own cell {cell.id} {ran['outcome']}: {ran['why']}")
                    if ran["outcome"] != "ok":
                        _skip(pending, ran["outcome"], ran["why"])
                        pending.clear()
                        return
                ready = True
                while pending and self._check(pending.pop(0), verify):
                    pass
        except KernelUnavailable:
            raise
        except Exception as error:  # the kernel did not start, or would not stop
            if not ready:
                raise KernelUnavailable(f"the kernel did not start: {type(error).__name__}: {error}") from error
        finally:
            self._sandbox.kill()

    def _check(self, cell: NotebookNode, verify: str) -> bool:
        """Run a check cell; returns whether the kernel can go on."""
        cell.metadata.grading["ran"] = {"outcome": "crashed", "why": "its kernel ended", "seconds": 0.0}
        ran = self._try(cell)
        ran["intact"] = ran["outcome"] in ("ok", "error") and (not verify or self._is_intact(verify))
        cell.metadata.grading["ran"] = ran  # a copy is stored
        return ran["intact"]

    def _is_intact(self, verify: str) -> bool:
        cell = new_code_cell(verify)
        self.nb.cells.append(cell)
        try:
            return self._try(cell)["outcome"] == "ok"
        finally:
            self.nb.cells.remove(cell)

    def _try(self, cell: NotebookNode) -> dict[str, Any]:
        started, outcome, why = time.monotonic(), "ok", ""
        self._printed, self._reply = 0, {}
        try:
            self.execute_cell(cell, self.nb.cells.index(cell), store_history=False)
            # code that disables the display of errors still has an error in the reply
            errors = [output for output in cell.outputs if output.output_type == "error"]
            errors += [self._reply] if self._reply.get("status") == "error" else []
            if errors:
                outcome, why = "error", f"{errors[0]['ename']}: {errors[0]['evalue']}"
        except CellTimeoutError:
            outcome, why = "timed out", f"it ran longer than {self.timeout_func(cell)} seconds"
        except DeadKernelError:
            outcome, why = "crashed", "it ended Python itself"
        except Exception as error:  # code inside the kernel can send any message
            outcome, why = "crashed", f"its kernel sent messages that cannot be read ({type(error).__name__})"
        if self._sandbox.killed:
            outcome = "timed out" if "longer" in self._sandbox.killed else "crashed"
            why = self._sandbox.killed
        return {"outcome": outcome, "why": why, "seconds": time.monotonic() - started}

    def _note_reply(self, execute_reply: Mapping[str, Any], **_: Any) -> None:
        self._reply = execute_reply["content"]

    def process_message(self, msg: dict, cell: NotebookNode, cell_index: int) -> Any:
        """Count what a cell prints; a flood ends its kernel."""
        if msg["msg_type"] not in ("status", "execute_input"):
            self._printed += len(str(msg["content"]))
            if self._printed > PRINTED:
                self._sandbox.end(f"it printed more than {PRINTED // 1024:,} KiB")
                return None
        return super().process_message(msg, cell, cell_index)


def _role(cell: NotebookNode) -> str:
    return cell.metadata.get("grading", {}).get("role", "")


def _skip(cells: Sequence[NotebookNode], outcome: str, why: str) -> None:
    for cell in cells:
        cell.metadata.grading["ran"] = {"outcome": outcome, "why": why, "seconds": 0.0, "imported": False}
