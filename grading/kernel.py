"""A Jupyter kernel in the sandbox, and running cells in it so that one that dies or hangs costs nothing but itself.

The kernel talks through sockets in the sandbox's runtime folder (transport ``ipc``; there is no network inside). The
path in ``ip`` is absolute and the same on both sides, or client and kernel would miss each other.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbgrader.preprocessors import Execute
from traitlets import Any as AnyTrait
from traitlets import Bool, Float, Integer

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


class SandboxedExecute(Execute):
    """nbgrader's preprocessor that executes a notebook, in a sandbox, as long as there is a cell left to try.

    The notebook's cells carry ``metadata.grading["role"]``: ``prelude`` cells (the course's own) and ``student`` cells
    (imports of the submission) run first in every kernel; each ``check`` cell runs after them. When a check kills its
    kernel or takes longer than ``timeout``, a new kernel runs these again and goes on with the next check. What
    became of a check is in ``metadata.grading["ran"]``: ``outcome`` (``ok``, ``error``, ``timed out`` or ``crashed``),
    ``why``, ``seconds``, ``whole`` (whether the seal was, afterwards) and ``imported`` (False: the submission's import
    failed).
    """

    sandbox_factory = AnyTrait(help="Makes a fresh Sandbox for a kernel.").tag(config=True)
    verify = AnyTrait("", help="Source that is run after each check; it raises if the course was changed.").tag(
        config=True
    )
    budget = Float(900.0, help="Seconds for all cells together, kernels' starts included.").tag(config=True)
    timeout = Integer(120, allow_none=True).tag(config=True)
    import_timeout = Integer(60, help="Seconds for a cell that imports the submission.").tag(config=True)
    startup_timeout = Integer(120).tag(config=True)
    interrupt_on_timeout = Bool(False).tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Any, km: Any = None) -> tuple[NotebookNode, Any]:
        """Execute the checks of ``nb`` in place.

        Raises:
            KernelUnavailable: no kernel starts, or the course's own cells fail in it.
        """
        self.resources = resources
        pending = [cell for cell in nb.cells if _role(cell) == CHECK]
        deadline = time.monotonic() + self.budget
        failures = 0
        while pending:
            if time.monotonic() > deadline:
                _skip(pending, "timed out", f"the submission took more than {self.budget:g} seconds")
                break
            with self.sandbox_factory() as sandbox:
                try:
                    self._one_kernel(nb, sandbox, pending)
                except KernelUnavailable:
                    failures += 1
                    if failures == STARTS:
                        raise
        return nb, resources

    def _one_kernel(self, nb: NotebookNode, sandbox: Sandbox, pending: list[NotebookNode]) -> None:
        """Run as many of the ``pending`` cells as one kernel survives; they are taken off the list."""
        self._sandbox = sandbox
        NotebookClient.__init__(self, nb, SandboxedKernelManager(sandbox=sandbox, config=self.config))
        self.reset_execution_trackers()
        ready = False
        try:
            with self.setup_kernel():
                self.wait_for_reply(self.kc.kernel_info())
                for cell in (cell for cell in nb.cells if _role(cell) in (PRELUDE, STUDENT)):
                    ran = self._try(cell)
                    if ran["outcome"] != "ok":
                        if _role(cell) == PRELUDE:
                            raise KernelUnavailable(f"the course's own cell {cell.id} {ran['outcome']}: {ran['why']}")
                        _skip(pending, ran["outcome"], ran["why"])
                        pending.clear()
                        return
                    ready = ready or _role(cell) == STUDENT
                while pending:
                    cell = pending.pop(0)
                    cell.metadata.grading["ran"] = {"outcome": "crashed", "why": "its kernel ended", "seconds": 0.0}
                    ran = self._try(cell)
                    ran["whole"] = ran["outcome"] in ("ok", "error") and (not self.verify or self._whole())
                    cell.metadata.grading["ran"] = ran  # a copy is stored
                    if not ran["whole"]:
                        return
        except KernelUnavailable:
            raise
        except Exception as error:  # the kernel did not start, or would not stop
            if not ready:
                raise KernelUnavailable(f"the kernel did not start: {type(error).__name__}: {error}") from error
        finally:
            sandbox.kill()

    def _try(self, cell: NotebookNode) -> dict[str, Any]:
        started, outcome, why = time.monotonic(), "ok", ""
        self._printed = 0
        cell.outputs, cell.execution_count = [], None
        seconds = self.import_timeout if _role(cell) == STUDENT else self.timeout
        self.timeout_func = lambda _: seconds
        try:
            self.execute_cell(cell, self.nb.cells.index(cell), store_history=False)
            errors = [output for output in cell.outputs if output.output_type == "error"]
            if errors:
                outcome, why = "error", f"{errors[0].ename}: {errors[0].evalue}"
        except CellTimeoutError:
            outcome, why = "timed out", f"it ran longer than {seconds} seconds"
        except DeadKernelError:
            outcome, why = "crashed", "it ended Python itself"
        except Exception as error:  # whoever runs inside the kernel can send any message
            outcome, why = "crashed", f"its kernel could not be understood any more ({type(error).__name__})"
        if self._sandbox.killed:
            outcome = "timed out" if "longer" in self._sandbox.killed else "crashed"
            why = self._sandbox.killed
        return {"outcome": outcome, "why": why, "seconds": time.monotonic() - started}

    def _whole(self) -> bool:
        cell = NotebookNode(cell_type="code", source=self.verify, metadata={}, outputs=[], execution_count=None)
        self.nb.cells.append(cell)
        try:
            return self._try(cell)["outcome"] == "ok"
        finally:
            self.nb.cells.remove(cell)

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
