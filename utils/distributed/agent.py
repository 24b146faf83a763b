"""The process between the caller and the ranks: PyTorch's elastic agent starts the ranks and watches them.

It is a process of its own for the sake of notebooks, scripts and threads: the ranks are forked from a clean server that
has PyTorch imported and nothing else, never from a process that has used CUDA, has threads, or would run the caller's
script again. The server is a fork of the agent, made before the agent does anything else. The agent leads a process
group of its own, so that the caller can end all of it with one signal; and it ends all of it itself when the caller
goes away.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import uuid
from multiprocessing import resource_tracker
from pathlib import Path

from utils.distributed.rank_server import fork_server


def main(preload: list[str], idle_seconds: float) -> None:
    """Run the jobs whose folders come as lines of the standard input, until none has come for ``idle_seconds``.

    The caller has turned garbage collection off, which imports take less time without.

    Args:
        preload: Modules that are imported here, so that a rank need not.
        idle_seconds: How long to wait for another job.
    """
    for module in preload:
        importlib.import_module(module)
    gc.freeze()  # a collection would write to every object, and each rank would copy all of what is imported
    gc.enable()
    fork_server()
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(folders,), daemon=True).start()
    _spare_what_clusters_need()
    while True:
        try:
            folder = Path(folders.get(timeout=idle_seconds))
        except queue.Empty:
            _end()
        (folder / "accepted").touch()
        done = folder / "done.draft"
        done.write_bytes(pickle.dumps(_run(folder)))
        done.rename(folder / "done")


def _spare_what_clusters_need() -> None:
    """Leave out what takes the elastic agent half a second a job here, and two more at the first one that fails."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    socket.getfqdn = lambda name="": "localhost"  # it asks again and again; a slow name server would be felt
    # nodes come at random moments, so as not to ask the store all at once: this is one node
    sleep = getattr(dynamic_rendezvous, "_delay", None)
    if sleep is not None:
        dynamic_rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else sleep(seconds)

    # it looks up the names of its callers, for which nobody needs the lines of source around the call
    def stack(context: int = 1) -> list[inspect.FrameInfo]:
        frame, frames = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return frames

    inspect.stack = stack
    # PyTorch's own format imports its compiler to write down an exception
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def _listen(folders: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        folders.put(line.rstrip("\n"))
    _end()  # the caller is gone


def _end() -> None:
    """End the ranks, then their server, then this process, each waited for, so that not even a zombie is left."""
    ranks = multiprocessing.active_children()
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join(1)
    for pid in (multiprocessing.forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
        with contextlib.suppress(OSError, TypeError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with what the ranks may have started


def _run(folder: Path) -> dict[int, int]:
    """Run one job; return the exit code of a rank that failed (negative: the signal that ended it), by rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from utils.distributed import worker

    settings = pickle.loads((folder / "settings.pkl").read_bytes())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings["world_size"],
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{settings['port']}",  # 0: the store itself takes a free port, so none can be lost
        rdzv_configs={"timeout": 60, "read_timeout": 10, "is_host": True},
        max_restarts=0,
        monitor_interval=0.02,
        start_method=settings["start_method"],
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, worker.run)(str(folder))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}
