"""The server that ranks are forked from: itself a fork of the agent, so that the two import PyTorch once.

``multiprocessing`` would start the server as a program of its own, which imports everything again.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from unittest import mock

_START = util.spawnv_passfds


def fork_server() -> None:
    """Start the server of ``multiprocessing``'s start method "forkserver" as a fork of this process.

    This process must have no other thread yet. What it has imported, each rank has.
    """
    resource_tracker.ensure_running()  # a program of its own
    multiprocessing.set_forkserver_preload([])
    with mock.patch.object(util, "spawnv_passfds", _fork):
        multiprocessing.forkserver.ensure_running()


def _fork(path: bytes, arguments: Sequence[str], passfds: Sequence[int]) -> int:
    """Do in a fork what ``python -c PROGRAM`` would do, where PROGRAM is the last of the ``arguments``."""
    tracker = os.dup(resource_tracker.getfd())
    pid = os.fork()
    if pid:
        os.close(tracker)
        return pid
    try:
        util.spawnv_passfds = _START  # what this process starts is a program of its own again
        resource_tracker._resource_tracker._fd = tracker  # Python 3.14 has closed the old one, and would start another
        _close_all_but({0, 1, 2, tracker, *passfds})
        multiprocessing.forkserver._forkserver._lock = threading.RLock()  # the old one is held, and stays so in a fork
        exec(arguments[-1], {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    """Close what the parent has open: a pipe whose other end it watches would never end."""
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
