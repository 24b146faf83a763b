"""Runs a function on several ranks and leaves no failed process behind."""

from __future__ import annotations

import errno
import importlib.util
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from utils.distributed import pool, worker
from utils.distributed.faults import DistributedError
from utils.distributed.job import Job

#: Ranks on CPUs that one core may carry: each is a process of about 200 MB.
RANKS_PER_CORE = 16

#: How a rank's process starts. Ranks on CPUs are forked from a server that has PyTorch imported; those with a GPU start
#: from nothing, since what CUDA has touched must not be forked.
START_METHODS = {"gloo": "forkserver", "nccl": "spawn"}


def launch(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str | None = None,
    timeout: float = 120.0,
    collective_timeout: float = 10.0,
    port: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on each of ``world_size`` ranks and return their results in order of rank.

    PyTorch's elastic launcher starts the ranks, each a process of its own, joined in the default process group. The
    function may be a closure or live in a notebook's cell or a script without ``if __name__ == "__main__"``; ``launch``
    may be called on any thread. The ranks see the caller's environment, directory and import path. A rank's tensors
    come back on the CPU. Rank 0's output is shown as it comes, that of the others after it. Processes kept warm for the
    next call end after a minute, with the caller, or at ``shutdown()``; when a job fails, at once.

    Args:
        function: What each rank runs; ``torch.distributed.get_rank()`` tells it which one it is.
        args: Its arguments.
        world_size: Number of ranks.
        backend: "gloo" on CPUs, "nccl" with a GPU for each rank; by default "nccl" if there are enough GPUs.
        timeout: Seconds that the whole job may take.
        collective_timeout: Seconds that ranks may wait in a collective for one that does not arrive; raise it where one
            rank has much more to do than its peers.
        port: TCP port of the ranks' store; by default a free one.
        kwargs: Its named arguments.

    Raises:
        DistributedError: A rank raised, died, called another collective than its peers or did not arrive; or the
            machine has no room for so many ranks. It says which rank and why, and no process is left.
        ValueError, TypeError: An argument makes no sense.
        RuntimeError: The system is Windows.
    """
    _check(function, world_size, timeout, collective_timeout)
    backend = _choose(backend, world_size)
    if port is not None:
        _check_port(port)
    settings = {
        "world_size": world_size,
        "backend": backend,
        "collective_timeout": collective_timeout,
        "port": port or 0,
        "start_method": START_METHODS[backend],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "directory": os.getcwd(),
    }
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "logs").mkdir()
        (folder / "settings.pkl").write_bytes(pickle.dumps(settings))
        (folder / "job.pkl").write_bytes(_pack(function, args, kwargs))
        agent = pool.take(folder)
        job = Job(folder, world_size, timeout, collective_timeout)
        try:
            results = job.wait(agent)
        except BaseException as error:
            if pool.is_kept_warm() and isinstance(error, DistributedError) and job.end(agent):
                pool.give_back(agent)
            else:
                agent.kill()
            raise
        pool.give_back(agent)
        return results


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The job; a function of a module that a rank could not import travels with its code."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    by_value = False
    if module is not None and module.__name__ != "__main__":
        try:
            by_value = importlib.util.find_spec(module.__name__) is None
        except (ImportError, ValueError):
            by_value = True
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return worker.pack((function, args, kwargs), "what launch is given")
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _check(function: object, world_size: object, timeout: float, collective_timeout: float) -> None:
    if os.name != "posix":
        raise RuntimeError("launch needs Linux or macOS (on Windows: WSL or the dev container)")
    if not callable(function):
        raise TypeError(f"launch runs a function, got {function!r} (pass the function itself, then its arguments)")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be a whole number of ranks, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    for name, seconds in (("timeout", timeout), ("collective_timeout", collective_timeout)):
        if not seconds > 0:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds}")


def _choose(backend: str | None, world_size: int) -> str:
    """The backend, if the machine has room for so many ranks with it."""
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"backend must be 'gloo' (CPUs), 'nccl' (GPUs) or None, got {backend!r}")
    gpus = torch.cuda.device_count()
    if backend is None:
        from utils import runtime

        backend = "nccl" if runtime.HAS_GPU and gpus >= world_size else "gloo"
    room, why = gpus, f"NCCL needs a GPU for each rank, and this machine has {gpus}"
    if backend == "gloo":
        cores = os.cpu_count() or 1
        room, why = (
            RANKS_PER_CORE * cores,
            f"this machine has {cores} CPU cores, of at most {RANKS_PER_CORE} ranks each",
        )
    if world_size > room:
        ways = [f"world_size={room}" if backend == "gloo" else f"world_size={room} or less"] if room else []
        ways += ["backend='gloo', on CPUs"] if backend == "nccl" else []
        raise DistributedError(
            f"world_size={world_size} is more than this machine has room for: {why}; rank {room} is the first without "
            f"a place (use {' or '.join(ways)})",
            rank=room,
            kind="world_size",
        )
    return backend


def _check_port(port: int) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"port must be between 1 and 65535, got {port!r} (leave it out to take a free one)")
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                continue  # no such family here
            raise DistributedError(
                f"port {port} is in use or not allowed ({error.strerror}), so rank 0's store, where the ranks meet, "
                "cannot listen on it (leave out port= to take a free one)",
                rank=0,
                kind="port",
            ) from None
