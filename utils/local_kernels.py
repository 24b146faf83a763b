"""A pytest plugin: notebook kernels that tests start talk through sockets in a folder, not through TCP ports.

``pyproject.toml`` loads it for every pytest run (``-p utils.local_kernels``). A manager chooses a kernel's five TCP
ports before the kernel binds them; when several start at once, as under pytest-xdist, one can lose a port in between,
and the kernel then never answers. A folder of its own for each kernel leaves nothing to lose. A kernel that
nevertheless does not answer is started once more, since that says nothing about the notebook.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

#: Seconds that a kernel may take to answer, and how often it is started.
PATIENCE = 60
ATTEMPTS = 3


def _use_sockets_in_a_folder() -> None:
    construct = KernelManager.__init__

    @functools.wraps(construct)
    def with_folder(self: KernelManager, *args: Any, **kwargs: Any) -> None:
        if "transport" not in kwargs and "ip" not in kwargs:
            folder = tempfile.mkdtemp(prefix="kernel-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            kwargs |= {"transport": "ipc", "ip": str(Path(folder) / "socket")}
        construct(self, *args, **kwargs)

    KernelManager.__init__ = with_folder


def _start_again_when_silent() -> None:
    from nbval import kernel

    start = kernel.start_new_kernel

    @functools.wraps(start)
    def persistent(startup_timeout: float = PATIENCE, *args: Any, **kwargs: Any) -> Any:
        for _ in range(ATTEMPTS - 1):
            try:
                return start(startup_timeout, *args, **kwargs)
            except RuntimeError as error:
                print(f"the notebook's kernel did not start ({error}); trying again")
        return start(startup_timeout, *args, **kwargs)

    kernel.start_new_kernel = persistent


_use_sockets_in_a_folder()
_start_again_when_silent()
